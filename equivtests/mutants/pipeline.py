"""Mutants of pipeline parallelism: what is scaled, kept, sent and paired, and parameters that several stages have."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from equivtests.adapters.textbook.pipeline import PipelineParallel
from equivtests.cases.windows import MicroBatch
from equivtests.models.parts import Terms
from equivtests.mutants.mutant import mutant
from equivtests.mutants.split_situations import (
    STAGED,
    STAGED_BESIDE_DATA,
    STAGED_CLIPPED,
    STAGED_LENGTHS,
    STAGED_TIED,
    STAGED_TIED_DATA,
    STAGED_TIED_VIRTUAL,
    STAGED_VIRTUAL,
)
from equivtests.mutants.stages import CopyRefreshed, ScaledAfterwards, SendsLate
from equivtests.reference.timeline import Operation

# ---------------------------------------------------------------------------------------------- the scale


@mutant(
    "deepspeed-pipe-sum",
    strategy="1f1b",
    case=STAGED_BESIDE_DATA,
    quantity="gradient",
    source="deepspeedai/DeepSpeed#7773",
    mistake="the pipeline engine adds up gradients of micro-batches without the division by K of the other path",
)
class SummedByThePipeline(PipelineParallel):
    """Each micro-batch counts as if it were the window."""

    def differentiated(self, terms: Terms, k: int, batch: MicroBatch) -> Tensor:
        return self.objective(terms, k, batch) * self.counts.microbatches


@mutant(
    "titan-pp-sum-loss",
    strategy="gpipe",
    case=STAGED,
    quantity="gradient",
    source="pytorch/torchtitan#2972, #4194",
    mistake="a sum over tokens is differentiated; only the loss that is logged is divided by them",
)
class SumDifferentiated(PipelineParallel):
    """The division by the window's tokens comes after the backward pass, for the log."""

    def differentiated(self, terms: Terms, k: int, batch: MicroBatch) -> Tensor:
        return self.case.magnitude * terms["main"]


@mutant(
    "torch-pp-no-scale",
    strategy="1f1b",
    case=STAGED,
    quantity="gradient",
    source="pytorch/pytorch#144352",
    mistake="what has been accumulated is never divided by the number of micro-batches",
)
class NeverScaled(ScaledAfterwards):
    """Gradients stay M times too large."""

    def scale_gradients(self) -> None:
        pass


@mutant(
    "titan-scale-grads-again",
    strategy="gpipe",
    case=STAGED,
    quantity="gradient",
    source="pytorch/torchtitan#1733, #1732",
    mistake="after every group of micro-batches all that has been accumulated is divided, earlier groups again",
)
class ScaledAgain(ScaledAfterwards):
    """The first half of the micro-batches is divided twice."""

    def perform(self, operation: Operation) -> None:
        super().perform(operation)
        if operation.kind == "B" and operation.microbatch == len(self.batches) // 2 - 1:
            self.scale_gradients()


@mutant(
    "torch-pp-dw-scale",
    strategy="zero-bubble",
    case=STAGED,
    quantity="gradient",
    source="pytorch/pytorch#164777",
    mistake="in a split backward pass the half for inputs is scaled, the half for weights is not",
)
class WeightsUnscaled(PipelineParallel):
    """Gradients of weights are M times too large, what stages pass on is right."""

    def weight_gradients(self, stage: int, k: int) -> list[Tensor | None]:
        found = super().weight_gradients(stage, k)
        return [None if gradient is None else gradient * len(self.batches) for gradient in found]


# ---------------------------------------------------------------------------------------------- what stages keep


@mutant(
    "automodel-stage-reset",
    strategy="1f1b",
    case=STAGED_LENGTHS,
    quantity="gradient",
    source="NVIDIA-NeMo/Automodel#3530",
    mistake="where the sequence length changes inside a window, stages are set up again and accumulated gradients cleared",
)
class StageReset(PipelineParallel):
    """A micro-batch of another shape sets gradients to None."""

    length = 0

    def forward_stage(self, stage: int, k: int) -> None:
        length = self.batches[k].inputs.shape[1]
        if length != self.length:
            self.optimizer.zero_grad()
        self.length = length
        super().forward_stage(stage, k)


@mutant(
    "torch-latest-bwd-only",
    strategy="gpipe",
    case=STAGED,
    quantity="gradient",
    source="pytorch/pytorch#139404",
    mistake="a stage keeps one outgoing gradient, the newest, and sends it late",
)
class OneSlot(SendsLate):
    """The stage before gets the gradient of the micro-batch that followed."""

    def slot(self, stage: int, k: int) -> tuple[int, int]:
        return stage, 0


