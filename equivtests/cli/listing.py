"""Commands that show what there is: list, doctor."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from equivtests.adapters.adapter import KINDS_OF_CASES, Strategy
from equivtests.adapters.builtin import BUILTIN
from equivtests.cases.grid import GRID, TIERS
from equivtests.cases.split_grid import SPLIT_GRID, SplitRow
from equivtests.cases.stale_grid import STALE_GRID
from equivtests.chapters.plan import claims_of
from equivtests.judge.check import QUANTITIES
from equivtests.report.doctor import doctor

AXES = ("dp", "cp", "ep", "tp", "pp")


def list_everything(options: argparse.Namespace) -> int:
    print("strategies")
    for spec in options.adapter or BUILTIN:
        for strategy in claims_of(spec).strategies:
            print(f"  {strategy.name:18} {spec}")
            print("\n".join(f"  {'':18} {line}" for line in described(strategy)))
    print("\ncases of data parallelism; names are ROW-wWORLD")
    for row in GRID:
        worlds = ", ".join(map(str, row.worlds))
        print(f"  {row.name:24} {row.tier:8} worlds {worlds:11} {row.why}")
    print("\ncases of models that are split across ranks; names are ROW-LAYOUT")
    print_rows(SPLIT_GRID)
    print("\ncases of asynchronous runs; names are ROW-LAYOUT")
    print_rows(STALE_GRID)
    print(f"\ntiers (each holds those before it): {', '.join(TIERS)}")
    print("\ncompared quantities, in causal order")
    print("  " + "\n  ".join(QUANTITIES))
    return 0


def print_rows(grid: tuple[SplitRow, ...]) -> None:
    for line in grid:
        print(f"  {line.name:24} {line.tier:8} {line.why}")
        print(f"  {'':24} {'':8} {', '.join(line.layouts + line.more)}")


def described(strategy: Strategy) -> Iterator[str]:
    """What a strategy is for, in lines."""
    yield f"features: {', '.join(sorted(strategy.features)) or 'none'}"
    if strategy.axes != {"dp"}:
        schedule = f"; schedule: {strategy.schedule}" if strategy.schedule else ""
        yield f"axes: {', '.join(axis for axis in AXES if axis in strategy.axes)}{schedule}"
    if strategy.asynchronous:
        yield f"runs cases of {KINDS_OF_CASES[strategy.asynchronous]}"


def show_doctor(options: argparse.Namespace) -> int:
    print("\n".join(doctor()))
    return 0
