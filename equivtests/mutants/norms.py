"""Mutants of gradient norms and clipping."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from equivtests.adapters.native.fsdp1 import FSDP1
from equivtests.adapters.textbook.collectives import all_reduce
from equivtests.adapters.textbook.dp import DataParallel
from equivtests.adapters.textbook.zero import Zero3
from equivtests.adapters.torch_adapter import CLIP_EPS, coefficient
from equivtests.cases.windows import MicroBatch
from equivtests.mutants.mutant import mutant
from equivtests.mutants.sharding import DividedLate, WholeVectors
from equivtests.mutants.situations import CLIPPED_COPIES, CLIPPED_SCALED, CLIPPED_SHARDS, CLIPPED_THREES, LOOSE


@mutant(
    "areal-local-norm",
    strategy="zero-3",
    case=CLIPPED_SHARDS,
    quantity="norm",
    source="areal-project/AReaL#312; sgl-project/SpecForge#663",
    mistake="each rank clips by the norm of its own shard",
)
class LocalNorm(Zero3):
    """Squares of the shards are not added up over ranks before the coefficient is computed."""

    def add_squares(self, own: Tensor) -> Tensor:
        return own


@mutant(
    "areal-local-norm-logged",
    strategy="zero-3",
    case=CLIPPED_SHARDS,
    quantity="weight update",
    source="areal-project/AReaL#312",
    mistake="the norm that is logged is global, the one that clips is local",
)
class LocalNormGlobalLog(Zero3):
    """Each rank clips by its own shard's norm; the norm is reduced for the log only."""

    def clip_gradients(self, limit: float, order: float) -> Tensor:
        gradients = [g for _, g, _ in self.gradients()]
        norm = self.gradient_norm(order)
        local = torch.nn.utils.get_total_norm(gradients, order)
        for gradient in gradients:
            gradient.mul_(coefficient(limit, local))
        return norm


@mutant(
    "torch-fsdp1-plain-clip",
    strategy="fsdp1-full",
    case=CLIPPED_SHARDS,
    quantity="norm",
    source="pytorch/pytorch#72548, #88621",
    mistake="torch.nn.utils.clip_grad_norm_ on FSDP1 parameters, which are local shards",
)
class PlainClip(FSDP1):
    """The plain clipping utility takes each rank's shards for the whole model."""

    def clip_gradients(self, limit: float, order: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit, order)


@mutant(
    "veomni-hsdp-overcount",
    strategy="zero-3",
    case=CLIPPED_COPIES,
    quantity="norm",
    source="ByteDance-Seed/VeOmni#184, #862",
    mistake="squares are added up over the copies of the shards too",
)
class CopiesCounted(Zero3):
    """The norm is reduced over all ranks instead of one copy's, so every element counts once per copy."""

    def add_squares(self, own: Tensor) -> Tensor:
        return all_reduce(own)


@mutant(
    "hyper-replicated-counted",
    strategy="zero-1",
    case=CLIPPED_SHARDS,
    quantity="norm",
    source="mindspore-ai/hyper-parallel#279",
    mistake="parameters that are not sharded count once per rank in the norm",
)
class VectorsCountedByAll(WholeVectors):
    """Gradients that all ranks share go into the sum over ranks."""

    def total(self, pieces: Tensor, vectors: Tensor) -> Tensor:
        return self.add_squares(pieces + vectors)


@mutant(
    "clip-per-microbatch",
    strategy="dp",
    case=CLIPPED_SHARDS,
    quantity="gradient",
    source="tenstorrent/tt-metal#17568",
    mistake="gradients are clipped after every micro-batch",
)
class ClipEveryMicroBatch(DataParallel):
    """The partial sum is clipped inside the accumulation loop, again and again."""

    def after_backward(self, k: int) -> None:
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.case.optimizer.clip or math.inf)


@mutant(
    "clip-before-backward",
    strategy="dp",
    case=CLIPPED_SHARDS,
    quantity="norm",
    source="simchowitzlabpublic/nano-world-model#22",
    mistake="gradients are clipped before the backward pass",
)
class ClipTooEarly(DataParallel):
    """What is clipped are the gradients from before the backward pass: none."""

    def accumulate(self, batches: list[MicroBatch]) -> Tensor:
        self.early = super().clip_gradients(self.case.optimizer.clip or math.inf, 2.0)
        return super().accumulate(batches)

    def clip_gradients(self, limit: float, order: float) -> Tensor:
        return self.early


@mutant(
    "gemini-clip-accum",
    strategy="zero-2",
    case=CLIPPED_THREES,
    quantity="norm",
    source="hpcaitech/ColossalAI#5002",
    mistake="the norm is taken before accumulated gradients are divided by the number of micro-batches",
)
class NormBeforeDivision(DividedLate):
    """Clipping sees a gradient that is still K times too large."""

    def synchronize(self) -> None:
        self.early = self.add_squares(self.gradient_shard.square().sum()).sqrt()
        super().synchronize()

    def gradient_norm(self, order: float) -> Tensor:
        return self.early


@mutant(
    "clip-before-unscale",
    strategy="dp",
    case=CLIPPED_SCALED,
    quantity="norm",
    source="huggingface/transformers#40799; Lightning-AI/pytorch-lightning#19536",
    mistake="the norm is that of gradients still multiplied by the loss scale",
)
class NormOfScaled(DataParallel):
    """The norm is taken before gradients are divided by the loss scale, so everything is clipped."""

    def unscale(self) -> None:
        self.early = super().gradient_norm(2.0)
        super().unscale()

    def gradient_norm(self, order: float) -> Tensor:
        return self.early


@mutant(
    "clip-scales-up",
    strategy="dp",
    case=LOOSE,
    quantity="clip coefficient",
    source="DingfanChen/GS-WGAN#5; tinygrad/tinygrad#11761",
    mistake="the clip coefficient is not limited to 1",
)
class ClipScalesUp(DataParallel):
    """Gradients with a small norm are scaled up to the limit."""

    def clip_factor(self, limit: float, norm: Tensor) -> Tensor:
        return limit / (norm + CLIP_EPS)
