"""Mutants of expert parallelism: divisors of experts' gradients, the way of tokens, the router, auxiliary losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from equivtests.adapters.textbook.dp import DataParallel
from equivtests.adapters.textbook.expert import (
    Choices,
    DispatchedExperts,
    ExpertParallel,
    GatheredExperts,
    GatherTokens,
    own,
)
from equivtests.cases.windows import MicroBatch
from equivtests.models.moe import MoE
from equivtests.models.parts import Terms
from equivtests.mutants.mutant import mutant
from equivtests.mutants.situations import BALANCED, SECOND_HEAD
from equivtests.mutants.split_situations import (
    MIXED,
    MIXED_BALANCED,
    MIXED_CLIPPED,
    MIXED_IDLE,
    MIXED_IN_FOUR,
    MIXED_LIMITED,
)

# ---------------------------------------------------------------------------------------------- divisors


@mutant(
    "torch-ep-double",
    strategy="ep",
    case=MIXED,
    quantity="gradient",
    source="pytorch/pytorch#160285; deepspeedai/DeepSpeed#6546, #5259",
    mistake="gradients of experts, made of the tokens of all data ranks, are divided by the number of ranks that hold them",
)
@mutant(
    "megatron-ep-divisor",
    strategy="ep-gather",
    case=MIXED,
    quantity="gradient",
    source="NVIDIA/Megatron-LM#5956, #7160",
    mistake="the average of experts' gradients is that of the small mesh of ranks that hold them",
)
class DividesByHolders(ExpertParallel):
    """Exactly ep times too large, which Adam would hide."""

    def average_data(self) -> None:
        super().average_data()
        for gradient in self.gradients_of(lambda laid: "ep" in laid.cut):
            gradient.mul_(self.averaged() / self.line("edp").size)


@mutant(
    "megablocks-ep-scale",
    strategy="ep",
    case=MIXED_IN_FOUR,
    quantity="gradient",
    source="databricks/megablocks#20, #86",
    mistake="experts that one rank holds are not reduced, and so not divided either",
)
class NeitherReducedNorDivided(ExpertParallel):
    """W times too large."""

    def average_data(self) -> None:
        super().average_data()
        if self.line("edp").size == 1:
            for gradient in self.gradients_of(lambda laid: "ep" in laid.cut):
                gradient.mul_(self.averaged())


@mutant(
    "megatron-expert-group",
    strategy="ep",
    case=MIXED,
    quantity="gradient",
    source="NVIDIA/Megatron-LM#5916",
    mistake="gradients of experts are not reduced over the ranks that hold the same ones: the wrong expert group",
)
class WrongExpertGroup(ExpertParallel):
    """Copies of an expert part ways."""

    def average_data(self) -> None:
        self.sum_over(self.line("dp", "cp"), self.gradients_of(lambda laid: "ep" not in laid.cut))
        for gradient in self.gradients_of(lambda laid: True):
            gradient.div_(self.averaged())


@mutant(
    "megatron-ep-tp-undercount",
    strategy="ep",
    case=MIXED_CLIPPED,
    quantity="norm",
    source="NVIDIA/Megatron-LM#5916",
    mistake="experts of all ranks but the first are left out of the norm",
)
class NormOfFirstExperts(ExpertParallel):
    """The norm is too small."""

    def counts_here(self, name: str) -> bool:
        return self.ranks.rank == 0


# ---------------------------------------------------------------------------------------------- auxiliary losses


class Scaled(torch.autograd.Function):
    """The value as it is; its gradient times a factor: how an auxiliary loss is usually attached."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


@mutant(
    "megatron-aux-scale",
    strategy="ep",
    case=MIXED_BALANCED,
    quantity="gradient",
    source="NVIDIA/Megatron-LM#2217, #5047, #1652, #3672",
    mistake="the main loss is multiplied by the number of ranks that gradients are averaged over, the balance loss is not",
)
class BalanceNotScaled(ExpertParallel):
    """The balance loss counts W times too little."""

    def forward(self, model: nn.Module, batch: MicroBatch) -> Terms:
        terms = super().forward(model, batch)
        return terms | {"balance": Scaled.apply(terms["balance"], 1 / self.averaged())}


@mutant(
    "automodel-aux-accum",
    strategy="dp",
    case=BALANCED,
    quantity="gradient",
    source="NVIDIA-NeMo/Automodel#3359",
    mistake="the balance loss enters every backward pass of a window whole: K times",
)
class BalanceOfEveryMicroBatch(DataParallel):
    """The main loss is divided over the window, the balance loss is not."""

    def forward(self, model: nn.Module, batch: MicroBatch) -> Terms:
        terms = super().forward(model, batch)
        return terms | {"balance": Scaled.apply(terms["balance"], self.counts.microbatches)}


