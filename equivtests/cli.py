"""The command line: list, certify, run, reproduce, export, check-record, judge, shrink, adapter-check, doctor.

Where a launcher (torchrun, srun, Ray) started this process as one of several, the commands that need ranks use those.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from equivtests import __version__
from equivtests.adapters.adapter import Strategy
from equivtests.adapters.builtin import BUILTIN
from equivtests.campaign import campaign
from equivtests.cases.case import Case, dumps, loads
from equivtests.cases.fixture import Fixture, find, read
from equivtests.cases.grid import GRID, TIERS, named, own_grid
from equivtests.cases.split_grid import SPLIT_GRID, split_named
from equivtests.chapters.certify import certify
from equivtests.chapters.check_adapter import check_adapter
from equivtests.chapters.export import export
from equivtests.chapters.ledger import judge_ledger_run
from equivtests.chapters.plan import claims_of, plan, use_model
from equivtests.chapters.records import read_record, write_record
from equivtests.chapters.run import Chapter, Result, Run, seating_of
from equivtests.chapters.update import judge_update
from equivtests.errors import AdapterError, CaseError, EquivtestsError
from equivtests.explain.shrink import shrink
from equivtests.judge.check import QUANTITIES, Verdict
from equivtests.judge.form import form_problems
from equivtests.judge.tolerance import THRESHOLD
from equivtests.own import loaded
from equivtests.ranks.launch import Launch, launch_of
from equivtests.ranks.leader import LaunchedPools, follow
from equivtests.ranks.pools import Pools, Runs
from equivtests.report.certificate import Selection
from equivtests.report.doctor import doctor
from equivtests.report.tally import RATIOS

OK = (Verdict.PASS, Verdict.KNOWN)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 if everything passed, 1 if something did not, 2 for bad input."""
    options = parser().parse_args(arguments)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # where adapters lie; `python -m` does the same
    try:
        if getattr(options, "model", ""):
            use_model(options.model)
        launch = launch_of(os.environ) if hasattr(options, "backend") else None
        return options.command(options) if launch is None else on_launched_ranks(launch, options)
    except EquivtestsError as error:
        print(f"equivtests: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None:
            raise
        print(f"equivtests: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def on_launched_ranks(launch: Launch, options: argparse.Namespace) -> int:
    """The process of rank 0 obeys the command line; all others obey it. All end with the same exit status."""
    if launch.rank > 0:
        return follow(launch, options.backend, options.device)
    options.pools = LaunchedPools(launch, options.backend, options.device, options.deadline)
    status = 2
    try:
        status = options.command(options)
        return status
    finally:
        options.pools.end(status)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="equivtests", description=__doc__)
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=about, description=about)
        sub.set_defaults(command=run)
        return sub

    listing = command("list", list_everything, "show strategies, cases and compared quantities")
    listing.add_argument("--adapter", action="append", default=[], metavar="MODULE:CLASS")
    certifying = command(
        "certify", certify_all, "the whole suite, without pytest; also on ranks that a launcher started"
    )
    _on_ranks(certifying)
    _selection(certifying)
    running = command("run", run_case, "run one case on every strategy that claims it")
    running.add_argument("case", type=Path, metavar="CASE.json")
    _on_ranks(running)
    running.add_argument("--keep-records", type=Path, metavar="DIR", help="keep what the ranks observed")
    replay = command("reproduce", reproduce, "replay a fixture: with the planted mistake, or with an adapter of yours")
    replay.add_argument("fixture", metavar="FIXTURE.json")
    _on_ranks(replay)
    judging = command("judge", judge_record, "judge a record directory, without processes")
    judging.add_argument("record", type=Path, metavar="RECORD_DIR")
    _model(judging)
    exporting = command("export", export_case, "write a case as plain files, for a program that does not run our code")
    exporting.add_argument("directory", type=Path, metavar="CASE_DIR")
    exporting.add_argument(
        "--case", required=True, metavar="NAME_OR_FILE", help="ROW-wWORLD of the grid, or a case file"
    )
    _model(exporting)
    complete = command("check-record", check_record, "name what is missing or malformed in a record directory")
    complete.add_argument("record", type=Path, metavar="RECORD_DIR")
    _model(complete)
    checking = command("adapter-check", adapter_check, "find out in seconds whether an adapter itself works")
    checking.add_argument("adapter", metavar="MODULE:CLASS")
    checking.add_argument("--nproc", type=int, default=2, help="ranks to try it on (default 2)")
    _where(checking)
    shrinking = command("shrink", shrink_case, "make a failing case small")
    shrinking.add_argument("case", type=Path, metavar="CASE.json")
    shrinking.add_argument("output", type=Path, metavar="SMALLER.json")
    _on_ranks(shrinking)
    command("doctor", show_doctor, "print what this machine can run")
    return top


