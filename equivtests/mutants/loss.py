"""Mutants of the loss's denominator and of accumulation windows."""

from __future__ import annotations

from torch import Tensor

from equivtests.adapters.textbook.dp import DataParallel
from equivtests.adapters.textbook.zero import Zero1
from equivtests.adapters.torch_adapter import Counts
from equivtests.cases.windows import MicroBatch, Window
from equivtests.models.parts import Terms
from equivtests.mutants.mutant import mutant
from equivtests.mutants.parents import LoggedApart, MeanOverMicroBatches
from equivtests.mutants.situations import (
    ACCUMULATED,
    EVEN_TOKENS,
    SECOND_HEAD,
    SHORT_TAIL,
    SPREAD_OVER_RANKS,
    TWO_BY_THREE,
    TWO_BY_THREE_GPT,
    TWO_BY_THREE_MLP,
    TWO_BY_TWO_MESH,
    UNEQUAL_ROWS,
    Z_LOSS,
)


def own_mean(batch: MicroBatch) -> float:
    """Factor that makes a token sum the mean over the micro-batch's own tokens."""
    return 1 / max(1, batch.tokens)


@mutant(
    "hf-ga-mean-of-means",
    strategy="dp",
    case=ACCUMULATED,
    quantity="loss",
    source="huggingface/transformers#34191",
    mistake="each micro-batch is divided by its own tokens and by K",
)
class MeanOfMeans(DataParallel):
    """Micro-batch means are averaged instead of dividing the summed loss by the window's tokens."""

    def token_factor(self, span: str, k: int, batch: MicroBatch) -> float:
        return own_mean(batch) / len(self.window.microbatches)


@mutant(
    "hf-ddp-local-count",
    strategy="dp",
    case=TWO_BY_THREE,
    quantity="tokens",
    source="huggingface/transformers#34242, #34373, #39392, #39395",
    mistake="the token count is added up over micro-batches but not over ranks",
)
class LocalCount(DataParallel):
    """The denominator is this rank's own token count; ranks are then averaged with equal weight."""

    def count(self, window: Window) -> Counts:
        return Counts(self.own_counts(window).numpy())

    def token_factor(self, span: str, k: int, batch: MicroBatch) -> float:
        return 1 / int(self.counts.tokens.sum())


@mutant(
    "hf-dp-count-replicated",
    strategy="dp",
    case=SPREAD_OVER_RANKS,
    quantity="loss",
    source="huggingface/transformers#37474, #40799",
    mistake="divides by the tokens of all ranks, and averages over ranks on top",
)
class DividedAndAveraged(DataParallel):
    """The factor W that undoes the average over ranks is missing."""

    def token_factor(self, span: str, k: int, batch: MicroBatch) -> float:
        return 1 / int(self.counts.tokens.sum())


@mutant(
    "unsloth-double-divide",
    strategy="dp",
    case=TWO_BY_THREE,
    quantity="loss",
    source="unslothai/unsloth-zoo#1023",
    mistake="divides by the window's tokens and again by K",
)
class DividedTwice(DataParallel):
    """The loss is already normalised by the window, yet the trainer divides by the number of micro-batches."""

    def objective(self, terms: Terms, k: int, batch: MicroBatch) -> Tensor:
        return super().objective(terms, k, batch) / self.case.accumulation


@mutant(
    "trl-local-normaliser",
    strategy="dp",
    case=TWO_BY_THREE_MLP,
    quantity="loss",
    source="huggingface/trl#3231, #3938",
    mistake="the normaliser is the micro-batch's own token count, so the loss depends on how samples are spread",
)
class LocalNormaliser(DataParallel):
    """A mean over the tokens at hand, averaged over micro-batches and ranks."""

    def objective(self, terms: Terms, k: int, batch: MicroBatch) -> Tensor:
        return self.case.magnitude * terms["main"] / max(1, batch.tokens) / self.counts.microbatches


@mutant(
    "verl-sample-weights",
    strategy="dp",
    case=UNEQUAL_ROWS,
    quantity="loss",
    source="verl-project/verl#5625",
    mistake="means over tokens are weighted by samples / all samples",
)
class WeightedBySamples(DataParallel):
    """Per-token means of micro-batches are put together with weights that count samples."""

    def token_factor(self, span: str, k: int, batch: MicroBatch) -> float:
        return own_mean(batch) * self.ranks.world * batch.rows / int(self.counts.rows.sum())


@mutant(
    "verl-ulysses-accum",
    strategy="dp",
    case=TWO_BY_THREE_GPT,
    quantity="loss",
    source="verl-project/verl#2857",
    mistake="tokens are counted over the ranks of a group, but the accumulated average is one of micro-batches",
)
class AveragedByMicroBatch(DataParallel):
    """Ranks work on one micro-batch together, and the K micro-batches count equally whatever their tokens."""

    def token_factor(self, span: str, k: int, batch: MicroBatch) -> float:
        return self.ranks.world / int(self.counts.tokens[k]) / self.counts.microbatches


