"""Sequences whose positions are shared out over the ranks of a line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equivtests.adapters.textbook.lines import Line
from equivtests.models.sequence import WholeSequence


@dataclass(frozen=True)
class Shards:
    """Which positions of a sequence every rank of a line holds: an even part each, where that goes.

    zigzag: every part is halved, and rank r of n has the halves r and 2n - 1 - r, the one from the front and the other from
    the back, so that causal attention is about as much work everywhere (Llama Team 2024, The Llama 3 herd of models,
    section 3.3.2).
    """

    line: Line
    zigzag: bool = False

    def chunks(self, length: int, rank: int | None = None) -> list[tuple[int, int]]:
        """(start, stop) of the pieces of the line's rank of a number (None: this one), ascending; they may be empty."""
        index = self.line.index if rank is None else rank
        if not self.zigzag:
            return [self.line.span(length, index)]
        return [self.half(length, index), self.half(length, 2 * self.line.size - 1 - index)]

    def half(self, length: int, number: int) -> tuple[int, int]:
        """(start, stop) of one half of a part; the first half is longer by one where two do not divide it."""
        start, stop = self.line.span(length, number // 2)
        middle = (start + stop + 1) // 2
        return (middle, stop) if number % 2 else (start, middle)

    def positions(self, length: int, rank: int | None = None) -> Tensor:
        """The positions of a rank (None: this one) in the whole sequence, int64, ascending."""
        return torch.cat([torch.arange(*chunk) for chunk in self.chunks(length, rank)])

    def length(self, here: int) -> int:
        """Positions of the whole sequence, of which there are so many here."""
        return int(self.line.sum(torch.tensor([here])))

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """The whole sequence, in its own order, from the parts of all ranks along a dimension."""
        return self.in_order(self.line.gather(part, dim), dim)

    def in_order(self, parts: Tensor, dim: int) -> Tensor:
        """The whole sequence from the ranks' parts, one behind the other."""
        length = parts.shape[dim]
        stands = torch.cat([self.positions(length, rank) for rank in range(self.line.size)])
        return parts.index_select(dim, stands.argsort().to(parts.device))

    def cut(self, whole: Tensor, dim: int, rank: int | None = None) -> Tensor:
        """The part of a rank (None: this one) along a dimension."""
        return whole.index_select(dim, self.positions(whole.shape[dim], rank).to(whole.device))


class GatherShards(torch.autograd.Function):
    """Forward: the whole sequence, for each rank to do its part of the work on. Backward: the own part of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards, dim: int) -> Tensor:
        ctx.shards, ctx.dim = shards, dim
        return shards.gather(x, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        total = ctx.shards.line.sum(gradients[0].clone(memory_format=torch.contiguous_format))
        return ctx.shards.cut(total, ctx.dim), None, None


class ShardedSequence(WholeSequence):
    """A sequence of which each rank has some positions. How queries meet the keys of other ranks is for subclasses.

    Positions and documents are those of the whole sequence. They are found from the whole of its tokens, every time anew:
    nothing is left from one micro-batch to the next.
    """

    def __init__(self, packed: bool, shards: Shards) -> None:
        super().__init__(packed)
        self.shards = shards

    def positions(self, inputs: Tensor) -> Tensor:
        return self.shards.cut(super().positions(self.whole(inputs)), 1)

    def whole(self, inputs: Tensor) -> Tensor:
        """The tokens of the whole sequence, int64 (N, L)."""
        return self.shards.gather(inputs, 1)

    def visible(self, whole: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """Which keys every query sees, by their positions; bool (N or 1, 1, queries, keys), whole (N, L)."""
        queries, keys = queries.to(whole.device), keys.to(whole.device)
        earlier = queries[:, None] >= keys
        documents = self.documents(whole)
        if documents is None:
            return earlier[None, None]
        return (earlier & (documents[:, queries, None] == documents[:, None, keys]))[:, None]
