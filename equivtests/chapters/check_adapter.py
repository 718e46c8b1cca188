"""The smoke stage: does the adapter itself work, before anything is judged?"""

from __future__ import annotations

import numpy as np

from equivtests.adapters.adapter import Strategy
from equivtests.cases.case import Case, Layout, Model, Optimizer
from equivtests.cases.parameters import parameters
from equivtests.chapters.plan import claims_of
from equivtests.chapters.run import Run
from equivtests.chapters.update import run_update
from equivtests.errors import AdapterError
from equivtests.judge.check import Verdict
from equivtests.ranks.job import Job
from equivtests.ranks.pools import Pools
from equivtests.record.observation import Record

SMOKE_MODELS = (Model("linear"), Model("mlp"), Model("gpt", depth=1), Model("chain"))


def check_adapter(pools: Pools, spec: str) -> tuple[list[str], bool]:
    """(lines for a reader, whether every strategy works) after one tiny case per strategy at one rank and at several."""
    lines, works = [f"{spec}: loaded"], True
    for strategy in claims_of(spec).strategies:
        for world in sorted({1, pools.nproc}):
            problem = smoke(pools, spec, strategy, world)
            works = works and not problem
            lines.append(f"  {strategy.name}, {world} rank{'s' if world > 1 else ''}: {problem or 'works'}")
    return [*lines, "the adapter works: certify it with pytest --adapter" if works else "mend this first"], works


def smoke_case(strategy: Strategy, world: int) -> Case | None:
    """Two updates of the smallest model that the strategy claims; None if it claims none."""
    window = tuple(((3, 5 + rank),) for rank in range(world))
    for model in SMOKE_MODELS:
        for name in ("sgd", "adamw"):
            optimizer = Optimizer(name, lr=0.125)
            case = Case(f"smoke-{model.family}-w{world}", model, (window, window), Layout(world), optimizer)
            if strategy.refusal(case) is None:
                return case
    return None


def smoke(pools: Pools, spec: str, strategy: Strategy, world: int) -> str:
    """What to fix, or "" if the strategy works."""
    if world not in strategy.worlds:
        return ""
    case = smoke_case(strategy, world)
    if case is None:
        return "claims none of linear, mlp, gpt, chain in float32 with sgd or adamw: widen Strategy(...)"
    outcome = pools.run(Job(spec, strategy.name, case))
    if outcome.failure is not None:
        stack = outcome.failure.stacks.get(outcome.failure.rank, "").rstrip().splitlines()[-6:]
        return "\n    ".join([outcome.failure.message, *stack])
    assert outcome.record is not None
    problems = form_problems(case, strategy, outcome.record)
    if problems:
        return "\n    ".join(problems)
    try:
        result = run_update(pools, Run("update", spec, strategy, case))
    except AdapterError as error:
        return str(error)
    return "" if result.verdict is Verdict.PASS else "\n    ".join(["runs, but differs:", *result.explanation])


def form_problems(case: Case, strategy: Strategy, record: Record) -> list[str]:
    """What is wrong with the form of a record: kinds never shown, names, shapes, numbers that are not finite."""
    problems = []
    for kind in sorted(strategy.observes - {"norm", "clip", "buffer", "state"}):
        if not record.of(kind):
            problems.append(f"never called observe({kind!r}, …), which strategy {strategy.name} promises in `observes`")
    shapes = {p.name: p.shape for p in parameters(case.model)}
    for o in record.observations:
        where = f"observe({o.kind!r}, {o.name!r}, …) on rank {o.rank} at update {o.update}"
        if o.kind in ("weight", "gradient") and o.name not in shapes:
            problems.append(f"{where}: the model has no such parameter; canonical names are {', '.join(shapes)}")
        elif o.kind in ("weight", "gradient") and tuple(o.place.shape) != shapes[o.name]:
            problems.append(f"{where}: shape {o.place.shape}, the parameter has {shapes[o.name]}")
        elif o.values().dtype.kind == "f" and not np.isfinite(o.values()).all():
            problems.append(f"{where}: not finite (NaN or infinity)")
    shown = {o.name for o in record.of("weight")}
    missing = [name for name in shapes if name not in shown]
    if missing:
        problems.append(f"observe('weight', …) never showed {', '.join(missing)}: show every parameter at every update")
    return problems[:8]
