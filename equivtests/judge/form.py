"""What is missing or malformed in a record, before any number in it is compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from equivtests.adapters.adapter import Strategy
from equivtests.cases.case import Case, Semantics
from equivtests.cases.parameters import parameters
from equivtests.judge.arrivals import settled
from equivtests.judge.assemble import incomplete
from equivtests.judge.feeds import fed, sample_shapes
from equivtests.record.observation import SINGLE, Observation, Record
from equivtests.reference.expectation import trajectory
from equivtests.reference.local import workers_of
from equivtests.reference.rows import rows_of

Names = frozenset[str]
SOME: Names = frozenset()  # whatever the names are

COUNTERS = ("step", "cursor", "random_state", "loss_scale")
ENTERING = frozenset({"weight", "state", "buffer", *COUNTERS})
"""Kinds that carry the number of the update that they enter."""

NOT_PARTS = frozenset({"inputs", "tokens", "bytes", "output", "mask", "timeline", "live"})
"""Kinds whose arrays are not copies or parts of one tensor."""


def form_problems(case: Case, strategy: Strategy, record: Record) -> list[str]:
    """Lines that name what a record lacks of what its strategy promises, and what in it cannot be read as what it says."""
    form = Form(case, strategy, record)
    return [*form.never_shown(), *form.malformed(), *form.missing(), *form.incomplete()]


@dataclass
class Form:
    """A record beside what it has to show. demanded[u]: names by kind, of the update u or entering it."""

    case: Case
    strategy: Strategy
    record: Record
    demanded: dict[int, dict[str, Names]] = field(init=False)
    contract: Semantics = field(init=False)
    parts: dict[tuple[str, int], dict[str, list[Observation]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.contract, _ = settled(self.case, self.strategy.contract(self.case), self.record)
        self.demanded = demands(self.case, self.contract, self.strategy.observes, self.record.start)
        for o in self.record.observations:
            self.parts.setdefault((o.kind, o.update), {}).setdefault(o.name, []).append(o)

    def never_shown(self) -> Iterator[str]:
        """Promised kinds of which there is nothing."""
        for kind in sorted({kind for kinds in self.demanded.values() for kind in kinds} - self.kinds()):
            yield f"{kind}: never shown, though strategy {self.strategy.name} promises it in `observes`"

    def kinds(self) -> set[str]:
        return {o.kind for o in self.record.observations}

    def malformed(self) -> Iterator[str]:
        """The first observation of every kind and name that is not as it has to be."""
        seen = set()
        for o in self.record.observations:
            problem = observation_problem(self.case, o)
            if problem and (o.kind, o.name) not in seen:
                seen.add((o.kind, o.name))
                yield f"{words(o.kind, o.name)} on rank {o.rank} at update {o.update}: {problem}"

    def missing(self) -> Iterator[str]:
        """What is shown of some update but not of another; what is never shown is said once, elsewhere."""
        for update, kinds in self.demanded.items():
            if not any(at == update for _, at in self.parts):
                last = "" if update < self.case.updates else ": show what the last update leaves with this number"
                yield f"update {update}: nothing shown{last}"
                continue
            for kind in (kind for kind in kinds if kind in self.kinds()):
                shown = self.parts.get((kind, update), {})
                lost = sorted(kinds[kind] - shown.keys())
                if lost or not shown:
                    yield f"{words(kind, ', '.join(lost) or kind)} {self.moment(kind, update)}: shown by no rank"
            yield from self.missing_samples(update)

    def moment(self, kind: str, update: int) -> str:
        if kind not in ENTERING:
            return f"of update {update}"
        return f"entering update {update}" if update < self.case.updates else f"after the last update ({update})"

    def wanted_samples(self, update: int) -> Counter[int]:
        """How often every sample is to be fed; a worker that steps alone may pass over what it need not learn from."""
        fed_to = (
            alone for alone in workers_of(self.case, self.contract) if alone.worker is None or alone.tokens(update)
        )
        return Counter(i for alone in fed_to for i in rows_of(alone, update).ids.tolist())

    def missing_samples(self, update: int) -> Iterator[str]:
        shown = [o for parts in self.parts.get(("inputs", update), {}).values() for o in parts]
        if not shown or update == self.case.updates:
            return
        whole = fed(self.case, [o for o in shown if not observation_problem(self.case, o)])
        if whole.problem:
            yield f"inputs of update {update}: {whole.problem}"
            return
        found = sum(whole.samples(self.case.model).values(), Counter())
        lost = sorted((self.wanted_samples(update) - found).elements())
        if lost:
            yield f"inputs of update {update}: samples {', '.join(map(str, lost))} shown by no rank"

    def incomplete(self) -> Iterator[str]:
        """The first of every tensor whose parts do not make a whole."""
        seen = set()
        for (kind, update), tensors in self.parts.items():
            for name, parts in tensors.items() if kind not in NOT_PARTS else ():
                problem = incomplete(parts, self.record.world)
                if problem and (kind, name) not in seen:
                    seen.add((kind, name))
                    yield f"{words(kind, name)} {self.moment(kind, update)}: {problem}"


def words(kind: str, name: str) -> str:
    """An observation by its kind, and its name where there are several of a kind."""
    return kind if name == kind else f"{kind} {name}"


def demands(case: Case, contract: Semantics, promised: Names, start: int = 0) -> dict[int, dict[str, Names]]:
    """What a run has to show, by update and kind, from the update `start` to the state after the last one."""
    found = {}
    for update, step in enumerate(trajectory(case, contract).steps):
        shown = [] if case.tokens(update) == 0 else of_window(case, frozenset(step.gradients))
        made = [] if step.applies is None else of_update()
        arrival = [("arrival", frozenset({"arrival"}))] if contract.staleness.versions == "arrivals" else []
        found[update] = dict([*entering(case, step.steps), ("tokens", frozenset({"tokens"})), *shown, *made, *arrival])
    found[case.updates] = dict(entering(case, step.steps + (step.applies is not None)))
    return {u: {k: n for k, n in kinds.items() if k in promised} for u, kinds in found.items() if u >= start}


def entering(case: Case, made: int) -> Iterator[tuple[str, Names]]:
    """What enters an update, after `made` of them."""
    yield "weight", frozenset(p.name for p in parameters(case.model))
    yield from ((kind, frozenset({kind})) for kind in COUNTERS)
    if made and (case.optimizer.momentum or case.optimizer.name in ("adam", "adamw")):
        yield "state", SOME
    if case.model.keeps_statistics:
        yield "buffer", SOME


def of_update() -> Iterator[tuple[str, Names]]:
    """What belongs to an update that is made."""
    yield from ((kind, frozenset({kind})) for kind in ("lr", "weight_norm"))


def of_window(case: Case, gradients: Names) -> Iterator[tuple[str, Names]]:
    """What belongs to a window that has a valid token."""
    yield "inputs", SOME
    yield "loss", frozenset({"loss"})
    yield "gradient", gradients
    yield "bytes", SOME
    if case.optimizer.clip is not None:
        yield from ((kind, frozenset({kind})) for kind in ("norm", "clip"))


def observation_problem(case: Case, o: Observation) -> str:
    """What is wrong with the name, the shape or the numbers of one observation, or ""."""
    shapes = {p.name: p.shape for p in parameters(case.model)}
    tensor = o.kind in ("weight", "gradient")
    if tensor and o.name not in shapes:
        return f"the model has no such parameter; canonical names are {', '.join(shapes)}"
    if tensor and tuple(o.place.shape) != shapes[o.name]:
        return f"place.shape is {tuple(o.place.shape)}, but the whole parameter has shape {shapes[o.name]}"
    if o.kind in SINGLE - {"bytes"} and o.name != o.kind:
        return f"its name is to be {o.kind}"
    rows = sample_shapes(case, o.microbatch)
    if o.kind == "inputs" and (o.array.shape if o.place.box is None else o.place.shape)[1:] not in rows:
        return f"shape {o.array.shape}, but what reached the forward pass has rows of shape {rows[0]}"
    if o.values().dtype.kind == "f" and not np.isfinite(o.values()).all():
        return "not finite (NaN or infinity)"
    return ""
