"""FullyShardedDataParallel (the wrapper class, FSDP1)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from equivtests.adapters.adapter import Claims
from equivtests.adapters.native.checkpoint import DistributedCheckpoint
from equivtests.adapters.native.ddp import native
from equivtests.adapters.torch_adapter import Shown
from equivtests.models.gpt import Block
from equivtests.record.observation import Place

SHARDING = {
    "fsdp1-full": ShardingStrategy.FULL_SHARD,
    "fsdp1-grad-op": ShardingStrategy.SHARD_GRAD_OP,
    "fsdp1-no-shard": ShardingStrategy.NO_SHARD,
    "fsdp1-hybrid": ShardingStrategy.HYBRID_SHARD,
}
ALL = frozenset({"weights", "gradients", "state"})


class FSDP1(DistributedCheckpoint):
    """Flat parameters per wrapped block; original parameters stay visible as local views."""

    def claims(self) -> Claims:
        return Claims(
            (
                native("fsdp1-full", shards=ALL, algorithm="fsdp-full"),
                native("fsdp1-grad-op", shards=ALL, algorithm="fsdp-grad-op"),
                native("fsdp1-no-shard", algorithm="all-reduce-per-microbatch"),
                native("fsdp1-hybrid", shards=ALL, replicates=True, algorithm="hsdp"),
            ),
            framework=f"torch {torch.__version__}",
        )

    def wrap(self, module: nn.Module) -> nn.Module:
        layout, options = self.case.layout, {}
        if self.strategy == "fsdp1-hybrid":
            options["device_mesh"] = self.ranks.mesh((layout.replicate, layout.shard), ("replicate", "shard"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # NO_SHARD is deprecated, and certified all the same
            return FullyShardedDataParallel(
                module,
                sharding_strategy=SHARDING[self.strategy],
                auto_wrap_policy=ModuleWrapPolicy({Block}),
                use_orig_params=True,
                device_id=torch.device(self.ranks.device),
                **options,
            )

    def clip_gradients(self, limit: float, order: float) -> Tensor:
        return self.model.clip_grad_norm_(limit, order)

    def shown(self) -> Iterator[Shown]:
        """Local views of the original parameters, each an interval of the flattened parameter."""
        names = {id(p): clean(name) for name, p in self.model.named_parameters()}
        for wrapped in FullyShardedDataParallel.fsdp_modules(self.model):
            handle = wrapped._handle
            if handle is None:
                continue
            flat = handle.flat_param
            for parameter, shape, where in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True):
                yield names[id(parameter)], parameter, self.place(handle, tuple(shape), where)

    def place(self, handle: Any, shape: tuple[int, ...], where: Any) -> Place:
        if not handle.uses_sharded_strategy:
            return Place(shape, replica=self.ranks.rank)
        replica = self.ranks.rank // self.case.layout.shard
        if not where.in_shard:
            return Place(shape, interval=(0, 0), replica=replica)
        return Place(shape, interval=(where.intra_param_start_idx, where.intra_param_end_idx + 1), replica=replica)


def clean(name: str) -> str:
    """The canonical name of a parameter inside wrappers."""
    return name.replace("_fsdp_wrapped_module.", "")
