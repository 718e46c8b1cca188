"""The smoke stage: does the adapter itself work, before anything is judged?"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from equivtests.adapters.adapter import Strategy
from equivtests.cases.case import DOUBLE, Case, Layout, Model, Optimizer, Precision
from equivtests.cases.grid import BF16, FP16_WIRE
from equivtests.chapters.plan import claims_of
from equivtests.chapters.restore import run_restore
from equivtests.chapters.run import Result, Run, seating_of
from equivtests.chapters.update import judge_update
from equivtests.errors import EquivtestsError
from equivtests.judge.check import Verdict
from equivtests.judge.form import form_problems
from equivtests.ranks.job import Failure, Seating
from equivtests.ranks.pools import Runs
from equivtests.record.observation import Record

SMOKE_MODELS = (Model("linear"), Model("mlp"), Model("gpt", depth=1), Model("chain"))
SMOKE_OPTIMIZERS = (Optimizer("sgd", lr=0.125), Optimizer("adamw", lr=0.125))
SMOKE_PRECISIONS = (Precision(), FP16_WIRE, BF16, DOUBLE)
MOST = 8  # lines about one strategy: the first ones tell


def check_adapter(pools: Runs, spec: str) -> tuple[list[str], bool]:
    """(lines for a reader, whether every strategy works) after a tiny case per strategy at one rank and at several."""
    lines, works = [f"{spec}: loaded"], True
    claims = claims_of(spec)
    for strategy in claims.strategies:
        worlds = [world for world in sorted({1, pools.nproc} & strategy.worlds) if pools.has(world)]
        if not worlds:
            works = False
            lines.append(f"  {strategy.name}: claims worlds {sorted(strategy.worlds)}: try one of them with --nproc")
        for world in worlds:
            problem = smoke(pools, spec, strategy, world, seating_of(claims))
            works = works and not problem
            lines.append(f"  {strategy.name}, {world} rank{'s' if world > 1 else ''}: {problem or 'works'}")
    next_step = f"the adapter works; certify it: python -m pytest --pyargs equivtests --nproc 4 --adapter {spec}"
    return [*lines, next_step if works else "mend this first"], works


def smoke(pools: Runs, spec: str, strategy: Strategy, world: int, seating: Seating) -> str:
    """What to fix, or "" if the strategy works."""
    case = smoke_case(strategy, world)
    if case is None:
        return "claims none of linear, mlp, gpt, chain with sgd or adamw: widen Strategy(...)"
    run = Run("update", spec, strategy, case, seating)
    outcome = pools.run(run.job())
    if outcome.record is None:
        return in_lines(stack_of(outcome.failure))
    problems = form_problems(case, strategy, outcome.record)[:MOST]
    return in_lines(problems) or numbers_problem(pools, run, outcome.record)


def smoke_case(strategy: Strategy, world: int) -> Case | None:
    """Two updates of the smallest model that the strategy claims; None if it claims none."""
    window = tuple(((3, 5 + rank),) for rank in range(world))
    for precision, model, optimizer in product(SMOKE_PRECISIONS, SMOKE_MODELS, SMOKE_OPTIMIZERS):
        name = f"smoke-{model.family}-w{world}"
        case = Case(name, model, (window, window), Layout(world), optimizer, precision)
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
