"""Naive uses of torch as it is: what its own functions do without a word where they are not used as they must be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from equivtests.adapters.adapter import Claims
from equivtests.adapters.native.ddp import DDP
from equivtests.adapters.native.fsdp2 import FSDP2
from equivtests.adapters.native.mesh import whole
from equivtests.adapters.native.pipeline import Pipeline, pipeline_strategy
from equivtests.adapters.native.plan import Plan
from equivtests.adapters.native.tensor import ShardedVocabulary, TensorParallel
from equivtests.adapters.torch_adapter import SHOWN, Shown
from equivtests.cases.windows import MicroBatch
from equivtests.models.gpt import GPT
from equivtests.models.parts import widen
from equivtests.models.vocabulary import WholeVocabulary
from equivtests.mutants.mutant import mutant
from equivtests.mutants.parents import SummedPairs
from equivtests.mutants.situations import PAIRS, SPREAD_OVER_RANKS, TWO_BY_THREE
from equivtests.mutants.split_situations import (
    SPREAD,
    SPREAD_HEAD_NORMS,
    SPREAD_SHARED_HEAD,
    SPREAD_SMOOTHED,
    STAGED,
    TENSOR_TIED,
)
from equivtests.mutants.tied import without_head
from equivtests.record.observation import Place

ONCE = replace(SPREAD_OVER_RANKS, name="once", windows=SPREAD_OVER_RANKS.windows[:1])
"""One micro-batch per rank, one update: what the next forward pass would raise does not come up."""

# ---------------------------------------------------------------------------------------------- pipelines


@mutant(
    "stock-pipeline-scales",
    strategy="torch-1f1b",
    case=STAGED,
    quantity="gradient",
    source="pytorch/pytorch#144352",
    mistake="a loss that is already divided by the window's tokens, with schedules that divide gradients by default",
)
class DividedTwice(Pipeline):
    """`scale_grads` is on by default: gradients are M times too small."""

    scale_grads = True


@mutant(
    "stock-pipeline-does-not-scale",
    strategy="torch-1f1b",
    case=STAGED,
    quantity="gradient",
    source="pytorch/pytorch#144352",
    mistake="a mean over micro-batches is left to the schedule, whose scaling is off",
)
class NeverDivided(Pipeline):
    """Gradients are M times too large; the mean of the losses is right."""

    def loss_of(self, terms: Tensor, number: Tensor) -> Tensor:
        return super().loss_of(terms, number) * len(self.batches)

    def accumulate(self, batches: list[MicroBatch]) -> Tensor:
        return super().accumulate(batches) / len(batches)


@mutant(
    "stock-pipeline-sum-loss",
    strategy="torch-gpipe",
    case=STAGED,
    quantity="gradient",
    source="pytorch/torchtitan#2972, #4194",
    mistake="loss_fn is a sum over tokens; only the losses that `step` returns are divided by their number",
)
class SumLoss(Pipeline):
    """Gradients are as many times too large as the window has tokens."""

    def loss_of(self, terms: Tensor, number: Tensor) -> Tensor:
        return super().loss_of(terms, number) * int(self.counts.tokens.sum())

    def accumulate(self, batches: list[MicroBatch]) -> Tensor:
        return super().accumulate(batches) / int(self.counts.tokens.sum())


@mutant(
    "stock-pipeline-mean-loss",
    strategy="torch-1f1b",
    case=STAGED,
    quantity="loss",
    source="pytorch/torchtitan#2206",
    mistake="loss_fn is cross-entropy with its default reduction, and gradients are divided by the number of micro-batches",
)
class MeanOfMeans(Pipeline):
    """Micro-batches count equally, whatever their tokens."""

    scale_grads = True

    def token_factor(self, span: str, k: int, batch: MicroBatch) -> float:
        return 1 / batch.tokens if batch.tokens else 0.0

    def accumulate(self, batches: list[MicroBatch]) -> Tensor:
        return super().accumulate(batches) / len(batches)


class TwoSteps(Pipeline):
    """A window in two calls of `step`, between two steps of the optimizer: accumulation on top of the pipeline's own."""

    def claims(self) -> Claims:
        strategy = pipeline_strategy("torch-gpipe-twice", "gpipe", restores=False)
        return Claims(
            (replace(strategy, schedule=None, observes=SHOWN | {"output"}),), framework=f"torch {torch.__version__}"
        )

    @property
    def schedule_name(self) -> str:
        return "gpipe"

    def accumulate(self, batches: list[MicroBatch]) -> Tensor:
        half = len(batches) // 2
        loss = super().accumulate(batches[:half])
        outputs = self.outputs
        loss += super().accumulate(batches[half:])
        self.batches, self.outputs = batches, outputs + self.outputs
        return loss