def _selection(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--nproc", type=int, default=4, help="largest number of ranks (default 4); a launcher's own counts"
    )
    sub.add_argument("--tier", choices=TIERS, default="default", help="how much of the grid (default: default)")
    sub.add_argument("--seeds", type=int, default=1, metavar="N", help="run the grid on seeds 0..N-1 (default 1)")
    sub.add_argument("--threshold", type=seconds, default=THRESHOLD, help=f"largest ratio that passes ({THRESHOLD:g})")
    sub.add_argument("--certificate", type=Path, default=Path("equivtests-certificate.json"), metavar="FILE")
    sub.add_argument("--keep-records", type=Path, metavar="DIR", help="keep what the ranks observed")


ON_RANKS = {"backend": "gloo", "device": "cpu", "deadline": 30.0}


def _on_ranks(sub: argparse.ArgumentParser) -> None:
    instead = "instead of the built-in ones"
    sub.add_argument("--adapter", action="append", default=[], metavar="MODULE:CLASS", help=instead)
    sub.add_argument("--strategy", action="append", default=[], metavar="NAME")
    _model(sub)
    _where(sub)


def _model(sub: argparse.ArgumentParser) -> None:
    trusted = "the model of your own that the case is about: imports and runs its code"
    sub.add_argument("--model", default="", metavar="MODULE:CLASS", help=trusted)


def _where(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    sub.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    sub.add_argument("--deadline", type=seconds, default=30.0, metavar="SECONDS")


def seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text}: a positive number is needed")
    return value


# ---------------------------------------------------------------------------------------------- commands


def list_everything(options: argparse.Namespace) -> int:
    print("strategies")
    for spec in options.adapter or BUILTIN:
        for strategy in claims_of(spec).strategies:
            features = ", ".join(sorted(strategy.features)) or "none"
            print(f"  {strategy.name:18} {spec}\n  {'':18} features: {features}")
    print("\ncases")
    for row in GRID:
        worlds = ", ".join(map(str, row.worlds))
        print(f"  {row.name:24} {row.tier:8} worlds {worlds:11} {row.why}")
    print(f"\ntiers (each holds those before it): {', '.join(TIERS)}")
    print("\ncompared quantities, in causal order")
    print("  " + "\n  ".join(QUANTITIES))
    return 0


def run_case(options: argparse.Namespace) -> int:
    case = loads(_text(options.case), str(options.case))
    return _run_all(options, runs_of(options, case), options.keep_records)


