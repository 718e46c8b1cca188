"""Adapters that work, and adapters that break in every way a rank can break. `FAULTY` is the rank that breaks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from equivtests.adapters.adapter import Adapter, Claims, Strategy
from equivtests.adapters.context import Ranks
from equivtests.cases.case import Case
from equivtests.cases.windows import Window
from equivtests.record.observation import Observe

FAULTY = 1


class Summing(Adapter):
    """Works: shows the number of tokens of each window, added up over ranks, and the weight entering each update."""

    def claims(self) -> Claims:
        return Claims((Strategy("sum"),))

    def setup(self, case: Case, ranks: Ranks) -> None:
        self.ranks = ranks
        self.weight = torch.zeros(1)

    def update(self, window: Window, observe: Observe) -> None:
        tokens = torch.tensor([float(sum(m.tokens for m in window.microbatches))])
        observe("weight", "w", self.weight, update=window.update)
        if self.ranks.rank == FAULTY and window.update == 1:
            self.fault()
        dist.all_reduce(tokens)
        self.weight += tokens
        observe("tokens", "", tokens, update=window.update)
        observe("weight", "w", self.weight, update=window.update + 1)

    def fault(self) -> None:
        """Nothing is wrong here."""


class Saving(Summing):
    def save(self, directory: Path) -> None:
        np.save(directory / f"{self.ranks.rank}.npy", np.array([self.weight.item(), self.feed.position]))

    def load(self, directory: Path) -> None:
        weight, position = np.load(directory / f"{self.ranks.rank}.npy")
        self.weight[0] = weight
        self.feed.seek(int(position))


class MeetingAlone(Summing):
    """A framework without torch's process group: shows whether there is one, and what rank 0 told the others."""

    def update(self, window: Window, observe: Observe) -> None:
        told = self.ranks.agree("number", lambda: "2" if self.ranks.rank == 0 else "wrong")
        if window.update == 0:
            observe("inputs", "", [int(dist.is_initialized()), int(told)], update=0)


class TellingVariables(Summing):
    def update(self, window: Window, observe: Observe) -> None:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        if window.update == 0:
            observe("inputs", "", [int(os.environ[name]) for name in names], update=0)


class ImportedBefore(Summing):
    """Raises unless the module that its jobs ask to preload is there."""

    def setup(self, case: Case, ranks: Ranks) -> None:
        super().setup(case, ranks)
        if "tabnanny" not in sys.modules:
            raise RuntimeError("tabnanny was not preloaded")


class Raising(Summing):
    def fault(self) -> None:
        raise ValueError("the weights are\nnot mine")


class RaisingAndLeaving(Summing):
    """Tears its group down while raising, so that its peers raise too, perhaps before it."""

    def fault(self) -> None:
        dist.destroy_process_group()
        time.sleep(0.2)
        raise ValueError("the weights are not mine")


class LeavingAndSleeping(Summing):
    """Tears its group down and goes on: only its peers raise."""

    def fault(self) -> None:
        dist.destroy_process_group()
        time.sleep(3600)


class Spawning(Summing):
    """Starts a process of its own and breaks."""

    def fault(self) -> None:
        child = subprocess.Popen(["sleep", "3600"])
        raise ValueError(f"started {child.pid}")


class Unsendable(Summing):
    """Shows something that cannot travel to the main process."""

    def update(self, window: Window, observe: Observe) -> None:
        super().update(window, observe)
        if self.ranks.rank == FAULTY and window.update == 2:
            observe("lr", (lambda: ""), 0.0, update=2)  # type: ignore[arg-type]


