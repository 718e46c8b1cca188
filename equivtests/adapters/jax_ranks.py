"""JAX over the suite's ranks: how they meet, and global arrays of which every rank holds a part."""

from __future__ import annotations

import socket

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, Sharding

from equivtests.adapters.context import Ranks
from equivtests.cases.layout import Layout
from equivtests.record.observation import Observe, Place


def meet(ranks: Ranks) -> None:
    """Initialize JAX over all ranks, one CPU device each; once per process. Raises ValueError on other devices."""
    if ranks.device != "cpu":
        raise ValueError(f"the JAX adapter runs on CPUs, not on {ranks.device}: leave --device out")
    if jax.distributed.is_initialized():
        return
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(ranks.agree("coordinator", free_address), ranks.world, ranks.rank)


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return "{}:{}".format(*free.getsockname())


def mesh_of(layout: Layout) -> Mesh:
    """The devices by the coordinates of their ranks: axis "data" has the data ranks, axis "model" the tensor ranks."""
    devices = np.empty((layout.dp, layout.tp), dtype=object)
    for device in jax.devices():
        at = layout.at(device.process_index)
        devices[at["dp"], at["tp"]] = device
    return Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


def place(array: np.ndarray, sharding: Sharding) -> jax.Array:
    """A global array of which this rank holds its part."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def local(array: jax.Array) -> np.ndarray:
    """This rank's part of a global array."""
    return np.asarray(array.addressable_data(0))


def show(
    observe: Observe, kind: str, name: str, array: jax.Array, *, update: int, shape: tuple[int, ...] | None = None
) -> None:
    """Observe this rank's part of a global array, which knows where it belongs.

    shape: of the tensor itself, where `array` is larger because it was filled up to a size that the ranks divide.
    """
    whole, part = array.shape if shape is None else shape, array.addressable_shards[0]
    sides = [side.indices(size) for side, size in zip(part.index, array.shape, strict=True)]
    box = tuple((min(start, size), min(stop, size)) for (start, stop, _), size in zip(sides, whole, strict=True))
    values = local(array)[tuple(slice(stop - start) for start, stop in box)]
    observe(kind, name, values, update=update, place=Place(whole, box=box, replica=part.replica_id))
