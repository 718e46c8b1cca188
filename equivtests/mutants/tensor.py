"""Mutants of tensor and sequence parallelism: collectives that are missing, made twice, or made over other ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from equivtests.adapters.textbook.dp import DataParallel
from equivtests.adapters.textbook.lines import Gather, GatherForWork, Line, Reduce
from equivtests.adapters.textbook.tensor import (
    RowLinear,
    TensorParallel,
    VocabularyEmbedding,
    VocabularyLosses,
    same,
)
from equivtests.cases.windows import MicroBatch
from equivtests.models.gpt import GPT
from equivtests.mutants.mutant import mutant
from equivtests.mutants.situations import TWO_BY_THREE
from equivtests.mutants.split_situations import (
    SPREAD,
    SPREAD_BESIDE_DATA,
    SPREAD_CLIPPED,
    SPREAD_HEAD_NORMS,
    SPREAD_IN_FOUR,
    SPREAD_SHARED_HEAD,
    SPREAD_SMOOTHED,
)

# ---------------------------------------------------------------------------------------------- parts of a gradient's sum


@mutant(
    "neox-ln-hooks",
    strategy="tp-sequence",
    case=SPREAD,
    quantity="gradient",
    source="EleutherAI/gpt-neox#1257, #1259",
    mistake="gradients of norms that saw a part of each sequence are not added up: the hooks sit on replaced parameters",
)
class HooksNeverFire(TensorParallel):
    """Every tensor rank steps with what its own positions say."""

    def sum_partial(self) -> None:
        """The parameters that the hooks were put on are no longer in the model."""


@mutant(
    "neox-ln-mean",
    strategy="tp-sequence",
    case=SPREAD_IN_FOUR,
    quantity="gradient",
    source="EleutherAI/gpt-neox#1257, #1259",
    mistake="gradients of norms that saw a part of each sequence are averaged over the tensor ranks instead of added up",
)
class AveragesParts(TensorParallel):
    """The parts of a sum are no copies: their mean is tp times too small."""

    def sum_partial(self) -> None:
        super().sum_partial()
        for gradient in self.gradients_of(lambda laid: laid.partial):
            gradient.div_(self.tp.size)


@mutant(
    "megatron-final-ln",
    strategy="tp-sequence",
    case=SPREAD,
    quantity="gradient",
    source="NVIDIA/Megatron-LM#1446; NVIDIA/TransformerEngine#435, #441",
    mistake="the last norm is not in the list of parameters that saw a part of each sequence",
)
class ForgetsFinalNorm(TensorParallel):
    """One norm is wrong, all others are right."""

    def sequence_parameters(self, module: nn.Module) -> list[str]:
        return [name for name in super().sequence_parameters(module) if not name.startswith("norm.")]


@mutant(
    "mcorebridge-lora-sp",
    strategy="tp-sequence",
    case=SPREAD,
    quantity="gradient",
    source="modelscope/mcore-bridge#173; NVIDIA-NeMo/Megatron-Bridge#5634, #5900",
    mistake="replicated parameters of cut layers are not marked as having seen a part of each sequence",
)
class UnmarkedReplicas(TensorParallel):
    """There it is the replicated factor of a low-rank adapter, here the bias that is added after a row-parallel sum."""

    def sequence_parameters(self, module: nn.Module) -> list[str]:
        return [name for name in super().sequence_parameters(module) if "norm" in name]


@mutant(
    "nemorl-bypass-finalise",
    strategy="tp",
    case=SPREAD_HEAD_NORMS,
    quantity="gradient",
    source="NVIDIA-NeMo/RL#3716",
    mistake="a second way to make a step leaves out what finishes gradients: norms of queries and keys stay partial",
)
class StepsUnfinished(TensorParallel):
    """Each tensor rank has the sum over its own heads."""

    def synchronize(self) -> None:
        self.average_data()


@mutant(
    "bigcode-mqa-kv",
    strategy="tp",
    case=SPREAD_SHARED_HEAD,
    quantity="gradient",
    source="bigcode-project/Megatron-LM#12",
    mistake="of a key/value head that all tensor ranks use, the weights are marked as partial sums, the bias is not",
)
class ForgetsSharedBias(TensorParallel):
    """The bias follows the query heads of its own rank."""

    def whole(self, module: nn.Module, name: str) -> None:
        super().whole(module, name)
        if f"{name}.bias" in self.laid:
            self.lay(f"{name}.bias", partial=())


@mutant(
    "autoparallel-double-reduce",
    strategy="tp",
    case=SPREAD_BESIDE_DATA,
    quantity="gradient",
    source="meta-pytorch/autoparallel#517",
    mistake="gradients of norms, which every tensor rank has whole, are marked as partial and added up again",
)
class ReducesTwice(TensorParallel):
    """Metadata says partial, the data is replicated: tp times too large."""

    def split_gpt(self, module: GPT) -> None:
        super().split_gpt(module)
        for name in self.sequence_parameters(module):
            self.lay_partial(name)


@mutant(
    "xla-missing-reduce",
    strategy="tp",
    case=SPREAD_BESIDE_DATA,
    quantity="gradient",
    source="openxla/xla#40034",
    mistake="the data-parallel reduction of one parameter gets lost beside a tensor axis",
)
class LosesOneReduction(TensorParallel):
    """The bias of the last layer of a feedforward keeps the gradient of its own data rank."""

    def average_data(self) -> None:
        gradient = dict(self.trainable())["layers.0.mlp.down.bias"].grad
        assert gradient is not None
        local = gradient / self.averaged()
        super().average_data()
        gradient.copy_(local)


# ---------------------------------------------------------------------------------------------- forward and backward


@mutant(
    "dtensor-early-return",
    strategy="tp",
    case=SPREAD,
    quantity="gradient",
    source="pytorch/pytorch#121653, #115967, #170147",
    mistake="what enters a column-parallel layer is there already: nothing is done, and nothing in the backward pass either",
)
class ReturnsEarly(TensorParallel):
    """Gradients below a block are those of this rank's part of it."""

    def enter(self, x: Tensor) -> Tensor:
        return x


