"""The restore chapter: what came back from a checkpoint, and the updates that followed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from equivtests.judge.arrivals import on_their_way, processed_before
from equivtests.judge.assemble import Whole, equal_bits
from equivtests.judge.check import Check, Judgement, Verdict
from equivtests.judge.checks import applied_once, made
from equivtests.judge.judge import failed, judge_view
from equivtests.judge.local import named, views_of
from equivtests.judge.tolerance import equal
from equivtests.judge.view import View
from equivtests.record.observation import Observation, Place, Record

STATES = {
    "restored step": "step",
    "restored weights": "weight",
    "restored optimizer state": "state",
    "restored buffers": "buffer",
    "restored random state": "random_state",
    "restored loss scale": "loss_scale",
    "restored schedule": "lr",
}
"""What has to survive, and the kind of observation that shows it; cursor and layout have checks of their own."""


def judge_restored(whole: View, restored: View) -> Judgement:
    """Judge a run that was loaded in fresh ranks (`going_on`) against the uninterrupted run that saved it.

    First every state entering the first update after the restore, bit for bit; then the updates themselves, as any run.
    """
    update = whole.case.save_after
    judgement = Judgement([*cursor(whole, restored, update), *layout(whole, restored, update)])
    for before, after in zip(views_of(whole), views_of(restored), strict=True):
        judgement.checks += [named(after, check) for stage in STATE_STAGES for check in stage(before, after, update)]
    if not failed(judgement.checks):
        entering = {} if whole.expectation.workers else applied_once(whole, update - 1)[1]
        record = with_earlier_windows(whole, restored)
        judgement.checks += judge_view(again(restored, record=record, entering=entering, earlier=whole)).checks
    return judgement


def again(view: View, **changes: Any) -> View:
    """A view of the same record with other fields; the given one stays as it is."""
    return dataclasses.replace(view, **changes, parts={}, wholes={}, cache={})


SHOWN_BEFORE = ("inputs", "tokens", "loss")
"""What is shown when a gradient is computed, and is not shown again where the gradient is restored."""


def with_earlier_windows(whole: View, restored: View) -> Record:
    """The restored run's record, and what was shown before the save of windows with later numbers.

    Of those processed before, everything; of those whose gradients were on their way, all but the gradients.
    """
    start, rule = restored.record.start, restored.expectation.semantics.staleness
    fed_again = {o.update for o in restored.record.of("inputs")}
    done = processed_before(rule, start) - fed_again
    begun = on_their_way(rule, start, made(whole, start)) - fed_again
    kinds = dict.fromkeys(SHOWN_BEFORE, begun | done) | {"gradient": done}
    saved = [o for o in whole.record.observations if o.update >= start and o.update in kinds.get(o.kind, ())]
    return dataclasses.replace(restored.record, observations=[*restored.record.observations, *saved])


def going_on(record: Record) -> Record:
    """The record of a restored run: it starts with the first update that weights enter."""
    return dataclasses.replace(record, start=min((o.update for o in record.of("weight")), default=0))


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
    before, after = held(whole, update), held(restored, update)
    moved = sorted(places(after) ^ places(before), key=str)
    if moved:
        rank, kind, name, _ = moved[0]
        detail = f"{kind} {name} of rank {rank} is cut otherwise than before saving"
        yield restored.failed("restored layout", update, name, detail, rank)
        return
    for (rank, kind), parts in after.items():
        owner = other_owner(rank, kind, parts, before)
        if owner is not None:
            detail = f"rank {rank} holds the {WORDS[kind]} that rank {owner} held before saving"
            yield restored.failed("restored layout", update, WORDS[kind], detail, rank)
            return
    yield Check("restored layout", update, "places", Verdict.PASS)


WORDS = {"weight": "weights", "state": "optimizer state"}
Parts = dict[str, Observation]
Held = dict[tuple[int, str], Parts]
"""What each rank holds, by rank and kind: its parts by name, in the order it showed them."""


def held(view: View, update: int) -> Held:
    found: Held = {}
    for kind in WORDS:
        for o in view.observations(kind, update):
            found.setdefault((o.rank, kind), {})[o.name] = o
    return found


def places(holdings: Held) -> set[tuple[int, str, str, Place]]:
    """Where the weights are cut. (Optimizer state may be absent; that is judged by name.)"""
    weights = [o for (_, kind), parts in holdings.items() if kind == "weight" for o in parts.values()]
    return {(o.rank, o.kind, o.name, o.place) for o in weights}


def other_owner(rank: int, kind: str, parts: Parts, before: Held) -> int | None:
    """The rank whose parts these were before saving, if they are not the rank's own."""
    own = before.get((rank, kind))
    if own is None or same_content(parts, own):
        return None
    others = (o for o, k in before if k == kind and o != rank and same_content(parts, before[o, k]))
    return next(others, None)