def runs_of(options: argparse.Namespace, case: Case) -> list[Run]:
    """The update runs of a case that the options choose. Raises AdapterError if there is none."""
    if case.model.own:
        loaded(case.model.own)  # or ModelError
    runs = [
        Run("update", spec, strategy, case, seating_of(claims), command=_command(options, strategy.name))
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


def _command(options: argparse.Namespace, strategy: str) -> str:
    """The command line that repeats one strategy of this one."""
    given = [("adapter", spec) for spec in options.adapter]
    given += [("model", options.model)] if options.model else []
    given += [(name, getattr(options, name)) for name, usual in ON_RANKS.items() if getattr(options, name) != usual]
    verb = f"reproduce {options.fixture}" if hasattr(options, "fixture") else f"run {options.case}"
    return f"python -m equivtests {verb}{''.join(f' --{n} {v}' for n, v in given)} --strategy {strategy}"


def _pools(options: argparse.Namespace, nproc: int) -> Pools | LaunchedPools:
    """The ranks of the launcher, or else of our own, at most `nproc`."""
    return getattr(options, "pools", None) or Pools(nproc, options.backend, options.device, options.deadline)


def _largest(runs: list[Run]) -> int:
    return max(run.case.layout.world for run in runs)


def certify_all(options: argparse.Namespace) -> int:
    """All runs that the options declare, a line for each, and the certificate."""
    adapters, seeds = tuple(options.adapter) or BUILTIN, tuple(range(options.seeds))
    with closing(_pools(options, options.nproc)) as pools:
        launched = isinstance(pools, LaunchedPools)
        chosen = (adapters, options.tier, pools.nproc, options.strategy, seeds, options.model, launched)
        declared = plan(*chosen)

        def selection() -> Selection:
            where = (pools.nproc, options.backend, options.device, options.tier, adapters, tuple(options.strategy))
            return Selection(*where, seeds, options.threshold, pools.settings, options.model)

        passed, lines = campaign(declared, pools, selection, options.certificate, options.keep_records, print_result)
    print("\n".join(lines))
    return 0 if passed else 1


def _run_all(options: argparse.Namespace, runs: list[Run], records: Path | None = None) -> int:
    with closing(_pools(options, _largest(runs))) as pools:
        results = [certify(pools, run) for run in runs]
    for result in results:
        print_result(result)
        for i, record in enumerate(result.records):
            if records is not None:
                write_record(records / result.run.id / f"record-{i}", result.run.case, result.run.strategy, record)
    return 0 if all(result.verdict in OK for result in results) else 1


def reproduce(options: argparse.Namespace) -> int:
    """With the fixture's own faulty adapter: 0 if the mistake shows. With --adapter: 0 if the adapter passes."""
    fixture = read(find(options.fixture))
    if options.adapter:
        return _run_all(options, list(_claimed(options, fixture)))
    strategy = next((s for s in claims_of(fixture.faulty).strategies if s.name == fixture.strategy), None)
    if strategy is None:
        raise CaseError(f"{options.fixture}: {fixture.faulty} has no strategy {fixture.strategy!r}")
    command = f"python -m equivtests reproduce {options.fixture}"
    run = Run(fixture.chapter, fixture.faulty, strategy, fixture.case, command=command)
    with closing(_pools(options, _largest([run]))) as pools:
        result = certify(pools, run)
    print(f"{fixture.name}: {fixture.mistake} ({fixture.source})")
    print_result(result)
    first = result.first
    shown = result.verdict is Verdict.FAIL and first is not None and first.quantity == fixture.quantity
    print("reproduced" if shown else f"not reproduced: expected FAIL by {fixture.quantity}")
    return 0 if shown else 1


def _claimed(options: argparse.Namespace, fixture: Fixture) -> Iterable[Run]:
    """Runs of a fixture's case by the adapters that the options name; what is not claimed is said."""
    found = 0
    for spec in options.adapter:
        claims = claims_of(spec)
        for strategy in claims.strategies:
            reason = strategy.refusal(fixture.case) or chapter_refusal(strategy, fixture.chapter)
            if reason is not None:
                print(f"NOT CLAIMED {strategy.name}: {reason}")
            elif not options.strategy or strategy.name in options.strategy:
                found += 1
                seating, command = seating_of(claims), _command(options, strategy.name)
                yield Run(fixture.chapter, spec, strategy, fixture.case, seating, command)
    if not found:
        raise AdapterError(f"no strategy of {', '.join(options.adapter)} claims this case")


def chapter_refusal(strategy: Strategy, chapter: Chapter) -> str | None:
    """Why a strategy is not judged in a chapter."""
    if chapter == "restore" and not strategy.restores:
        return "restoring"
    if chapter == "ledger" and strategy.algorithm is None:
        return "the ledger: it declares no algorithm"
    return None


def judge_record(options: argparse.Namespace) -> int:
    case, strategy, record = read_record(options.record)
    if record.start:
        print(f"a restored run: judged from update {record.start} on")
    command = f"python -m equivtests judge {options.record}"
    run = Run("update", "(a record)", strategy, case, command=command)
    results = [judge_update(run, record)]
    print_result(results[0])
    if strategy.algorithm is not None and len(record.collectives) == record.world:
        print(f"collectives and bytes, by the declared algorithm {strategy.algorithm}:")
        results.append(judge_ledger_run(replace(run, chapter="ledger"), record))
        print_result(results[1])
    return 0 if all(result.verdict in OK for result in results) else 1


def export_case(options: argparse.Namespace) -> int:
    case = _case(options)
    export(case, options.directory)
    print(f"{options.directory}: {case.name}, {case.updates} updates on {case.layout.world} ranks")
    return 0


def _case(options: argparse.Namespace) -> Case:
    """The case of a file, or of a name in the grid (that of the user's own model, where there is one)."""
    path = Path(options.case)
    if path.suffix == ".json" or path.exists():
        return loads(_text(path), options.case)
    own = use_model(options.model).model if options.model else None
    if own is not None:
        return named(options.case, own_grid(options.model, own.length, own.learning_rate))
    return split_named(options.case) or named(options.case)


def check_record(options: argparse.Namespace) -> int:
    """Exit status: 0 if the record can be judged, 1 if something is missing or malformed."""
    case, strategy, record = read_record(options.record)
    problems = form_problems(case, strategy, record)
    if problems:
        print("\n  ".join([f"{options.record}: {len(problems)} to mend", *problems]))
        return 1
    counted = f"{len(record.observations)} observations of {record.world} ranks"
    print(f"{options.record}: complete, {counted}; next: python -m equivtests judge {options.record}")
    return 0


def adapter_check(options: argparse.Namespace) -> int:
    with closing(_pools(options, options.nproc)) as pools:
        lines, ok = check_adapter(pools, options.adapter)
    print("\n".join(lines))
    return 0 if ok else 1


def shrink_case(options: argparse.Namespace) -> int:
    """Write the smallest case found that still fails first by the same quantity."""
    case = loads(_text(options.case), str(options.case))
    runs = runs_of(options, case)
    if len(runs) != 1:
        raise AdapterError(f"{len(runs)} strategies claim the case: choose one with --adapter and --strategy")
    with closing(_pools(options, _largest(runs))) as pools:
        quantity = failing_quantity(pools, runs[0])
        if quantity is None:
            raise CaseError(f"{options.case}: {runs[0].strategy.name} does not fail on it, there is nothing to shrink")
        smaller = shrink(case, lambda c: failing_quantity(pools, replace(runs[0], case=c)) == quantity)
    options.output.write_text(dumps(smaller))
    print(f"{options.output}: {smaller.updates} updates on {smaller.layout.world} ranks, still fails by {quantity}")
    return 0


def failing_quantity(pools: Runs, run: Run) -> str | None:
    """The quantity that fails first, None if the run does not fail or the case is refused."""
    if run.strategy.refusal(run.case) is not None:
        return None
    try:
        result = certify(pools, run, confirm=False)
    except (EquivtestsError, IndexError):
        return None
    return result.first.quantity if result.first is not None and result.verdict is Verdict.FAIL else None


def show_doctor(options: argparse.Namespace) -> int:
    print("\n".join(doctor()))
    return 0


def print_result(result: Result) -> None:
    worst = result.judgement.worst()
    ratios = ", ".join(f"{q} {worst[q]:.2g}" for q in RATIOS if q in worst)
    print(f"{result.verdict:12} {result.run.id}" + (f"  (worst ratios: {ratios})" if ratios else ""))
    for line in result.explanation:
        print(f"  {line}")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        raise CaseError(f"{path}: not text: {error}") from None
