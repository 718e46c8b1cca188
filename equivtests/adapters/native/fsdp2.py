"""fully_shard (FSDP2): parameters become DTensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from equivtests.adapters.adapter import Claims
from equivtests.adapters.native.checkpoint import DistributedCheckpoint
from equivtests.adapters.native.ddp import native
from equivtests.adapters.native.fsdp1 import ALL
from equivtests.adapters.torch_adapter import Shown
from equivtests.models.gpt import Block


class FSDP2(DistributedCheckpoint):
    """fully_shard on every block and on the root."""

    def claims(self) -> Claims:
        mixed = frozenset({"float32/bfloat16/float32"})
        return Claims(
            (
                native("fsdp2", shards=ALL, algorithm="fsdp-full"),
                native("fsdp2-no-reshard", shards=ALL, algorithm="fsdp-grad-op"),
                native("fsdp2-mixed", shards=ALL, precisions=mixed, algorithm="fsdp-full"),
                native("fsdp2-hsdp", shards=ALL, replicates=True, algorithm="hsdp"),
            ),
            framework=f"torch {torch.__version__}",
        )

    def wrap(self, module: nn.Module) -> nn.Module:
        layout = self.case.layout
        if self.strategy == "fsdp2-hsdp":
            mesh = self.ranks.mesh((layout.replicate, layout.shard), ("replicate", "shard"))
        else:
            mesh = self.ranks.mesh((layout.dp,), ("shard",))
        options = {"mesh": mesh, "mp_policy": self.policy(), "reshard_after_forward": self.strategy != "fsdp2-no-reshard"}
        for block in [m for m in module.modules() if isinstance(m, Block)]:
            fully_shard(block, **options)
        return fully_shard(module, **options)

    def policy(self) -> MixedPrecisionPolicy:
        precision = self.case.precision
        if precision.compute == precision.weights:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(getattr(torch, precision.compute), getattr(torch, precision.reduce))

    def clip_gradients(self, limit: float, order: float) -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit, order)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def shown(self) -> Iterator[Shown]:
        """DTensors, which carry their place."""
        for name, parameter in self.module.named_parameters():
            yield name, parameter, None
