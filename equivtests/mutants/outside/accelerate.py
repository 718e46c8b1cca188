"""Mutants of the Accelerate adapter: what users of it write who miss a line of its guides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin
from torch import Tensor

from equivtests.adapters.accelerate import SHARED, Accelerate
from equivtests.adapters.adapter import Claims, Strategy
from equivtests.adapters.native.fsdp1 import ALL
from equivtests.cases.windows import MicroBatch
from equivtests.mutants.mutant import mutant
from equivtests.mutants.situations import CLIPPED_THREES, MIDDLE, TWO_BY_THREE, TWO_BY_THREE_GPT

GUIDE = "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation"


@mutant(
    "accelerate-mean-of-means",
    strategy="accelerate-ddp",
    case=TWO_BY_THREE,
    quantity="loss",
    source=f"huggingface/transformers#34191; {GUIDE}",
    mistake="the mean over each micro-batch's own tokens is handed to backward, which averages over micro-batches",
)
class MeanOfMeans(Accelerate):
    """The guide's finished code, which it warns about where samples have different lengths."""

    def forward_backward(self, k: int, batch: MicroBatch, last: bool) -> Tensor:
        with self.accelerator.accumulate(self.model):
            loss = self.forward(self.model, batch)["main"] / max(1, batch.tokens)
            self.accelerator.backward(loss)
        return loss / self.accelerator.gradient_accumulation_steps


@mutant(
    "accelerate-local-tokens",
    strategy="accelerate-ddp",
    case=TWO_BY_THREE_GPT,
    quantity="loss",
    source="huggingface/transformers#34242, #34373",
    mistake="tokens are counted over the window, but not gathered from the other processes",
)
class LocalTokens(Accelerate):
    """Every process divides by its own tokens; DDP then averages over processes."""

    def token_factor(self, span: str, k: int, batch: MicroBatch) -> float:
        return 1 / sum(b.tokens for b in self.window.microbatches)


@mutant(
    "accelerate-divided-twice",
    strategy="accelerate-ddp",
    case=TWO_BY_THREE,
    quantity="gradient",
    source="huggingface/transformers#35210; unslothai/unsloth-zoo#1023",
    mistake="backward divides by gradient_accumulation_steps what is divided by the window's tokens already",
)
class DividedTwice(Accelerate):
    """The factor gradient_accumulation_steps of the guide is forgotten."""

    def backward(self, objective: Tensor) -> None:
        self.accelerator.backward(objective)


@mutant(
    "accelerate-averaged-twice",
    strategy="accelerate-ddp",
    case=TWO_BY_THREE,
    quantity="loss",
    source="huggingface/transformers#37474, #40799",
    mistake="DDP averages over processes what is divided by the tokens of all of them already",
)
class AveragedTwice(Accelerate):
    """The factor num_processes of the guide is forgotten."""

    def token_factor(self, span: str, k: int, batch: MicroBatch) -> float:
        return super().token_factor(span, k, batch) / self.accelerator.num_processes


@mutant(
    "accelerate-clipped-too-early",
    strategy="accelerate-ddp",
    case=CLIPPED_THREES,
    quantity="gradient",
    source="https://huggingface.co/docs/accelerate/quicktour",
    mistake="gradients are clipped after every backward pass, not only when accelerator.sync_gradients",
)
class ClippedTooEarly(Accelerate):
    """What is clipped is one process's gradient of the micro-batches so far."""

    def after_backward(self, k: int) -> None:
        self.accelerator.clip_grad_norm_(self.model.parameters(), self.case.optimizer.clip)


@mutant(
    "accelerate-fast-schedule",
    strategy="accelerate-ddp",
    case=MIDDLE,
    quantity="learning rate",
    source="huggingface/transformers#24088; huggingface/accelerate#2142, #2926",
    mistake="a prepared schedule steps num_processes times per update, unless batches are split",
)
class FastSchedule(Accelerate):
    """Accelerate takes the schedule for one of a single process, whose batches are num_processes times smaller."""

    def options(self) -> dict[str, Any]:
        return super().options() | {"dataloader_config": DataLoaderConfiguration()}


@mutant(
    "accelerate-no-sync-forgotten",
    strategy="accelerate-ddp",
    case=TWO_BY_THREE_GPT,
    quantity="collectives",
    source="https://huggingface.co/docs/accelerate/concept_guides/gradient_synchronization",
    mistake="gradients travel after every micro-batch: right, but K times the traffic",
    chapter="ledger",
)
class SynchronizedAlways(Accelerate):
    """Every micro-batch is treated as the last one."""

    def forward_backward(self, k: int, batch: MicroBatch, last: bool) -> Tensor:
        return super().forward_backward(k, batch, last=True)


FSDP_ON_CPU: dict[str, Any] = {
    "strategy": "accelerate-ddp",
    "case": TWO_BY_THREE_GPT,
    "source": "https://huggingface.co/docs/accelerate/usage_guides/fsdp",
    "mistake": "on CPUs the FSDP plugin is dropped without a message: the model is wrapped in DDP",
}


@mutant("accelerate-fsdp2-on-cpu", quantity="vacuity", **FSDP_ON_CPU)
@mutant("accelerate-fsdp2-on-cpu-traffic", quantity="collectives", chapter="ledger", **FSDP_ON_CPU)
class FSDP2OnCPU(Accelerate):
    """FSDP2 as its guide has it, and claimed to shard."""

    def claims(self) -> Claims:
        sharded = SHARED | {"shards": ALL, "cut": "rows", "algorithm": "fsdp-full"}
        return replace(super().claims(), strategies=(Strategy("accelerate-ddp", **sharded),))

    def options(self) -> dict[str, Any]:
        return super().options() | {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}
