"""chain, linear and mlp: squared error on float inputs."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from equivtests.cases.case import Model
from equivtests.models.parts import (
    Dropout,
    DropoutStream,
    Terms,
    Unused,
    squared_error,
    transpose_storage,
)


class Chain(nn.Module):
    """y = w_P · … · w_1 · x for every position: the smallest model with depth."""

    def __init__(self, model: Model, stream: DropoutStream) -> None:
        super().__init__()
        self.factors = nn.ParameterList([nn.Parameter(torch.empty(1)) for _ in range(model.depth)])

    def forward(self, inputs: Tensor, targets: Tensor, valid: Tensor, ids: Tensor, conditional: bool) -> Terms:
        y = inputs
        for factor in self.factors:
            y = factor * y
        return {"main": squared_error(y, targets, valid)}


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


class MLP(nn.Module):
    """`depth` linear layers with ReLU between them, and the optional features."""

    def __init__(self, model: Model, stream: DropoutStream) -> None:
        super().__init__()
        sizes = [model.inputs] + [model.width] * (model.depth - 1) + [model.outputs]
        bias = model.has("bias")
        self.layers = nn.ModuleList([nn.Linear(a, b, bias=bias) for a, b in zip(sizes, sizes[1:], strict=False)])
        self.pairs = model.has("pairs")
        if model.has("transposed"):
            transpose_storage(cast(nn.Linear, self.layers[0]))
        if model.has("conditional"):
            self.branch = nn.Linear(model.inputs, model.outputs, bias=False)
        if model.has("unused"):
            self.unused = Unused(model.width)
        self.dropout = Dropout("mlp", stream) if model.has("dropout") else None
        self.running = RunningMean(sizes[1]) if model.has("running") else None

    def forward(self, inputs: Tensor, targets: Tensor, valid: Tensor, ids: Tensor, conditional: bool) -> Terms:
        x = inputs
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 0 and self.running is not None:
                self.running(x)
            if i < len(self.layers) - 1:
                x = torch.relu(x)
            if i == 0 and self.dropout is not None:
                x = self.dropout(x, ids)
        if conditional and hasattr(self, "branch"):
            x = x + self.branch(inputs)
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
