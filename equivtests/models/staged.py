"""A model as a beginning, layers and an end: what a pipeline cuts between its ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor, nn

from equivtests.models.parts import Terms


class Staged(nn.Module, ABC):
    """forward = end after all layers after begin. One stage of a pipeline calls some of these, in the same order.

    depth: layers of the whole model, wherever they are. stack: the attribute that holds the layers, and the prefix of their
    canonical names.
    """

    stack: ClassVar[str] = "layers"

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth

    @abstractmethod
    def begin(self, inputs: Tensor, ids: Tensor) -> Tensor:
        """What enters layer 0, from the inputs of a micro-batch and its sample ids, int64 (N,)."""

    @abstractmethod
    def layer(self, i: int, x: Tensor, inputs: Tensor) -> Tensor:
        """What follows layer `i` on its input; the inputs of the whole model tell documents and positions."""

    @abstractmethod
    def end(self, x: Tensor, targets: Tensor, valid: Tensor, conditional: bool) -> Terms:
        """Loss terms from what the last layer gave."""

    def through(self, inputs: Tensor, ids: Tensor) -> Tensor:
        """What the last layer gives."""
        x = self.begin(inputs, ids)
        for i in range(self.depth):
            x = self.layer(i, x, inputs)
        return x

    def forward(self, inputs: Tensor, targets: Tensor, valid: Tensor, ids: Tensor, conditional: bool) -> Terms:
        return self.end(self.through(inputs, ids), targets, valid, conditional)
