"""Products of axes: one class that has those of the axes as bases, each of which cuts what the ones before it left."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from equivtests.adapters.adapter import Claims
from equivtests.adapters.textbook.context import ContextParallel
from equivtests.adapters.textbook.expert import ExpertParallel
from equivtests.adapters.textbook.mesh import split_strategy
from equivtests.adapters.textbook.pipeline import PipelineParallel, pipeline_strategy
from equivtests.adapters.textbook.ring import RingAttention
from equivtests.adapters.textbook.shards import Shards
from equivtests.adapters.textbook.tensor import TensorParallel
from equivtests.cases.case import Model
from equivtests.cases.windows import MicroBatch
from equivtests.models.moe import MoE
from equivtests.record.observation import Observe


class TensorPipeline(PipelineParallel, TensorParallel):
    """Layers are cut over tensor ranks first, then dealt out to stages; every tensor rank has a pipeline of its own."""

    def claims(self) -> Claims:
        axes, gpt, whole = {"dp", "tp", "pp"}, frozenset({"gpt"}), "tp+pipeline"
        two, sequence = frozenset({2}), "tp-sequence+pipeline"
        return Claims(
            (
                pipeline_strategy("tp-gpipe", axes, "gpipe", families=gpt, algorithm=whole),
                pipeline_strategy("tp-1f1b", axes, "1f1b", families=gpt, algorithm=whole),
                pipeline_strategy("tp-sequence-1f1b", axes, "1f1b", families=gpt, algorithm=sequence),
                # both halves of a split backward pass go through the layers, and their collectives run twice
                pipeline_strategy("tp-zbv", axes, "zbv", families=gpt, virtual=two, algorithm=None),
            ),
            framework="equivtests textbook",
        )

    def positions_here(self, length: int) -> int:
        """Under sequence parallelism, each tensor rank passes on its own positions."""
        start, stop = self.tp.span(length) if self.sequence_parallel else (0, length)
        return stop - start


class ContextTensor(ContextParallel, TensorParallel):
    """Every tensor rank has its heads of some positions; those heads' keys go round the ranks that share a sequence."""

    schemes = {"cp-tp": (RingAttention, True)}

    def claims(self) -> Claims:
        strategy = split_strategy("cp-tp", {"dp", "cp", "tp"}, algorithm="cp-ring-zigzag+tp")
        return Claims((strategy,), framework="equivtests textbook")


class ContextPipeline(PipelineParallel, ContextParallel):
    """Every stage sees some positions of each micro-batch; the ranks of a stage exchange keys among themselves."""

    schemes = {"cp-1f1b": (RingAttention, True), "cp-zero-bubble": (RingAttention, False)}

    def claims(self) -> Claims:
        axes, gpt = {"dp", "cp", "pp"}, frozenset({"gpt"})
        return Claims(
            (
                pipeline_strategy("cp-1f1b", axes, "1f1b", families=gpt, algorithm="cp-ring-zigzag+pipeline"),
                pipeline_strategy("cp-zero-bubble", axes, "zero-bubble", families=gpt, algorithm=None),
            ),
            framework="equivtests textbook",
        )

    def accumulate(self, batches: list[MicroBatch]) -> Tensor:
        return super().accumulate([self.cut(batch) for batch in batches])

    def show_inputs(self, observe: Observe) -> None:
        """What reached stage 0."""
        for k, inputs in sorted(self.begun.items()):
            self.show_shard(observe, k, inputs)


class ShardedMoE(MoE):
    """A mixture that sees some positions of each row, and decides what depends on a whole row by all of them."""

    def __init__(self, model: Model, shards: Shards) -> None:
        super().__init__(model)
        self.shards = shards

    def kept(self, chosen_BLK: Tensor) -> Tensor:
        return self.shards.cut(super().kept(self.whole(chosen_BLK)), 1)

    def balance_loss(self, probability_BLE: Tensor, chosen_BLK: Tensor) -> Tensor:
        """This rank's part of the sum: the share of choices is the whole row's, the mean probability a sum of parts."""
        whole_BLK = self.whole(chosen_BLK)
        positions = whole_BLK.shape[1]
        share_BE = self.tokens(whole_BLK).to(probability_BLE.dtype) / (positions * self.top_k)
        return self.count * (share_BE * probability_BLE.sum(dim=1)).sum() / positions

    def whole(self, chosen_BLK: Tensor) -> Tensor:
        """The choices of all positions."""
        return self.shards.gather(chosen_BLK, 1)


class ContextExpert(ContextParallel, ExpertParallel):
    """Experts are shared out over data ranks, those that share a sequence among them."""

    schemes = {"cp-ep": (RingAttention, True)}
    mixture = ShardedMoE

    def claims(self) -> Claims:
        dispatched = next(s for s in ExpertParallel.claims(self).strategies if s.name == "ep")
        strategy = replace(dispatched, name="cp-ep", algorithm=None, axes=frozenset({"dp", "cp", "ep"}))
        return Claims((strategy,), framework="equivtests textbook")

    def split(self, module: nn.Module) -> None:
        super().split(module)
        for name, moe in self.mixtures.items():
            sharded = self.mixture(self.case.model, self.shards)
            sharded.router, sharded.experts = moe.router, moe.experts
            module.set_submodule(name, sharded)
            self.mixtures[name] = sharded
