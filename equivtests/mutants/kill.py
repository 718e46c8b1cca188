"""Killing a mutant: its parent passes the case, and it fails it by the right quantity first."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache

from equivtests.adapters.adapter import Strategy
from equivtests.adapters.builtin import BUILTIN
from equivtests.cases.case import Case
from equivtests.chapters.certify import certify
from equivtests.chapters.plan import claims_of
from equivtests.chapters.run import Result, Run, seating_of
from equivtests.errors import AdapterError
from equivtests.judge.check import Verdict
from equivtests.mutants.mutant import MUTANTS, Mutant
from equivtests.ranks.pools import Runs


@dataclass
class Kill:
    """The outcome for one mutant, and lines for a reader if it was not killed."""

    mutant: Mutant
    killed: bool
    lines: list[str] = field(default_factory=list)
    result: Result | None = None


_passed: set[tuple[str, str, str, Case]] = set()


def planted(nproc: int, adapters: Iterable[str] = BUILTIN) -> list[Mutant]:
    """The mutants that fit in `nproc` ranks, in the order they are planted: all of the suite's own, or of other adapters.

    Raises AdapterError if a module that an adapter claims to plant mutants in cannot be imported.
    """
    if tuple(adapters) == BUILTIN:
        importlib.import_module("equivtests.mutants.catalogue")
        own = [m for m in MUTANTS.values() if not m.adapter.startswith("equivtests.mutants.outside.")]
        return [m for m in own if m.case.layout.world <= nproc]
    chosen = tuple(adapters)
    for spec in chosen:
        plant(spec)
    return [replace(m, outside=True) for m in MUTANTS.values() if m.parent in chosen and m.case.layout.world <= nproc]


def plant(spec: str) -> None:
    """Import the modules in which an adapter says that its mutants are."""
    for module in claims_of(spec).mutants:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise AdapterError(f"{spec}: claims mutants in {module}, which cannot be imported: {error}") from error


def run_of(mutant: Mutant, spec: str) -> Run:
    """The mutant's run with itself or its parent."""
    return mutant.run(spec, strategy_of(spec, mutant.strategy), seating_of(claims_of(spec)))


@lru_cache(maxsize=256)
def strategy_of(spec: str, name: str) -> Strategy:
    """A strategy as an adapter claims it."""
    return next(s for s in claims_of(spec).strategies if s.name == name)


def attempt(pools: Runs, mutant: Mutant) -> Kill:
    """Run parent and mutant. Nothing but a FAIL by the declared quantity is a kill."""
    parent = parent_lines(pools, mutant)
    if parent:
        return Kill(mutant, False, parent)
    result = certify(pools, run_of(mutant, mutant.adapter), confirm=False)
    first = result.first
    if result.verdict is Verdict.FAIL and first is not None and first.quantity == mutant.quantity:
        if names_axis(mutant.case, result.explanation):
            return Kill(mutant, True, result.explanation, result)
        words = f"{mutant.name}: failed by {mutant.quantity}, as it must, but the explanation names no axis"
        return Kill(mutant, False, [words, *result.explanation], result)
    seen = f"{result.verdict} by {first.quantity}" if first else str(result.verdict)
    return Kill(
        mutant,
        False,
        [f"{mutant.name} survived: expected FAIL by {mutant.quantity}, got {seen}", *result.explanation],
        result,
    )


ALL_AXES = "the model is split along"
AXIS = re.compile(r"\b(?:dp|tp|cp|pp|ep|edp|pipeline|stage)\b")


def names_axis(case: Case, explanation: list[str]) -> bool:
    """Whether, where a model is split, an explanation says along which axis it went wrong.

    Its first line, which names the run, does not count; nor does a list of several axes that the model is split along,
    unless they are the same ranks.
    """
    several = len({case.layout.partition(axis) for axis in case.layout.splits}) > 1
    told = [line for line in explanation[1:] if "reproduce:" not in line and not (several and ALL_AXES in line)]
    return not case.layout.splits or any(AXIS.search(line) for line in told)


def parent_lines(pools: Runs, mutant: Mutant) -> list[str]:
    """Nothing if the parent passes the mutant's case; it is run once per case."""
    key = (mutant.parent, mutant.strategy, mutant.chapter, mutant.case)
    if key in _passed:
        return []
    run = run_of(mutant, mutant.parent)
    reason = run.strategy.refusal(mutant.case)
    if reason is not None:
        return [f"{mutant.name}: its parent {mutant.parent} does not claim the case: {reason}"]
    result = certify(pools, run, confirm=False)
    if result.verdict is Verdict.PASS:
        _passed.add(key)
        return []
    return [f"{mutant.name}: its parent {mutant.parent} was judged {result.verdict} on the case", *result.explanation]
