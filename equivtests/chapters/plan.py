"""Which runs a selection declares: strategies that claim a case run it, the others are listed as not claimed."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache

from equivtests.adapters.adapter import MANDATORY, Adapter, Claims, KnownDivergence, Strategy
from equivtests.adapters.builtin import BUILTIN
from equivtests.cases.case import Case, Semantics
from equivtests.cases.grid import (
    GRID,
    LEDGER_CASES,
    OWN_RESTORE_CASES,
    RESTORE_CASES,
    Row,
    Tier,
    cases,
    includes,
    own_grid,
    tier_of,
    too_large,
    worlds_of,
)
from equivtests.cases.split_grid import SPLIT_GRID, SPLIT_RESTORE_CASES, split_cases, split_too_large
from equivtests.cases.stale_grid import REPLAY_CASES, STALE_GRID, STALE_RESTORE_CASES
from equivtests.chapters.run import Chapter, Run, seating_of
from equivtests.errors import AdapterError, CaseError
from equivtests.own import Loaded, loaded
from equivtests.ranks.loading import load_adapter, load_model
from equivtests.reference.expectation import refuse_discontinuities, trajectory
from equivtests.reference.own import examine

SEED_STRIDE = 1000  # where a seed puts a case at a discontinuity, seed + 1000, + 2000, … are tried


@dataclass(frozen=True)
class NotClaimed:
    """A case of the grid that a strategy does not claim, and why."""

    strategy: str
    case: str
    reason: str


@dataclass
class Plan:
    """Declared runs in the order they are made, what is not claimed, cases that need more ranks, idle declarations.

    model: the user's own one that the cases are about ("": the suite's). frameworks: name and version by adapter.
    """

    runs: list[Run] = field(default_factory=list)
    strategies: list[str] = field(default_factory=list)
    not_claimed: list[NotClaimed] = field(default_factory=list)
    too_large: list[tuple[str, int]] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    model: str = ""
    frameworks: dict[str, str] = field(default_factory=dict)

    def of(self, chapter: Chapter) -> list[Run]:
        return [run for run in self.runs if run.chapter == chapter]


def claims_of(spec: str) -> Claims:
    """The claims of an adapter. Raises AdapterError if it cannot be loaded or its claims are not well formed."""
    adapter = make(spec)
    try:
        claims = adapter.claims()
    except Exception as error:
        raise AdapterError(f"{spec}: claims() raised {type(error).__name__}: {error}") from error
    if not isinstance(claims, Claims) or not sequence_of(claims.strategies, Strategy):
        raise AdapterError(f"{spec}: claims() must return Claims((Strategy(…), …)), got {str(claims)[:80]}")
    names = [s.name for s in claims.strategies]
    if not names or len(set(names)) != len(names):
        raise AdapterError(f"{spec}: claims() names {names or 'no strategy'}; give every strategy a name of its own")
    problem = next((f"strategy {s.name}: {p}" for s in claims.strategies for p in problems_of(s)), "")
    problem = problem or processes_problem(claims)
    if problem:
        raise AdapterError(f"{spec}: {problem}")
    return claims if adapter.own_models else without_own_models(claims)


def without_own_models(claims: Claims) -> Claims:
    """The claims of an adapter that builds the suite's models itself."""
    strategies = tuple(replace(s, families=s.families - {"own"}) for s in claims.strategies)
    return replace(claims, strategies=strategies)


def processes_problem(claims: Claims) -> str:
    """What is not well formed in what an adapter asks of its processes, or ""."""
    if claims.isolation not in ("pool", "case"):
        return f"isolation is {claims.isolation!r}; use 'pool' or 'case'"
    if claims.group not in ("torch", "own"):
        return f"group is {claims.group!r}; use 'torch' or 'own'"
    for name in ("preload", "mutants"):
        if not sequence_of(getattr(claims, name), str):
            return f"{name} must be a tuple of module names: ('my_framework',)"
    return ""


