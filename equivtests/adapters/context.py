"""What an adapter learns about the process it runs in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from equivtests.cases.layout import Layout


@dataclass
class Ranks:
    """One rank's view of the group.

    The default process group of torch.distributed is initialized, unless the adapter claims `group="own"`. The variables
    that launchers set (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, …) are set, too.
    device: "cpu" or "cuda:N". backend: "gloo" or "nccl". store: key-value store that all ranks share.
    """

    rank: int
    world: int
    device: str = "cpu"
    backend: str = "gloo"
    store: Any = None
    _meshes: dict[Any, Any] = field(default_factory=dict)
    _groups: dict[tuple[tuple[int, ...], ...], Any] = field(default_factory=dict)

    def mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
        """A torch DeviceMesh of the given shape, made once per process (making its groups costs some 10 ms each)."""
        from torch.distributed import init_device_mesh

        key = (shape, names)
        if key not in self._meshes:
            self._meshes[key] = init_device_mesh(self.device.split(":")[0], shape, mesh_dim_names=names)
        return self._meshes[key]

    def split_mesh(self, layout: Layout, *axes: str) -> Any:
        """A torch DeviceMesh of all ranks with these axes of a layout, in the layout's rank order; made once per process.

        Axes of the layout that are not named must have one rank.
        """
        from torch.distributed import DeviceMesh

        ranks = sorted(range(self.world), key=lambda rank: [layout.at(rank)[axis] for axis in axes])
        shape = tuple(layout.degree(axis) for axis in axes)
        key = (tuple(ranks), shape, axes)
        if key not in self._meshes:
            table = np.array(ranks).reshape(shape).tolist()
            self._meshes[key] = DeviceMesh(self.device.split(":")[0], table, mesh_dim_names=axes)
        return self._meshes[key]

    def group(self, groups: tuple[tuple[int, ...], ...]) -> Any:
        """The process group, among disjoint ones that cover all ranks, that this rank is in; made once per process.

        All ranks call it with the same groups. A group of all ranks is the default one (None).
        """
        import torch.distributed as dist

        if len(groups) == 1:
            return None
        if groups not in self._groups:
            made = [dist.new_group(list(members), backend=self.backend) for members in groups]
            self._groups[groups] = next(g for g, members in zip(made, groups, strict=True) if self.rank in members)
        return self._groups[groups]

    def agree(self, name: str, make: Callable[[], str]) -> str:
        """What rank 0 made is what all ranks get: an address to meet at, say. Needs no process group.

        `name` stands for one value as long as these ranks live: `make` is called once, later calls give the same.
        """
        if self.rank == 0 and not self.store.check([name]):
            self.store.set(name, make())
        return str(self.store.get(name).decode())
