"""From torch tensors to numpy arrays with their place: whole tensors, DTensors and flat pieces."""

from __future__ import annotations

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
    """Place of this rank's part of a DTensor (Shard and Replicate placements)."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, mesh = tuple(tensor.shape), tensor.device_mesh
    local, offset = compute_local_shape_and_global_offset(shape, mesh, tensor.placements)
    box = tuple((o, o + n) for o, n in zip(offset, local, strict=True))
    replica = 0
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            replica = replica * mesh.size(axis) + mesh.get_local_rank(axis)
    return Place(shape, box=box, replica=replica)


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
    """Observe a torch tensor. DTensors carry their place; others are whole (copy number `replica`) unless `place` says."""
    if type(tensor).__name__ == "DTensor":
        place, tensor = dtensor_place(tensor), tensor.to_local()
    array, tag = to_numpy(tensor)
    where = place or Place(tuple(array.shape), replica=replica)
    observe(kind, name, array, update=update, microbatch=microbatch, place=where, dtype=tag)