def problems_of(strategy: Strategy) -> Iterator[str]:
    """What is not well formed in a strategy, so that it would claim or run something else than it says."""
    if not re.fullmatch(r"[\w.+-]+", str(strategy.name)):
        yield "a name consists of letters, digits and . _ + - (it names tests, and -k selects by it)"
    for field_name in SETS:
        value = getattr(strategy, field_name)
        if not isinstance(value, (set, frozenset)):
            yield f"{field_name} is {value!r}; write frozenset({{…}})"
            return
    if not sequence_of(strategy.known, KnownDivergence):
        yield "known must be a tuple: (KnownDivergence(…),)"
    needed = dict.fromkeys(MANDATORY, "is mandatory")
    kept = sorted(strategy.features & {"batch_norm", "running"})
    needed |= {"buffer": f"feature {kept[0]} needs it"} if kept else {}
    needed |= {"loss_scale": "loss_scale=True needs it"} if strategy.loss_scale else {}
    for kind in sorted(needed.keys() - strategy.observes):
        yield f"observes lacks {kind!r}, which {needed[kind]}: what is not shown cannot be certified"
    if strategy.asynchronous == "pipeline" and "timeline" in strategy.observes and strategy.schedule is None:
        yield "it shows a timeline, but names no schedule to hold it to: schedule='1f1b'"
    lower = sorted(p for p in strategy.precisions if "bfloat16" in p)
    if lower and "float32" not in strategy.precisions:
        yield (
            f"claims {lower[0]} without float32: bfloat16 hides most mistakes, so it is certified beside float32, "
            "never instead of it"
        )


SETS = tuple(f.name for f in fields(Strategy) if isinstance(getattr(Strategy("default"), f.name), frozenset))
"""Fields of a strategy that are sets: a string would be searched for parts of words, a list has no set operations."""


def sequence_of(value: object, kind: type) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(item, kind) for item in value)


def make(spec: str) -> Adapter:
    """An instance of an adapter class, made without arguments."""
    try:
        return load_adapter(spec)()
    except TypeError as error:
        raise AdapterError(f"{spec} cannot be made without arguments: {error}") from error


def use_model(spec: str) -> Loaded:
    """Load a user's own model and examine it. Raises ModelError if it cannot serve as a reference."""
    own = load_model(spec)
    examine(own)
    return own


def plan(
    adapters: Iterable[str] = BUILTIN,
    tier: Tier = "default",
    nproc: int = 4,
    strategies: Iterable[str] = (),
    seeds: Iterable[int] = (0,),
    model: str = "",
    exactly: bool = False,
) -> Plan:
    """All runs of a selection, on the suite's models or on one of the user's own (`model`: "package.module:Class").

    exactly: every case on `nproc` ranks, no fewer.
    Raises AdapterError for an unknown strategy name, ModelError for a model that cannot serve as a reference.
    """
    own = use_model(model) if model else None
    seeds = tuple(seeds)
    lines = None if own is None else own_grid(model, own.model.length, own.model.learning_rate)
    wanted, found = set(strategies), Plan(too_large=too_large(tier, nproc, lines, exactly), model=model)
    grids = {
        (seed, part): list(all_cases(part, nproc, seed, lines, exactly))
        for seed in seeds
        for part in {tier, tier_of_variants(tier)}
    }
    known: set[str] = set()
    for spec in adapters:
        claims = claims_of(spec)
        names = {s.name for s in claims.strategies}
        if names & known:
            raise AdapterError(f"{spec}: another adapter has a strategy {min(names & known)}, too; rename one")
        known |= names
        found.frameworks[spec] = claims.framework
        for strategy in claims.strategies:
            if not wanted or strategy.name in wanted:
                found.strategies.append(strategy.name)
                found.unmatched += unmatched(strategy)
                found.too_large += [t for t in split_too_large_for(strategy, tier, nproc) if t not in found.too_large]
                part = tier_of_variants(tier) if strategy.variant and spec in BUILTIN else tier
                for seed in seeds:
                    add_strategy(found, spec, claims, strategy, part, grids[seed, part], first=seed == min(seeds))
    if wanted - known:
        raise AdapterError(f"--strategy {sorted(wanted - known)[0]}: unknown; known are {', '.join(sorted(known))}")
    return found


def tier_of_variants(tier: Tier) -> Tier:
    """What variants of other strategies run in a tier: by default the quick cases."""
    return "quick" if tier == "default" else tier


