"""Lightning Fabric: tensor parallelism by ModelParallelStrategy, alone and inside of fully_shard.

Written like its guides: https://lightning.ai/docs/fabric/stable/advanced/model_parallel/tp_fsdp.html
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning_fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from equivtests.adapters.adapter import Claims
from equivtests.adapters.fabric import Fabric
from equivtests.adapters.native.fsdp1 import ALL, units
from equivtests.adapters.native.tensor import TensorParallel, tensor_strategy
from equivtests.adapters.places import dtensor_place
from equivtests.adapters.torch_adapter import TorchAdapter
from equivtests.cases.case import Case
from equivtests.cases.windows import MicroBatch, Window
from equivtests.record.observation import Place

AXES = {"data_parallel": "dp", "tensor_parallel": "tp"}


class FabricTensor(Fabric, TensorParallel):
    """The plan of every layer is torch's; Fabric makes the mesh, whose axes it names and orders itself.

    fabric-tp: tensor ranks alone. fabric-fsdp2-tp: norms and dropout see a part of each sequence, and the parts of layers
    are cut again over the data ranks.
    """

    def claims(self) -> Claims:
        shared: dict[str, Any] = {"precisions": frozenset({"float32"}), "turned": False}
        sharded: dict[str, Any] = {"families": frozenset({"gpt"}), "shards": ALL}
        return Claims(
            (
                tensor_strategy("fabric-tp", axes=frozenset({"tp"}), **shared),
                tensor_strategy("fabric-fsdp2-tp", **shared, **sharded),
            ),
            framework=f"lightning-fabric {lightning_fabric.__version__}",
            preload=("lightning_fabric",),
            mutants=("equivtests.mutants.outside.fabric_tensor",),
        )

    @property
    def sequence(self) -> bool:
        return self.strategy == "fabric-fsdp2-tp"

    def options(self, case: Case) -> dict[str, Any]:
        return {"strategy": ModelParallelStrategy(self.parallelize_model, case.layout.dp, case.layout.tp)}

    def parallelize_model(self, module: nn.Module, mesh: Any) -> nn.Module:
        """What the guides call parallelize_fn: tensor ranks first, then data ranks."""
        self.parallelize(module, mesh["tensor_parallel"])
        self.watch_last(module)
        if self.sequence:
            for part in (*units(module), module):
                fully_shard(part, mesh=mesh["data_parallel"])
        return module

    def balanced(self, window: Window) -> list[MicroBatch]:
        """Data ranks gather and reduce together in every micro-batch."""
        return TorchAdapter.balanced(self, window)

    def synchronize(self) -> None:
        """fully_shard has averaged; parts of sums that are left are added up, as the optimizer would."""
        self.complete_gradients()

    def place(self, tensor: Tensor) -> Place:
        """As of any DTensor; but the axes of the mesh have Fabric's names."""
        if not isinstance(tensor, DTensor):
            return super().place(tensor)
        axes = [AXES[name] for name in tensor.device_mesh.mesh_dim_names or ()]
        cut = [a for a, p in zip(axes, tensor.placements, strict=True) if not isinstance(p, Replicate)]
        return replace(dtensor_place(tensor), replica=self.layout.copy(self.ranks.rank, *cut))
