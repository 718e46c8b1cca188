"""Products of axes: one class that has those of the axes as bases, each of which cuts what the ones before it left."""

from __future__ import annotations

from torch import Tensor

from equivtests.adapters.adapter import Claims
from equivtests.adapters.textbook.context import ContextParallel
from equivtests.adapters.textbook.mesh import split_strategy
from equivtests.adapters.textbook.pipeline import PipelineParallel, pipeline_strategy
from equivtests.adapters.textbook.ring import RingAttention
from equivtests.adapters.textbook.tensor import TensorParallel
from equivtests.cases.windows import MicroBatch
from equivtests.record.observation import Observe


class TensorPipeline(PipelineParallel, TensorParallel):
    """Layers are cut over tensor ranks first, then dealt out to stages; every tensor rank has a pipeline of its own."""

    def claims(self) -> Claims:
        axes, gpt = {"dp", "tp", "pp"}, frozenset({"gpt"})
        return Claims(
            (
                pipeline_strategy("tp-gpipe", axes, "gpipe", families=gpt),
                pipeline_strategy("tp-1f1b", axes, "1f1b", families=gpt),
                pipeline_strategy("tp-sequence-1f1b", axes, "1f1b", families=gpt),
                pipeline_strategy("tp-zbv", axes, "zbv", families=gpt, virtual=frozenset({2})),
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
        return Claims((split_strategy("cp-tp", {"dp", "cp", "tp"}),), framework="equivtests textbook")


class ContextPipeline(PipelineParallel, ContextParallel):
    """Every stage sees some positions of each micro-batch; the ranks of a stage exchange keys among themselves."""

    schemes = {"cp-1f1b": (RingAttention, True), "cp-zero-bubble": (RingAttention, False)}

    def claims(self) -> Claims:
        axes, gpt = {"dp", "cp", "pp"}, frozenset({"gpt"})
        return Claims(
            (
                pipeline_strategy("cp-1f1b", axes, "1f1b", families=gpt),
                pipeline_strategy("cp-zero-bubble", axes, "zero-bubble", families=gpt),
            ),
            framework="equivtests textbook",
        )

    def accumulate(self, batches: list[MicroBatch]) -> Tensor:
        return super().accumulate([self.cut(batch) for batch in batches])

    def show_inputs(self, observe: Observe) -> None:
        """What reached stage 0."""
        for k, inputs in sorted(self.begun.items()):
            self.show_shard(observe, k, inputs)
