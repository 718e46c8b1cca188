"""What an adapter learns about the process it runs in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


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
    _meshes: dict[tuple[tuple[int, ...], tuple[str, ...]], Any] = field(default_factory=dict)

    def mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
        """A torch DeviceMesh of the given shape, made once per process (making its groups costs some 10 ms each)."""
        from torch.distributed import init_device_mesh

        key = (shape, names)
        if key not in self._meshes:
            self._meshes[key] = init_device_mesh(self.device.split(":")[0], shape, mesh_dim_names=names)
        return self._meshes[key]

    def agree(self, name: str, make: Callable[[], str]) -> str:
        """What rank 0 made is what all ranks get: an address to meet at, say. Needs no process group.

        `name` stands for one value as long as these ranks live: `make` is called once, later calls give the same.
        """
        if self.rank == 0 and not self.store.check([name]):
            self.store.set(name, make())
        return str(self.store.get(name).decode())
