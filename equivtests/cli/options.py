"""Options that several commands share, and what they choose: cases, runs, ranks."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from equivtests.adapters.builtin import BUILTIN
from equivtests.cases.case import Case, loads
from equivtests.cases.grid import TIERS, named, own_grid
from equivtests.cases.split_grid import SPLIT_GRID, split_named
from equivtests.cases.stale_grid import STALE_GRID
from equivtests.chapters.plan import claims_of, use_model
from equivtests.chapters.run import Run, seating_of
from equivtests.errors import AdapterError, CaseError
from equivtests.judge.tolerance import THRESHOLD
from equivtests.own import loaded
from equivtests.ranks.leader import LaunchedPools
from equivtests.ranks.pools import Pools

CASE = "a case of the grid (ROW-wWORLD or ROW-LAYOUT), or a case file"
ON_RANKS = {"backend": "gloo", "device": "cpu", "deadline": 30.0}


def selection(sub: argparse.ArgumentParser) -> None:
    """How much of the suite, and what becomes of it."""
    sub.add_argument(
        "--nproc", type=int, default=4, help="largest number of ranks (default 4); a launcher's own counts"
    )
    sub.add_argument("--tier", choices=TIERS, default="default", help="how much of the grid (default: default)")
    sub.add_argument("--seeds", type=int, default=1, metavar="N", help="run the grid on seeds 0..N-1 (default 1)")
    sub.add_argument("--threshold", type=positive, default=THRESHOLD, help=f"largest ratio that passes ({THRESHOLD:g})")
    sub.add_argument("--certificate", type=Path, default=Path("equivtests-certificate.json"), metavar="FILE")
    sub.add_argument("--keep-records", type=Path, metavar="DIR", help="keep what the ranks observed")


def on_ranks(sub: argparse.ArgumentParser) -> None:
    """Which strategies run, and where."""
    instead = "instead of the built-in ones"
    sub.add_argument("--adapter", action="append", default=[], metavar="MODULE:CLASS", help=instead)
    sub.add_argument("--strategy", action="append", default=[], metavar="NAME")
    own_model(sub)
    where(sub)


def own_model(sub: argparse.ArgumentParser) -> None:
    trusted = "the model of your own that the case is about: imports and runs its code"
    sub.add_argument("--model", default="", metavar="MODULE:CLASS", help=trusted)


def where(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    sub.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    sub.add_argument("--deadline", type=positive, default=30.0, metavar="SECONDS")


def positive(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text}: a positive number is needed")
    return value


def case_of(options: argparse.Namespace) -> Case:
    """The case of a file, or of a name in the grid (that of the user's own model, where there is one)."""
    path = Path(options.case)
    if path.suffix == ".json" or path.exists():
        return loads(text_of(path), options.case)
    own = use_model(options.model).model if options.model else None
    if own is not None:
        return named(options.case, own_grid(options.model, own.length, own.learning_rate))
    return split_named(options.case, SPLIT_GRID + STALE_GRID) or named(options.case)


def text_of(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        raise CaseError(f"{path}: not text: {error}") from None


def runs_of(options: argparse.Namespace, case: Case) -> list[Run]:
    """The update runs of a case that the options choose. Raises AdapterError if there is none."""
    if case.model.own:
        loaded(case.model.own)  # or ModelError
    runs = [
        Run("update", spec, strategy, case, seating_of(claims), command=repeating(options, strategy.name))
        for spec in options.adapter or BUILTIN
        for claims in [claims_of(spec)]
        for strategy in claims.strategies
        if strategy.name in options.strategy or (not options.strategy and strategy.refusal(case) is None)
    ]
    for run in runs:
        reason = run.strategy.refusal(case)
        if reason is not None:
            raise AdapterError(f"strategy {run.strategy.name} does not claim case {case.name!r}: {reason}")
    if not runs:
        raise AdapterError(f"no strategy claims case {case.name!r}; `equivtests list` shows what is claimed")
    return runs


def only_run(options: argparse.Namespace, case: Case) -> Run:
    """The one update run that the options choose. Raises AdapterError if there are several, or none."""
    runs = runs_of(options, case)
    if len(runs) != 1:
        raise AdapterError(f"{len(runs)} strategies claim the case: choose one with --adapter and --strategy")
    return runs[0]


def repeating(options: argparse.Namespace, strategy: str) -> str:
    """The command line that repeats one strategy of this one."""
    given = [("adapter", spec) for spec in options.adapter]
    given += [("model", options.model)] if options.model else []
    given += [(name, getattr(options, name)) for name, usual in ON_RANKS.items() if getattr(options, name) != usual]
    verb = f"reproduce {options.fixture}" if hasattr(options, "fixture") else f"run {options.case}"
    return f"python -m equivtests {verb}{''.join(f' --{n} {v}' for n, v in given)} --strategy {strategy}"


def pools_of(options: argparse.Namespace, nproc: int) -> Pools | LaunchedPools:
    """The ranks of the launcher, or else of our own, at most `nproc`."""
    return getattr(options, "pools", None) or Pools(nproc, options.backend, options.device, options.deadline)
