"""Collectives over the ranks along one axis of a mesh, plain and differentiable.

A differentiable one is a function of the forward pass and its adjoint: what a rank differentiates is one and the same loss
on every rank of the line, and its gradient with respect to a value that all of them hold is wanted once, not once per rank.
(Shoeybi et al. 2019, Megatron-LM, section 3, figure 3; Korthikanti et al. 2022, Reducing Activation Recomputation,
section 4.2.2.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from equivtests.adapters.textbook.collectives import Group, all_gather, all_reduce


@dataclass(frozen=True)
class Line:
    """The ranks of this rank's group along an axis, ascending, and which of them it is. A line of one rank moves nothing."""

    group: Group
    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        return len(self.ranks)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the line, in place."""
        return all_reduce(tensor, self.group) if self.size > 1 else tensor

    def max(self, tensor: Tensor) -> Tensor:
        """The largest over the line, in place."""
        return all_reduce(tensor, self.group, dist.ReduceOp.MAX) if self.size > 1 else tensor

    def span(self, total: int, index: int | None = None) -> tuple[int, int]:
        """(start, stop) of this rank's part of `total` things, the first ranks with one more where it does not divide."""
        at, (each, rest) = self.index if index is None else index, divmod(total, self.size)
        start = at * each + min(at, rest)
        return start, start + each + (at < rest)

    def cut(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part along a dimension."""
        start, stop = self.span(tensor.shape[dim])
        return tensor.narrow(dim, start, stop - start)

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """The parts of all ranks along a dimension, of which each has its `span` of the whole."""
        if self.size == 1:
            return part
        sizes = self.sizes(part, dim)
        moved = part.movedim(dim, 0).contiguous()
        padded = moved.new_zeros(max(sizes), *moved.shape[1:])
        padded[: len(moved)] = moved
        parts = all_gather(padded.flatten(), self.group).view(self.size, *padded.shape)
        return torch.cat([p[:n] for p, n in zip(parts, sizes, strict=True)]).movedim(0, dim)

    def sizes(self, part: Tensor, dim: int) -> list[int]:
        """How much of a dimension every rank has."""
        table = torch.zeros(self.size, dtype=torch.int64, device=part.device)
        table[self.index] = part.shape[dim]
        return self.sum(table).tolist()


class Copy(torch.autograd.Function):
    """Forward: the value that every rank has. Backward: the sum of what the ranks' parts of the work say of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.line.sum(gradients[0].clone(memory_format=torch.contiguous_format)), None


class Reduce(torch.autograd.Function):
    """Forward: the sum of the ranks' parts. Backward: every part's gradient is that of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        return line.sum(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class Gather(torch.autograd.Function):
    """Forward: the ranks' parts along a dimension, put together. Backward: the own part of a gradient that all have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line, dim: int) -> Tensor:
        ctx.line, ctx.dim = line, dim
        return line.gather(x, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.line.cut(gradients[0], ctx.dim), None, None


class Scatter(torch.autograd.Function):
    """Forward: the own part, along a dimension, of a value that every rank has. Backward: the ranks' parts put together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line, dim: int) -> Tensor:
        ctx.line, ctx.dim = line, dim
        return line.cut(x, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.line.gather(gradients[0], ctx.dim), None, None


class GatherForWork(Gather):
    """Forward: the ranks' parts put together, for each rank to work on. Backward: the own part of the sum."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        total = ctx.line.sum(gradients[0].clone(memory_format=torch.contiguous_format))
        return ctx.line.cut(total, ctx.dim), None, None


class ReduceScatter(Scatter):
    """Forward: the own part of the sum of the ranks' values. Backward: the ranks' parts put together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line, dim: int) -> Tensor:
        ctx.line, ctx.dim = line, dim
        return line.cut(line.sum(x.clone(memory_format=torch.contiguous_format)), dim).contiguous()
