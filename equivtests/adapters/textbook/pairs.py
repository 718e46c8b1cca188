"""A loss over pairs of samples on different ranks, with a gather that can be differentiated."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from equivtests.adapters.textbook.collectives import all_gather, all_reduce


def pair_loss(embeddings: Tensor) -> Tensor:
    """Sum over ordered pairs i != j of the product of their embeddings; embeddings (N, D)."""
    total = embeddings.sum(dim=0)
    return (total * total).sum() - (embeddings * embeddings).sum()


class Gather(torch.autograd.Function):
    """Gather in the forward pass; the sum of all ranks' gradients, cut to the own rows, in the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], rank: int) -> Tensor:
        ctx.counts, ctx.rank = counts, rank
        padded = rows.new_zeros(max(counts), rows.shape[1])
        padded[: len(rows)] = rows
        gathered = all_gather(padded.flatten()).view(len(counts), max(counts), rows.shape[1])
        return torch.cat([part[:n] for part, n in zip(gathered, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        total = all_reduce(gradients[0].contiguous())
        start = sum(ctx.counts[: ctx.rank])
        return total[start : start + ctx.counts[ctx.rank]], None, None


def gather_rows(rows: Tensor, gather: type[Gather] = Gather) -> Tensor:
    """Rows of all ranks, in rank order; ranks may have unequal numbers of rows."""
    counts = all_gather(torch.tensor([len(rows)], device=rows.device)).tolist()
    return gather.apply(rows, counts, dist.get_rank())
