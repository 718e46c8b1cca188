"""chain, linear, mlp and gated_mlp: squared error on float inputs."""

from __future__ import annotations

from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivtests.cases.case import Model
from equivtests.models.batch_norm import BatchNorm
from equivtests.models.parts import (
    Dropout,
    DropoutStream,
    Terms,
    Unused,
    squared_error,
    transpose_storage,
)
from equivtests.models.staged import Staged


class Chain(Staged):
    """y = w_P · … · w_1 · x for every position: the smallest model with depth."""

    stack: ClassVar[str] = "factors"

    def __init__(self, model: Model, stream: DropoutStream) -> None:
        super().__init__(model.depth)
        self.factors = nn.ParameterList([nn.Parameter(torch.empty(1)) for _ in range(model.depth)])

    def begin(self, inputs: Tensor, ids: Tensor) -> Tensor:
        return inputs

    def layer(self, i: int, x: Tensor, inputs: Tensor) -> Tensor:
        return self.factors[i] * x

    def end(self, x: Tensor, targets: Tensor, valid: Tensor, conditional: bool) -> Terms:
        return {"main": squared_error(x, targets, valid)}


class Linear(nn.Module):
    """y = xWᵀ (+ b)."""

    def __init__(self, model: Model, stream: DropoutStream) -> None:
        super().__init__()
        self.linear = nn.Linear(model.inputs, model.outputs, bias=model.has("bias"))
        if model.has("transposed"):
            transpose_storage(self.linear)
        if model.has("unused"):
            self.unused = Unused(model.width)

    def forward(self, inputs: Tensor, targets: Tensor, valid: Tensor, ids: Tensor, conditional: bool) -> Terms:
        return {"main": squared_error(self.linear(inputs), targets, valid)}


class GatedMLP(nn.Module):
    """y = down(silu(gate(x)) · up(x))."""

    def __init__(self, model: Model, stream: DropoutStream) -> None:
        super().__init__()
        bias = model.has("bias")
        self.gate = nn.Linear(model.inputs, model.width, bias=bias)
        self.up = nn.Linear(model.inputs, model.width, bias=bias)
        self.down = nn.Linear(model.width, model.outputs, bias=bias)
        if model.has("unused"):
            self.unused = Unused(model.width)

    def forward(self, inputs: Tensor, targets: Tensor, valid: Tensor, ids: Tensor, conditional: bool) -> Terms:
        y = self.down(F.silu(self.gate(inputs)) * self.up(inputs))
        return {"main": squared_error(y, targets, valid)}


class MLP(Staged):
    """`depth` linear layers with ReLU between them, and the optional features."""

    def __init__(self, model: Model, stream: DropoutStream) -> None:
        super().__init__(model.depth)
        sizes = [model.inputs] + [model.width] * (model.depth - 1) + [model.outputs]
        biased = [model.has("bias") and not (i == 0 and model.has("batch_norm")) for i in range(model.depth)]
        layers = zip(sizes, sizes[1:], biased, strict=False)
        self.layers = nn.ModuleList([nn.Linear(a, b, bias=bias) for a, b, bias in layers])
        self.pairs = model.has("pairs")
        if model.has("transposed"):
            transpose_storage(cast(nn.Linear, self.layers[0]))
        if model.has("conditional"):
            self.branch = nn.Linear(model.inputs, model.outputs, bias=False)
        if model.has("unused"):
            self.unused = Unused(model.width)
        self.dropout = Dropout("mlp", stream) if model.has("dropout") else None
        self.running = RunningMean(sizes[1]) if model.has("running") else None
        self.batch_norm = BatchNorm(sizes[1]) if model.has("batch_norm") else None

    def begin(self, inputs: Tensor, ids: Tensor) -> Tensor:
        self.ids = ids  # for the dropout behind layer 0, which always follows in the same stage
        return inputs

    def layer(self, i: int, x: Tensor, inputs: Tensor) -> Tensor:
        x = self.layers[i](x)
        if i == 0 and self.running is not None:
            self.running(x)
        if i == 0 and self.batch_norm is not None:
            x = self.batch_norm(x)
        if i < self.depth - 1:
            x = torch.relu(x)
        return self.dropout(x, self.ids) if i == 0 and self.dropout is not None else x

    def forward(self, inputs: Tensor, targets: Tensor, valid: Tensor, ids: Tensor, conditional: bool) -> Terms:
        x = self.through(inputs, ids)
        if conditional and hasattr(self, "branch"):  # it reads the inputs, which the end of a pipeline does not have
            x = x + self.branch(inputs)
        return self.end(x, targets, valid, conditional)

    def end(self, x: Tensor, targets: Tensor, valid: Tensor, conditional: bool) -> Terms:
        terms = {"main": squared_error(x, targets, valid)}
        return terms | {"pairs": x.sum(dim=1)} if self.pairs else terms


class RunningMean(nn.Module):
    """Collects sums of what passes; `commit` turns the window's sums into a step of the running mean `mean`."""

    MOMENTUM = 0.25

    mean: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.total: Tensor | None = None
        self.count = 0

    def forward(self, x: Tensor) -> None:
        collected = x.detach().flatten(0, 1).sum(dim=0)
        self.total = collected if self.total is None else self.total + collected
        self.count += x.shape[0] * x.shape[1]

    def commit(self, total: Tensor, count: float) -> None:
        """Move the running mean towards total / count (of all ranks) and forget what was collected."""
        self.mean.lerp_((total / count).to(self.mean.dtype), self.MOMENTUM)
        self.total, self.count = None, 0
