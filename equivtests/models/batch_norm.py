"""Normalization by the statistics of a micro-batch, which ranks may share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from equivtests.models.parts import widen


class BatchNorm(nn.Module):
    """(x - mean) / √(variance + EPS) by feature, over all rows and positions of a micro-batch; x is (N, L, D).

    Ioffe, Szegedy 2015: Batch normalization, algorithm 1, without gain and bias. total: the sum of a vector over all that
    shares the micro-batch, differentiable; replace it where its rows lie on several ranks. `commit` makes what was seen
    since the last one, as one set of rows, a step of the running `mean` and (unbiased) `var`. Both start at zero.
    """

    EPS = 2.0**-6
    MOMENTUM = 0.25

    mean: Tensor
    var: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.zeros(width))
        self.total: Callable[[Tensor], Tensor] = alone
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows(widen(x))
        mean, variance, count = self.statistics(rows)
        self.note(rows, mean.detach(), variance.detach(), count)
        return ((widen(x) - mean) / (variance + self.EPS).sqrt()).to(x.dtype)

    def rows(self, x_NLD: Tensor) -> Tensor:
        """What statistics are taken of, (S, D)."""
        return x_NLD.flatten(0, 1)

    def statistics(self, x_SD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(mean, variance, number) of the S rows and positions here and wherever `total` adds up."""
        sums = self.total(torch.cat([x_SD.sum(dim=0), x_SD.new_tensor([len(x_SD)])]))
        count = sums[-1].detach().clamp(min=1)
        mean = sums[:-1] / count
        return mean, self.total((x_SD - mean).square().sum(dim=0)) / count, count

    def note(self, x_SD: Tensor, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Keep what the running statistics are to be moved by."""
        self.seen.append((mean, variance, count))

    def commit(self) -> None:
        """Move the running statistics, and forget what was seen. (Chan et al. 1983: Algorithms for the sample variance.)"""
        count = sum((n for _, _, n in self.seen), self.mean.new_zeros(()))
        mean = sum((n * m for m, _, n in self.seen), torch.zeros_like(self.mean)) / count
        squares = sum((n * (v + (m - mean).square()) for m, v, n in self.seen), torch.zeros_like(self.var))
        self.mean.lerp_(mean.to(self.mean.dtype), self.MOMENTUM)
        self.var.lerp_((squares / (count - 1)).to(self.var.dtype), self.MOMENTUM)
        self.seen.clear()


def alone(x: Tensor) -> Tensor:
    """The sum over one rank."""
    return x
