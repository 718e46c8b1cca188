"""Correct ways of running a pipeline that the textbook adapter lacks, as parents for mutants."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from equivtests.adapters.textbook.pipeline import TIED, PipelineParallel
from equivtests.cases.windows import MicroBatch
from equivtests.models.parts import Terms


class ScaledAfterwards(PipelineParallel):
    """M times the objective is differentiated, and what has been accumulated is divided by M once, at the end."""

    def differentiated(self, terms: Terms, k: int, batch: MicroBatch) -> Tensor:
        return self.objective(terms, k, batch) * len(self.batches)

    def accumulate(self, batches: list[MicroBatch]) -> Tensor:
        loss = super().accumulate(batches)
        self.scale_gradients()
        return loss

    def scale_gradients(self) -> None:
        for _, gradient, _ in self.gradients():
            gradient.div_(len(self.batches))


class SendsLate(PipelineParallel):
    """A gradient for the stage before is kept until the next backward pass has been computed, too."""

    def accumulate(self, batches: list[MicroBatch]) -> Tensor:
        self.outgoing: dict[tuple[int, int], Tensor] = {}
        return super().accumulate(batches)

    def send_backward(self, stage: int, k: int, gradient: Tensor) -> None:
        self.outgoing[self.slot(stage, k)] = gradient
        last = k == len(self.batches) - 1
        for ready in [k - 1] * (k > 0) + [k] * last:
            super().send_backward(stage, ready, self.outgoing[self.slot(stage, ready)])

    def slot(self, stage: int, k: int) -> tuple[int, int]:
        """What a gradient is kept under."""
        return stage, k


class CopyRefreshed(PipelineParallel):
    """The first stage updates a tied parameter, and the last one gets its new value."""

    def optimizer_step(self) -> None:
        named = dict(self.trainable())
        copied = named.get(TIED) if self.ends.index > 0 else None
        gradient = None if copied is None else copied.grad
        if copied is not None:
            copied.grad = None
        super().optimizer_step()
        if copied is not None:
            copied.grad = gradient
        if TIED in named:
            self.refresh(named[TIED].detach())

    def refresh(self, weight: Tensor) -> None:
        dist.broadcast(weight, self.ends.ranks[0], group=self.ends.group)
