"""Version tables: which weights every stage uses in both passes of every mini-batch, and what follows from them.

Versions are numbered by the updates made before. With P stages, stage s has made t - (P-1-s) updates when the forward pass
of mini-batch t reaches it in 1F1B order without flushes. Sources. Stashing, vertical sync: Harlap et al. 2018, PipeDream,
arXiv 1806.03377, section 3.3; Narayanan et al., SOSP 2019, section 3.3. Two-buffered: Narayanan et al. 2021,
Memory-efficient pipeline-parallel DNN training (PipeDream-2BW), section 3.1, where t counts groups of micro-batches.
Unstashed: what PipeDream's section 3.3 warns of. Predicted: Chen, Yang and Cheng 2018, Efficient and robust parallel DNN
training through model parallelism on multi-GPU platform (SpecTrain), section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from equivtests.cases.case import Case, Semantics
from equivtests.cases.staleness import Scheme, Staleness
from equivtests.reference import optimizers
from equivtests.reference.forward import Weights
from equivtests.reference.timeline import Operation

States = dict[str, optimizers.State]


@dataclass(frozen=True)
class Used:
    """Versions that one stage uses for one mini-batch. ahead: updates that are predicted beyond them."""

    forward: int
    backward: int
    ahead: int = 0


Rule = Callable[[int, int, int, int], Used]
"""(mini-batch t, stage s, P stages, updates made at the last drain) to what the stage uses."""


def both(version: int, ahead: int = 0) -> Used:
    return Used(version, version, ahead)


def arrived(t: int, s: int, P: int, drained: int) -> int:
    """Updates made on stage s when the forward pass of mini-batch t reaches it."""
    return max(drained, t - (P - 1 - s))


RULES: dict[Scheme, Rule] = {
    "newest": lambda t, s, P, drained: both(t),
    "stashing": lambda t, s, P, drained: both(arrived(t, s, P, drained)),
    "vertical-sync": lambda t, s, P, drained: both(arrived(t, 0, P, drained)),
    "two-buffered": lambda t, s, P, drained: both(max(0, t - 1)),
    "unstashed": lambda t, s, P, drained: Used(arrived(t, s, P, drained), t),
    "predicted": lambda t, s, P, drained: both(arrived(t, s, P, drained), t - arrived(t, s, P, drained)),
}
"""The schemes that follow from numbers of mini-batches and stages alone. Both buffers of two-buffered survive a drain."""

Table = tuple[tuple[Used, ...], ...]
"""By mini-batch and stage."""


def version_table(scheme: Scheme, stages: int, minibatches: int, drains: Sequence[int] = ()) -> Table:
    """The table of a scheme of `RULES`. Raises ValueError for an unknown scheme and for numbers below 1."""
    if scheme not in RULES:
        raise ValueError(f"unknown scheme {scheme!r}; known are {', '.join(RULES)}")
    if min(stages, minibatches) < 1:
        raise ValueError(f"stages and mini-batches must be at least 1, got {stages} and {minibatches}")
    rule = RULES[scheme]
    return tuple(
        tuple(rule(t, s, stages, max((d for d in drains if d <= t), default=0)) for s in range(stages))
        for t in range(minibatches)
    )


def first_difference(one: Table, other: Table) -> int | None:
    """The first mini-batch in which two tables differ, or None: what they prescribe cannot be told apart.

    Version 0 has no momentum yet, so that a prediction from it is version 0 itself.
    """
    rows = zip(one, other, strict=True)
    return next((t for t, (a, b) in enumerate(rows) if any(map(_other_weights, a, b))), None)


def _other_weights(one: Used, other: Used) -> bool:
    moved = [replace(u, ahead=u.ahead if u.forward or u.backward else 0) for u in (one, other)]
    return moved[0] != moved[1]


# ------------------------------------------------------------------------------------------------ of a case


def stage_of(case: Case, name: str) -> int:
    """The pipeline stage that a parameter belongs to (0 without pipeline); of a tied embedding the first."""
    first, _, rest = name.partition(".")
    if first in ("embedding", "positions") or case.layout.stage_count == 1:
        return 0
    if first in ("layers", "factors"):
        number = int(rest.partition(".")[0])
        return next(s for s, layers in enumerate(case.layout.layers_of(case.model.depth)) if number in layers)
    return case.layout.stage_count - 1


def made_before(case: Case, window: int) -> int:
    """Windows before this one that make an update: those with a valid token."""
    return sum(case.tokens(earlier) > 0 for earlier in range(window))


def used(case: Case, staleness: Staleness, window: int) -> tuple[Used, ...]:
    """By stage, what a window uses. Raises ValueError where the arrivals are not known yet."""
    stages = case.layout.stage_count
    if staleness.versions == "table":
        return tuple(Used(*row) for row in staleness.table[window])
    if staleness.versions == "arrivals":
        if not staleness.arrivals:
            raise ValueError("in which order gradients arrive is known from a record only")
        return (both(next(version for w, version in staleness.arrivals if w == window)),)
    drained = max((made_before(case, d) for d in staleness.drains if d <= window), default=0)
    rule = RULES[staleness.versions]
    made = made_before(case, window - staleness.delay)  # what a delay holds back is not made when the window is passed
    return tuple(rule(made, s, stages, drained) for s in range(stages))


def table_of(case: Case, staleness: Staleness) -> Table:
    return tuple(used(case, staleness, window) for window in range(case.updates))


def applies(case: Case, staleness: Staleness, update: int, made: int) -> tuple[int | None, float]:
    """(the window whose gradient an update applies, None if there is none; the factor on its learning rate).

    made: updates made before.
    """
    window, late = update - staleness.delay, 0
    if staleness.versions == "arrivals":
        window, version = staleness.arrivals[update]
        late = max(0, made - version - staleness.bound) if staleness.bound is not None else 0
    if window < 0 or case.tokens(window) == 0 or (late and staleness.late == "dropped"):
        return None, 1.0
    return window, 1.0 / (1 + late) if staleness.late == "reweighted" else 1.0


def indistinguishable(case: Case, semantics: Semantics) -> list[Scheme]:
    """Schemes that prescribe what this case's does, so that the case cannot tell them from it."""
    staleness = semantics.staleness
    own = without_momentum(case, table_of(case, staleness))
    names = (name for name in RULES if name != staleness.versions)
    others = (replace(staleness, versions=name, table=(), arrivals=()) for name in names)
    tables = ((other.versions, without_momentum(case, table_of(case, other))) for other in others)
    return [name for name, table in tables if first_difference(own, table) is None]


