"""Mutants of context parallelism, and of dropout where ranks share a sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equivtests.adapters.textbook.context import SCHEMES, ContextParallel, GatheredKeys
from equivtests.adapters.textbook.products import ContextExpert, ContextPipeline, ContextTensor, ShardedMoE
from equivtests.adapters.textbook.ring import RingAttention, Softmax
from equivtests.adapters.textbook.shards import GatherShards, ShardedSequence
from equivtests.adapters.textbook.tensor import TensorParallel
from equivtests.adapters.torch_adapter import Counts
from equivtests.cases.windows import MicroBatch, Window
from equivtests.models.moe import MoE
from equivtests.models.parts import Terms
from equivtests.models.sequence import WholeSequence
from equivtests.mutants.mutant import mutant
from equivtests.mutants.split_situations import (
    SPLIT_BESIDE_DATA,
    SPLIT_DOCUMENTS,
    SPLIT_DROPOUT,
    SPLIT_EXPERTS_TOO,
    SPLIT_HEADS_TOO,
    SPLIT_IN_FOUR,
    SPLIT_SEQUENCE,
    SPLIT_STAGES,
    SPLIT_TWO_HEADS,
    SPREAD_DROPOUT,
    SPREAD_DROPOUT_DATA,
)

Schemes = dict[str, tuple[type[ShardedSequence], bool]]


def with_sequence(strategy: str, sequence: type[ShardedSequence]) -> Schemes:
    """The schemes of context parallelism, with another way for queries to meet keys in one of them."""
    return SCHEMES | {strategy: (sequence, SCHEMES[strategy][1])}


# ---------------------------------------------------------------------------------------------- scales


@mutant(
    "megatron-cp-loss",
    strategy="cp-ring",
    case=SPLIT_BESIDE_DATA,
    quantity="gradient",
    source="NVIDIA/Megatron-LM#906, #673",
    mistake="the loss undoes an average over dp · cp, but gradients are divided by dp alone",
)
class DividedByDataRanks(ContextParallel):
    """The two conventions were changed separately: gradients are cp times too large."""

    def average_data(self) -> None:
        super().average_data()
        for gradient in self.gradients_of(lambda laid: True):
            gradient.mul_(self.layout.cp)


@mutant(
    "veomni-cp-scale",
    strategy="cp-gather",
    case=SPLIT_BESIDE_DATA,
    quantity="loss",
    source="ByteDance-Seed/VeOmni#338",
    mistake="the loss is multiplied by dp where gradients are averaged over dp · cp",
)
class ScaledByDataRanks(ContextParallel):
    """The average is undone with the size of one axis of the mesh."""

    def factor(self, term: str, k: int, batch: MicroBatch) -> float:
        return super().factor(term, k, batch) / self.layout.cp


@mutant(
    "megatron-mtp-shards",
    strategy="cp-ring",
    case=SPLIT_TWO_HEADS,
    quantity="loss",
    source="NVIDIA/Megatron-LM#7452",
    mistake="the second head's loss is normalised by the valid tokens of this rank's part of the sequences",
)
class SecondHeadByShard(ContextParallel):
    """Only the main loss knows the tokens of all ranks."""

    def factor(self, term: str, k: int, batch: MicroBatch) -> float:
        own = sum(self.cut(b).tokens for b in self.window.microbatches)
        return 1 / max(1, own) if term == "extra" else super().factor(term, k, batch)


@mutant(
    "megatron-aux-cp",
    strategy="cp-ep",
    case=SPLIT_EXPERTS_TOO,
    quantity="loss",
    source="NVIDIA/Megatron-LM#2217, #5047, #1652, #3672",
    mistake="the main loss is rescaled for the ranks that share a sequence, the auxiliary one is not",
)
class AuxiliaryNotRescaled(ContextExpert):
    """The balance loss is cp times too small."""

    def factor(self, term: str, k: int, batch: MicroBatch) -> float:
        return super().factor(term, k, batch) / (self.layout.cp if term == "balance" else 1)


@mutant(
    "megatron-balance-of-shard",
    strategy="cp-ep",
    case=SPLIT_EXPERTS_TOO,
    quantity="loss",
    source="NVIDIA/Megatron-LM#5996; cf. pytorch/torchtitan#3000",
    mistake="the balance loss of a row is computed from the choices of the positions that are here",
)
class BalanceOfShard(ContextExpert):
    """Each part of a row is balanced by itself: the sum of products is taken for the product of sums."""

    class Mixture(ShardedMoE):
        def balance_loss(self, probability_BLE: Tensor, chosen_BLK: Tensor) -> Tensor:
            return MoE.balance_loss(self, probability_BLE, chosen_BLK) / self.shards.line.size

    mixture = Mixture


@mutant(
    "cp-capacity-of-shard",
    strategy="cp-ep",
    case=SPLIT_EXPERTS_TOO,
    quantity="routing",
    source="cf. NVIDIA/Megatron-LM#5996",
    mistake="an expert's room for a row is counted anew on every rank that has a part of it",
)
class CapacityOfShard(ContextExpert):
    """Tokens are kept that one device would drop."""

    class Mixture(ShardedMoE):
        def kept(self, chosen_BLK: Tensor) -> Tensor:
            return MoE.kept(self, chosen_BLK)

    mixture = Mixture


@mutant(
    "cp-tokens-of-shard",
    strategy="cp-ring",
    case=SPLIT_SEQUENCE,
    quantity="tokens",
    source="cf. huggingface/transformers#34242",
    mistake="valid tokens are counted behind the cut, and added up over data ranks only",
)
class CountedBehindTheCut(ContextParallel):
    """Each rank of a sequence divides by the tokens of its own part."""

    def count(self, window: Window) -> Counts:
        return super().count(Window(window.update, tuple(self.cut(batch) for batch in window.microbatches)))


# ---------------------------------------------------------------------------------------------- what is cut


@mutant(
    "hf-shift-after-cut",
    strategy="cp-gather",
    case=SPLIT_SEQUENCE,
    quantity="loss",
    source="huggingface/transformers#36607, #48570; NVIDIA-BioNeMo/bionemo-recipes#1449",
    mistake="labels are shifted behind the cut: the last token of each part but the last loses its target",
)
class ShiftedBehindTheCut(ContextParallel):
    """The target of a part's last token is the first token of the next part, which is not there."""

    def cut(self, batch: MicroBatch) -> MicroBatch:
        here = super().cut(batch)
        valid = here.valid.copy()
        if self.shards.line.index < self.shards.line.size - 1:
            valid[:, -1:] = False
        return replace(here, valid=valid)


