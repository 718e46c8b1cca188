"""Mutants of Lightning Fabric's tensor parallelism: ranks that hold parts of one model, treated as data ranks."""

from __future__ import annotations

from equivtests.adapters.fabric_tensor import FabricTensor
from equivtests.adapters.native.mesh import here
from equivtests.cases.case import Model
from equivtests.mutants.mutant import mutant
from equivtests.mutants.split_situations import ONE_DATA_RANK, SPREAD_BESIDE_DATA, split_situation

EVEN = split_situation("even", "tp2", Model("gpt", depth=1, vocabulary=16, features=("bias",)), ONE_DATA_RANK)


@mutant(
    "fabric-tp-world-size",
    strategy="fabric-fsdp2-tp",
    case=SPREAD_BESIDE_DATA,
    quantity="loss",
    source="huggingface/transformers#39648",
    mistake="the loss is multiplied by fabric.world_size, which counts tensor ranks, too",
)
class WorldSize(FabricTensor):
    """fully_shard averages over the data ranks alone."""

    def averaged(self) -> int:
        return self.fabric.world_size


@mutant(
    "fabric-tp-averaged-over-all",
    strategy="fabric-tp",
    case=EVEN,
    quantity="gradient",
    source="https://lightning.ai/docs/fabric/stable/advanced/distributed_communication.html",
    mistake="gradients are averaged by fabric.all_reduce, whose ranks are all ranks: parts of layers are mixed",
)
class AveragedOverAll(FabricTensor):
    """Each tensor rank has other rows of a weight."""

    def synchronize(self) -> None:
        super().synchronize()
        for gradient in self.own_gradients():
            here(gradient).copy_(self.fabric.all_reduce(here(gradient).clone(), reduce_op="mean"))
