"""Lightning Fabric: DistributedDataParallel, and fully_shard by ModelParallelStrategy.

Written like its guides: https://lightning.ai/docs/fabric/stable/
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning_fabric
import torch
from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from equivtests.adapters.adapter import PLAIN_FEATURES, Claims, Strategy
from equivtests.adapters.context import Ranks
from equivtests.adapters.native.fsdp1 import ALL, units
from equivtests.adapters.native.fsdp2 import EMPTY_SHARD
from equivtests.adapters.torch_adapter import SHOWN, Shown, TorchAdapter
from equivtests.cases.case import Case
from equivtests.cases.windows import MicroBatch
from equivtests.models.parts import Terms

FEATURES = PLAIN_FEATURES | {"dropout", "extra_head", "z_loss"}
BF16 = "float32/bfloat16/float32"
DDP_PRECISIONS = {"float32": "32-true", "float64": "64-true", BF16: "bf16-mixed"}
MUTANTS = ("equivtests.mutants.outside.fabric",)


class Fabric(TorchAdapter):
    """Fabric wraps model and optimizer; backward, accumulation, precision and clipping are its own."""

    def claims(self) -> Claims:
        ddp: dict[str, Any] = {"precisions": frozenset(DDP_PRECISIONS), "algorithm": "all-reduce", "observes": SHOWN}
        fsdp2: dict[str, Any] = {"precisions": frozenset({"float32", BF16}), "observes": SHOWN}
        fsdp2 |= {"features": FEATURES - {"transposed"}, "known": (EMPTY_SHARD,)}
        cut: dict[str, Any] = {"shards": ALL, "cut": "rows", "units": "layers", "algorithm": "fsdp-full"}
        strategies = (
            Strategy("fabric-ddp", features=FEATURES, **ddp),
            Strategy("fabric-ddp-find-unused", features=FEATURES | {"conditional", "unused"}, **ddp),
            Strategy("fabric-fsdp2", **fsdp2, **cut),
            Strategy("fabric-fsdp2-no-sync", **fsdp2, shards=frozenset({"weights", "state"})),
        )
        framework = f"lightning-fabric {lightning_fabric.__version__}"
        return Claims(strategies, framework=framework, preload=("lightning_fabric",), mutants=MUTANTS)

    def setup(self, case: Case, ranks: Ranks) -> None:
        self.fabric = lightning_fabric.Fabric(
            accelerator=ranks.device.split(":")[0], devices=ranks.world, **self.options(case)
        )
        self.fabric.launch()
        super().setup(case, ranks)

    def options(self, case: Case) -> dict[str, Any]:
        if "fsdp2" in self.strategy:
            return {"strategy": ModelParallelStrategy(self.parallelize_model, case.layout.dp, 1)}
        ddp = DDPStrategy(find_unused_parameters=self.strategy == "fabric-ddp-find-unused")
        return {"strategy": ddp, "precision": DDP_PRECISIONS[case.precision.label]}

    def parallelize_model(self, module: nn.Module, mesh: Any) -> nn.Module:
        """Shard over the data-parallel axis; ModelParallelStrategy leaves the precision to be set here."""
        precision = self.case.precision
        policy = MixedPrecisionPolicy(getattr(torch, precision.compute), getattr(torch, precision.reduce))
        for part in (*units(module), module):
            fully_shard(part, mesh=mesh["data_parallel"], mp_policy=policy)
        return module

    def wrap(self, module: nn.Module) -> nn.Module:
        return self.fabric.setup(module)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return self.fabric.setup_optimizers(super().make_optimizer())

    def forward_backward(self, k: int, batch: MicroBatch, last: bool) -> Tensor:
        with self.fabric.no_backward_sync(self.model, enabled=not last and self.strategy != "fabric-fsdp2"):
            return super().forward_backward(k, batch, last)

    def forward(self, model: nn.Module, batch: MicroBatch) -> Terms:
        with self.fabric.autocast():  # else "64-true" returns the loss in torch's default dtype
            return super().forward(model, batch)

    def backward(self, objective: Tensor) -> None:
        self.fabric.backward(objective)

    def clip_gradients(self, limit: float, order: float) -> Tensor:
        norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=limit, norm_type=order)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def shown(self) -> Iterator[Shown]:
        """Sharded parameters are DTensors, which carry their place."""
        for name, parameter, place in super().shown():
            yield name, parameter, None if isinstance(parameter, DTensor) else place
