"""One launched process: it keeps one rank, does what the leader says, and tells what becomes of the rank.

The rank itself is a child of the launched process, forked as in a pool. So a rank may die or hang: the process that the
launcher watches lives on, names it, and forks a new one for the next run.

Everything goes through the launcher's store. Below the meeting's prefix, `command/N` is the leader's N-th command,
`news/RANK/N` the N-th message of a process, and `beat/RANK` counts up as long as that process lives.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from equivtests.cases.case import from_json, to_json
from equivtests.errors import RanksError
from equivtests.ranks import traces
from equivtests.ranks.forkserver import Child, ForkServer
from equivtests.ranks.job import Job, Seat, Seating
from equivtests.ranks.launch import Launch, connect
from equivtests.ranks.pool import Watch
from equivtests.ranks.progress import Progress
from equivtests.record.serialize import rank_to_bytes

PAUSE = 0.01
"""Seconds between two looks at the store while there is nothing to do."""

BEAT = 1.0
LOST = 15.0
"""Seconds without a beat after which a launched process counts as gone."""

LARGEST = 4 * 2**20  # bytes of one value; the store refuses values of more than 8 MiB


def put(store: Any, key: str, header: dict[str, Any], *parts: bytes) -> None:
    """Write a message: plain data and byte strings of any length."""
    whole = b"".join(parts)
    pieces = [whole[i : i + LARGEST] for i in range(0, len(whole), LARGEST)]
    for i, piece in enumerate(pieces):
        store.set(f"{key}/{i}", piece)
    store.set(key, json.dumps(header | {"sizes": [len(p) for p in parts], "pieces": len(pieces)}))


def take(store: Any, key: str) -> tuple[dict[str, Any], list[bytes]]:
    """Read a message and remove it."""
    header = json.loads(store.get(key))
    whole = b"".join(store.get(f"{key}/{i}") for i in range(header["pieces"]))
    for name in (key, *(f"{key}/{i}" for i in range(header["pieces"]))):
        store.delete_key(name)
    parts, start = [], 0
    for size in header["sizes"]:
        parts.append(whole[start : start + size])
        start += size
    return header, parts


class Beats:
    """Which launched processes still give signs of life. `beats`: a connection of its own."""

    def __init__(self, beats: Any) -> None:
        self.beats = beats
        self.seen: dict[int, tuple[int, float]] = {}

    def lost(self, rank: int) -> bool:
        count, now = self.beats.add(f"beat/{rank}", 0), time.monotonic()
        if self.seen.get(rank, (-1, 0.0))[0] != count:
            self.seen[rank] = (count, now)
        return now - self.seen[rank][1] > LOST


class Follower:
    """`serve` runs until the leader ends the meeting. prefix: of everything that this meeting writes."""

    def __init__(self, launch: Launch, prefix: str, backend: str, device: str) -> None:
        import torch.distributed as dist

        self.launch, self.prefix, self.backend, self.device = launch, prefix, backend, device
        self.store = dist.PrefixStore(prefix, connect(launch))
        self.beats = Beats(dist.PrefixStore(prefix, connect(launch)))
        self.server = ForkServer()
        self.child: Child | None = None
        self.watch: Watch | None = None
        self.directory: Path | None = None
        self.heard = self.told = self.of = 0
        self.done = threading.Event()

    def serve(self) -> int:
        """Obey until told to end. Returns the exit status that the leader tells. Raises RanksError if the leader is gone."""
        threading.Thread(target=self.beat, name="beat", daemon=True).start()
        orders: dict[str, Callable[[dict[str, Any]], None]] = {
            "start": self.start,
            "run": self.run,
            "collect": self.collect,
            "stop": lambda _: self.stop(),
        }
        try:
            while True:
                command = self.next_command()
                if command is None:
                    self.look()
                elif command["do"] == "end":
                    self.store.add("ended", 1)
                    return int(command["status"])
                else:
                    self.of = self.heard - 1
                    orders[command["do"]](command)
        finally:
            self.done.set()
            self.stop()
            self.server.close()

    def beat(self) -> None:
        """Tell that this process lives, on a connection of its own."""
        import torch.distributed as dist

        store = dist.PrefixStore(self.prefix, connect(self.launch))
        while not self.done.wait(BEAT):
            try:
                store.add(f"beat/{self.launch.rank}", 1)
            except RuntimeError:
                return  # the store is gone: the main loop tells

    def next_command(self) -> dict[str, Any] | None:
        key = f"command/{self.heard}"
        try:
            if not self.store.check([key]):
                if self.launch.rank and self.beats.lost(0):
                    raise RanksError(f"rank {self.launch.rank}: the process of rank 0 is gone")
                return None
            command = json.loads(self.store.get(key))
        except RuntimeError as error:  # what torch raises for a lost connection
            raise RanksError(f"rank {self.launch.rank}: the store of rank 0 is gone: {error}".split("\n")[0]) from None
        self.heard += 1
        return dict(command)

    def tell(self, kind: str, *parts: bytes, **header: Any) -> None:
        """Tell the leader something about the command that was last obeyed."""
        put(self.store, f"news/{self.launch.rank}/{self.told}", {"kind": kind, "of": self.of, **header}, *parts)
        self.told += 1

    # ------------------------------------------------------------------------------------------ what it is told to do

    def start(self, command: dict[str, Any]) -> None:
        """Fork a rank, which meets the others in a store of this generation."""
        self.stop()
        seating = from_json(Seating, command["seating"], "seating")
        self.directory = Path(tempfile.mkdtemp(prefix="launched-", dir=self.server.directory))
        self.progress = Progress(self.directory / "progress", self.launch.world)
        self.server.preload(seating.preload)
        meeting = f"{self.launch.address}:{self.launch.port}/{self.prefix}/ranks-{command['generation']}"
        given = (self.backend, self.device, str(self.directory), seating.group, self.launch.variables, meeting)
        self.child = self.server.seat(Seat(self.launch.rank, self.launch.world, *given))
        self.watch = self.new_watch()

    def run(self, command: dict[str, Any]) -> None:
        """Hand a job to the rank; `look` tells what becomes of it."""
        assert self.child is not None
        self.watch = self.new_watch()
        try:
            self.child.pipe.send((from_json(Job, command["job"], "job"), list(sys.path)))
        except OSError:
            pass  # it ended; its status tells

    def new_watch(self) -> Watch:
        assert self.child is not None and self.directory is not None
        return Watch({self.launch.rank: self.child}, self.directory, self.progress)

    def collect(self, command: dict[str, Any]) -> None:
        """Tell what the rank is doing, or what it left."""
        assert self.directory is not None and self.child is not None
        rank = self.launch.rank
        if self.child.exit_code() is None and not (self.watch and rank in self.watch.ended):
            stacks, collectives = traces.collect(self.directory, {rank: self.child})
        else:
            stacks, collectives = {rank: traces.remains(self.directory, rank)}, {}
        phase = self.progress.describe(rank)
        self.tell("traces", stack=stacks[rank], collectives=collectives.get(rank), phase=phase)

    def stop(self) -> None:
        """Kill the rank and remove what it left."""
        if self.child is not None:
            self.child.kill()
            self.child.exit_code(timeout=10.0)
            self.child.close()
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
        self.child = self.watch = self.directory = None

    # ------------------------------------------------------------------------------------------ what it tells

    def look(self) -> None:
        """Wait a moment for the rank, and tell its answer or its end."""
        watch = self.watch
        if watch is None:
            time.sleep(PAUSE)
            return
        watch.until(time.monotonic() + PAUSE, past_failure=True)
        if not watch.pending:
            self.watch = None
            self.tell_what_became(watch)

    def tell_what_became(self, watch: Watch) -> None:
        for event in watch.events:
            self.tell("event", event=to_json(event), ended=event.rank in watch.ended)
        answer = watch.answers.get(self.launch.rank, ("",))
        if answer[0] == "ready":
            self.tell("ready", settings=answer[1])
        if answer[0] == "done":
            text, arrays = rank_to_bytes(answer[1], answer[2])
            self.tell("done", text.encode(), arrays, collectives_made=answer[3])
