"""The smoke stage: does the adapter itself work, before anything is judged?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from equivtests.adapters.adapter import Strategy
from equivtests.cases.case import Case, Layout, Model, Optimizer
from equivtests.cases.parameters import parameters
from equivtests.chapters.plan import claims_of
from equivtests.chapters.restore import run_restore
from equivtests.chapters.run import Result, Run, seating_of
from equivtests.chapters.update import judge_update
from equivtests.errors import EquivtestsError
from equivtests.judge.check import Verdict
from equivtests.ranks.job import Failure, Seating
from equivtests.ranks.pools import Pools
from equivtests.record.observation import Observation, Record

SMOKE_MODELS = (Model("linear"), Model("mlp"), Model("gpt", depth=1), Model("chain"))
NOT_IN_EVERY_RUN = frozenset({"norm", "clip", "buffer", "state", "weight_norm"})


def check_adapter(pools: Pools, spec: str) -> tuple[list[str], bool]:
    """(lines for a reader, whether every strategy works) after a tiny case per strategy at one rank and at several."""
    lines, works = [f"{spec}: loaded"], True
    claims = claims_of(spec)
    for strategy in claims.strategies:
        worlds = sorted({1, pools.nproc} & strategy.worlds)
        if not worlds:
            works = False
            lines.append(f"  {strategy.name}: claims worlds {sorted(strategy.worlds)}: try one of them with --nproc")
        for world in worlds:
            problem = smoke(pools, spec, strategy, world, seating_of(claims))
            works = works and not problem
            lines.append(f"  {strategy.name}, {world} rank{'s' if world > 1 else ''}: {problem or 'works'}")
    next_step = f"the adapter works; certify it: python -m pytest --pyargs equivtests --nproc 4 --adapter {spec}"
    return [*lines, next_step if works else "mend this first"], works


def smoke(pools: Pools, spec: str, strategy: Strategy, world: int, seating: Seating) -> str:
    """What to fix, or "" if the strategy works."""
    case = smoke_case(strategy, world)
    if case is None:
        return "claims none of linear, mlp, gpt, chain in float32 with sgd or adamw: widen Strategy(...)"
    run = Run("update", spec, strategy, case, seating)
    outcome = pools.run(run.job())
    if outcome.record is None:
        return in_lines(stack_of(outcome.failure))
    problems = form_problems(case, strategy, outcome.record)
    return in_lines(problems) or numbers_problem(pools, run, outcome.record)


def smoke_case(strategy: Strategy, world: int) -> Case | None:
    """Two updates of the smallest model that the strategy claims; None if it claims none."""
    window = tuple(((3, 5 + rank),) for rank in range(world))
    for model in SMOKE_MODELS:
        for name in ("sgd", "adamw"):
            optimizer = Optimizer(name, lr=0.125)  # type: ignore[arg-type, unused-ignore]
            case = Case(f"smoke-{model.family}-w{world}", model, (window, window), Layout(world), optimizer)
            if strategy.refusal(case) is None:
                return case
    return None


def in_lines(problems: list[str]) -> str:
    return "\n    ".join(problems)


def stack_of(failure: Failure | None) -> list[str]:
    """The message of a broken run and the end of the stack of the rank to blame."""
    assert failure is not None
    return [failure.message, *failure.stacks.get(failure.rank, "").rstrip().splitlines()[-6:]]


def numbers_problem(pools: Pools, run: Run, record: Record) -> str:
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


def form_problems(case: Case, strategy: Strategy, record: Record) -> list[str]:
    """What is wrong with the form of a record: kinds never shown, names, shapes, numbers that are not finite."""
    problems = [
        f"never called observe({kind!r}, …), which strategy {strategy.name} promises in `observes`"
        for kind in sorted(strategy.observes - NOT_IN_EVERY_RUN)
        if not record.of(kind)
    ]
    problems += malformed(case, record)
    shapes = {p.name: p.shape for p in parameters(case.model)}
    for kind, wanted in (("weight", set(shapes)), ("gradient", {p.name for p in parameters(case.model) if p.trained})):
        missing = sorted(wanted - {o.name for o in record.of(kind)})
        if missing and record.of(kind):
            names = ", ".join(missing)
            problems.append(f"observe({kind!r}, …) never showed {names}: show every parameter at every update")
    return problems[:8]


def malformed(case: Case, record: Record) -> Iterator[str]:
    """The first observation of every kind and name that is not as it has to be."""
    seen = set()
    for o in record.observations:
        problem = form_problem(case, o)
        if problem and (o.kind, o.name) not in seen:
            seen.add((o.kind, o.name))
            yield f"observe({o.kind!r}, {o.name!r}, …) on rank {o.rank} at update {o.update}: {problem}"


def form_problem(case: Case, o: Observation) -> str:
    """What is wrong with the name, the shape or the numbers of one observation, or ""."""
    shapes = {p.name: p.shape for p in parameters(case.model)}
    tensor = o.kind in ("weight", "gradient")
    if tensor and o.name not in shapes:
        return f"the model has no such parameter; canonical names are {', '.join(shapes)}"
    if tensor and tuple(o.place.shape) != shapes[o.name]:
        return f"place.shape is {tuple(o.place.shape)}, but the whole parameter has shape {shapes[o.name]}"
    if o.kind == "inputs" and o.array.ndim != (2 if case.model.family == "gpt" else 3):
        return f"shape {o.array.shape}: show what reached the forward pass, shaped like MicroBatch.inputs"
    if o.values().dtype.kind == "f" and not np.isfinite(o.values()).all():
        return "not finite (NaN or infinity)"
    return ""
