"""The restore chapter: what came back from a checkpoint, and the updates that followed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from equivtests.judge.assemble import equal_bits
from equivtests.judge.check import Check, Judgement, Verdict
from equivtests.judge.judge import failed, judge
from equivtests.judge.tolerance import equal
from equivtests.judge.view import View
from equivtests.record.observation import Observation

STATES = {
    "restored step": "step",
    "restored weights": "weight",
    "restored optimizer state": "state",
    "restored buffers": "buffer",
    "restored random state": "random_state",
    "restored loss scale": "loss_scale",
    "restored schedule": "lr",
}
"""What has to survive, and the kind of observation that shows it; the cursor and the layout have checks of their own."""


def judge_restored(whole: View, restored: View) -> Judgement:
    """Judge a run that was loaded in fresh ranks against the uninterrupted run that saved it.

    First every state entering the first update after the restore, bit for bit; then the updates themselves, as any run.
    """
    update = whole.case.save_after
    judgement = Judgement([check for stage in STAGES for check in stage(whole, restored, update)])
    if not failed(judgement.checks):
        case, strategy, threshold = restored.case, restored.strategy, restored.threshold
        judgement.checks += judge(case, strategy, restored.record, restored.expectation, threshold).checks
    return judgement


def cursor(whole: View, restored: View, update: int) -> Iterator[Check]:
    """Training goes on with the window after the last one that was saved."""
    first = restored.updates.start
    position = restored.whole("cursor", "cursor", first)
    shown = first if position is None else int(position.values)
    if first == update == shown:
        yield Check("restored cursor", update, "cursor", Verdict.PASS)
    else:
        words = f"training goes on at window {shown}, but {update} windows were consumed before saving"
        yield Check("restored cursor", update, "cursor", Verdict.FAIL, np.inf, None, str(update), str(shown), words)


def layout(whole: View, restored: View, update: int) -> Iterator[Check]:
    """Every rank holds the parts that it held: no other places, no other rank's shards."""
    before, after = by_place(whole, update), by_place(restored, update)
    moved = sorted(set(after) ^ set(before), key=str)
    swapped = next((found for key in after if (found := other_owner(key, before, after)) is not None), None)
    if moved:
        rank, kind, name = moved[0][:3]
        detail = f"{kind} {name} of rank {rank} is cut otherwise than before saving"
        yield restored.failed("restored layout", update, name, detail, rank)
    elif swapped is not None:
        rank, owner, name = swapped
        detail = f"rank {rank} holds what rank {owner} held before saving"
        yield restored.failed("restored layout", update, name, detail, rank)
    else:
        yield Check("restored layout", update, "places", Verdict.PASS)


Key = tuple[int, str, str, object]


def by_place(view: View, update: int) -> dict[Key, Observation]:
    """Parts of weights that entered an update, by rank, kind, name and place."""
    return {(o.rank, o.kind, o.name, o.place): o for o in view.observations("weight", update)}


def other_owner(key: Key, before: dict[Key, Observation], after: dict[Key, Observation]) -> tuple[int, int, str] | None:
    """(rank, previous owner, name) if a rank's part is not its own but equals that of another rank at another place."""
    mine = after[key]
    if key not in before or equal_bits(mine.array, before[key].array) or not mine.array.any():
        return None
    for other in before.values():
        moved = other.rank != mine.rank and (other.place, other.name) != (mine.place, mine.name)
        if moved and mine.array.size > 1 and prefix_equal(mine.array, other.array):
            return mine.rank, other.rank, mine.name
    return None


def prefix_equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether the shorter of two parts is how the longer one begins."""
    n = min(a.size, b.size)
    return n > 1 and bool(np.array_equal(a.reshape(-1)[:n], b.reshape(-1)[:n]))


def state(quantity: str, kind: str) -> Callable[[View, View, int], Iterator[Check]]:
    """A stage that compares all tensors of one kind, bit for bit."""

    def stage(whole: View, restored: View, update: int) -> Iterator[Check]:
        for name in dict.fromkeys([*whole.names(kind, update), *restored.names(kind, update)]):
            before, after = whole.whole(kind, name, update), restored.whole(kind, name, update)
            if before is None:
                yield restored.failed(quantity, update, name, "present, but there was none when it was saved")
            elif after is None:
                yield restored.failed(quantity, update, name, "did not survive: no rank has it after loading")
            elif after.problem:
                yield restored.failed(quantity, update, name, after.problem, after.rank)
            else:
                distance = equal(after.values, before.values)
                yield restored.compared(quantity, update, name, after.values, before.values, distance)

    return stage


STAGES = (cursor, layout, *(state(quantity, kind) for quantity, kind in STATES.items()))
