"""FullyShardedDataParallel (the wrapper class, FSDP1)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from equivtests.adapters.adapter import Claims, KnownDivergence
from equivtests.adapters.native.checkpoint import DistributedCheckpoint
from equivtests.adapters.native.ddp import NATIVE_FEATURES, native
from equivtests.adapters.torch_adapter import Shown
from equivtests.record.observation import Place

SHARDING = {
    "fsdp1-full": ShardingStrategy.FULL_SHARD,
    "fsdp1-grad-op": ShardingStrategy.SHARD_GRAD_OP,
    "fsdp1-no-shard": ShardingStrategy.NO_SHARD,
    "fsdp1-hybrid": ShardingStrategy.HYBRID_SHARD,
}
ALL = frozenset({"weights", "gradients", "state"})
ONE_SHARD = KnownDivergence(
    case="*-one-shard-*",
    quantity="gradient",
    reason="a shard axis of size 1 turns HYBRID_SHARD into NO_SHARD, which does not reduce gradients over the copies",
    link="https://github.com/pytorch/pytorch/issues/154888",
)

TRANSPOSED = KnownDivergence(
    case="linear-transposed-*",
    quantity="gradient",
    reason="NO_SHARD with original parameters gives the gradient of a parameter that is not contiguous in wrong order",
    link="https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_flat_param.py",
)


class FSDP1(DistributedCheckpoint):
    """Flat parameters per wrapped block; original parameters stay visible as local views."""

    model: FullyShardedDataParallel

    def claims(self) -> Claims:
        whole: dict[str, Any] = {"cut": "aligned", "units": "layers"}
        # Shards of a parameter that is not contiguous are intervals of its memory, which no place describes.
        flat = whole | {"features": NATIVE_FEATURES - {"transposed"}}
        return Claims(
            (
                native("fsdp1-full", shards=ALL, algorithm="fsdp-full", **flat),
                native("fsdp1-grad-op", shards=ALL, algorithm="fsdp-grad-op", **flat),
                native("fsdp1-no-shard", algorithm="all-reduce-per-microbatch", known=(TRANSPOSED,), **whole),
                native("fsdp1-hybrid", shards=ALL, replicates=True, algorithm="fsdp-full", known=(ONE_SHARD,), **flat),
            ),
            framework=f"torch {torch.__version__}",
        )

    def wrap(self, module: nn.Module) -> nn.Module:
        layers = units(module)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # NO_SHARD is deprecated, and certified all the same
            return FullyShardedDataParallel(
                module,
                sharding_strategy=SHARDING[self.strategy],
                auto_wrap_policy=CustomPolicy(lambda m: m in layers),
                use_orig_params=True,
                device_id=torch.device(self.ranks.device),
                device_mesh=self.mesh(),
            )

    def mesh(self) -> Any:
        """With a mesh, sharded state dicts hold DTensors (ShardedTensors without rows cannot always be loaded)."""
        layout = self.case.layout
        if self.strategy == "fsdp1-hybrid":
            return self.ranks.mesh((layout.replicate, layout.shard), ("replicate", "shard"))
        return self.ranks.mesh((layout.dp,), ("shard",))

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
            for parameter, shape, where in zip(flat._params or [], flat._shapes, flat._shard_param_infos, strict=True):
                yield names[id(parameter)], parameter, self.place(handle, tuple(shape), where)

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((clean(name), buffer) for name, buffer in super().buffers())

    def place(self, handle: Any, shape: tuple[int, ...], where: Any) -> Place:
        if not handle.uses_sharded_strategy:
            return Place(shape, replica=self.ranks.rank)
        replica = self.ranks.rank // self.case.layout.shard
        if not where.in_shard:
            return Place(shape, interval=(0, 0), replica=replica)
        return Place(shape, interval=(where.intra_param_start_idx, where.intra_param_end_idx + 1), replica=replica)


def units(module: nn.Module) -> list[nn.Module]:
    """The layers that are wrapped one by one, below the root."""
    return list(getattr(module, "layers", []))


def clean(name: str) -> str:
    """The canonical name of a parameter inside wrappers."""
    return name.replace("_fsdp_wrapped_module.", "")
