"""Ranks that somebody else launched: what the launcher says, and how their processes meet."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from equivtests.errors import RanksError
from equivtests.ranks.forkserver import START_DEADLINE

TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun, Ray Train and most others set for every process."""

SLURM = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
"""What srun sets for every task of a step."""

FIRST_PORT, PORTS = 61440, 4096  # a port for every SLURM job, outside of what is usually given to connections


@dataclass(frozen=True)
class Launch:
    """The place of one launched process. address, port: where rank 0 (or the launcher for it) can be met.

    attempt: tells one start of the processes from the next where the launcher restarts them.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    node: int
    address: str
    port: int
    attempt: str = "0"
    hosted: bool = False
    """Whether the launcher itself keeps the store at the address."""

    @property
    def variables(self) -> dict[str, str]:
        """What frameworks look for, in torch's names."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "GROUP_RANK": str(self.node),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def launch_of(environ: Mapping[str, str]) -> Launch | None:
    """What a launcher set for this process, or None if none did. Raises RanksError for variables that make no sense."""
    try:
        if all(name in environ for name in TORCH):
            return _by_torch(environ)
        if all(name in environ for name in SLURM):
            return _by_slurm(environ)
    except ValueError as error:
        raise RanksError(f"a variable set by the launcher is not a number: {error}") from None
    return None


def _by_torch(environ: Mapping[str, str]) -> Launch:
    rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    if not 0 <= rank < world:
        raise RanksError(f"RANK is {rank} and WORLD_SIZE {world}: a rank lies in 0..{world - 1}")
    return Launch(
        rank,
        world,
        int(environ.get("LOCAL_RANK", rank)),
        int(environ.get("LOCAL_WORLD_SIZE", world)),
        int(environ.get("GROUP_RANK", environ.get("NODE_RANK", 0))),
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        f"{environ.get('TORCHELASTIC_RUN_ID', '')}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _by_slurm(environ: Mapping[str, str]) -> Launch:
    """One task per rank. MASTER_ADDR and MASTER_PORT are used where they are set; else the step's first node is met."""
    tasks = re.match(r"\d+", environ.get("SLURM_STEP_TASKS_PER_NODE", environ["SLURM_NTASKS"]))
    return Launch(
        int(environ["SLURM_PROCID"]),
        int(environ["SLURM_NTASKS"]),
        int(environ["SLURM_LOCALID"]),
        int(tasks.group() if tasks else environ["SLURM_NTASKS"]),
        int(environ.get("SLURM_NODEID", 0)),
        environ.get("MASTER_ADDR") or first_host(environ["SLURM_STEP_NODELIST"]),
        int(environ.get("MASTER_PORT") or FIRST_PORT + int(environ["SLURM_JOB_ID"]) % PORTS),
        environ["SLURM_STEP_ID"],
    )


def first_host(nodes: str) -> str:
    """The first host of SLURM's compressed list: "gpu[03-07,9],login1" begins with "gpu03"."""
    found = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    if found is None:
        raise RanksError(f"SLURM_STEP_NODELIST {nodes!r} names no host")
    return found.group(1) + (found.group(2) or "")


def connect(launch: Launch, host: bool = False) -> Any:
    """A connection of its own to the store that all launched processes share (`torch.distributed.TCPStore`).

    host: keep the store in this process unless somebody keeps one at the address already. Raises RanksError if nobody does.
    """
    import torch.distributed as dist

    def store(keep: bool) -> Any:
        patience = timedelta(seconds=START_DEADLINE)
        return dist.TCPStore(launch.address, launch.port, None, keep, patience, wait_for_workers=False)

    try:
        if host and not launch.hosted:
            try:
                return store(True)
            except dist.DistNetworkError:
                pass  # the launcher keeps one there
        return store(False)
    except dist.DistError as error:
        where = f"{launch.address}:{launch.port}"
        raise RanksError(
            f"rank {launch.rank} cannot meet the others at {where}: {str(error).splitlines()[0]}"
        ) from None


def number_of_meeting(store: Any, launch: Launch) -> int:
    """How often the processes of this launch met before; every process of one meeting gets the same number."""
    return int((store.add(f"equivtests/{launch.attempt}/arrivals", 1) - 1) // launch.world)
