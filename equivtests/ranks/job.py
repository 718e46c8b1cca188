"""What ranks are asked to do, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from equivtests.cases.case import Case
from equivtests.own import loaded
from equivtests.record.observation import Record

FailureKind = Literal["raised", "exited", "killed", "deadline"]


@dataclass(frozen=True)
class Seating:
    """What a run needs of its ranks.

    isolated: ranks that ran nothing before and run nothing afterwards. group "own": no torch process group is made, the
    framework initializes its processes itself. preload: modules imported once, before ranks are forked.
    """

    isolated: bool = False
    group: Literal["torch", "own"] = "torch"
    preload: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """One run of a case. adapter: "package.module:Class".

    save_to: after `case.save_after` windows the adapter saves there, then the same run goes on to its end.
    load_from: the adapter loads from there after `setup`. stop: number of windows to feed (None: all of them).
    ledger: record collectives.

    A case about a user's own model needs that model to be loaded here already: ranks import what a job names.
    """

    adapter: str
    strategy: str
    case: Case
    seating: Seating = Seating()
    save_to: str | None = None
    load_from: str | None = None
    stop: int | None = None
    ledger: bool = False

    def __post_init__(self) -> None:
        if self.case.model.own:
            loaded(self.case.model.own)


@dataclass(frozen=True)
class Failure:
    """Why a run broke. `message` is one line and names the rank to blame, as far as that can be told.

    stacks: per rank what it was doing: its traceback if it raised, its Python stack if it was alive, else the end of
    what it printed. last_collectives: the newest collectives of every rank that could still tell, oldest first.
    """

    kind: FailureKind
    rank: int
    message: str
    stacks: dict[int, str] = field(default_factory=dict)
    last_collectives: dict[int, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Exactly one of the two is there."""

    record: Record | None
    failure: Failure | None


@dataclass(frozen=True)
class Seat:
    """The place of one rank: what it has to know before it can meet the others.

    directory: owned by the parent: stacks, logs and progress are files in it. group: whether torch's process group is
    made ("torch") or not ("own"). variables: what launchers set for a rank. store: "host:port/prefix" of the store in which
    the ranks meet; "": a file in the directory.
    """

    rank: int
    world: int
    backend: str
    device: str
    directory: str
    group: Literal["torch", "own"] = "torch"
    variables: dict[str, str] = field(default_factory=dict)
    store: str = ""
