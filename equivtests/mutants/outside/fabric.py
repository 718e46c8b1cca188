"""Mutants of the Lightning Fabric adapter."""

from __future__ import annotations

from torch import Tensor, nn

from equivtests.adapters.fabric import Fabric
from equivtests.adapters.torch_adapter import TorchAdapter
from equivtests.cases.case import DOUBLE
from equivtests.cases.windows import MicroBatch
from equivtests.models.parts import Terms
from equivtests.mutants.mutant import mutant
from equivtests.mutants.situations import (
    CLIPPED_THREES,
    LAST_IN_ONE_PASS,
    THREES,
    TINY_MLP,
    TWO_BY_THREE,
    TWO_BY_THREE_GPT,
    situation,
)

IN_DOUBLE = situation("two-by-three-double", TINY_MLP, THREES, precision=DOUBLE)
GUIDE = "https://lightning.ai/docs/fabric/stable/advanced/gradient_accumulation.html"


@mutant(
    "fabric-mean-of-means",
    strategy="fabric-ddp",
    case=TWO_BY_THREE,
    quantity="loss",
    source="huggingface/transformers#34191",
    mistake="the mean over each micro-batch's own tokens is divided by K and handed to fabric.backward",
)
class MeanOfMeans(Fabric):
    """Micro-batches and ranks count alike, whatever their tokens."""

    def forward_backward(self, k: int, batch: MicroBatch, last: bool) -> Tensor:
        with self.fabric.no_backward_sync(self.model, enabled=not last):
            loss = self.forward(self.model, batch)["main"] / max(1, batch.tokens) / self.counts.microbatches
            self.fabric.backward(loss)
        return loss


@mutant(
    "fabric-fsdp2-local-tokens",
    strategy="fabric-fsdp2",
    case=TWO_BY_THREE_GPT,
    quantity="loss",
    source="pytorch/torchtitan#2206",
    mistake="each rank divides by its own tokens of the window, then fully_shard averages over ranks",
)
class LocalTokens(Fabric):
    """The tokens are not added up with fabric.all_reduce."""

    def token_factor(self, span: str, k: int, batch: MicroBatch) -> float:
        return 1 / sum(b.tokens for b in self.window.microbatches)


@mutant(
    "fabric-bypassed",
    strategy="fabric-ddp",
    case=TWO_BY_THREE,
    quantity="gradient",
    source="Lightning-AI/pytorch-lightning#17937",
    mistake="the forward pass calls the module, not what fabric.setup returned: gradients are never synchronized",
)
class Bypassed(Fabric):
    """No error: DDP's hooks wait for a forward pass through the wrapper."""

    def forward(self, model: nn.Module, batch: MicroBatch) -> Terms:
        return TorchAdapter.forward(self, self.module, batch)


@mutant(
    "fabric-single-outputs",
    strategy="fabric-ddp",
    case=IN_DOUBLE,
    quantity="loss",
    source="Lightning-AI/pytorch-lightning#14859",
    mistake='with precision "64-true" the loss that the model returns is rounded to float32',
)
class SingleOutputs(Fabric):
    """Fabric casts outputs to torch's default dtype, unless the call stands under fabric.autocast()."""

    def forward(self, model: nn.Module, batch: MicroBatch) -> Terms:
        return TorchAdapter.forward(self, model, batch)


@mutant(
    "fabric-clipped-too-early",
    strategy="fabric-ddp",
    case=CLIPPED_THREES,
    quantity="gradient",
    source=GUIDE,
    mistake="gradients are clipped after every backward pass, before the window is accumulated",
)
class ClippedTooEarly(Fabric):
    """What is clipped is one rank's gradient of the micro-batches so far."""

    def after_backward(self, k: int) -> None:
        self.clip_gradients(float(self.case.optimizer.clip or 0), 2.0)


@mutant(
    "fabric-no-sync-forgotten",
    strategy="fabric-ddp",
    case=TWO_BY_THREE_GPT,
    quantity="collectives",
    source=GUIDE,
    mistake="gradients travel after every micro-batch: right, but K times the traffic",
    chapter="ledger",
)
class SynchronizedAlways(Fabric):
    """Every micro-batch is treated as the last one."""

    def forward_backward(self, k: int, batch: MicroBatch, last: bool) -> Tensor:
        return super().forward_backward(k, batch, last=True)


@mutant(
    "fabric-sync-left-off",
    strategy="fabric-fsdp2-no-sync",
    case=LAST_IN_ONE_PASS,
    quantity="gradient",
    source="https://github.com/Lightning-AI/pytorch-lightning/blob/master/src/lightning/fabric/strategies/model_parallel.py",
    mistake="after no_backward_sync(enabled=False), a backward pass outside of it leaves fully_shard without gradients",
)
class SyncLeftOff(Fabric):
    """Only windows that accumulate use the context; the one that does not is trained on nothing."""

    def forward_backward(self, k: int, batch: MicroBatch, last: bool) -> Tensor:
        if self.counts.microbatches > 1:
            return super().forward_backward(k, batch, last)
        return TorchAdapter.forward_backward(self, k, batch, last)