@mutant(
    "cce-partial-embed",
    strategy="tp",
    case=SPREAD,
    quantity="gradient",
    source="apple/ml-cross-entropy#42",
    mistake="the loss over a cut vocabulary returns a partial gradient, and nobody adds it up over the tensor ranks",
)
class PartialBelowHead(TensorParallel):
    """All that lies below the head sees one part of the vocabulary."""

    def split_vocabulary(self, module: GPT) -> None:
        super().split_vocabulary(module)
        module.head.enter = same  # type: ignore[assignment]


class SumSummedBack(torch.autograd.Function):
    """A sum over ranks whose backward pass adds up what every rank has whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return line.sum(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.line.sum(gradients[0].clone(memory_format=torch.contiguous_format)), None


@mutant(
    "dtensor-roundtrip",
    strategy="tp",
    case=SPREAD_IN_FOUR,
    quantity="gradient",
    source="pytorch/pytorch#172932",
    mistake="a partial value is taken out and wrapped again, and the gradient of its sum is taken for partial too",
)
class GradientTakenForPartial(TensorParallel):
    """The embedding's gradient is tp times too large."""

    def embedding(self, module: GPT, span: tuple[int, int]) -> None:
        super().embedding(module, span)
        embedding = module.embedding
        assert isinstance(embedding, VocabularyEmbedding)
        embedding.leave = lambda x: SumSummedBack.apply(x, self.tp)


@mutant(
    "megatron-wrong-group",
    strategy="tp",
    case=SPREAD_BESIDE_DATA,
    quantity="output",
    source="NVIDIA/Megatron-LM#7452",
    mistake="a collective of a tensor group is given no group, and runs over all ranks",
)
class WrongGroup(TensorParallel):
    """Embeddings of the samples of different data ranks are added up."""

    def embedding(self, module: GPT, span: tuple[int, int]) -> None:
        super().embedding(module, span)
        embedding = module.embedding
        assert isinstance(embedding, VocabularyEmbedding)
        embedding.leave = lambda x: Reduce.apply(x, self.line("world"))