def without_momentum(case: Case, table: Table) -> Table:
    """The table as far as it shows in a case: without momentum a prediction changes nothing."""
    if case.optimizer.momentum:
        return table
    return tuple(tuple(replace(stage, ahead=0) for stage in row) for row in table)


# ------------------------------------------------------------------------------------------------ weights


@dataclass(frozen=True)
class History:
    """Weights and optimizer states by version."""

    weights: Callable[[int], Weights]
    states: Callable[[int], States]


@dataclass(frozen=True)
class Seen:
    """The weights that a window's forward pass used, and its backward pass if they were others."""

    forward: Weights
    backward: Weights | None = None


def seen(case: Case, staleness: Staleness, window: int, history: History) -> Seen:
    """The weights that a window has to use, each parameter in the version of its stage."""
    table = used(case, staleness, window)
    if len(set(table)) == 1 and table[0] == both(table[0].forward):
        return Seen(history.weights(table[0].forward))
    names = list(history.weights(0))
    stages = {name: table[stage_of(case, name)] for name in names}
    forward = {n: predicted(case, history, n, u.forward, u.ahead) for n, u in stages.items()}
    if all(u.forward == u.backward for u in stages.values()):
        return Seen(forward)
    return Seen(forward, {n: predicted(case, history, n, u.backward, u.ahead) for n, u in stages.items()})


def predicted(case: Case, history: History, name: str, version: int, ahead: int) -> Tensor:
    """One parameter of a version, moved on by `ahead` updates of its momentum: W - ahead · rate · buffer."""
    weight = history.weights(version)[name]
    buffer = history.states(version).get(name, {}).get("momentum_buffer") if ahead else None
    if buffer is None:
        return weight
    return weight.add(buffer.to(weight.dtype), alpha=-ahead * case.optimizer.rate(version))


# ------------------------------------------------------------------------------------------------ live versions


def live_versions(
    order: Sequence[Operation], versions: Mapping[Operation, int], updates: Mapping[Operation, int]
) -> int:
    """The most versions that a stage has to keep at once, the newest among them.

    order: its operations. versions: that each uses. updates: of the operations after which the stage makes an update, the
    version that this makes.
    """
    most, newest = 0, 0
    for number, operation in enumerate(order):
        newest = updates.get(operation, newest)
        needed = {versions[later] for later in order[number + 1 :] if versions[later] <= newest}
        most = max(most, len(needed | {newest}))
    return max(most, 1)


def live_by_stage(table: Table, orders: Sequence[Sequence[Operation]], group: int = 1) -> tuple[int, ...]:
    """`live_versions` of every stage, from the table, the order of each stage and the micro-batches of a mini-batch."""
    return tuple(_live_of(table, stage, order, group) for stage, order in enumerate(orders))


def _live_of(table: Table, stage: int, order: Sequence[Operation], group: int) -> int:
    return live_versions(order, dict(_versions(table, stage, order, group)), _updates(order, group))


def by_operation(table: Table, orders: Sequence[Sequence[Operation]], group: int = 1) -> dict[Operation, int]:
    """The version that every operation uses. Arguments as for `live_by_stage`."""
    return dict(pair for stage, order in enumerate(orders) for pair in _versions(table, stage, order, group))


def not_made(table: Table, orders: Sequence[Sequence[Operation]], group: int = 1) -> str:
    """The first operation that would use a version which its stage has not made yet, in words, or "".

    Arguments as for `live_by_stage`.
    """
    versions = by_operation(table, orders, group)
    for order in orders:
        newest, updates = 0, _updates(order, group)
        for operation in order:
            if versions[operation] > newest:
                return f"the {operation} uses weight version {versions[operation]}; the newest there is {newest}"
            newest = updates.get(operation, newest)
    return ""


def _updates(order: Sequence[Operation], group: int) -> dict[Operation, int]:
    """The last backward pass of every mini-batch, and the version that the update after it makes."""
    last = {o.microbatch // group: o for o in order if o.kind != "F"}
    return {operation: t + 1 for t, operation in last.items()}


def _versions(table: Table, stage: int, order: Sequence[Operation], group: int) -> Iterator[tuple[Operation, int]]:
    for operation in order:
        row = table[operation.microbatch // group][stage]
        yield operation, row.forward if operation.kind == "F" else row.backward
