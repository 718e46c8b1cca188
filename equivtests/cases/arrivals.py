"""Orders in which gradients reach parameter servers, drawn from a case's seed as if workers took turns of any length."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from equivtests.cases import numbers
from equivtests.cases.case import Case, Semantics
from equivtests.cases.stale_grid import workers_of
from equivtests.cases.staleness import Staleness

ATTEMPTS = 64  # orders that are tried, until one shows what the rule is about

Todo = dict[int, list[int]]
"""By worker, the windows that feed it, in order."""


def windows_by_worker(case: Case) -> Todo:
    """What every worker computes gradients of: each window of an asynchronous server's case feeds one of them."""
    todo: Todo = {worker: [] for worker in workers_of(case.layout, case.windows)}
    for number, window in enumerate(case.windows):
        (worker,) = (rank for rank, batches in enumerate(window) if batches)
        todo[worker].append(number)
    return todo


def in_time(made: int, versions: Iterable[int], bound: int | None) -> bool:
    """Whether gradients of these versions can still be applied, one after the other, each within the bound.

    made: updates made so far. The oldest comes first (earliest deadline first); None is no bound.
    """
    return bound is None or all(made + place - version <= bound for place, version in enumerate(sorted(versions)))


def declared(case: Case, bound: int | None = None, late: str = "refused") -> Semantics:
    """The rule of a run: in the order that the case names (none: in any), or in one drawn from the seed of the case."""
    if case.semantics.staleness.versions == "arrivals":
        return case.semantics
    return replace(case.semantics, staleness=drawn(case, bound, late))


def drawn(case: Case, bound: int | None = None, late: str = "refused") -> Staleness:
    """Arrivals as `Staleness` has them; some gradient is stale, and late where late ones are dropped or reweighted."""
    rule = Staleness("arrivals", bound=bound, late=late)  # type: ignore[arg-type]
    least = 0 if late == "refused" or bound is None else bound
    found = rule
    for attempt in range(ATTEMPTS):
        found, lag = one_order(case, rule, attempt)
        if lag > least:
            break
    return found


def one_order(case: Case, rule: Staleness, attempt: int) -> tuple[Staleness, int]:
    """(arrivals, the most updates that one of the gradients was behind). Weights are pulled as soon as the bound allows."""
    todo, computing, made, most = windows_by_worker(case), dict[int, tuple[int, int]](), 0, 0
    bound = rule.bound if rule.late == "refused" else None
    choices = numbers.integers(case.seed, f"arrivals.{attempt}", case.updates, 2**16)
    arrivals = []
    for choice in choices.tolist():
        for worker in todo:
            if worker not in computing and todo[worker] and in_time(made, [*versions(computing), made], bound):
                computing[worker] = (todo[worker].pop(0), made)
        others = {worker: versions(computing, but=worker) for worker in computing}
        ready = [worker for worker in computing if in_time(made + 1, others[worker], bound)]
        window, version = computing.pop(ready[choice % len(ready)])
        arrivals.append((window, version))
        lag = made - version
        dropped = rule.late == "dropped" and rule.bound is not None and lag > rule.bound
        made, most = made + (not dropped and case.tokens(window) > 0), max(most, lag)
    return replace(rule, arrivals=tuple(arrivals)), most


def versions(computing: dict[int, tuple[int, int]], but: int | None = None) -> list[int]:
    """The versions that gradients are being computed at."""
    return [version for worker, (_, version) in computing.items() if worker != but]