@mutant(
    "veomni-sp-scale",
    strategy="zero-1",
    case=TWO_BY_TWO_MESH,
    quantity="loss",
    source="ByteDance-Seed/VeOmni#338",
    mistake="undoes the average with the size of one axis of a mesh that gradients are averaged over as a whole",
)
class WrongMeshSize(Zero1):
    """The loss is multiplied by the shard axis alone; gradients are divided by replicas times shards."""

    def token_factor(self, span: str, k: int, batch: MicroBatch) -> float:
        return self.case.layout.shard / int(self.counts.tokens.sum())


@mutant(
    "automodel-undo-nothing",
    strategy="dp",
    case=EVEN_TOKENS,
    quantity="gradient",
    source="NVIDIA-NeMo/Automodel#3830",
    mistake="the factor W that undoes the average is applied to a local mean, and K is never divided",
)
class UndoesNothing(LoggedApart):
    """W times the mean over a micro-batch's own tokens is differentiated."""

    def differentiated(self, terms: Terms, k: int, batch: MicroBatch) -> Tensor:
        return self.weighted(terms, {"main": self.ranks.world * own_mean(batch)})


@mutant(
    "hf-last-window",
    strategy="dp",
    case=SHORT_TAIL,
    quantity="gradient",
    source="huggingface/transformers#39659; Lightning-AI/pytorch-lightning#19987; modelscope/ms-swift#10084",
    mistake="the short last window is divided by the configured K instead of its own k",
)
class DividedByFullWindow(MeanOverMicroBatches):
    """The divisor is the configured number of micro-batches."""

    def divisor(self) -> float:
        return self.case.accumulation


@mutant(
    "mlx-drop-tail",
    strategy="dp",
    case=SHORT_TAIL,
    quantity="weight update",
    source="ml-explore/mlx-lm#1413",
    mistake="a last window with fewer than K micro-batches is accumulated but never applied",
)
class DroppedTail(DataParallel):
    """The optimizer steps only when K micro-batches have come together."""

    def step_everything(self) -> None:
        if self.counts.microbatches == self.case.accumulation:
            super().step_everything()


@mutant(
    "titan-local-tokens",
    strategy="dp",
    case=TWO_BY_THREE_GPT,
    quantity="gradient",
    source="pytorch/torchtitan#2206",
    mistake="a mean over each rank's own tokens, then an average over ranks",
)
class LocalMean(LoggedApart):
    """Ranks with few valid tokens count as much as full ones."""

    def differentiated(self, terms: Terms, k: int, batch: MicroBatch) -> Tensor:
        own = sum(b.tokens for b in self.window.microbatches)
        return self.weighted(terms, {"main": 1 / own})


@mutant(
    "olmo-zloss",
    strategy="dp",
    case=Z_LOSS,
    quantity="loss",
    source="allenai/OLMo#634",
    mistake="the z-loss has the denominator of the token loss (tokens) instead of its own (rows)",
)
class AuxiliaryByTokens(DataParallel):
    """Both loss terms are divided by the tokens of the window."""

    def factor(self, term: str, k: int, batch: MicroBatch) -> float:
        return self.token_factor(self.case.semantics.denominator, k, batch)


@mutant(
    "opennmt-extra-term",
    strategy="dp",
    case=SECOND_HEAD,
    quantity="loss",
    source="OpenNMT/OpenNMT-py#2209",
    mistake="the main term is normalised by the window, the second term by the micro-batch",
)
class SecondTermByMicroBatch(DataParallel):
    """The second head's loss is divided by the tokens of each micro-batch, so it counts about K times."""

    def factor(self, term: str, k: int, batch: MicroBatch) -> float:
        if term == "extra":
            return self.ranks.world / int(self.counts.tokens[k])
        return super().factor(term, k, batch)


@mutant(
    "openinstruct-reduce-sum",
    strategy="dp",
    case=TWO_BY_THREE_MLP,
    quantity="gradient",
    source="allenai/open-instruct#1728, #1161",
    mistake="the differentiated loss is a mean over each micro-batch instead of a sum that is divided once",
)
class MeanForSum(LoggedApart):
    """The default reduction of the loss function, a mean, is accumulated."""

    def differentiated(self, terms: Terms, k: int, batch: MicroBatch) -> Tensor:
        return self.weighted(terms, {"main": own_mean(batch) / len(self.window.microbatches)})


@mutant(
    "megatron-mtp-per-token",
    strategy="dp",
    case=SECOND_HEAD,
    quantity="gradient",
    source="NVIDIA/Megatron-LM#7452",
    mistake="the second head's loss is normalised by this rank's own tokens, the main one by all",
)
class SecondHeadLocal(LoggedApart):
    """Only the main loss uses the token count of all ranks."""

    def differentiated(self, terms: Terms, k: int, batch: MicroBatch) -> Tensor:
        own = sum(b.tokens for b in self.window.microbatches)
        return self.weighted(terms, {"main": self.factor("main", k, batch), "extra": 1 / own})
