"""The smoke stage: does the adapter itself work, before anything is judged?"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

from equivtests.adapters.adapter import Strategy
from equivtests.cases.case import DOUBLE, Case, Layout, Model, Optimizer, Precision
from equivtests.cases.grid import BF16, FP16_WIRE
from equivtests.cases.parameters import parameters
from equivtests.cases.split_grid import SPLIT_GRID, split_cases
from equivtests.cases.stale_grid import STALE_GRID
from equivtests.chapters.plan import claims_of
from equivtests.chapters.restore import run_restore
from equivtests.chapters.run import Result, Run, seating_of
from equivtests.chapters.update import judge_update
from equivtests.errors import EquivtestsError
from equivtests.judge.check import Verdict
from equivtests.judge.form import form_problems
from equivtests.ranks.job import Failure
from equivtests.ranks.pools import Runs
from equivtests.record.observation import Record

SMOKE_MODELS = (Model("linear"), Model("mlp"), Model("gpt", depth=1), Model("chain"))
SMOKE_OPTIMIZERS = (Optimizer("sgd", lr=0.125), Optimizer("adamw", lr=0.125))
SMOKE_PRECISIONS = (Precision(), FP16_WIRE, BF16, DOUBLE)
MOST = 8  # lines about one strategy: the first ones tell


def check_adapter(pools: Runs, spec: str) -> tuple[list[str], bool]:
    """(lines for a reader, whether every strategy works) after a tiny case per strategy at one rank and at several.

    Of a strategy for split models or for asynchronous runs: after one case of its grid.
    """
    lines, works = [f"{spec}: loaded"], True
    claims = claims_of(spec)
    for strategy in claims.strategies:
        cases = smoke_cases(pools, strategy)
        if isinstance(cases, str):
            works = False
            lines.append(f"  {strategy.name}: {cases}")
            continue
        for where, case in cases:
            problem = smoke(pools, Run("update", spec, strategy, case, seating_of(claims)))
            works = works and not problem
            lines.append(f"  {strategy.name}, {where}: {problem or 'works'}")
    next_step = f"the adapter works; certify it: python -m pytest --pyargs equivtests --nproc 4 --adapter {spec}"
    return [*lines, next_step if works else "mend this first"], works


def smoke(pools: Runs, run: Run) -> str:
    """What to fix, or "" if the strategy works."""
    try:
        run.strategy.contract(run.case)
    except EquivtestsError as error:
        return str(error)
    outcome = pools.run(run.job())
    if outcome.record is None:
        return in_lines(stack_of(outcome.failure))
    problems = form_problems(run.case, run.strategy, outcome.record)[:MOST]
    return in_lines(problems) or numbers_problem(pools, run, outcome.record)


def smoke_cases(pools: Runs, strategy: Strategy) -> list[tuple[str, Case]] | str:
    """(ranks in words, case) of what a strategy is tried on, or why there is nothing to try."""
    if strategy.axes != {"dp"} or strategy.asynchronous:
        case = case_of_grid(pools, strategy)
        words = f"claims no case of its grid on up to {pools.nproc} ranks: try a larger --nproc, or widen Strategy(...)"
        return words if case is None else [(case.layout.label, case)]
    worlds = [world for world in sorted({1, pools.nproc} & strategy.worlds) if pools.has(world)]
    if not worlds:
        return f"claims worlds {sorted(strategy.worlds)}: try one of them with --nproc"
    cases = [(f"{world} rank{'s' if world > 1 else ''}", smoke_case(strategy, world)) for world in worlds]
    found = [(where, case) for where, case in cases if case is not None]
    return found or "claims none of linear, mlp, gpt, chain with sgd or adamw: widen Strategy(...)"


def case_of_grid(pools: Runs, strategy: Strategy) -> Case | None:
    """Of the grid of split models, or of asynchronous runs: the claimed case with the most ranks, and of those the one
    with the largest model: in a single layer the parts of a split model have little to exchange.
    """
    grid = STALE_GRID if strategy.asynchronous else SPLIT_GRID
    claimed = [
        case
        for case in split_cases("nightly", pools.nproc, grid=grid)
        if pools.has(case.layout.world)
        and strategy.meant_for(case.layout, case.asynchronous)
        and strategy.refusal(case) is None
    ]
    return max(claimed, key=lambda case: (case.layout.world, size_of(case)), default=None)


def size_of(case: Case) -> int:
    """Elements of all parameters."""
    return sum(math.prod(p.shape) for p in parameters(case.model))


def smoke_case(strategy: Strategy, world: int) -> Case | None:
    """Two updates, or as many as it needs, of the smallest model that the strategy claims; None if it claims none."""
    window = tuple(((3, 5 + rank),) for rank in range(world))
    windows = (window,) * max(2, strategy.updates)
    for precision, model, optimizer in product(SMOKE_PRECISIONS, SMOKE_MODELS, SMOKE_OPTIMIZERS):
        name = f"smoke-{model.family}-w{world}"
        case = Case(name, model, windows, Layout(world), optimizer, precision)
        if strategy.refusal(case) is None:
            return case
    return None


def in_lines(problems: list[str]) -> str:
    return "\n    ".join(problems)


def stack_of(failure: Failure | None) -> list[str]:
    """The message of a broken run and the end of the stack of the rank to blame."""
    assert failure is not None
    return [failure.message, *failure.stacks.get(failure.rank, "").rstrip().splitlines()[-6:]]


def numbers_problem(pools: Runs, run: Run, record: Record) -> str:
    """What differs from one device; where the strategy restores, also after saving and loading."""
    try:
        result = judge_update(run, record)
        if result.verdict is Verdict.PASS and run.strategy.restores:
            run = replace(run, chapter="restore")
            result = run_restore(pools, run)
    except EquivtestsError as error:
        return str(error)
    return "" if result.verdict is Verdict.PASS else in_lines(differences(result))


def differences(result: Result) -> list[str]:
    """The explanation, without the suite's command: a smoke case is not one of the suite's."""
    if result.failure is not None:
        return [f"{result.run.chapter}: {line}" if i == 0 else line for i, line in enumerate(stack_of(result.failure))]
    return ["runs, but differs:", *(line for line in result.explanation if not line.startswith("  reproduce:"))]
