"""The main loop of one rank: meet the others, then run jobs until the parent is gone."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from equivtests.adapters.adapter import Adapter
from equivtests.adapters.context import Ranks
from equivtests.ranks import flight, progress
from equivtests.ranks.collectives import CollectiveRecorder
from equivtests.ranks.determinism import deterministic, reseed
from equivtests.ranks.job import Job, Seat
from equivtests.ranks.loading import load_adapter, load_model
from equivtests.ranks.progress import Progress, WatchedFeed
from equivtests.record.observation import Collective, Observation, Recorder

GROUP_TIMEOUT = timedelta(hours=1)
"""Longer than any deadline of the parent, which alone decides that a rank is stuck and can tell which."""

ENTERING = frozenset({"weight", "state", "buffer", "step", "loss_scale", "random_state", "cursor"})
MESSAGE = 500

Answer = tuple[Any, ...]
"""("ready", settings), ("done", observations, collectives, number of the newest collective), or
("raised" or "exited", "raised ValueError: …", traceback)."""


def main(seat: Seat, pipe: Connection) -> int:
    """Run jobs until the pipe closes. Returns the exit code."""
    _schedule_as_batch()
    directory = Path(seat.directory)
    board = Progress(directory / "progress", seat.world)
    _leave_traces(seat, directory)
    settings = deterministic(seat.device)
    os.environ |= seat.variables
    ranks = _meet(seat, directory)
    pipe.send(("ready", settings))
    while True:
        board.set(seat.rank, progress.IDLE)
        try:
            job, path = pipe.recv()
        except EOFError:
            return 0
        sys.path[:] = path
        pipe.send(_answer(job, ranks, board))


def devices() -> dict[str, Any]:
    """What torch finds on this machine."""
    return {"torch": str(torch.__version__), "cuda": torch.cuda.is_available(), "count": torch.cuda.device_count()}


def _schedule_as_batch() -> None:
    """gloo's busy waits cost seven times less with more ranks than cores when they are not preempted for each other."""
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        pass


def _leave_traces(seat: Seat, directory: Path) -> None:
    """What the parent reads when this rank is stuck or dead: output, Python stacks (SIGUSR1), collectives (SIGUSR2)."""
    log = os.open(directory / f"{seat.rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    stacks = (directory / f"{seat.rank}.stack").open("a")
    faulthandler.enable(file=stacks, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    flight.answer_requests(directory / f"{seat.rank}.collectives")


def _meet(seat: Seat, directory: Path) -> Ranks:
    device = seat.device
    if device == "cuda":
        device = f"cuda:{int(seat.variables['LOCAL_RANK']) % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    store = _store(seat, directory)
    store.set_timeout(GROUP_TIMEOUT)
    if seat.group == "torch":
        own = dist.PrefixStore("group", store)
        dist.init_process_group(seat.backend, store=own, rank=seat.rank, world_size=seat.world, timeout=GROUP_TIMEOUT)
    return Ranks(seat.rank, seat.world, device, seat.backend, dist.PrefixStore("agreed", store))


def _store(seat: Seat, directory: Path) -> dist.Store:
    """The store in which the ranks meet."""
    if not seat.store:
        return dist.FileStore(f"{directory}/store", seat.world)
    address, _, prefix = seat.store.partition("/")
    host, _, port = address.rpartition(":")
    return dist.PrefixStore(prefix, dist.TCPStore(host, int(port), None, False, GROUP_TIMEOUT, wait_for_workers=False))


# ---------------------------------------------------------------------------------------------- one job


def _answer(job: Job, ranks: Ranks, board: Progress) -> Answer:
    os.ftruncate(2, 0)
    reseed()
    try:
        return ("done", *run_job(job, ranks, board), flight.world_collectives())
    except BaseException as error:  # noqa: BLE001 - whatever an adapter raises is an outcome
        kind, message = "exited", f"called sys.exit({getattr(error, 'code', None)!r})"
        if not isinstance(error, SystemExit):
            kind, message = "raised", f"raised {type(error).__name__}: {' '.join(str(error).split())[:MESSAGE]}"
        return (kind, f"{message}{_where(job, error)} {board.describe(ranks.rank)}", traceback.format_exc())
    finally:
        gc.collect()


def run_job(job: Job, ranks: Ranks, board: Progress) -> tuple[list[Observation], list[Collective]]:
    """Run a case with a new adapter. A collective's update is the one whose window was taken last (-1: none yet)."""
    board.set(ranks.rank, progress.SETUP)
    ledger = CollectiveRecorder(lambda: max(board.get(ranks.rank), progress.SETUP)) if job.ledger else None
    recorder = Recorder(ranks.rank, job.case.updates)
    watch: AbstractContextManager[Any] = ledger or nullcontext()
    with watch:
        if job.case.model.own:
            load_model(job.case.model.own)
        adapter = load_adapter(job.adapter)()
        adapter.strategy = job.strategy
        adapter.feed = feed = WatchedFeed(job.case, ranks.rank, job.stop, board)
        adapter.setup(job.case, ranks)
        if job.load_from is not None:
            board.set(ranks.rank, progress.LOADING)
            adapter.load(Path(job.load_from))
        if job.save_to is not None:
            _run_and_save(job, adapter, recorder, lambda: board.set(ranks.rank, progress.SAVING))
        adapter.run(feed, recorder)
    shown = _without_repeats(recorder.observations) if job.save_to is not None else recorder.observations
    return shown, ledger.collectives if ledger else []


def _run_and_save(job: Job, adapter: Adapter, recorder: Recorder, saving: Callable[[], None]) -> None:
    """Run to the middle of the case and save there; the feed is left ready to go on."""
    feed, end = adapter.feed, adapter.feed.stop
    feed.stop = min(job.case.save_after, end)
    adapter.run(feed, recorder)
    saving()
    assert job.save_to is not None
    directory = Path(job.save_to)
    directory.mkdir(parents=True, exist_ok=True)
    adapter.save(directory)
    feed.stop = end


def _without_repeats(observations: list[Observation]) -> list[Observation]:
    """An adapter that is run on after saving shows the state entering the next update twice; keep the first."""
    kept: dict[Any, Observation] = {}
    for number, o in enumerate(observations):
        entering = o.kind in ENTERING
        kept.setdefault((o.kind, o.name, o.update, o.place) if entering else number, o)
    return list(kept.values())


def _where(job: Job, error: BaseException) -> str:
    """The innermost line of the adapter's own modules that the error passed, as " (file.py:31)"."""
    module, _, name = job.adapter.partition(":")
    adapter = getattr(sys.modules.get(module), name, None)
    modules = [c.__module__ for c in getattr(adapter, "__mro__", ()) if c not in (Adapter, object)]
    files = {getattr(sys.modules.get(m), "__file__", None) for m in modules}
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in files]
    return f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
