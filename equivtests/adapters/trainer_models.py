"""The model that Trainer is given."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equivtests.models.build import TERM_WEIGHTS

IGNORED = -100
"""The label of a position that Trainer does not count."""


class LossModel(nn.Module):
    """A model as Trainer expects it: a sum over tokens, divided by Trainer's count of the window or else by its own."""

    accepts_loss_kwargs = True

    def __init__(self, module: nn.Module, magnitude: float) -> None:
        super().__init__()
        self.module, self.magnitude = module, magnitude

    def forward(
        self, inputs: Tensor, targets: Tensor, labels: Tensor, ids: Tensor, conditional: bool,
        num_items_in_batch: Tensor | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        valid = labels != IGNORED
        terms = self.module(inputs, targets, valid, ids, conditional)
        total = torch.stack([TERM_WEIGHTS[name] * value for name, value in terms.items()]).sum()
        tokens = valid.sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": self.magnitude * total / tokens.clamp(min=1)}