class BiasBeforeSum(RowLinear):
    """Every rank adds the bias to its part."""

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(nn.functional.linear(self.enter(x), self.weight, self.bias))


@mutant(
    "dtensor-partial-scalar",
    strategy="tp",
    case=SPREAD,
    quantity="output",
    source="pytorch/pytorch#163193",
    mistake="what is to be added once is added to the part of every tensor rank, before the sum",
)
class AddedOnEveryRank(TensorParallel):
    """The bias of a row-parallel layer counts tp times."""

    def row(self, module: nn.Module, name: str, *rest: Any, **options: Any) -> None:
        super().row(module, name, *rest, **options)
        layer = module.get_submodule(name)
        assert isinstance(layer, RowLinear)
        module.set_submodule(name, BiasBeforeSum(layer.weight, layer.bias, layer.enter, layer.leave))


@mutant(
    "dtensor-view",
    strategy="tp-sequence",
    case=SPREAD,
    quantity="output",
    source="pytorch/pytorch#179502",
    mistake="rows and positions are flattened into one dimension although positions are cut over ranks",
)
class ViewsCutDimension(TensorParallel):
    """With more than one row, tokens are gathered into the places of others."""

    def enter(self, x: Tensor) -> Tensor:
        gathered: Tensor = GatherForWork.apply(x.flatten(0, 1), self.tp, 0)
        return gathered.view(len(x), -1, x.shape[-1])


@mutant(
    "dtensor-scalar-cache",
    strategy="dp",
    case=TWO_BY_THREE,
    quantity="loss",
    source="pytorch/pytorch#153603, #147180",
    mistake="a factor is cached without its value in the key: the next window is multiplied by the first one's",
)
class CachedFactor(DataParallel):
    """From the second update on, token losses are divided by the tokens of the first window."""

    def wrap(self, module: nn.Module) -> nn.Module:
        self.cached: dict[str, float] = {}
        return super().wrap(module)

    def factor(self, term: str, k: int, batch: MicroBatch) -> float:
        return self.cached.setdefault(term, super().factor(term, k, batch))


# ---------------------------------------------------------------------------------------------- losses over a cut vocabulary


class LossesOf(TensorParallel):
    """Tensor parallelism with another loss over the parts of the vocabulary."""

    losses: type[VocabularyLosses] = VocabularyLosses

    def split_vocabulary(self, module: GPT) -> None:
        super().split_vocabulary(module)
        plain = module.vocabulary
        assert isinstance(plain, VocabularyLosses)
        module.vocabulary = self.losses(plain.smoothing, plain.line, plain.start, plain.vocabulary)


class LocalMean(VocabularyLosses):
    def mean_logit(self, logits: Tensor) -> Tensor:
        return logits.mean(dim=-1)


@mutant(
    "megatron-label-smoothing",
    strategy="tp",
    case=SPREAD_SMOOTHED,
    quantity="loss",
    source="NVIDIA/Megatron-LM#737, #7464, #5522",
    mistake="label smoothing takes the mean over the part of the vocabulary that is on this rank",
)
class SmoothsLocally(LossesOf):
    """Every tensor rank has a loss of its own."""

    losses = LocalMean


class OfGatheredLogits(VocabularyLosses):
    """Gathered logits, of as many tokens as there are, taken for the part of each rank."""

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        parts = VocabularyLosses(self.smoothing, self.line, self.line.index * self.vocabulary, self.vocabulary)
        return parts.losses(Gather.apply(logits, self.line, -1), targets)


@mutant(
    "megatron-gathered-logits",
    strategy="tp",
    case=SPREAD,
    quantity="loss",
    source="NVIDIA/Megatron-LM#7452",
    mistake="logits of the whole vocabulary are passed to the loss that takes parts of it",
)
class LossOfGathered(LossesOf):
    """The partition counts every token tp times: log(tp) more on every valid token."""

    losses = OfGatheredLogits


