"""What a reader sees at the end of a whole run: the table, what did not run, and where the certificate lies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from equivtests.chapters.plan import Plan
from equivtests.judge.tolerance import THRESHOLD
from equivtests.report.tally import declared_rules, table, tally, total


def summary(plan: Plan, results: list[dict[str, Any]], certificate: dict[str, Any], path: Path | None) -> Iterator[str]:
    """Lines for a terminal. `certificate`: what was written to `path`."""
    rows = tally(plan, results)
    yield from table([*rows, total(rows)])
    yield from (f"{name} needs --nproc {world}" for name, world in plan.too_large)
    yield from plan.unmatched
    yield from declared_rules(plan)
    threshold = certificate["threshold"]
    if threshold["loosened"]:
        yield f"the threshold was loosened to {threshold['value']:g} (default {THRESHOLD:g})"
    if plan.model:
        yield certificate["claim"]
    partial = "partial result, not a certificate (not everything declared ran and passed)"
    whole = "certificate of the weaker claim" if plan.model else "certificate"
    yield f"{whole if certificate['complete'] else partial}: {path}"
