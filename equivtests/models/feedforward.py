"""The feedforward of a block, or one expert of it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from equivtests.cases.case import Model


class Gated(nn.Module):
    """down(silu(gate(x)) · up(x)). Shazeer 2020: GLU variants improve Transformer, section 2."""

    def __init__(self, inputs: int, hidden: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(inputs, hidden, bias=bias)
        self.up = nn.Linear(inputs, hidden, bias=bias)
        self.down = nn.Linear(hidden, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class TwoLayers(nn.Module):
    """up, GELU (erf), down."""

    def __init__(self, inputs: int, hidden: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(inputs, hidden, bias=bias)
        self.down = nn.Linear(hidden, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def feedforward(model: Model) -> nn.Module:
    """From width to width by way of twice the width."""
    kind = Gated if model.has("gated") else TwoLayers
    return kind(model.width, 2 * model.width, model.width, model.has("bias"))
