"""Rank 0 of launched processes: it gives the jobs out and puts together what becomes of them, as a pool does."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from equivtests.cases.case import from_json, to_json
from equivtests.errors import RanksError
from equivtests.ranks import blame
from equivtests.ranks.blame import Event, Scene
from equivtests.ranks.follower import BEAT, LOST, PAUSE, Beats, Follower, take
from equivtests.ranks.forkserver import START_DEADLINE
from equivtests.ranks.job import Job, Outcome, Seating
from equivtests.ranks.launch import Launch, connect, number_of_meeting
from equivtests.ranks.pool import GRACE, in_step, record_of
from equivtests.ranks.pools import Runs
from equivtests.record.serialize import rank_from_bytes

PATIENCE = 5.0
"""Seconds that processes get to tell what their ranks were doing."""


def meet(launch: Launch) -> tuple[Any, str]:
    """(a connection to the store, prefix of this meeting's keys), after all processes of the launch have come.

    Raises RanksError naming those that have not.
    """
    store = connect(launch, host=launch.rank == 0)
    prefix = f"equivtests/{launch.attempt}/{number_of_meeting(store, launch)}"
    store.set(f"{prefix}/here/{launch.rank}", "")
    deadline = time.monotonic() + START_DEADLINE
    missing = list(range(launch.world))
    while missing := [rank for rank in missing if not store.check([f"{prefix}/here/{rank}"])]:
        if time.monotonic() > deadline:
            who = blame.ranks_text(missing)
            raise RanksError(
                f"{who} of {launch.world} did not come to {launch.address}:{launch.port}: start all of them"
            )
        time.sleep(PAUSE)
    return store, prefix


def follow(launch: Launch, backend: str, device: str) -> int:
    """What every launched process but that of rank 0 does. Returns its exit status."""
    store, prefix = meet(launch)  # kept: a store lives as long as its first connection
    return Follower(launch, prefix, backend, device).serve()


@dataclass
class News:
    """What launched processes told of one start or run, in the order in which it was heard.

    of: numbers of the commands that are asked about; what is told of others is late, and dropped.
    """

    store: Any
    beats: Beats
    heard: dict[int, int]
    of: set[int]
    updates: int = 0
    answers: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    pending: set[int] = field(default_factory=set)
    traces: dict[int, dict[str, Any]] = field(default_factory=dict)

    def until(self, moment: float, past_failure: bool = False) -> None:
        """Return at `moment`, or when every rank has answered or failed, or (unless past_failure) one has failed."""
        while self.pending and (past_failure or not self.events) and time.monotonic() < moment:
            self.listen()

    def listen(self) -> None:
        """Read what is there of every rank, or wait a moment."""
        found = [rank for rank in self.heard if self.read(rank)]
        if not found:
            time.sleep(PAUSE)
            self.events += [self.vanished(rank) for rank in sorted(self.pending) if self.beats.lost(rank)]

    def vanished(self, rank: int) -> Event:
        self.pending.discard(rank)
        return Event(rank, "killed", "is gone, with the process that was launched for it")

    def read(self, rank: int) -> bool:
        key = f"news/{rank}/{self.heard[rank]}"
        if not self.store.check([key]):
            return False
        header, parts = take(self.store, key)
        self.heard[rank] += 1
        self.note(rank, header, parts)
        return True

    def note(self, rank: int, header: dict[str, Any], parts: list[bytes]) -> None:
        kind = header["kind"]
        if header["of"] not in self.of:
            return
        if kind == "traces":
            self.traces[rank] = header
            return
        self.pending.discard(rank)
        if kind == "event":
            self.events.append(from_json(Event, header["event"], "event"))
        elif kind == "ready":
            self.answers[rank] = ("ready", header["settings"])
        else:
            where = f"what rank {rank} sent: "
            observations, collectives = rank_from_bytes(parts[0], parts[1], rank, self.updates, where)
            self.answers[rank] = ("done", observations, collectives or [], header["collectives_made"])


class LaunchedPools(Runs):
    """The ranks of a launch. There is one world: that of the launch."""

    def __init__(self, launch: Launch, backend: str, device: str, deadline: float) -> None:
        import torch.distributed as dist

        self.launch, self.backend, self.device, self.deadline = launch, backend, device, deadline
        self.nproc = launch.world
        self.settings: dict[str, str] = {}
        self._keeps, prefix = meet(launch)
        self.store = dist.PrefixStore(prefix, connect(launch))
        self.beats = Beats(dist.PrefixStore(prefix, connect(launch)))
        own = Follower(launch, prefix, backend, device)
        self.own = threading.Thread(target=own.serve, name="rank 0", daemon=True)
        self.own.start()
        self.commands = self.generation = self.runs = 0
        self.heard = dict.fromkeys(range(launch.world), 0)
        self.standing: str = ""

    def run(self, job: Job) -> Outcome:
        return self.run_fresh(job) if job.seating.isolated else self._run(job)

    def run_fresh(self, job: Job) -> Outcome:
        if self.runs:
            self._stop()
        try:
            return self._run(job)
        finally:
            self._stop()

    def has(self, world: int) -> bool:
        return world == self.nproc

    def close(self) -> None:
        """End the ranks; the processes wait for further commands."""
        self._stop()

    def end(self, status: int) -> None:
        """Let all launched processes end with an exit status."""
        self._command("end", status=status)
        self.own.join(PATIENCE)
        deadline = time.monotonic() + PATIENCE  # the store must live until all have heard
        while time.monotonic() < deadline and self.store.add("ended", 0) < self.nproc:
            time.sleep(PAUSE)

    # ------------------------------------------------------------------------------------------

    def _run(self, job: Job) -> Outcome:
        world = job.case.layout.world
        if world != self.nproc:
            raise RanksError(f"case {job.case.name!r} needs {world} ranks, but {self.nproc} were launched")
        self._start_unless_standing(job.seating)
        self.runs += 1
        news = self._news(job.case.updates)
        self._command("run", job=to_json(job))
        news.until(time.monotonic() + self.deadline)
        if not news.events and not news.pending:
            if not in_step(news.answers):
                self._stop()
            return Outcome(record_of(self.device, news.answers), None)
        if news.events:
            only_victims = all(event.is_victim for event in news.events)
            wait = LOST + 2 * BEAT if only_victims and news.pending else GRACE  # whose process is gone, if one is
            news.until(time.monotonic() + wait, past_failure=True)
        failure = blame.failure(news.events, news.pending, self._scene(news), self.deadline)
        self._stop()
        return Outcome(None, failure)

    def _start_unless_standing(self, seating: Seating) -> None:
        if self.standing == seating.group:
            return
        self._stop()
        self.generation += 1
        news = self._news()
        self._command("start", seating=to_json(seating), generation=self.generation)
        news.until(time.monotonic() + START_DEADLINE)
        if news.events or news.pending:
            text = f"rank {news.events[0].rank} {news.events[0].message}" if news.events else ""
            raise RanksError(f"ranks did not start: {text or blame.ranks_text(sorted(news.pending)) + ' gave no sign'}")
        self.settings = news.answers[0][1]
        self.standing = seating.group

    def _stop(self) -> None:
        if self.standing or self.runs:
            self._command("stop")
        self.standing, self.runs = "", 0

    def _scene(self, news: News) -> Scene:
        """What every process tells of its rank."""
        news.of.add(self.commands)
        self._command("collect")
        moment = time.monotonic() + PATIENCE
        while len(news.traces) < self.nproc and time.monotonic() < moment:
            news.listen()
        stacks = {rank: str(told["stack"]) for rank, told in news.traces.items()}
        collectives = {r: told["collectives"] for r, told in news.traces.items() if told["collectives"] is not None}
        unknown = "at an unknown moment"
        phases = {rank: str(news.traces.get(rank, {}).get("phase", unknown)) for rank in range(self.nproc)}
        return Scene(stacks, collectives, phases)

    def _news(self, updates: int = 0) -> News:
        """News of the next command."""
        return News(self.store, self.beats, self.heard, {self.commands}, updates, pending=set(range(self.nproc)))

    def _command(self, do: str, **arguments: Any) -> None:
        self.store.set(f"command/{self.commands}", json.dumps({"do": do, **arguments}))
        self.commands += 1
