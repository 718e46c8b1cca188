"""A standing pool of ranks: runs jobs, watches, names what broke, and replaces all ranks when one fails."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

from equivtests.errors import RanksError
from equivtests.ranks import blame, traces
from equivtests.ranks.blame import Event, Scene
from equivtests.ranks.forkserver import START_DEADLINE, Child, ForkServer
from equivtests.ranks.job import Failure, Job, Outcome, Seat
from equivtests.ranks.launch import Launch
from equivtests.ranks.progress import Progress
from equivtests.record.observation import Record

GRACE = 0.5
"""Seconds that other ranks get to tell what they know after the first one failed."""


class Pool:
    """`world` ranks in one process group. Ranks start with the first job; nothing is left after `close`."""

    def __init__(
        self,
        world: int,
        backend: str = "gloo",
        device: str = "cpu",
        deadline: float = 30.0,
        server: ForkServer | None = None,
        group: Literal["torch", "own"] = "torch",
    ) -> None:
        self.world, self.backend, self.device, self.deadline, self.group = world, backend, device, deadline, group
        self.settings: dict[str, str] = {}
        """The determinism settings that the ranks reported."""
        self._owns_server = server is None
        self._server = server or ForkServer()
        self._children: dict[int, Child] = {}
        self._directory: Path | None = None
        self._runs = 0

    def run(self, job: Job) -> Outcome:
        """Run a job on all ranks. A failure is an outcome, never an exception; the next job finds new ranks."""
        try:
            self._start_unless_standing()
            return self._run(job)
        except BaseException:
            self.stop()
            raise

    def run_fresh(self, job: Job) -> Outcome:
        """Run a job in ranks that ran nothing before and run nothing afterwards."""
        if self._runs:
            self.stop()
        try:
            return self.run(job)
        finally:
            self.stop()

    def restart(self) -> None:
        """Replace all ranks by new ones."""
        self.stop()
        self._start_unless_standing()

    def stop(self) -> None:
        """Kill all ranks and remove what they left; the next job starts new ones."""
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.exit_code(timeout=10.0)
            child.close()
        self._children = {}
        self._runs = 0
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def close(self) -> None:
        self.stop()
        if self._owns_server:
            self._server.close()

    # ------------------------------------------------------------------------------------------ starting

    def _start_unless_standing(self) -> None:
        if self._children and all(child.exit_code() is None for child in self._children.values()):
            return
        self.stop()
        if not self._server.alive and self._owns_server:
            self._server.close()
            self._server = ForkServer()
        self._start()

    def _start(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix=f"pool-{self.world}-", dir=self._server.directory))
        self._progress = Progress(self._directory / "progress", self.world)
        for rank in range(self.world):
            place = Launch(
                rank, self.world, rank, self.world, 0, "127.0.0.1", 0
            )  # no server listens: the ranks have met
            given = (self.backend, self.device, str(self._directory), self.group, place.variables)
            self._children[rank] = self._server.seat(Seat(rank, self.world, *given))
        watch = Watch(self._children, self._directory, self._progress)
        watch.until(time.monotonic() + START_DEADLINE)
        if watch.events:
            first = blame.culprit(watch.events)
            words = traces.last_words(self._directory, first.rank)
            raise RanksError(f"ranks did not start: rank {first.rank} {first.message}{': ' if words else ''}{words}")
        if watch.pending:
            raise RanksError(f"{blame.ranks_text(sorted(watch.pending))} did not start within {START_DEADLINE:g} s")
        self.settings = watch.answers[0][1]

    # ------------------------------------------------------------------------------------------ running

    def _run(self, job: Job) -> Outcome:
        assert self._directory is not None
        self._runs += 1
        watch = Watch(self._children, self._directory, self._progress)
        for child in self._children.values():
            try:
                child.pipe.send((job, list(sys.path)))
            except OSError:
                pass  # it ended; its status tells
        watch.until(time.monotonic() + self.deadline)
        if not watch.events and not watch.pending:
            if not in_step(watch.answers):
                self.stop()
            return Outcome(record_of(self.device, watch.answers), None)
        if watch.events:
            watch.until(time.monotonic() + GRACE, past_failure=True)
        failure = self._explain(watch)
        self.stop()
        return Outcome(None, failure)

    def _explain(self, watch: Watch) -> Failure:
        assert self._directory is not None
        living = {rank: child for rank, child in self._children.items() if rank not in watch.ended}
        stacks, collectives = traces.collect(self._directory, living)
        stacks |= {rank: traces.remains(self._directory, rank) for rank in watch.ended}
        phases = {rank: self._progress.describe(rank) for rank in self._children}
        return blame.failure(watch.events, watch.pending, Scene(stacks, collectives, phases), self.deadline)


def in_step(answers: dict[int, tuple[Any, ...]]) -> bool:
    """Whether all ranks made the same collectives; one that some did not make would meet the next job's."""
    return len({answer[3] for answer in answers.values()}) == 1


def record_of(device: str, answers: dict[int, tuple[Any, ...]]) -> Record:
    """The record of a run from every rank's answer."""
    ranks = sorted(answers)
    return Record(
        world=len(ranks),
        device=device,
        observations=[observation for rank in ranks for observation in answers[rank][1]],
        collectives={rank: answers[rank][2] for rank in ranks if answers[rank][2]},
    )


@dataclass
class Watch:
    """Waits for one answer of every rank, and notes failures in the order in which they are seen."""

    children: dict[int, Child]
    directory: Path
    progress: Progress
    answers: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    pending: set[int] = field(default_factory=set)
    _silent: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.pending = set(self.children)

    def until(self, moment: float, past_failure: bool = False) -> None:
        """Return at `moment`, or when every rank has answered or ended, or (unless past_failure) one has failed."""
        while self.pending and (past_failure or not self.events):
            left = moment - time.monotonic()
            if left <= 0:
                return
            pipes = {self.children[r].pipe: r for r in self.pending - self._silent}
            statuses = {self.children[r].status: r for r in self.children if r not in self.ended}
            ready = wait([*pipes, *statuses], left)
            for rank in [pipes[p] for p in ready if p in pipes]:
                self._receive(rank)
            for rank in [statuses[s] for s in ready if s in statuses]:
                self._end(rank)

    def _receive(self, rank: int) -> None:
        try:
            answer = self.children[rank].pipe.recv()
        except (EOFError, OSError):
            self._silent.add(rank)  # it is ending; its status will tell how
            return
        self.answers[rank] = answer
        self.pending.discard(rank)
        if answer[0] in ("raised", "exited"):
            self.events.append(Event(rank, answer[0], answer[1], answer[2]))

    def _end(self, rank: int) -> None:
        code = self.children[rank].exit_code()
        if code is None:
            return
        self.ended.add(rank)
        self.pending.discard(rank)
        when, words = self.progress.describe(rank), traces.last_words(self.directory, rank)
        self.events.append(blame.ended(rank, code, when, words))
