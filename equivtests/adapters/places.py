"""From torch tensors to numpy arrays with their place: whole tensors, DTensors and flat pieces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equivtests.record.observation import Observe, Place


def to_numpy(tensor: Tensor) -> tuple[np.ndarray, str]:
    """(array, dtype tag); bfloat16 becomes uint16 with the tag "bfloat16"."""
    plain = tensor.detach().cpu()
    if plain.dtype == torch.bfloat16:
        return plain.contiguous().view(torch.uint16).numpy(), "bfloat16"
    return plain.numpy(), str(plain.dtype).removeprefix("torch.")


def dtensor_place(tensor: Any) -> Place:
    """Place of this rank's part of a DTensor (Shard, Replicate and Partial placements).

    replica: number of the copy among those of the DTensor's own mesh.
    """
    from torch.distributed.tensor import Partial, Replicate
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, mesh = tuple(tensor.shape), tensor.device_mesh
    local, offset = compute_local_shape_and_global_offset(shape, mesh, tensor.placements)
    box = tuple((o, o + n) for o, n in zip(offset, local, strict=True))
    replica, parts = 0, 1
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            replica = replica * mesh.size(axis) + mesh.get_local_rank(axis)
        if isinstance(placement, Partial):
            parts *= mesh.size(axis)
    if parts == 1:
        return Place(shape, box=box, replica=replica)
    return Place(shape, box=box, replica=replica, partial="sum", parts=parts)


def show(
    observe: Observe,
    kind: str,
    name: str,
    tensor: Any,
    *,
    update: int,
    place: Place | None = None,
    replica: int = 0,
    microbatch: int | None = None,
) -> None:
    """Observe a torch tensor. Unless `place` says where it belongs, DTensors carry their place, and others are whole.

    replica: number of the copy; of a DTensor, number of the mesh among those that each hold all copies of its own.
    """
    if type(tensor).__name__ == "DTensor":
        if place is None:
            within = dtensor_place(tensor)
            place = replace(within, replica=replica * tensor.device_mesh.size() + within.replica)
        tensor = tensor.to_local()
    array, tag = to_numpy(tensor)
    where = place or Place(tuple(array.shape), replica=replica)
    observe(kind, name, array, update=update, microbatch=microbatch, place=where, dtype=tag)