@mutant(
    "megatron-mtp-mean",
    strategy="dp",
    case=SECOND_HEAD,
    quantity="loss",
    source="NVIDIA/Megatron-LM#1532",
    mistake="the loss of a second head is added up where it should be averaged over tokens",
)
class SecondHeadSummed(DataParallel):
    """It counts as often as there are valid tokens."""

    def factor(self, term: str, k: int, batch: MicroBatch) -> float:
        return self.averaged() if term == "extra" else super().factor(term, k, batch)


# ---------------------------------------------------------------------------------------------- the router


class OwnGradient(GatherTokens):
    """A gather whose backward pass takes the own part of the own gradient."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return own(ctx.line, gradients[0], ctx.sizes).contiguous(), None, None


class FactorsNotSummed(GatheredExperts):
    def gather_weights(self, weight_TK: Tensor, sizes: list[int]) -> Tensor:
        return OwnGradient.apply(weight_TK, self.line, sizes)


@mutant(
    "hf-ep-router",
    strategy="ep-gather",
    case=MIXED,
    quantity="gradient",
    source="huggingface/transformers#48687",
    mistake="what other ranks' experts say of the routing factors is not added up",
)
class RouterOfOwnExperts(ExpertParallel):
    """The loss is right; the router learns from the experts of its own rank only."""

    gathered = FactorsNotSummed


class FactorsDetached(GatheredExperts):
    def gather_weights(self, weight_TK: Tensor, sizes: list[int]) -> Tensor:
        return self.line.gather(weight_TK.detach(), 0)


@mutant(
    "automodel-router-detached",
    strategy="ep-gather",
    case=MIXED,
    quantity="gradient",
    source="NVIDIA-NeMo/Automodel#2995",
    mistake="routing factors are gathered by a collective that cannot be differentiated",
)
class RouterDetached(ExpertParallel):
    """The router has no gradient at all."""

    gathered = FactorsDetached


class SkipsIdle(DispatchedExperts):
    def items(self) -> Any:
        """The experts that some token here goes to."""
        return [(name, expert) for name, expert in super().items() if int(name) in self.busy]

    def apply_experts(self, x_RD: Tensor, expert_R: Tensor) -> Tensor:
        self.busy = set(expert_R.tolist())
        return super().apply_experts(x_RD, expert_R) + 0 * x_RD  # the way back needs a gradient, too


@mutant(
    "automodel-expert-none",
    strategy="ep",
    case=MIXED_IDLE,
    quantity="gradient",
    source="NVIDIA-NeMo/Automodel#2995",
    mistake="an expert without tokens is not called, so its gradient is absent instead of zero",
)
class IdleExpertsAbsent(ExpertParallel):
    """Decay and momentum pass such an expert by."""

    dispatched = SkipsIdle


# ---------------------------------------------------------------------------------------------- the way of tokens


class KeepsExpertOrder(DispatchedExperts):
    def combine(self, y_CD: Tensor, x_TD: Tensor, weight_TK: Tensor, choices: Choices) -> Tensor:
        return super().combine(y_CD, x_TD, weight_TK, choices._replace(token=choices.token.sort().values))


@mutant(
    "titan-combine-order",
    strategy="ep",
    case=MIXED,
    quantity="output",
    source="cf. pytorch/torchtitan#3604",
    mistake="what comes back from the experts is put into the wrong places: the order by expert is not undone",
)
class CombinesByExpert(ExpertParallel):
    """A token gets what another token's expert gave."""

    dispatched = KeepsExpertOrder


@mutant(
    "ep-capacity-of-rank",
    strategy="ep",
    case=MIXED_LIMITED,
    quantity="routing",
    source="cf. microsoft/Tutel#173",
    mistake="the capacity of an expert limits the tokens of all rows of a rank together",
)
class CapacityOfRank(ExpertParallel):
    """Which tokens are dropped depends on how rows are spread over ranks."""

    def split_experts(self, name: str, moe: MoE) -> None:
        super().split_experts(name, moe)
        by_row = moe.kept
        moe.kept = lambda chosen_BLK: by_row(chosen_BLK.flatten(0, 1)[None]).view_as(chosen_BLK)  # type: ignore[method-assign]
