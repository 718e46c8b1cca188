"""The collectives that the textbook adapters are made of."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = Any  # torch.distributed.ProcessGroup; None is the default group

# torch 2.13 renamed these two; 2.11 and 2.12 know the older names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_reduce(tensor: Tensor, group: Group = None, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Reduce in place over the group; returns the tensor."""
    dist.all_reduce(tensor, op=op, group=group)
    return tensor


def reduce_scatter(flat: Tensor, group: Group = None) -> Tensor:
    """Sum a flat tensor of n·size elements over the group; returns this rank's n elements."""
    shard = flat.new_empty(flat.numel() // dist.get_world_size(group))
    _reduce_scatter(shard, flat, group=group)
    return shard


def all_gather(shard: Tensor, group: Group = None) -> Tensor:
    """Concatenate the group's shards (of equal size) in rank order."""
    flat = shard.new_empty(shard.numel() * dist.get_world_size(group))
    _all_gather(flat, shard, group=group)
    return flat


def any_rank(flags: list[bool], device: str) -> list[bool]:
    """Element-wise OR over all ranks."""
    tensor = torch.tensor(flags, dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [bool(x) for x in tensor.tolist()]
