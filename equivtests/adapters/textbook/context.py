"""Context parallelism: every rank has some positions of each sequence, and the whole model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivtests.adapters.adapter import Claims
from equivtests.adapters.places import show
from equivtests.adapters.textbook import expert
from equivtests.adapters.textbook.lines import Line
from equivtests.adapters.textbook.mesh import Mesh, split_strategy
from equivtests.adapters.textbook.ring import RingAttention
from equivtests.adapters.textbook.shards import GatherShards, ShardedSequence, Shards
from equivtests.cases.windows import MicroBatch
from equivtests.models.gpt import GPT
from equivtests.models.parts import Terms
from equivtests.record.observation import Observe, Place


class GatheredKeys(ShardedSequence):
    """Keys and values of all positions are gathered; queries stay (Llama Team 2024, The Llama 3 herd, section 3.3.2)."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, inputs: Tensor) -> Tensor:
        whole = self.whole(inputs)
        here, everywhere = self.shards.positions(whole.shape[1]), torch.arange(whole.shape[1])
        mask = self.visible(whole, here, everywhere)
        return F.scaled_dot_product_attention(q, self.gather(k), self.gather(v), attn_mask=mask)

    def gather(self, x: Tensor) -> Tensor:
        """Keys or values of all positions, (N, heads, L, d)."""
        return GatherShards.apply(x, self.shards, 2)


class ExchangedHeads(ShardedSequence):
    """All positions of some heads instead of some positions of all heads, just for attention.

    Jacobs et al. 2023, DeepSpeed Ulysses, section 3.1. Ranks may have no head, where there are fewer heads than ranks.
    """

    def attention(self, q: Tensor, k: Tensor, v: Tensor, inputs: Tensor) -> Tensor:
        q, k, v = (ToHeads.apply(x, self.shards) for x in (q, k, v))
        return ToPositions.apply(super().attention(q, k, v, self.whole(inputs)), self.shards)


class ToHeads(torch.autograd.Function):
    """From (N, heads, positions here, d) to (N, heads here, L, d)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        return to_heads(x, shards)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return to_positions(gradients[0], ctx.shards), None


class ToPositions(torch.autograd.Function):
    """From (N, heads here, L, d) to (N, heads, positions here, d)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        return to_positions(x, shards)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return to_heads(gradients[0], ctx.shards), None


def to_heads(x: Tensor, shards: Shards) -> Tensor:
    """Each rank's heads to that rank."""
    line = shards.line
    spans = [line.span(x.shape[1], rank) for rank in range(line.size)]
    parts = exchange(line, [x[:, start:stop] for start, stop in spans], dim=2)
    return shards.in_order(torch.cat(parts, dim=2), 2)


def to_positions(x: Tensor, shards: Shards) -> Tensor:
    """Each rank's positions to that rank."""
    line = shards.line
    return torch.cat(exchange(line, [shards.cut(x, 2, rank) for rank in range(line.size)], dim=1), dim=1)


def exchange(line: Line, parts: list[Tensor], dim: int) -> list[Tensor]:
    """Give parts[r] to rank r of the line, and get one of each; they may differ in size along `dim`."""
    own = parts[line.index]
    sizes = line.sizes(own, dim)
    shapes = [(*own.shape[:dim], size, *own.shape[dim + 1 :]) for size in sizes]
    counts = [torch.Size(shape).numel() for shape in shapes]
    given = torch.cat([part.flatten() for part in parts])
    taken = expert.exchange(given, line, [part.numel() for part in parts], counts)
    return [flat.view(shape) for flat, shape in zip(taken.split(counts), shapes, strict=True)]


SCHEMES: dict[str, tuple[type[ShardedSequence], bool]] = {
    "cp-gather": (GatheredKeys, False),
    "cp-gather-zigzag": (GatheredKeys, True),
    "cp-ring": (RingAttention, False),
    "cp-ring-zigzag": (RingAttention, True),
    "cp-ulysses": (ExchangedHeads, False),
}
"""How queries meet the keys of other ranks, and whether positions are dealt out in zigzag, by strategy."""


class ContextParallel(Mesh):
    """Every rank of a line is fed the same micro-batches, and takes its positions of inputs, targets and valid tokens.

    Its loss is a part of the sum over tokens, as that of a data rank is: gradients are averaged over dp · cp.
    """

    schemes = SCHEMES

    def claims(self) -> Claims:
        strategies = tuple(split_strategy(name, {"dp", "cp"}, algorithm=name) for name in SCHEMES)
        return Claims(strategies, framework="equivtests textbook")

    def split(self, module: nn.Module) -> None:
        super().split(module)
        assert isinstance(module, GPT)
        sequence, zigzag = self.schemes[self.strategy]
        self.shards = Shards(self.line("cp"), zigzag)
        if self.shards.line.size > 1:
            module.use_sequence(sequence(module.sequence.packed, self.shards))
            if module.dropout is not None:
                module.dropout.rows = self.rows_of_shard

    # ------------------------------------------------------------------ cutting sequences

    def forward(self, model: nn.Module, batch: MicroBatch) -> Terms:
        return super().forward(model, self.cut(batch))

    def cut(self, batch: MicroBatch) -> MicroBatch:
        """This rank's positions. Targets are shifted already: the last of a shard is the first token of the next one."""
        here = self.shards.positions(batch.valid.shape[1]).numpy()
        return replace(batch, inputs=batch.inputs[:, here], targets=batch.targets[:, here], valid=batch.valid[:, here])

    def rows_of_shard(self, here: int) -> tuple[int, Tensor]:
        """The length of the whole sequence, for which a dropout mask is drawn, and the positions of it here."""
        length = self.shards.length(here)
        return length, self.shards.positions(length)

    # ------------------------------------------------------------------ showing

    def pieces(self, k: int) -> list[tuple[int, int]]:
        return self.shards.chunks(self.case.length(k))

    def show_inputs(self, observe: Observe) -> None:
        for k, inputs in enumerate(self.fed):
            self.show_shard(observe, k, inputs)
        self.fed.clear()

    def show_shard(self, observe: Observe, k: int, inputs: Tensor) -> None:
        """Show this rank's positions of what entered the model, (N, positions here), piece by piece."""
        pieces, rows = self.pieces(k), len(inputs)
        for part, piece in zip(inputs.split([b - a for a, b in pieces], dim=1), pieces, strict=True):
            place = Place((rows, self.case.length(k)), box=((0, rows), piece))
            if part.numel():
                show(observe, "inputs", "inputs", part, update=self.window.update, microbatch=k, place=place)