@mutant(
    "titan-771-cp",
    strategy="cp-gather",
    case=SPLIT_SEQUENCE,
    quantity="output",
    source="pytorch/torchtitan#771",
    mistake="tokens are cut, positions are not: every part of a sequence is embedded as if it began it",
)
class LocalPositions(ContextParallel):
    """Positions are counted from the first token that is here."""

    class Sequence(GatheredKeys):
        def positions(self, inputs: Tensor) -> Tensor:
            return WholeSequence.positions(self, inputs)

    schemes = with_sequence("cp-gather", Sequence)


@mutant(
    "titan-771-pp-cp",
    strategy="cp-1f1b",
    case=SPLIT_STAGES,
    quantity="output",
    source="pytorch/torchtitan#771",
    mistake="with a pipeline the sequence is cut once outside the schedule, but its positions are not",
)
class LocalPositionsInPipeline(ContextPipeline):
    """Each axis is right by itself; positions are cut in the forward pass that a pipeline does not call."""

    class Sequence(RingAttention):
        def positions(self, inputs: Tensor) -> Tensor:
            return WholeSequence.positions(self, inputs)

    schemes = {"cp-1f1b": (Sequence, True)}


@mutant(
    "cp-documents-of-shard",
    strategy="cp-gather",
    case=SPLIT_DOCUMENTS,
    quantity="output",
    source="cf. NVIDIA-NeMo/Megatron-Bridge#1292",
    mistake="documents are numbered from 0 in every part of a sequence: other parts' documents are taken for one's own",
)
class LocalDocuments(ContextParallel):
    """Boundaries of documents are found behind the cut."""

    class Sequence(GatheredKeys):
        def documents(self, inputs: Tensor) -> Tensor | None:
            parts = [self.shards.cut(inputs, 1, rank) for rank in range(self.shards.line.size)]
            numbers = [WholeSequence.documents(self, part) for part in parts]
            return self.shards.in_order(torch.cat([n for n in numbers if n is not None], dim=1), 1)

    schemes = with_sequence("cp-gather", Sequence)


@mutant(
    "trl-packed-cp",
    strategy="cp-ring",
    case=SPLIT_DOCUMENTS,
    quantity="output",
    source="huggingface/trl#6843; huggingface/accelerate#4177",
    mistake="attention over parts of sequences knows no mask but the causal one: documents see those before them",
)
class CausalMaskOnly(ContextParallel):
    """The mask of documents is dropped where sequences are cut; positions still start anew."""

    class Sequence(RingAttention):
        def documents(self, inputs: Tensor) -> Tensor | None:
            return None

    schemes = with_sequence("cp-ring", Sequence)


