"""Whose fault a broken run is, from what the parent saw in the order it saw it. Pure functions."""

from __future__ import annotations

import re
import signal
from collections import Counter
from dataclasses import dataclass

from equivtests.ranks.job import Failure, FailureKind
from equivtests.ranks.traces import FINISHED, Doing, doing

_VICTIM = re.compile(
    r"closed by peer|reset by peer|broken pipe|peer closed|remote process exited|ncclRemoteError|"
    r"timed out waiting|socket closed|connection refused",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Event:
    """A rank that raised or ended. `message` goes on after "rank 2 ": "was killed by SIGKILL"; `text`: its traceback."""

    rank: int
    kind: FailureKind
    message: str
    text: str = ""

    @property
    def is_victim(self) -> bool:
        """Whether the rank only found that another one was gone."""
        return self.kind == "raised" and bool(_VICTIM.search(self.message))


@dataclass(frozen=True)
class Scene:
    """What ranks left when a run broke: what each was doing (a stack, or the end of its output), its newest collectives,
    and when it was ("while running update 1")."""

    stacks: dict[int, str]
    collectives: dict[int, list[str]]
    phases: dict[int, str]


def failure(events: list[Event], pending: set[int], scene: Scene, deadline: float) -> Failure:
    """Who is to blame for a broken run, and why. `pending`: ranks that neither answered nor ended."""
    if events:
        first = culprit(events)
        kind, rank, message = first.kind, first.rank, f"rank {first.rank} {first.message}"
        if kind == "killed":
            message += difference(scene.collectives)
        if first.is_victim:
            rank, more = bystander(rank, {r: doing(scene.stacks.get(r, "")) for r in pending})
            message += more
    else:
        kind, (rank, message) = "deadline", overdue(pending, scene, deadline)
    raised = {event.rank: event.text for event in events if event.text}
    return Failure(kind, rank, message, dict(sorted((scene.stacks | raised).items())), scene.collectives)


def overdue(pending: set[int], scene: Scene, deadline: float) -> tuple[int, str]:
    """(rank to blame, message) where ranks missed the deadline."""
    doings = {r: doing(scene.stacks.get(r, "")) if r in pending else FINISHED for r in scene.phases}
    rank, text = stuck(doings, odd_one(scene.collectives))
    more = difference(scene.collectives) if all(what.waits for what in doings.values()) else ""
    return rank, f"{text}; the deadline of {deadline:g} s passed {scene.phases[min(pending)]}{more}"


def ended(rank: int, code: int, when: str, words: str) -> Event:
    """The event of a process that ended; code as of `os.waitstatus_to_exitcode`."""
    if code >= 0:
        return Event(rank, "exited", f"exited with status {code} {when}{f': {words}' if words and code == 1 else ''}")
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    told = f": {words}" if words and name not in ("SIGKILL", "SIGTERM") else ""
    return Event(rank, "killed", f"was killed by {name} {when}{told}")


def culprit(events: list[Event]) -> Event:
    """The first event that is not the consequence of another."""
    return next((event for event in events if not event.is_victim), events[0])


def bystander(victim: int, doings: dict[int, Doing]) -> tuple[int, str]:
    """(rank to blame, what to add) where only victims told: the one other rank that waits for nobody, if there is one."""
    idle = [rank for rank, what in doings.items() if not what.waits]
    if len(idle) != 1:
        return victim, ""
    return idle[0], f"; meanwhile {_clause(idle, doings[idle[0]])}"


def stuck(doings: dict[int, Doing], odd: int | None) -> tuple[int, str]:
    """(rank to blame, "ranks 0, 1 wait in all_reduce at a.py:3 (update) while rank 2 is at a.py:5 (update)").

    The odd one out: a rank that waits for nobody while others wait, else the one whose collective differs, else the one
    that is alone at its place.
    """
    groups: dict[Doing, list[int]] = {}
    for rank, what in sorted(doings.items()):
        groups.setdefault(what, []).append(rank)
    ordered = sorted(groups.items(), key=lambda item: (not item[0].waits, -len(item[1]), item[1]))
    text = " while ".join(_clause(ranks, what) for what, ranks in ordered)
    return _blamed(ordered, odd), text


def _blamed(ordered: list[tuple[Doing, list[int]]], odd: int | None) -> int:
    last_doing, last_ranks = ordered[-1]
    if not last_doing.waits and ordered[0][0].waits:
        return last_ranks[0]
    return last_ranks[0] if odd is None else odd


def _clause(ranks: list[int], what: Doing) -> str:
    if what.text == "finished":
        return f"{ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} finished"
    if what.waits:
        return f"{ranks_text(ranks)} {'waits' if len(ranks) == 1 else 'wait'} {what.text}"
    return f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} {what.text}"


def ranks_text(ranks: list[int]) -> str:
    """ "rank 2" or "ranks 0, 1"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def odd_one(collectives: dict[int, list[str]]) -> int | None:
    """The one rank whose newest collective differs from that of all others, where those agree (3 ranks or more)."""
    newest = {rank: lines[-1] if lines else "none" for rank, lines in collectives.items()}
    counts = Counter(newest.values()).most_common()
    if len(counts) != 2 or counts[1][1] != 1 or counts[0][1] < 2:
        return None
    return next(rank for rank, line in newest.items() if line == counts[1][0])


def difference(collectives: dict[int, list[str]]) -> str:
    """Such as "; the newest collective of rank 2 is …, that of the others …", or ""."""
    odd = odd_one(collectives)
    if odd is None:
        return ""
    others = next(lines[-1] if lines else "none" for rank, lines in collectives.items() if rank != odd)
    own = collectives[odd][-1] if collectives[odd] else "none"
    return f"; the newest collective of rank {odd} is {own}, that of the others {others}"
