"""The module that frameworks are given of a user's own model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equivtests.cases.case import Model
from equivtests.models.parts import DropoutStream, Terms
from equivtests.own import loaded


class Own(nn.Module):
    """The user's module as the child `model`, behind the arguments and the loss terms that all families have."""

    def __init__(self, model: Model, stream: DropoutStream) -> None:
        super().__init__()
        self.own = loaded(model.own)
        self.model = self.own.build()

    @property
    def layers(self) -> list[nn.Module]:
        """What is wrapped one by one, below the root."""
        return list(self.own.model.units(self.model))

    def forward(self, inputs: Tensor, targets: Tensor, valid: Tensor, ids: Tensor, conditional: bool) -> Terms:
        if len(inputs) == 0:  # most modules refuse a batch without rows; a row without a valid token adds as little
            inputs, targets = (like(x, array) for x, array in zip((inputs, targets), self.own.sample(0), strict=True))
            valid = valid.new_zeros(1, valid.shape[1])
        return {"main": self.own.model.losses(self.model, inputs, targets, valid).sum()}


def like(empty: Tensor, array: object) -> Tensor:
    """A batch of one row from the array of a sample, in dtype and on the device of the empty batch."""
    return torch.as_tensor(array)[None].to(empty)