# ---------------------------------------------------------------------------------------------- attention


@mutant(
    "cp-attention-local",
    strategy="cp-ring",
    case=SPLIT_SEQUENCE,
    quantity="output",
    source="cf. huggingface/accelerate#4177",
    mistake="every rank attends to its own part only: the parts are as many sequences side by side",
)
class LocalAttention(ContextParallel):
    """Keys and values never leave their rank."""

    class Sequence(RingAttention):
        def origins(self) -> list[int]:
            return [self.shards.line.index]

        def pass_on(self, block: Tensor, origin: int, length: int) -> Tensor:
            return block

    schemes = with_sequence("cp-ring", Sequence)


@mutant(
    "zigzag-mask-contiguous",
    strategy="cp-ring-zigzag",
    case=SPLIT_SEQUENCE,
    quantity="output",
    source="cf. zhuzilin/ring-flash-attention#54",
    mistake="positions are dealt out in zigzag, but the causal mask takes each rank's to be contiguous",
)
class MaskOfContiguousParts(ContextParallel):
    """Queries of the front see keys of the back."""

    class Sequence(RingAttention):
        def scores(self, q: Tensor, keys: Tensor, whole: Tensor, origin: int) -> Tensor:
            contiguous = replace(self.shards, zigzag=False)
            line, length = self.shards.line, whole.shape[1]
            here, there = (contiguous.positions(length, rank) for rank in (line.index, origin))
            hidden = ~self.visible(whole, here, there)
            return (q @ keys.mT * self.scale(q)).masked_fill(hidden, -torch.inf)

    schemes = with_sequence("cp-ring-zigzag", Sequence)


@mutant(
    "ring-no-rescale",
    strategy="cp-ring",
    case=SPLIT_SEQUENCE,
    quantity="output",
    source="cf. NVIDIA/Megatron-LM#1464",
    mistake="what was summed up under a lower highest score is not rescaled when a higher one comes",
)
class NotRescaled(ContextParallel):
    """The online softmax weights its blocks wrongly wherever the highest score changes."""

    class Sequence(RingAttention):
        def rescale(self, before: Tensor, highest: Tensor) -> Tensor:
            return torch.ones_like(highest)

    schemes = with_sequence("cp-ring", Sequence)


@mutant(
    "ring-overwrites",
    strategy="cp-ring",
    case=SPLIT_IN_FOUR,
    quantity="output",
    source="feifeibear/long-context-attention#176",
    mistake="each step overwrites what the steps before gave, where the query sees anything of the block",
)
class OverwrittenByTheLastBlock(ContextParallel):
    """Blocks are not merged: the last one that is seen remains."""

    class Sequence(RingAttention):
        def add(self, seen: Softmax, scores: Tensor, values: Tensor) -> Softmax:
            visible = scores.isfinite().any(dim=-1, keepdim=True)
            total, mixed = (x.masked_fill(visible, 0.0) for x in (seen.total, seen.mixed))
            return super().add(Softmax(seen.highest, total, mixed), scores, values)

    schemes = with_sequence("cp-ring", Sequence)


@mutant(
    "te-cp-attention",
    strategy="cp-ring",
    case=SPLIT_SEQUENCE,
    quantity="gradient",
    source="NVIDIA/Megatron-LM#1464",
    mistake="the backward pass takes each block's softmax for the whole one",
)
class BackwardNotRescaled(ContextParallel):
    """Weights of a block are normalised by its own sum, not by that of all blocks; the forward pass is right."""

    class Sequence(RingAttention):
        def weights(self, scores: Tensor, log_total: Tensor) -> Tensor:
            return scores.softmax(dim=-1).nan_to_num()

    schemes = with_sequence("cp-ring", Sequence)