@mutant(
    "stock-pipeline-steps-twice",
    strategy="torch-gpipe-twice",
    case=STAGED,
    quantity="gradient",
    source="pytorch/torchtitan#1733, #1732",
    mistake="every `step` divides all of .grad by its number of micro-batches: what was there before is divided again",
)
class DividedAgain(TwoSteps):
    """With one call per window the mean over micro-batches would be right; with two the first half counts too little."""

    scale_grads = True

    def loss_of(self, terms: Tensor, number: Tensor) -> Tensor:
        return super().loss_of(terms, number) * len(self.batches)

    def accumulate(self, batches: list[MicroBatch]) -> Tensor:
        return super().accumulate(batches) / (len(batches) // 2)


# ---------------------------------------------------------------------------------------------- tensor parallelism


class PlannedLayers(TensorParallel):
    """Tensor parallelism whose plan can pass over layers: their parameters stay plain tensors."""

    passed_over: tuple[str, ...] = ()

    def plan(self, module: GPT, ranks: int) -> Plan:
        plan = super().plan(module, ranks)
        return {
            name: style for name, style in plan.items() if not (self.passed_over and name.endswith(self.passed_over))
        }


@mutant(
    "stock-plain-head-norms",
    strategy="dtensor-tp",
    case=SPREAD_HEAD_NORMS,
    quantity="gradient",
    source="NVIDIA-NeMo/RL#3716",
    mistake="norms of queries and keys are no part of the plan: each rank has the gradient of its own heads",
)
class PlainHeadNorms(PlannedLayers):
    """Column-parallel layers give local tensors, on which a plain norm works without a word."""

    passed_over = ("q_norm", "k_norm")


@mutant(
    "stock-plain-sequence-norms",
    strategy="dtensor-tp-sequence",
    case=SPREAD,
    quantity="gradient",
    source="EleutherAI/gpt-neox#1257, #1259",
    mistake="norms between the layers are no part of the plan: each rank has the gradient of its own positions",
)
class PlainSequenceNorms(PlannedLayers):
    """A plain norm works on a part of a sequence without a word."""

    passed_over = ("norm1", "norm2")


@mutant(
    "stock-plain-shared-heads",
    strategy="dtensor-tp",
    case=SPREAD_SHARED_HEAD,
    quantity="gradient",
    source="bigcode-project/Megatron-LM#12",
    mistake="one head of keys and values for all ranks is no part of the plan: each rank has the gradients of its queries",
)
class PlainSharedHeads(PlannedLayers):
    """The gradients of keys and values, and all below them, are those of the own query heads."""

    passed_over = (".k", ".v")


@mutant(
    "stock-untied",
    strategy="dtensor-tp",
    case=TENSOR_TIED,
    quantity="gradient",
    source="NVIDIA-NeMo/RL#227; facebookresearch/fairseq2#1380",
    mistake="parallelize_module cuts a tied weight once per module, and leaves two parameters",
)
class LeftUntied(TensorParallel):
    """Embedding and head each get the gradient of their own use."""

    def tie(self, module: GPT) -> None:
        pass

    def shown(self) -> Iterator[Shown]:
        return without_head(super().shown())


class HandSmoothed(ShardedVocabulary):
    """Label smoothing from log-probabilities, as one writes it on one device."""

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        logits = widen(logits).transpose(1, 2)
        loss = whole(F.cross_entropy(logits, targets, reduction="none"))
        uniform = whole(F.log_softmax(logits, dim=1).sum(dim=1)) / logits.shape[1]
        return (1 - self.smoothing) * loss - self.smoothing * uniform


@mutant(
    "stock-log-softmax",
    strategy="dtensor-tp-sequence",
    case=SPREAD_SMOOTHED,
    quantity="gradient",
    source="pytorch/pytorch#190746",
    mistake="inside loss_parallel, log_softmax has a backward pass that is right below cross-entropy only",
)
class SmoothedByHand(TensorParallel):
    """The loss is right, its gradient is not."""

    def vocabulary(self, smoothing: float) -> WholeVocabulary:
        return HandSmoothed(smoothing)


@mutant(
    "stock-same-shards",
    strategy="dtensor-tp",
    case=SPREAD,
    quantity="initial weights",
    source="pytorch/torchtitan#3106, #4600",
    mistake="weights are drawn after the model was cut: on CPUs, all shards of a matrix are drawn alike",
)
class DrawnAfterCutting(TensorParallel):
    """The canonical weights are what one device starts from; random numbers of DTensors depend on the layout."""

    def parallelize_gpt(self, module: GPT, mesh: Any) -> None:
        super().parallelize_gpt(module, mesh)
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()


# ---------------------------------------------------------------------------------------------- data parallelism


class LateBias(FSDP2):
    """A parameter that fully_shard has not seen."""

    def wrap(self, module: nn.Module) -> nn.Module:
        linear = cast(nn.Linear, module.get_submodule("linear"))
        bias, linear.bias = linear.bias, None  # type: ignore[assignment]
        wrapped = super().wrap(module)
        linear.bias = nn.Parameter(bias.detach())
        return wrapped

    def shown(self) -> Iterator[Shown]:
        for name, parameter, _ in super().shown():
            here = Place(tuple(parameter.shape), replica=self.ranks.rank) if name.endswith("bias") else None
            yield name, parameter, here


class LateBiasAveraged(LateBias):
    """The correct one: the framework cares for it, so somebody else has to."""

    def claims(self) -> Claims:
        found = super().claims()
        return replace(found, strategies=tuple(replace(s, restores=False) for s in found.strategies))

    def synchronize(self) -> None:
        gradient = self.module.get_parameter("linear.bias").grad
        assert gradient is not None
        self.reduce(gradient)

    def reduce(self, gradient: Tensor) -> None:
        dist.all_reduce(gradient)
        gradient /= self.ranks.world


@mutant(
    "late-params-after-shard",
    strategy="fsdp2",
    case=TWO_BY_THREE,
    quantity="gradient",
    source="hao-ai-lab/FastVideo#1666; huggingface/transformers#48873",
    mistake="a parameter that is attached after fully_shard is not reduced",
)
class LateBiasLeft(LateBiasAveraged):
    """Each rank keeps its own gradient of it."""

    def reduce(self, gradient: Tensor) -> None:
        pass


@mutant(
    "stock-reentrant-checkpoint",
    strategy="ddp",
    case=ONCE,
    quantity="gradient",
    source="pytorch/pytorch#65537",
    mistake="the first part of the model is recomputed by reentrant checkpointing: its inputs take no gradient, nor does it",
)
class ReentrantBeginning(DDP):
    """Embeddings have no gradient, and the bucket that waits for it is never reduced."""

    def wrap(self, module: nn.Module) -> Any:
        begin = module.begin
        cast(Any, module).begin = lambda inputs, ids: checkpoint(begin, inputs, ids, use_reentrant=True)
        return super().wrap(module)


@mutant(
    "stock-all-reduce-in-graph",
    strategy="dp",
    case=PAIRS,
    quantity="gradient",
    source="modelscope/ms-swift#9947",
    mistake="a plain all-reduce inside the loss: autograd takes it for the identity",
)
class PlainSum(SummedPairs):
    """The loss is right; the sum's gradient lacks the factor W."""

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total
