"""One pool per world size, made when first needed, on one fork server."""

from __future__ import annotations

from typing import Protocol

from equivtests.errors import RanksError
from equivtests.ranks.forkserver import ForkServer
from equivtests.ranks.job import Job, Outcome
from equivtests.ranks.pool import Pool


class Runs(Protocol):
    """What makes runs on ranks, however these came to be. nproc: the largest world that it has."""

    nproc: int

    def run(self, job: Job) -> Outcome:
        """Run a job in standing ranks, or in fresh ones if it asks to be isolated."""
        ...

    def run_fresh(self, job: Job) -> Outcome:
        """Run in ranks forked anew, which run nothing afterwards."""
        ...

    def has(self, world: int) -> bool:
        """Whether there are ranks for a world of this size."""
        return world <= self.nproc


class Pools(Runs):
    """All ranks of one main process. `nproc`: the largest world available. Starting costs nothing before `warm`."""

    def __init__(self, nproc: int, backend: str = "gloo", device: str = "cpu", deadline: float = 30.0) -> None:
        if backend not in ("gloo", "nccl"):
            raise RanksError(f"backend {backend!r} is unknown; use gloo or nccl")
        if device not in ("cpu", "cuda"):
            raise RanksError(f"device {device!r} is unknown; use cpu or cuda")
        if backend == "nccl" and device == "cpu":
            raise RanksError("backend nccl works on CUDA tensors only; use device cuda, or backend gloo")
        if nproc < 1:
            raise RanksError(f"--nproc {nproc}: at least one rank is needed")
        self.nproc, self.backend, self.device, self.deadline = nproc, backend, device, deadline
        self._server: ForkServer | None = None
        self._pools: dict[tuple[int, str], Pool] = {}
        self._checked = False

    def warm(self) -> None:
        """Start importing torch in the background; returns at once."""
        if self._server is not None and not self._server.alive:
            self.close()
        if self._server is None:
            self._server = ForkServer()

    def run(self, job: Job) -> Outcome:
        return self.run_fresh(job) if job.seating.isolated else self._pool(job).run(job)

    def run_fresh(self, job: Job) -> Outcome:
        return self._pool(job).run_fresh(job)

    @property
    def settings(self) -> dict[str, str]:
        """The determinism settings that the ranks reported (empty before the first run)."""
        return next((pool.settings for pool in self._pools.values() if pool.settings), {})

    def close(self) -> None:
        """End all ranks and the fork server."""
        for pool in self._pools.values():
            pool.close()
        self._pools = {}
        if self._server is not None:
            self._server.close()
            self._server = None

    def _pool(self, job: Job) -> Pool:
        world = job.case.layout.world
        if world > self.nproc:
            raise RanksError(f"case {job.case.name!r} needs --nproc {world}; this run has --nproc {self.nproc}")
        self.warm()
        self.check_devices()
        assert self._server is not None
        self._server.preload(job.seating.preload)
        key = (world, job.seating.group)
        if key not in self._pools:
            self._pools[key] = Pool(world, self.backend, self.device, self.deadline, self._server, job.seating.group)
        return self._pools[key]

    def check_devices(self) -> None:
        if self._checked or self.device == "cpu":
            return
        assert self._server is not None
        found = self._server.devices()
        text = f"found torch {found['torch']}, CUDA available: {found['cuda']}, CUDA devices: {found['count']}"
        if not found["cuda"]:
            raise RanksError(f"device cuda was asked for, but there is none ({text})")
        if self.backend == "nccl" and found["count"] < self.nproc:
            raise RanksError(f"backend nccl needs one GPU per rank: --nproc {self.nproc}, {text}")
        self._checked = True
