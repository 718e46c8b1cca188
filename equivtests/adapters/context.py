"""What an adapter learns about the process it runs in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Ranks:
    """One rank's view of the group. The default process group of torch.distributed is already initialized.

    device: "cpu" or "cuda:N". backend: "gloo" or "nccl".
    """

    rank: int
    world: int
    device: str = "cpu"
    backend: str = "gloo"
    _meshes: dict[tuple[tuple[int, ...], tuple[str, ...]], Any] = field(default_factory=dict)

    def mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
        """A torch DeviceMesh of the given shape, made once per process (making its groups costs some 10 ms each)."""
        from torch.distributed import init_device_mesh

        key = (shape, names)
        if key not in self._meshes:
            self._meshes[key] = init_device_mesh(self.device.split(":")[0], shape, mesh_dim_names=names)
        return self._meshes[key]
