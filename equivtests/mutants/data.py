"""Mutants of data order and sharding."""

from __future__ import annotations

from equivtests.mutants.mutant import mutant
from equivtests.mutants.parents import Sampler
from equivtests.mutants.situations import ODD_ROWS, UNEQUAL_ROWS


@mutant(
    "sampler-rank-seed",
    strategy="dp",
    case=UNEQUAL_ROWS,
    quantity="samples",
    source="NVlabs/LongLive#71; QwenLM/Qwen3-VL#1971; karpathy/llm.c#792; huggingface/datasets#5696",
    mistake="each rank shuffles with a seed of its own before it takes its slice",
)
class SeededByRank(Sampler):
    """The permutation is not shared, so slices overlap and leave holes."""

    def shuffle_seed(self) -> int:
        return self.ranks.rank


@mutant(
    "all-ranks-same-stream",
    strategy="dp",
    case=UNEQUAL_ROWS,
    quantity="samples",
    source="dreamzero0/dreamzero#91",
    mistake="every rank draws the same samples",
)
class SameStream(Sampler):
    """The slice does not depend on the rank: the gradient is that of one rank's samples."""

    def indices(self, update: int, count: int) -> list[int]:
        return self.shuffled(update, count)[:: self.ranks.world]


@mutant(
    "fairseq-drop-tail",
    strategy="dp",
    case=ODD_ROWS,
    quantity="samples",
    source="facebookresearch/fairseq#5036",
    mistake="samples that do not fill a multiple of the batch size are dropped",
)
class DroppedRemainder(Sampler):
    """The number of samples is rounded down to a multiple of the number of ranks."""

    def indices(self, update: int, count: int) -> list[int]:
        return super().indices(update, count - count % self.ranks.world)
