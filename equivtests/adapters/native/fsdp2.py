"""fully_shard (FSDP2): parameters become DTensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from equivtests.adapters.adapter import Claims, KnownDivergence
from equivtests.adapters.native.checkpoint import DistributedCheckpoint
from equivtests.adapters.native.ddp import NATIVE_FEATURES, native
from equivtests.adapters.native.fsdp1 import ALL, units
from equivtests.adapters.torch_adapter import Shown

EMPTY_SHARD = KnownDivergence(
    case="gpt-clip-inf-w3*",
    quantity="error",
    reason="clip_grad_norm_ with the infinity norm raises on a rank whose shard of a parameter has no element",
    link="https://github.com/meta-pytorch/torchrec/pull/3891",
    message="cannot compute the infinity norm on an empty tensor",
)


class FSDP2(DistributedCheckpoint):
    """fully_shard on every layer and on the root."""

    def claims(self) -> Claims:
        mixed = frozenset({"float32", "float32/bfloat16/float32"})
        features = NATIVE_FEATURES - {"transposed"}  # fully_shard refuses parameters that are not contiguous
        sharded: dict[str, Any] = {"shards": ALL, "cut": "rows", "units": "layers"}
        sharded |= {"features": features, "known": (EMPTY_SHARD,)}
        return Claims(
            (
                native("fsdp2", algorithm="fsdp-full", **sharded),
                native("fsdp2-no-reshard", algorithm="fsdp-grad-op", **sharded),
                native("fsdp2-mixed", precisions=mixed, algorithm="fsdp-full", **sharded),
                native("fsdp2-hsdp", replicates=True, algorithm="fsdp-full", **sharded),
            ),
            framework=f"torch {torch.__version__}",
        )

    def wrap(self, module: nn.Module) -> nn.Module:
        layout = self.case.layout
        if self.strategy == "fsdp2-hsdp":
            mesh = self.ranks.mesh((layout.replicate, layout.shard), ("replicate", "shard"))
        else:
            mesh = self.ranks.mesh((layout.dp,), ("shard",))
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": self.policy()}
        if self.strategy == "fsdp2-no-reshard":
            options["reshard_after_forward"] = False  # the default: all but the root's own parameters
        for layer in units(module):
            fully_shard(layer, **options)
        fully_shard(module, **options)
        return module

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
