"""Explaining runs with parameter servers: versions, gradients that arrive twice, late ones that count when they must not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from equivtests.explain.parts import close
from equivtests.judge.check import Check
from equivtests.judge.checks import number, states_of
from equivtests.judge.truth import seen_by
from equivtests.judge.view import View
from equivtests.reference import update as one
from equivtests.reference.forward import Weights
from equivtests.reference.versions import Seen, made_before

Lines = Iterator[str]


def served(view: View) -> bool:
    return view.expectation.semantics.staleness.versions == "arrivals"


# ------------------------------------------------------------------------------------------------ versions


def arrived(view: View, check: Check) -> Lines:
    """What is wrong with an arrival: its version, its turn, or that it came before."""
    whole = view.whole("arrival", "arrival", check.update)
    if not served(view) or not check.expected or whole is None or whole.values.size != 2:
        return
    window, said = (int(value) for value in whole.values.reshape(-1))
    wanted, version = view.expectation.semantics.staleness.arrivals[check.update]
    before = [u for u in range(check.update) if processed(view, u) == window]
    if before:
        yield f"the gradient of window {window} was processed twice: by update {before[0]}, and by this one"
    elif window != wanted:
        yield f"the gradient of window {window} went first; it was the turn of window {wanted}"
    elif gradients_of(view, window, seen_at(view, window, version)):
        yield f"the gradient of window {window} was computed at version {version}, the record says {said}"
    elif said <= view.expectation.steps[check.update].steps and gradients_of(view, window, seen_at(view, window, said)):
        yield f"the gradient of window {window} was computed at version {said}, as the record says, instead of {version}"


def processed(view: View, update: int) -> int | None:
    """The window whose gradient an update processed, as it was shown."""
    whole = view.at(update).whole("arrival", "arrival", update)
    return None if whole is None or whole.values.size != 2 else int(whole.values.reshape(-1)[0])


def of_another_version(view: View, check: Check) -> Lines:
    """Is the gradient of a window that of another version than it says, on all servers or on one?"""
    if not served(view):
        return
    window = check.update
    said = dict(view.expectation.semantics.staleness.arrivals)[window]
    declared, newest = seen_at(view, window, said), view.expectation.steps[-1].steps
    owners = {o.name: o.rank for o in view.observations("weight", view.record.start)}
    for version in (v for v in range(newest + 1) if v != said):
        other = seen_at(view, window, version)
        if gradients_of(view, window, other):
            yield f"the gradient of window {window} was computed at version {version}, the record says {said}"
            return
        for server in sorted(set(owners.values())):
            mixed = {n: other.forward[n] if owners.get(n) == server else w for n, w in declared.forward.items()}
            if gradients_of(view, window, Seen(mixed)):
                words = f"those of server {server} were of version {version}, all others of {said}"
                yield f"the gradient of window {window} was computed at a mixture of weights: {words}"
                return


def seen_at(view: View, window: int, version: int) -> Seen:
    """The observed weights of a version."""
    rule = view.expectation.semantics.staleness
    return seen_by(view, window, replace(rule, arrivals=((window, version),)))


def gradients_of(view: View, window: int, used: Seen) -> bool:
    """Whether the gradients shown of a window are those at given weights."""
    shown = {n: g.double().numpy() for n, g in view.at(window).tensors("gradient", window).items()}
    draw = made_before(view.case, window)
    found = one.gradients(view.case, view.expectation.semantics, window, draw, used.forward).values
    return same(found, shown, view)


def same(found: Weights, shown: dict[str, np.ndarray], view: View) -> bool:
    return set(found) == set(shown) and all(close(shown[n], g.double().numpy(), view) for n, g in found.items())


# ------------------------------------------------------------------------------------------------ what counts


def dropped(view: View, update: int) -> bool:
    """Whether an update had to drop a gradient that arrived too late."""
    rule, step = view.expectation.semantics.staleness, view.expectation.steps[update]
    return rule.late == "dropped" and step.applies is None and view.case.tokens(rule.arrivals[update][0]) > 0


def dropped_counted(view: View, check: Check) -> Lines:
    """Did a dropped gradient count as a step?"""
    before, after = (number(view.at(u), "step", u) for u in (check.update - 1, check.update))
    if check.update and dropped(view, check.update - 1) and before is not None and after == before + 1:
        yield f"update {check.update - 1} dropped a gradient that came too late, and counted it: no update was made"


def rate_of_late(view: View, check: Check) -> Lines:
    """Was the factor for late gradients that of another lateness, or was the schedule moved by what was dropped?"""
    rule, step, rate = view.expectation.semantics.staleness, view.expectation.steps[check.update], None
    if served(view):
        rate = number(view, "lr", check.update)
    if not rate:
        return
    late = view.case.optimizer.rate(step.steps) / rate - 1
    if rule.late == "reweighted" and abs(late - round(late)) < 1e-9 and round(late) >= 0:
        beyond = round(1 / step.factor) - 1
        words = f"this one is {beyond} beyond it"
        yield f"the rate is that of a gradient {round(late)} update(s) beyond the bound of {rule.bound}; {words}"
    skipped = sum(dropped(view, update) for update in range(check.update))
    if skipped and rate == view.case.optimizer.rate(step.steps + skipped):
        yield f"dropped gradients moved the schedule: {skipped} came before this update"


def applied_otherwise(view: View, check: Check) -> Lines:
    """Was a dropped gradient applied, alone or with the next one; or one gradient twice?"""
    if not served(view):
        return
    order, step = view.expectation.semantics.staleness.arrivals, view.expectation.steps[check.update]
    window = order[check.update][0]
    if dropped(view, check.update):
        if stepped(view, check, [window]):
            yield f"the gradient of window {window} was applied, though it came too late and was to be dropped"
        return
    for update in (u for u in range(check.update) if dropped(view, u)):
        if stepped(view, check, [order[update][0], window]):
            yield f"the gradient of window {order[update][0]}, which update {update} dropped, was applied with this one"
    if step.applies is not None and stepped(view, check, [window], times=2):
        rank = next(o.rank for o in view.observations("weight", check.update) if o.name == check.name)
        yield f"server {rank} made two steps with one gradient"


def stepped(view: View, check: Check, windows: list[int], times: int = 1) -> bool:
    """Whether a parameter is what some steps with the sum of these windows' gradients make of it."""
    name, update = check.name, check.update
    shown = [view.at(window).tensors("gradient", window).get(name) for window in windows]
    weights, after = view.tensors("weight", update), view.tensors("weight", update + 1).get(name)
    if after is None or name not in weights or any(g is None for g in shown):
        return False
    values, states = {name: sum(g for g in shown if g is not None)}, states_of(view, update)
    step, semantics = view.expectation.steps[update], view.expectation.semantics
    for _ in range(times):
        rate = number(view, "lr", update) or step.rate
        weights, states = one.apply(view.case, semantics, step.steps, weights, values, 1.0, states, rate)  # type: ignore[arg-type]
    return close(after.double().numpy(), weights[name].double().numpy(), view)