class OwnersOnly(VocabularyLosses):
    """The log-probability is made where the target is, and zero elsewhere; a plain all-reduce spreads its value."""

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        local = targets - self.start
        here = (local >= 0) & (local < logits.shape[-1])
        chosen = logits.gather(-1, local.where(here, 0)[..., None]).squeeze(-1)
        own = torch.where(here, self.log_partition(logits) - chosen, 0.0)
        return own + (self.line.sum(own.detach().clone()) - own.detach())


@mutant(
    "swift-nondiff-logprob",
    strategy="tp",
    case=SPREAD,
    quantity="gradient",
    source="modelscope/ms-swift#9947",
    mistake="a plain all-reduce in the loss: ranks that do not own the target token have no gradient of it",
)
class CutGraph(LossesOf):
    """The loss is right; logits of other ranks than the target's get the gradient zero."""

    losses = OwnersOnly


# ---------------------------------------------------------------------------------------------- norms


@mutant(
    "nemorl-tp-replicated",
    strategy="tp",
    case=SPREAD_CLIPPED,
    quantity="norm",
    source="NVIDIA-NeMo/RL#3788; ROCm/TransformerEngine#715",
    mistake="squares are added up over tensor ranks without a look at what these hold whole",
)
class ReplicasCounted(TensorParallel):
    """Norms, positions and biases count tp times."""

    def counts_here(self, name: str) -> bool:
        return self.layout.data_rank(self.ranks.rank) == 0


@mutant(
    "megatron-sinks-not-in-norm",
    strategy="tp",
    case=SPREAD_CLIPPED,
    quantity="norm",
    source="NVIDIA/Megatron-LM#7452",
    mistake="a vector that is cut by heads bears no mark that it is cut: the parts of other tensor ranks do not count",
)
class UnmarkedVector(TensorParallel):
    """There it is the sink of each head, here the bias of the queries."""

    def counts_here(self, name: str) -> bool:
        return self.copy() == 0 if name.endswith("attention.q.bias") else super().counts_here(name)


# ---------------------------------------------------------------------------------------------- initial weights


@mutant(
    "tp-same-seed",
    strategy="tp",
    case=SPREAD,
    quantity="initial weights",
    source="InternLM/InternLM#405; modelscope/ms-swift#7944; PaddlePaddle/PaddleNLP#9426",
    mistake="parts of one matrix are drawn with the same seed on every tensor rank",
)
class SameParts(TensorParallel):
    """Every rank holds what the first one holds."""

    def cut_parameter(self, name: str, parameter: Tensor, dim: int, span: tuple[int, int]) -> nn.Parameter:
        part = super().cut_parameter(name, parameter, dim, span)
        part.data.copy_(parameter.detach().narrow(dim, 0, part.shape[dim]))
        return part


@mutant(
    "sat-unequal-draws-tp",
    strategy="tp",
    case=SPREAD,
    quantity="initial weights",
    source="THUDM/SwissArmyTransformer#155",
    mistake="tensor ranks have drawn unequal numbers of random values before they draw what all of them hold whole",
)
class DrawsAhead(TensorParallel):
    """The second tensor rank is one value ahead in its stream."""

    def split_gpt(self, module: GPT) -> None:
        super().split_gpt(module)
        if self.tp.index == 1:
            module.norm.weight.data.copy_(module.norm.weight.data.roll(-1))


@mutant(
    "colossal-qkv-cut",
    strategy="tp",
    case=SPREAD,
    quantity="initial weights",
    source="hpcaitech/ColossalAI#817",
    mistake="queries, keys and values in one matrix are cut as one block instead of each by heads",
)
class CutsFusedBlock(TensorParallel):
    """The first tensor rank has most of the queries, the last one most of the values."""

    def split_attention(self, module: nn.Module, name: str) -> None:
        layers = [module.get_submodule(f"{name}.{part}") for part in "qkv"]
        fused = torch.cat([layer.weight.detach() for layer in layers if isinstance(layer.weight, Tensor)])
        super().split_attention(module, name)
        for part, rows in zip("qkv", self.tp.cut(fused, 0).chunk(3), strict=True):
            module.get_parameter(f"{name}.{part}.weight").data.copy_(rows)
