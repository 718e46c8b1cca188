"""Mutants of activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from equivtests.adapters.textbook.recompute import Recompute
from equivtests.cases.windows import MicroBatch
from equivtests.models.parts import Terms
from equivtests.models.plain import RunningMean
from equivtests.mutants.mutant import mutant
from equivtests.mutants.situations import DROPOUT, RUNNING


@mutant(
    "ac-no-rng",
    strategy="recompute",
    case=DROPOUT,
    quantity="dropout mask",
    source="allenai/OLMo-core#828; openai/guided-diffusion#167; pytorch/pytorch#190758",
    mistake="the random state is not put back for the recomputation, which draws another mask",
)
class FreshMask(Recompute):
    """The stream has gone on since the first pass; the loss is right, the gradients are those of other activations."""

    @contextmanager
    def recomputation(self) -> Iterator[None]:
        self.stream.draw += 1
        with super().recomputation():
            try:
                yield
            finally:
                self.stream.draw -= 1


@mutant(
    "fairscale-bn-recompute",
    strategy="recompute",
    case=RUNNING,
    quantity="buffer",
    source="facebookresearch/fairscale#1035",
    mistake="statistics are frozen in the first pass and left to the recomputation, which does not collect them either",
)
class FrozenStatistics(Recompute):
    """Each pass relies on the other one: the running mean never moves."""

    def passes(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return self.frozen(), self.recomputation()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        yield
        running = self.module.running
        assert isinstance(running, RunningMean)
        running.total, running.count = None, 0

    def reduce_buffers(self) -> None:
        """Nothing has been collected."""


@mutant(
    "torchgpipe-bn-chunks",
    strategy="recompute",
    case=RUNNING,
    quantity="buffer",
    source="kakaobrain/torchgpipe#9, #35",
    mistake="running statistics move with every forward pass: once per micro-batch, and again when it is recomputed",
)
class MovedByEveryPass(Recompute):
    """The result depends on the number of micro-batches, and on whether activations are kept."""

    def forward(self, model: nn.Module, batch: MicroBatch) -> Terms:
        terms = super().forward(model, batch)
        super().reduce_buffers()
        return terms

    @contextmanager
    def recomputation(self) -> Iterator[None]:
        fed = len(self.fed)
        try:
            yield
        finally:
            del self.fed[fed:]
            super().reduce_buffers()

    def reduce_buffers(self) -> None:
        """They have moved already."""
