"""Making a failing case small: greedily take away what the failure does not need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from equivtests.cases.case import Case, Layout, Optimizer, Precision, Windows
from equivtests.cases.grid import fold, longest
from equivtests.cases.layout import ORDER
from equivtests.errors import CaseError

ATTEMPTS = 400

Changes = Mapping[str, Any]


def shrink(case: Case, fails: Callable[[Case], bool], attempts: int = ATTEMPTS) -> Case:
    """The smallest case found on which `fails` still holds, which it must for `case` itself.

    Deterministic; every step keeps the first smaller case that still fails. `fails` is called at most `attempts` times.
    """
    left = attempts
    progress = True
    while progress:
        progress = False
        for candidate in candidates(case):
            if left == 0:
                return case
            left -= 1
            if fails(candidate):
                case, progress = candidate, True
                break
    return case


def candidates(case: Case) -> Iterator[Case]:
    """Smaller cases, the largest steps first; malformed ones are left out."""
    for changes in _changes(case):
        try:
            yield case.replace(**changes)
        except CaseError:
            continue


def _changes(case: Case) -> Iterator[Changes]:
    yield from _fewer_updates(case)
    yield from _fewer_ranks(case)
    yield from _simpler_parts(case)
    yield from _smaller_model(case)
    yield from _less_data(case)


def _with_windows(windows: Windows) -> Changes:
    return {"windows": windows, "accumulation": max(1, longest(windows))}


def _fewer_updates(case: Case) -> Iterator[Changes]:
    for u in reversed(range(case.updates if case.updates > 1 else 0)):
        yield _with_windows(case.windows[:u] + case.windows[u + 1 :])


def _fewer_ranks(case: Case) -> Iterator[Changes]:
    for layout in _smaller_layouts(case.layout):
        yield {**_with_windows(fold(case.windows, layout.dp)), "layout": layout}


def _smaller_layouts(layout: Layout) -> Iterator[Layout]:
    """Fewer ranks on one axis, but two at least where it cuts the model; then what is simpler on as many."""
    changes: list[dict[str, Any]] = []
    for dp in range(1, layout.dp):  # experts are cut over data ranks
        changes += [{"dp": dp}, *({"dp": dp, "ep": ep} for ep in range(2, layout.ep))]
    for axis in ("cp", "ep", "tp", "pp", "virtual"):
        changes += [{axis: degree, "stages": ()} for degree in range(2, layout.degree(axis))]
    changes += [{"virtual": 1, "stages": ()}, {"stages": ()}, {"order": ORDER}]
    yield from (smaller for change in changes if (smaller := replace(layout, **change)) != layout)


def _simpler_parts(case: Case) -> Iterator[Changes]:
    plain = Optimizer(lr=case.optimizer.lr)
    simpler = [plain, replace(plain, clip=case.optimizer.clip, clip_norm=case.optimizer.clip_norm)]
    simpler += [replace(case.optimizer, **one) for one in ({"schedule": (1.0,)}, {"weight_decay": 0.0})]
    yield from ({"optimizer": o} for o in simpler if o != case.optimizer)
    if case.precision != Precision():
        yield {"precision": Precision()}
    if case.magnitude != 1.0:
        yield {"magnitude": 1.0}
    if case.lengths:
        yield {"lengths": ()}


SIZES = {
    "depth": 1,
    "width": 2,
    "outputs": 1,
    "inputs": 2,
    "heads": 2,
    "kv_heads": 0,
    "experts": 2,
    "top_k": 1,
    "capacity": 0,
    "vocabulary": 13,
    "length": 2,
}
"""Sizes of a model, and the least that each may get."""


def _smaller_model(case: Case) -> Iterator[Changes]:
    model = case.model
    if model.own:
        return  # its sizes are its owner's
    for feature in model.features:
        rest = tuple(f for f in model.features if f != feature)
        yield {"model": replace(model, features=rest)}
    for size, least in SIZES.items():
        value = getattr(model, size)
        smaller = (v for v in sorted({least, value // 2}) if least <= v < value)
        yield from ({"model": replace(model, **{size: v})} for v in smaller)
    yield from _fewer_layers(case)


def _fewer_layers(case: Case) -> Iterator[Changes]:
    """One layer less in a stage, where the case says how many each has."""
    stages, model = case.layout.stages, case.model
    for i, layers in enumerate(stages):
        if layers and model.depth > 1:
            rest = (*stages[:i], layers - 1, *stages[i + 1 :])
            yield {"model": replace(model, depth=model.depth - 1), "layout": replace(case.layout, stages=rest)}


def _less_data(case: Case) -> Iterator[Changes]:
    for u, window in enumerate(case.windows):
        for r, micros in enumerate(window):
            for smaller in _fewer_micros(micros):
                changed = window[:r] + (smaller,) + window[r + 1 :]
                yield _with_windows(case.windows[:u] + (changed,) + case.windows[u + 1 :])


def _fewer_micros(micros: tuple[tuple[int, ...], ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    for k, rows in enumerate(micros):
        yield micros[:k] + micros[k + 1 :]
        for i, tokens in enumerate(rows):
            if len(rows) > 1:
                yield micros[:k] + (rows[:i] + rows[i + 1 :],) + micros[k + 1 :]
            if tokens > 1:
                yield micros[:k] + (rows[:i] + (1,) + rows[i + 1 :],) + micros[k + 1 :]
