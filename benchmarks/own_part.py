"""The suite's own part of a case: what certifying costs beyond building, stepping and gathering.

Prints, per strategy, the time of a bare script on the same ranks and the suite's own part as a fraction of it. The bar
is one half. Run: python benchmarks/own_part.py
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import torch

from equivtests.cases.case import Case
from equivtests.cases.grid import cases
from equivtests.chapters.certify import certify
from equivtests.chapters.run import Run
from equivtests.mutants.kill import strategy_of
from equivtests.ranks.job import Job
from equivtests.ranks.pools import Pools
from equivtests.reference.expectation import expect

CASES = ("linear-sgd-w4", "gpt-adamw-w4", "gpt-adamw-w2", "gpt-empty-window-w4")
ADAPTERS = {"ddp": "equivtests.adapters.native.ddp:DDP", "fsdp2": "equivtests.adapters.native.fsdp2:FSDP2"}
REPEATS = 7
BAR = 0.5
SHARERS = 12  # strategies of the default tier that share one expectation of a case, at the least


def median(action: Callable[[], object]) -> float:
    """Median seconds of an action, the first (cold) one left out."""
    action()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def expectation_seconds(case: Case) -> float:
    start = time.perf_counter()
    expect.__wrapped__(case, case.semantics)
    return (time.perf_counter() - start) / SHARERS


def main() -> int:
    torch.set_num_threads(1)
    chosen = [case for case in cases("default", 4) if case.name in CASES]
    worst = 0.0
    with closing(Pools(4)) as pools:
        for name, spec in ADAPTERS.items():
            bare = own = 0.0
            for case in chosen:
                run = Run("update", spec, strategy_of(spec, name), case)
                asked = median(partial(pools.run, Job("bare:Empty", name, case)))
                built = median(partial(pools.run, Job("bare:Bare", name, case))) - asked
                whole = median(partial(certify, pools, run)) + expectation_seconds(case)
                bare, own = bare + built, own + whole - built
                print(
                    f"{name:6} {case.name:20} bare {1e3 * built:6.1f} ms, own part {(whole - built) / built:5.2f} of it"
                )
            print(f"{name:6} all: own part {own / bare:.2f} of the bare script (bar {BAR})")
            worst = max(worst, own / bare)
    return 0 if worst <= BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
