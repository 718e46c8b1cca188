"""Activation checkpointing: the backward pass runs the forward pass again instead of keeping its activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from equivtests.adapters.adapter import Claims, Strategy
from equivtests.adapters.places import show
from equivtests.adapters.textbook.dp import TEXTBOOK_FEATURES, TEXTBOOK_OBSERVES, DataParallel
from equivtests.cases.windows import MicroBatch
from equivtests.models.parts import Terms
from equivtests.record.observation import Observe


class Recompute(DataParallel):
    """Data parallelism with every micro-batch's forward pass checkpointed as a whole (Chen et al. 2016, Training deep nets
    with sublinear memory cost, section 3). Dropout is drawn again, alike; what a forward pass leaves behind is left once.
    """

    def claims(self) -> Claims:
        strategy = Strategy(
            "recompute",
            features=TEXTBOOK_FEATURES | {"pairs", "running"},
            restores=True,
            observes=TEXTBOOK_OBSERVES | {"mask"},
            algorithm="all-reduce",
        )
        return Claims((strategy,), framework="equivtests textbook")

    def wrap(self, module: nn.Module) -> nn.Module:
        self.masks: list[tuple[str, int, Tensor]] = []
        dropout = getattr(module, "dropout", None)
        if dropout is not None:
            dropout.watch = lambda site, kept: self.masks.append((site, self.passing, kept))
        return super().wrap(module)

    def forward_backward(self, k: int, batch: MicroBatch, last: bool) -> Tensor:
        self.passing = k
        return super().forward_backward(k, batch, last)

    def forward(self, model: nn.Module, batch: MicroBatch) -> Terms:
        terms: Terms = checkpoint(super().forward, model, batch, use_reentrant=False, context_fn=self.passes)
        return terms

    def passes(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """What stands around the first forward pass, and around the second."""
        return nullcontext(), self.recomputation()

    @contextmanager
    def recomputation(self) -> Iterator[None]:
        """A forward pass whose samples and statistics have been taken before."""
        fed, running = len(self.fed), getattr(self.module, "running", None)
        collected = (running.total, running.count) if running is not None else None
        try:
            yield
        finally:
            del self.fed[fed:]
            if running is not None and collected is not None:
                running.total, running.count = collected

    def show_inputs(self, observe: Observe) -> None:
        super().show_inputs(observe)
        for site, k, kept in self.masks:
            if len(kept):
                show(observe, "mask", site, kept, update=self.window.update, microbatch=k)
        self.masks.clear()