class Killed(Summing):
    def fault(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Exiting(Summing):
    def fault(self) -> None:
        os._exit(3)


class SysExiting(Summing):
    def fault(self) -> None:
        sys.exit(4)


class Looping(Summing):
    def fault(self) -> None:
        while True:
            pass


class Sleeping(Summing):
    def fault(self) -> None:
        time.sleep(3600)


class Skipping(Summing):
    """Its faulty rank leaves out the collective of the last update."""

    def update(self, window: Window, observe: Observe) -> None:
        if self.ranks.rank != FAULTY or window.update == 0:
            super().update(window, observe)


class SkippingOnce(Summing):
    def update(self, window: Window, observe: Observe) -> None:
        if self.ranks.rank != FAULTY or window.update != 2:
            super().update(window, observe)


class OtherOperation(Summing):
    def fault(self) -> None:
        dist.broadcast(torch.zeros(1), src=0)


class Mismatched(Summing):
    """A collective of another size: gloo aborts some process, often not the one at fault."""

    def fault(self) -> None:
        dist.all_reduce(torch.zeros(4096))


class BackwardWaiting(Summing):
    """The faulty rank never enters the all-reduce that DDP makes in backward."""

    def update(self, window: Window, observe: Observe) -> None:
        if window.update == 1 and self.ranks.rank == FAULTY:
            self.fault()
        if window.update == 0:
            self.model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        self.model(torch.ones(2, 3)).sum().backward()

    def fault(self) -> None:
        time.sleep(3600)


class Misspelled(Summing):
    def fault(self) -> None:
        Observe.nothing  # type: ignore[attr-defined]  # noqa: B018


class SetupFails(Summing):
    def setup(self, case: Case, ranks: Ranks) -> None:
        raise RuntimeError("no such optimizer")


class Shouting(Summing):
    def fault(self) -> None:
        print("x" * 100_000, flush=True)


class Operations(Summing):
    """One of every collective."""

    def setup(self, case: Case, ranks: Ranks) -> None:
        super().setup(case, ranks)
        self.pair = dist.new_group([0, 1])

    def update(self, window: Window, observe: Observe) -> None:
        world, rank = self.ranks.world, self.ranks.rank
        part, full = torch.ones(2), torch.ones(2 * world)
        dist.all_reduce(part)
        if rank < 2:
            dist.broadcast(part, src=0, group=self.pair)
        dist.all_gather([torch.empty(2) for _ in range(world)], part)
        dist.reduce_scatter(part, list(full.chunk(world)))
        dist.all_to_all(list(torch.empty(2 * world).chunk(world)), list(full.chunk(world)))
        dist.reduce(part, dst=0)
        dist.gather(part, list(torch.empty(2 * world).chunk(world)) if rank == 0 else None, dst=0)
        dist.scatter(part, list(full.chunk(world)) if rank == 0 else None, src=0)
        if rank == 0:
            dist.send(part, 1)
        if rank == 1:
            dist.recv(part, 0)
        dist.barrier()


class Functional(Summing):
    """Functional collectives, their autograd variants, and a DTensor."""

    def update(self, window: Window, observe: Observe) -> None:
        import torch.distributed._functional_collectives as funcol
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        world = self.ranks.world
        part, full = torch.ones(2), torch.ones(2 * world)
        mesh = self.ranks.mesh((world,), ("dp",))
        for pending in (
            funcol.all_reduce(part, "sum", mesh),
            funcol.all_gather_tensor(part, 0, mesh),
            funcol.reduce_scatter_tensor(full, "sum", 0, mesh),
        ):
            funcol.wait_tensor(pending)  # type: ignore[no-untyped-call]
        whole = distribute_tensor(torch.ones(2 * world), mesh, [Shard(0)])
        whole.redistribute(placements=[Replicate()])


class Wrapped(Summing):
    """One training step per update of a small model, wrapped as the strategy says."""

    def setup(self, case: Case, ranks: Ranks) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model: torch.nn.Module = torch.nn.Linear(8, 8, bias=False)
        if self.strategy in ("ddp", "zero1"):
            model = torch.nn.parallel.DistributedDataParallel(model)
        elif self.strategy == "fsdp1":
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        elif self.strategy == "fsdp2":
            fully_shard(model, mesh=ranks.mesh((ranks.world,), ("dp",)))
        self.model = model
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if self.strategy == "zero1":
            self.optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)

    def update(self, window: Window, observe: Observe) -> None:
        self.model(torch.ones(2, 8)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class LeavingOneOpen(Summing):
    """The faulty rank starts a collective that the others never make, and does not wait for it."""

    def fault(self) -> None:
        self.open = dist.all_reduce(torch.zeros(1), async_op=True)

    def update(self, window: Window, observe: Observe) -> None:
        if window.update == 2 and self.ranks.rank == FAULTY:
            self.fault()
        elif window.update < 2:
            Summing.fault(self)
