"""Split models with right numbers in which something else travels than was asked for, or between other ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from equivtests.adapters.textbook.context import SCHEMES, ContextParallel, GatheredKeys
from equivtests.adapters.textbook.pipeline import PipelineParallel
from equivtests.adapters.textbook.products import TensorPipeline
from equivtests.adapters.textbook.tensor import Step, TensorParallel
from equivtests.adapters.textbook.zero import Zero1
from equivtests.cases.case import Model
from equivtests.mutants.mutant import mutant
from equivtests.mutants.situations import TWO_BY_TWO_MESH
from equivtests.mutants.split_situations import (
    FOUR_MICRO,
    ONE_DATA_RANK,
    SPLIT_IN_FOUR,
    SPREAD,
    TIED_FOUR,
    TWO_LAYERS,
    split_situation,
)

TIED_IN_FOUR = split_situation("tied-in-four", "pp4", TIED_FOUR, FOUR_MICRO)
SPREAD_AND_STAGED = split_situation("spread-and-staged", "tp2-pp2", TWO_LAYERS, ONE_DATA_RANK)
SPREAD_GATED = split_situation("spread-gated", "tp2", Model("gpt", depth=1, features=("bias", "gated")), ONE_DATA_RANK)


@mutant(
    "shards-across-copies",
    strategy="zero-1",
    case=TWO_BY_TWO_MESH,
    quantity="collectives",
    source="NVIDIA/Megatron-LM#6873",
    mistake="the axes of the mesh are exchanged: shards lie on ranks 0 and 2, copies on ranks 0 and 1",
    chapter="ledger",
)
class ShardsAcrossCopies(Zero1):
    def make_groups(self) -> None:
        layout = self.case.layout
        mesh = self.ranks.mesh((layout.shard, layout.replicate), ("shard", "replicate"))
        self.shard_group, self.replicate_group = mesh.get_group("shard"), mesh.get_group("replicate")
        self.shard_count, self.shard_index = layout.shard, self.ranks.rank // layout.replicate
        self.replica = self.ranks.rank % layout.replicate


@mutant(
    "tied-over-all-stages",
    strategy="gpipe",
    case=TIED_IN_FOUR,
    quantity="collectives",
    source="NVIDIA/Megatron-LM#7452",
    mistake="the gradient of a tied embedding is summed over all ranks of the pipeline, where the two ends would do",
    chapter="ledger",
)
class TiedOverAllStages(PipelineParallel):
    def sum_tied(self, gradients: list[Tensor]) -> None:
        """The ranks between the ends have no part in it, and add zeros."""
        model = self.case.model
        none = torch.zeros(model.vocabulary, model.width, dtype=self.dtype, device=self.ranks.device)
        self.sum_over(self.pipe, gradients or [none])


@mutant(
    "ring-is-gathered",
    strategy="cp-ring",
    case=SPLIT_IN_FOUR,
    quantity="collectives",
    source="pytorch/torchtitan#3086",
    mistake="keys and values are to go round a ring, and the option does nothing: they are gathered",
    chapter="ledger",
)
class RingIsGathered(ContextParallel):
    schemes = SCHEMES | {"cp-ring": (GatheredKeys, False)}


@mutant(
    "stages-exchange-whole-sequences",
    strategy="tp-sequence-1f1b",
    case=SPREAD_AND_STAGED,
    quantity="collectives",
    source="NVIDIA/Megatron-LM#4032",
    mistake="each tensor rank sends whole sequences to the next stage, which keeps its part of them",
    chapter="ledger",
)
class StagesExchangeWholeSequences(TensorPipeline):
    def positions_here(self, length: int) -> int:
        return length

    def send(self, tensor: Tensor, stage: int, tag: int) -> None:
        super().send(self.tp.gather(tensor.detach(), 1), stage, tag)

    def receive(self, source: int, stage: int, k: int, forward: bool) -> Tensor:
        return self.tp.cut(super().receive(source, stage, k, forward), 1).contiguous()


@mutant(
    "columns-enter-apart",
    strategy="tp",
    case=SPREAD_GATED,
    quantity="collectives",
    source="constructed: queries, keys and values as layers of their own, each with the collective of a whole block",
    mistake="what enters a block is summed backward once for each of its column-parallel layers",
    chapter="ledger",
)
class ColumnsEnterApart(TensorParallel):
    def enter_once(self, module: torch.nn.Module, name: str) -> None:
        """Every layer does it by itself."""

    def column(
        self,
        module: torch.nn.Module,
        name: str,
        span: tuple[int, int] | None = None,
        enter: Step | None = None,
        leave: Step | None = None,
    ) -> None:
        super().column(module, name, span, None, leave)


@mutant(
    "sum-averaged-again",
    strategy="tp",
    case=SPREAD,
    quantity="collectives",
    source="constructed: a layer that sums its output itself, inside of a block that does it, too",
    mistake="the ranks' sum, of which they have equal copies by then, is averaged over them once more",
    chapter="ledger",
)
class SumAveragedAgain(TensorParallel):
    def total(self, x: Tensor) -> Tensor:
        return super().total(super().total(x)) / self.tp.size