def all_cases(tier: Tier, nproc: int, seed: int, lines: tuple[Row, ...] | None, exactly: bool) -> Iterator[Case]:
    """The cases of the grid, of data parallelism and of split models (a user's own model is not split)."""
    yield from cases(tier, nproc, seed, lines, exactly)
    if lines is None:
        yield from split_cases(tier, nproc, seed, exactly)
        yield from split_cases(tier, nproc, seed, exactly, STALE_GRID)


def split_too_large_for(strategy: Strategy, tier: Tier, nproc: int) -> list[tuple[str, int]]:
    """(case name, world) of the split models in a strategy's grid that need more ranks than `nproc`."""
    grid = STALE_GRID if strategy.asynchronous else SPLIT_GRID
    return [
        (name, lay.world)
        for name, lay in split_too_large(tier, nproc, grid)
        if strategy.meant_for(lay, strategy.asynchronous)
    ]


def unmatched(strategy: Strategy) -> list[str]:
    """Declared divergences whose pattern fits no case of the whole grid: a slip of the pen, or an entry to remove."""
    sizes = {nproc for row in GRID for nproc in row.worlds}
    names = {f"{row.name}-w{world}" for row in GRID for nproc in sizes for world in worlds_of(row, nproc)}
    names |= {f"{row.name}-{label}" for row in SPLIT_GRID + STALE_GRID for label in row.layouts + row.more}
    return [
        f"known divergence {k.case!r} of {strategy.name} matches no case of the grid"
        for k in strategy.known
        if not fnmatch.filter(names, k.case)
    ]


def add_strategy(
    found: Plan, spec: str, claims: Claims, strategy: Strategy, tier: Tier, grid: list[Case], first: bool
) -> None:
    """Add the runs of one strategy on one seed; what is kept and what travels is looked at on the first seed alone."""
    seating = seating_of(claims)
    for case in (case for case in grid if strategy.meant_for(case.layout, case.asynchronous)):
        reason = strategy.refusal(case) or reference_refusal(case)
        if reason is not None:
            if first:
                found.not_claimed.append(NotClaimed(strategy.name, case.name, reason))
            continue
        case = usable(case, strategy.contract)
        found.runs.append(Run("update", spec, strategy, case, seating))
        if not first:
            continue
        if strategy.restores and includes(tier, restored_from(case)):
            found.runs.append(Run("restore", spec, strategy, case, seating))
        if strategy.replays and includes(tier, REPLAY_CASES.get(row_of(case))):
            found.runs.append(Run("replay", spec, strategy, case, seating))
        if strategy.algorithm is not None and includes(tier, tier_of(LEDGER_CASES, row_of(case))):
            found.runs.append(Run("ledger", spec, strategy, case, seating))


def restored_from(case: Case) -> Tier | None:
    """From which tier on a case is restored, too (None: never)."""
    if case.asynchronous:
        return STALE_RESTORE_CASES.get(row_of(case))
    if case.layout.splits:
        return SPLIT_RESTORE_CASES.get(row_of(case))
    return tier_of(RESTORE_CASES | OWN_RESTORE_CASES, row_of(case))


def reference_refusal(case: Case) -> str | None:
    """Why the reference has no truth for a case, or None if it does."""
    if case.model.own and case.precision.weights == "float64" and not loaded(case.model.own).double:
        return "precision float64: the model rounds to less inside"
    return None


def row_of(case: Case) -> str:
    """Name of the grid's row and world that a case was made from, without its seed."""
    return re.sub(r"-s\d+$", "", case.name)


def usable(case: Case, contract: Callable[[Case], Semantics]) -> Case:
    """The case, or the same with the next seed that under its rules keeps its distance from discontinuities."""
    if case.seed == 0 and contract(case) == case.semantics:
        return case  # a test shows that the grid itself keeps its distance
    for attempt in range(64):
        candidate = case.replace(seed=case.seed + attempt * SEED_STRIDE)
        if keeps_distance(candidate, contract(candidate)):
            return candidate
    raise CaseError(f"case {case.name!r}: no seed near {case.seed} keeps its distance from discontinuities")


@lru_cache(maxsize=4096)
def keeps_distance(case: Case, semantics: Semantics) -> bool:
    """Whether rounding cannot change a branch of a case under these rules."""
    try:
        refuse_discontinuities(trajectory(case, semantics))
    except CaseError:
        return False
    return True