@mutant(
    "torch-dw-not-filled",
    strategy="zero-bubble",
    case=STAGED,
    quantity="gradient",
    source="pytorch/pytorch#153833",
    mistake="the half of a backward pass for weights returns a tuple that was never filled",
)
class NotFilled(PipelineParallel):
    """Callers that use the return value have no gradient."""

    def weight_gradients(self, stage: int, k: int) -> list[Tensor | None]:
        return [None for _ in super().weight_gradients(stage, k)]


@mutant(
    "deepspeed-wrong-labels",
    strategy="1f1b",
    case=STAGED,
    quantity="loss",
    source="deepspeedai/DeepSpeed#5729",
    mistake="the last stage reads the loader by itself, and is one micro-batch ahead of the first",
)
class LabelsAhead(PipelineParallel):
    """Outputs of a micro-batch are paired with the targets of the next one."""

    def labels(self, k: int) -> MicroBatch:
        return self.batches[(k + 1) % len(self.batches)]


@mutant(
    "torch-pipe-ddp-nosync",
    strategy="1f1b",
    case=STAGED_BESIDE_DATA,
    quantity="gradient",
    source="pytorch/pytorch#60118",
    mistake="stages that lie on other ranks are never reported to the data-parallel reducer",
)
class StagesNotReduced(PipelineParallel):
    """Gradients stay those of each pipeline."""

    def average_data(self) -> None:
        pass


@mutant(
    "apex-interleave-untested",
    strategy="interleaved-1f1b",
    case=STAGED_VIRTUAL,
    quantity="schedule",
    source="NVIDIA/apex#1384",
    mistake="interleaving is asked for and never turned on: every rank has one stage, twice as large",
)
class NeverInterleaved(PipelineParallel):
    """All numbers are right; what was claimed has not run."""

    def split(self, module: nn.Module) -> None:
        self.layout = replace(self.layout, virtual=1)
        super().split(module)


@mutant(
    "titan-pp-local-norm",
    strategy="1f1b",
    case=STAGED_CLIPPED,
    quantity="norm",
    source="pytorch/torchtitan#596, #649",
    mistake="each pipeline stage clips by the norm of its own gradients",
)
class NormOfStage(PipelineParallel):
    """The squares are not added up over the stages."""

    def gradient_norm(self, order: float) -> Tensor:
        return torch.nn.utils.get_total_norm([gradient for _, gradient, _ in self.gradients()], order)


# ---------------------------------------------------------------------------------------------- tied ends


@mutant(
    "piper-tied-unsynced",
    strategy="1f1b",
    case=STAGED_TIED,
    quantity="gradient",
    source="uw-syfi/piper#13, #25",
    mistake="the copies of a tied embedding on the first and the last stage each train alone",
)
class CopiesAlone(PipelineParallel):
    """Each copy keeps the gradient of its own use."""

    def sum_tied(self, gradients: list[Tensor]) -> None:
        pass


@mutant(
    "megatron-tied-flat-layout",
    strategy="1f1b",
    case=STAGED_TIED_DATA,
    quantity="gradient",
    source="NVIDIA/Megatron-LM#6500",
    mistake="first and last stage add up raw pieces of flat buffers in which the tied weight has different offsets",
)
class OffsetsMixed(PipelineParallel):
    """In the buffer of the last stage the weight stands behind the norm's, so other elements meet."""

    OFFSET = 8

    def sum_tied(self, gradients: list[Tensor]) -> None:
        shift = self.OFFSET * self.ends.index
        moved = [gradient.flatten().roll(shift) for gradient in gradients]
        super().sum_tied(moved)
        for gradient, total in zip(gradients, moved, strict=True):
            gradient.copy_(total.roll(-shift).view_as(gradient))


@mutant(
    "megatron-untied-overlap",
    strategy="1f1b",
    case=STAGED_TIED,
    quantity="weight update",
    source="NVIDIA/Megatron-LM#656",
    mistake="after the step only the embedding gets the updated weight, the output head keeps the old one",
)
class CopyNotRefreshed(CopyRefreshed):
    """The copy on the last stage drifts away."""

    def refresh(self, weight: Tensor) -> None:
        pass


@mutant(
    "te-delayed-tied",
    strategy="zbv",
    case=STAGED_TIED_VIRTUAL,
    quantity="gradient",
    source="NVIDIA/TransformerEngine#3437",
    mistake="a delayed gradient of a tied weight overwrites that of the weight's other use",
)
class DelayedOverwrites(PipelineParallel):
    """Each use adds up its own micro-batches, and what is assigned last stays."""

    def accumulate(self, batches: list[MicroBatch]) -> Tensor:
        self.sites: dict[tuple[int, Tensor], Tensor] = {}
        return super().accumulate(batches)

    def add_gradient(self, stage: int, weight: Tensor, gradient: Tensor) -> None:
        own = self.sites.get((stage, weight))
        weight.grad = self.sites[stage, weight] = gradient if own is None else own + gradient
