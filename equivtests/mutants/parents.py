"""Correct ways of doing data parallelism that the textbook adapters lack, as parents for mutants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from equivtests.adapters.textbook.collectives import all_gather, all_reduce
from equivtests.adapters.textbook.dp import DataParallel
from equivtests.adapters.textbook.pairs import Gather, gather_rows
from equivtests.cases import numbers
from equivtests.cases.windows import MicroBatch, Window, micro_batch, sample_ids
from equivtests.models.build import TERM_WEIGHTS
from equivtests.models.parts import Terms
from equivtests.record.observation import Observe


class LoggedApart(DataParallel):
    """The loss that is reported comes from another path than the one that is differentiated."""

    def forward_backward(self, k: int, batch: MicroBatch, last: bool) -> Tensor:
        terms = self.forward(self.model, batch)
        self.backward(self.differentiated(terms, k, batch))
        return self.objective(terms, k, batch)

    def differentiated(self, terms: Terms, k: int, batch: MicroBatch) -> Tensor:
        return self.objective(terms, k, batch)

    def weighted(self, terms: Terms, factors: dict[str, float]) -> Tensor:
        """The terms added up with factors of the caller's own."""
        parts = [TERM_WEIGHTS[name] * factors[name] * value for name, value in terms.items()]
        return self.case.magnitude * torch.stack(parts).sum()


class MeanOverMicroBatches(DataParallel):
    """Gradients are the mean over the window's k micro-batches of k times their parts."""

    def backward(self, objective: Tensor) -> None:
        super().backward(objective * (self.counts.microbatches / self.divisor()))

    def divisor(self) -> float:
        return self.counts.microbatches


class Sampler(DataParallel):
    """Ranks draw their samples themselves: one shuffle of the window that all share, of which each takes its slice."""

    def update(self, window: Window, observe: Observe) -> None:
        super().update(Window(window.update, (self.draw(window.update),)), observe)

    def draw(self, update: int) -> MicroBatch:
        samples = self.samples(update)
        chosen = [samples[i] for i in self.indices(update, len(samples))]
        return micro_batch(self.case.model, self.case.seed, [i for i, _ in chosen], [n for _, n in chosen], False)

    def samples(self, update: int) -> list[tuple[int, int]]:
        """(id, valid tokens) of every sample of the window."""
        fed = enumerate(self.case.windows[update])
        return [
            pair
            for rank, micros in fed
            for k, rows in enumerate(micros)
            for pair in zip(sample_ids(self.case, update, rank, k), rows, strict=True)
        ]

    def indices(self, update: int, count: int) -> list[int]:
        """Positions of this rank's samples in the window."""
        return self.shuffled(update, count)[self.ranks.rank :: self.ranks.world]

    def shuffled(self, update: int, count: int) -> list[int]:
        return numbers.ranking(self.shuffle_seed(), f"shuffle.{update}", count).tolist()

    def shuffle_seed(self) -> int:
        return self.case.seed


class ModuleByModule(DataParallel):
    """One reduction per module that has gradients; modules without any are passed over."""

    def reduce_gradients(self, gradients: list[Tensor]) -> None:
        for held in self.held():
            super().reduce_gradients(held)

    def held(self) -> list[list[Tensor]]:
        return [gradients for gradients in self.by_module() if gradients]

    def by_module(self) -> list[list[Tensor]]:
        """Gradients of every innermost module, in the order of the model."""
        leaves = [m for m in self.module.modules() if not list(m.children())]
        return [[p.grad for p in m.parameters() if p.grad is not None] for m in leaves]


class TwoTermCompression(DataParallel):
    """Gradients in half precision first, then what the rounding lost, bucket by bucket.

    In the second update the buckets are put into another order between the two passes, as when arrival order is learnt.
    """

    BUCKETS = 3

    def reduce_gradients(self, gradients: list[Tensor]) -> None:
        flat = _flatten_dense_tensors(gradients)
        buckets = flat.chunk(self.BUCKETS)
        residuals: dict[int, Tensor] = {}
        for position, bucket in enumerate(self.order()):
            half = buckets[bucket].half()
            residuals[self.key(position, bucket)] = buckets[bucket] - half
            buckets[bucket].copy_(all_gather(half).view(self.ranks.world, -1).float().sum(dim=0))
        for position, bucket in enumerate(self.order(rebuilt=self.steps > 0)):
            buckets[bucket].add_(all_reduce(residuals[self.key(position, bucket)].clone()))
        for gradient, reduced in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(reduced.div_(self.ranks.world))

    def order(self, rebuilt: bool = False) -> list[int]:
        """Buckets in the order in which they are sent."""
        buckets = list(range(self.BUCKETS))
        return buckets[::-1] if rebuilt else buckets

    def key(self, position: int, bucket: int) -> int:
        """What the residual of a bucket is kept under."""
        return bucket


class LocalPairs(DataParallel):
    """Every rank computes the pairs whose first sample is its own, against the gathered embeddings of all ranks."""

    gather: type[Gather] = Gather

    def pair_term(self, embeddings: Tensor) -> Tensor:
        weight = self.ranks.world * self.case.magnitude * TERM_WEIGHTS["pairs"] / int(self.counts.rows.sum())
        total = gather_rows(embeddings, self.gather).sum(dim=0)
        return weight * (embeddings.sum(dim=0) @ total - (embeddings * embeddings).sum())


class SummedPairs(DataParallel):
    """The loss over pairs from sums over ranks: every rank holds all of it, the sum's backward undoes the average."""

    def pair_term(self, embeddings: Tensor) -> Tensor:
        weight = self.case.magnitude * TERM_WEIGHTS["pairs"] / int(self.counts.rows.sum())
        total = self.sum_over_ranks(embeddings.sum(dim=0))
        return weight * (total @ total - self.sum_over_ranks((embeddings * embeddings).sum()))

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        return ReplicatedSum.apply(x, self.ranks.world)


class ReplicatedSum(torch.autograd.Function):
    """A sum over ranks whose result is used alike on all of them: the gradient there is already that of the whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: int) -> Tensor:
        ctx.world = world
        return all_reduce(x.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.world, None
