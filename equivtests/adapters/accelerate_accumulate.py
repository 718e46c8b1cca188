"""Accelerate's own rule of accumulation: the loop that its guide calls the finished code."""

from __future__ import annotations

from dataclasses import replace

from accelerate.data_loader import DataLoaderShard
from torch import Tensor

from equivtests.adapters.accelerate import SHARED, Accelerate
from equivtests.adapters.adapter import PLAIN_FEATURES, Claims, KnownDivergence, Strategy
from equivtests.cases.case import Semantics
from equivtests.cases.windows import MicroBatch

SHORT_WINDOWS = ("linear-*", "mlp-*", "gpt-adamw-*", "chain-sgd-*", "gpt-frozen-*", "gpt-double-*")


def short_window(case: str) -> KnownDivergence:
    """A divergence of the cases with this name, whose last window is shorter than the others."""
    return KnownDivergence(
        case,
        quantity="loss",
        reason="Accelerator.backward divides by gradient_accumulation_steps where the last window has fewer micro-batches",
        link="https://github.com/huggingface/transformers/pull/39659",
    )


class AccelerateAccumulate(Accelerate):
    """Each loss is a mean over the tokens of its micro-batch; these means are averaged, whatever their tokens."""

    def claims(self) -> Claims:
        strategy = Strategy(
            "accelerate-ddp-accumulate",
            **SHARED | {"features": PLAIN_FEATURES},
            semantics=Semantics(denominator="rank-microbatch"),
            ragged=False,  # a prepared DataLoader gives every process the same number of batches
            known=tuple(map(short_window, SHORT_WINDOWS)),
        )
        return replace(super().claims(), strategies=(strategy,), mutants=())

    def accumulate(self, batches: list[MicroBatch]) -> Tensor:
        """From a DataLoader, at whose end Accelerate synchronizes and steps, however short the window."""
        return super().accumulate(DataLoaderShard(batches, batch_size=None, collate_fn=lambda batch: batch))

    def forward_backward(self, k: int, batch: MicroBatch, last: bool) -> Tensor:
        with self.accelerator.accumulate(self.model):
            loss = self.objective(self.forward(self.model, batch), k, batch)
            self.accelerator.backward(loss)
        return loss / self.accelerator.gradient_accumulation_steps

    def token_factor(self, span: str, k: int, batch: MicroBatch) -> float:
        return 1 / max(1, batch.tokens)
