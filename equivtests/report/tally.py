"""Counting results: the rows of every table, whatever it is printed with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from equivtests.cases.meaning import in_words
from equivtests.chapters.plan import Plan
from equivtests.judge.check import Verdict

COLUMNS = ("declared", "run", "passed", "failed", "known", "inconclusive", "error", "not claimed")
COUNTED = {
    Verdict.PASS: "passed",
    Verdict.FAIL: "failed",
    Verdict.KNOWN: "known",
    Verdict.INCONCLUSIVE: "inconclusive",
    Verdict.ERROR: "error",
}
RATIOS = ("loss", "gradient", "norm", "weight update", "trajectory")
"""Quantities whose worst ratio stands in the table."""


@dataclass
class Row:
    """One strategy: counts by column, worst ratio by quantity."""

    strategy: str
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COLUMNS, 0))
    worst: dict[str, float] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Everything declared ran and passed, or differs as declared."""
        return self.counts["declared"] == self.counts["passed"] + self.counts["known"] > 0

    def cells(self) -> list[str]:
        ratios = [f"{self.worst[q]:.2g}" if q in self.worst else "-" for q in RATIOS]
        return [self.strategy, *(str(self.counts[c]) for c in COLUMNS), *ratios]


HEADER = ["strategy", *COLUMNS, *RATIOS]


def tally(plan: Plan, results: Iterable[dict[str, Any]]) -> list[Row]:
    """A row per strategy in the order of the plan. `results`: summaries as in the certificate."""
    rows = {name: Row(name) for name in plan.strategies}
    for run in plan.runs:
        rows[run.strategy.name].counts["declared"] += 1
    for left in plan.not_claimed:
        rows[left.strategy].counts["not claimed"] += 1
    for result in results:
        row = rows[result["strategy"]]
        row.counts["run"] += 1
        row.counts[COUNTED[Verdict(result["verdict"])]] += 1
        if not result["exact"] and result["verdict"] != Verdict.KNOWN:
            for quantity, ratio in result["worst"].items():
                row.worst[quantity] = max(row.worst.get(quantity, 0.0), ratio)
    return list(rows.values())


def declared_rules(plan: Plan) -> list[str]:
    """A line for every strategy that is judged by a rule which its framework declares instead of one device's."""
    declared = {run.strategy.name: run.contract for run in plan.runs if run.strategy.semantics is not None}
    return [f"{name} is judged by its declared rule: {'; '.join(in_words(rule))}" for name, rule in declared.items()]


def total(rows: list[Row]) -> Row:
    whole = Row("all")
    for row in rows:
        for column in COLUMNS:
            whole.counts[column] += row.counts[column]
        for quantity, ratio in row.worst.items():
            whole.worst[quantity] = max(whole.worst.get(quantity, 0.0), ratio)
    return whole


def table(rows: list[Row]) -> list[str]:
    """Aligned lines of the terminal table, header first."""
    cells = [HEADER, *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEADER))]
    return [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in cells
    ]


def markdown(rows: list[Row]) -> str:
    """The same table for a GitHub step summary."""
    lines = [HEADER, ["---"] * len(HEADER), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