@mutant(
    "diffusers-stale-keys",
    strategy="cp-ring",
    case=SPLIT_SEQUENCE,
    quantity="gradient",
    source="huggingface/diffusers#14265",
    mistake="the backward pass works with the rank's own keys and values at every step of the ring",
)
class StaleKeys(ContextParallel):
    """What was saved at the first step of the forward pass is used instead of what goes round."""

    class Sequence(RingAttention):
        def backward_pass(self, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            self.own = k, v
            return super().backward_pass(q, k, v, *rest)

        def collect(self, block: Tensor, dk: Tensor, dv: Tensor, origin: int) -> Tensor:
            return torch.stack((*self.own, *super().collect(block, dk, dv, origin)[2:]))

        def pass_on(self, block: Tensor, origin: int, length: int) -> Tensor:
            taken = super().pass_on(block, origin, length)
            return torch.stack((*self.own, *taken[2:])) if len(taken) == 4 else taken

    schemes = with_sequence("cp-ring", Sequence)


@mutant(
    "ring-gradient-lost",
    strategy="cp-ring",
    case=SPLIT_IN_FOUR,
    quantity="gradient",
    source="cf. NVIDIA/Megatron-LM#1464",
    mistake="the gradients of keys and values of the last step do not go home",
)
class LastChunkLost(ContextParallel):
    """The ring's backward pass ends one message too early for one block."""

    class Sequence(RingAttention):
        def collect(self, block: Tensor, dk: Tensor, dv: Tensor, origin: int) -> Tensor:
            return block if origin == self.origins()[-1] else super().collect(block, dk, dv, origin)

    schemes = with_sequence("cp-ring", Sequence)


class Slice(GatherShards):
    """A gather whose backward pass takes the own part of the own gradient."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.shards.cut(gradients[0], ctx.dim), None, None


@mutant(
    "veomni-gather-nosum",
    strategy="cp-gather",
    case=SPLIT_BESIDE_DATA,
    quantity="gradient",
    source="ByteDance-Seed/VeOmni#1120",
    mistake="the gather's backward pass cuts the own part out without adding up what the other ranks say of it",
)
class SlicedBackward(ContextParallel):
    """Right where every rank does the same with what is gathered; here each has queries of its own."""

    class Sequence(GatheredKeys):
        def gather(self, x: Tensor) -> Tensor:
            return Slice.apply(x, self.shards, 2)

    schemes = with_sequence("cp-gather", Sequence)


@mutant(
    "te-ln-fp8-cp",
    strategy="cp-tp",
    case=SPLIT_HEADS_TOO,
    quantity="gradient",
    source="NVIDIA/TransformerEngine#1677; NVIDIA/Megatron-LM#1528",
    mistake="with both axes the norms' gradients are added up over tensor ranks on two code paths",
)
class NormsSummedTwice(ContextTensor):
    """tp times too large, for norms only."""

    def sum_partial(self) -> None:
        super().sum_partial()
        super().sum_partial()


# ---------------------------------------------------------------------------------------------- dropout


@mutant(
    "megatron-cp-rng",
    strategy="cp-ring",
    case=SPLIT_DROPOUT,
    quantity="dropout mask",
    source="NVIDIA/Megatron-LM#4828",
    mistake="ranks that hold different tokens draw from one stream: all parts of a sequence have one mask",
)
class OneMaskForAllParts(ContextParallel):
    """A mask is drawn for as many positions as are here, alike on every rank."""

    def rows_of_shard(self, here: int) -> tuple[int, Tensor]:
        return here, torch.arange(here)


@mutant(
    "sp-dropout-seed",
    strategy="tp-sequence",
    case=SPREAD_DROPOUT,
    quantity="dropout mask",
    source="PaddlePaddle/PaddleFleetX#1005; ecmwf/anemoi-core#595; tenstorrent/tt-metal#55947",
    mistake="between the layers tensor ranks hold different tokens, but draw the mask of one and the same part",
)
class OneMaskForTensorRanks(TensorParallel):
    """The seed is that of a tensor group, as it has to be where its ranks hold the same."""

    def rows_here(self, length: int) -> tuple[int, slice]:
        return length, slice(None)


@mutant(
    "tp-dropout-rank-seed",
    strategy="tp",
    case=SPREAD_DROPOUT,
    quantity="dropout mask",
    source="cf. ecmwf/anemoi-core#595",
    mistake="the stream is seeded by the rank, so that tensor ranks drop other elements of the same activations",
)
class MaskOfTheRank(TensorParallel):
    """What has to be equal within a tensor group is not."""

    def forward(self, model: Any, batch: MicroBatch) -> Terms:
        self.stream.seed = self.case.seed + self.ranks.rank
        return super().forward(model, batch)


@mutant(
    "dp-dropout-same",
    strategy="tp",
    case=SPREAD_DROPOUT_DATA,
    quantity="dropout mask",
    source="cf. PaddlePaddle/PaddleFleetX#1005",
    mistake="data ranks draw from one stream: the first row of each has one mask, and so on",
)
class MaskOfTheRowNumber(TensorParallel):
    """The seed lacks the data rank."""

    def forward(self, model: Any, batch: MicroBatch) -> Terms:
        return super().forward(model, replace(batch, ids=np.arange(batch.rows)))