def same_content(mine: Parts, theirs: Parts) -> bool:
    """Whether two ranks' parts have equal values as far as both go: laid end to end, or name by name."""
    names = [(mine[n].array.reshape(-1), theirs[n].array.reshape(-1)) for n in mine if n in theirs]
    return prefix_equal([(end_to_end(mine), end_to_end(theirs))]) or (len(names) == len(mine) and prefix_equal(names))


def end_to_end(parts: Parts) -> np.ndarray:
    return np.concatenate([o.array.reshape(-1) for o in parts.values()])


def prefix_equal(pairs: list[tuple[np.ndarray, np.ndarray]]) -> bool:
    """Whether in every pair the shorter array is how the longer one begins, and some pair has more than one element."""
    sizes = [min(a.size, b.size) for a, b in pairs]
    equal_values = all(np.array_equal(a[:n], b[:n]) for (a, b), n in zip(pairs, sizes, strict=True))
    return equal_values and max(sizes, default=0) > 1


def state(quantity: str, kind: str) -> Callable[[View, View, int], Iterator[Check]]:
    """A stage that compares all tensors of one kind, bit for bit."""

    def stage(whole: View, restored: View, update: int) -> Iterator[Check]:
        for name in dict.fromkeys([*whole.names(kind, update), *restored.names(kind, update)]):
            before, after = whole.whole(kind, name, update), restored.whole(kind, name, update)
            shown = quantity if name == kind else name
            if before is None:
                yield restored.failed(quantity, update, shown, "present, but there was none when it was saved")
            elif after is None:
                yield restored.failed(quantity, update, shown, "did not survive: no rank has it after loading")
            elif after.problem:
                yield restored.failed(quantity, update, shown, after.problem, after.rank)
            else:
                distance = equal(after.values, before.values)
                check = restored.compared(quantity, update, shown, after.values, before.values, distance)
                origin = "" if check.verdict is Verdict.PASS else origin_of(whole, kind, name, update, after.values)
                yield dataclasses.replace(check, detail="; ".join(filter(None, (check.detail, origin))))

    return stage


def origin_of(whole: View, kind: str, name: str, update: int, values: np.ndarray) -> str:
    """Where in the uninterrupted run restored values come from: another update, another tensor, or nowhere ("")."""
    if values.ndim and not values.any():
        return "all zero"
    for at in whole.updates:
        if at != update and same(whole.whole(kind, name, at), values):
            return f"this is what update {at} had: {'saved too late' if at > update else 'not restored'}"
    other = (n for n in whole.names(kind, update) if n != name and same(whole.whole(kind, n, update), values))
    return "".join(f"this is {n}" for n in itertools.islice(other, 1)) if values.size > 1 else ""


def same(whole: Whole | None, values: np.ndarray) -> bool:
    return whole is not None and not whole.problem and equal_bits(whole.values, values)


STATE_STAGES = tuple(state(quantity, kind) for quantity, kind in STATES.items())
