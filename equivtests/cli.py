"""The command line: list, run, reproduce, judge, adapter-check, doctor."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path

from equivtests import __version__
from equivtests.adapters.builtin import BUILTIN
from equivtests.cases.case import loads
from equivtests.cases.fixture import find, read
from equivtests.cases.grid import GRID, TIERS
from equivtests.chapters.certify import certify
from equivtests.chapters.check_adapter import check_adapter
from equivtests.chapters.plan import claims_of
from equivtests.chapters.run import Result, Run
from equivtests.chapters.update import judge_update
from equivtests.errors import AdapterError, CaseError, EquivtestsError
from equivtests.judge.check import QUANTITIES, Verdict
from equivtests.ranks.pools import Pools
from equivtests.record.files import read_record, write_record
from equivtests.report.doctor import doctor
from equivtests.report.tally import RATIOS

OK = (Verdict.PASS, Verdict.KNOWN)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 if everything passed, 1 if something did not, 2 for bad input."""
    options = parser().parse_args(arguments)
    try:
        return options.command(options)
    except EquivtestsError as error:
        print(f"equivtests: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


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
    running = command("run", run_case, "run one case on every strategy that claims it")
    running.add_argument("case", type=Path, metavar="CASE.json")
    _on_ranks(running)
    running.add_argument("--keep-records", type=Path, metavar="DIR", help="keep what the ranks observed")
    replay = command("reproduce", reproduce, "replay a fixture: with the planted mistake, or with an adapter of yours")
    replay.add_argument("fixture", metavar="FIXTURE.json")
    _on_ranks(replay)
    judging = command("judge", judge_record, "judge a record directory, without processes")
    judging.add_argument("record", type=Path, metavar="RECORD_DIR")
    checking = command("adapter-check", adapter_check, "find out in seconds whether an adapter itself works")
    checking.add_argument("adapter", metavar="MODULE:CLASS")
    checking.add_argument("--nproc", type=int, default=2, help="ranks to try it on (default 2)")
    command("doctor", show_doctor, "print what this machine can run")
    return top


def _on_ranks(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--adapter", action="append", default=[], metavar="MODULE:CLASS", help="instead of the built-in ones")
    sub.add_argument("--strategy", action="append", default=[], metavar="NAME")
    sub.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    sub.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    sub.add_argument("--deadline", type=float, default=30.0, metavar="SECONDS")


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
    runs = [
        Run("update", spec, strategy, case, claims.isolation == "case")
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
    return _run_all(options, runs, getattr(options, "keep_records", None))


def _run_all(options: argparse.Namespace, runs: list[Run], records: Path | None = None) -> int:
    pools = Pools(max(r.case.layout.world for r in runs), options.backend, options.device, options.deadline)
    with closing(pools):
        results = [certify(pools, run) for run in runs]
    for result in results:
        print_result(result)
        for i, record in enumerate(result.records if records else []):
            write_record(records / result.run.id / f"record-{i}", result.run.case, result.run.strategy, record)
    return 0 if all(result.verdict in OK for result in results) else 1


def reproduce(options: argparse.Namespace) -> int:
    """With the fixture's own faulty adapter: 0 if the mistake shows. With --adapter: 0 if the adapter passes."""
    fixture = read(find(options.fixture))
    if options.adapter:
        return _run_all(options, list(_claimed(options.adapter, options.strategy, fixture.case, fixture.chapter)))
    strategy = next((s for s in claims_of(fixture.faulty).strategies if s.name == fixture.strategy), None)
    if strategy is None:
        raise CaseError(f"{options.fixture}: {fixture.faulty} has no strategy {fixture.strategy!r}")
    pools = Pools(fixture.case.layout.world, options.backend, options.device, options.deadline)
    with closing(pools):
        result = certify(pools, Run(fixture.chapter, fixture.faulty, strategy, fixture.case))
    print(f"{fixture.name}: {fixture.mistake} ({fixture.source})")
    print_result(result)
    first = result.first
    shown = result.verdict is Verdict.FAIL and first is not None and first.quantity == fixture.quantity
    print("reproduced" if shown else f"not reproduced: expected FAIL by {fixture.quantity}")
    return 0 if shown else 1


def _claimed(adapters: Iterable[str], names: list[str], case: object, chapter: str) -> Iterable[Run]:
    found = 0
    for spec in adapters:
        for strategy in claims_of(spec).strategies:
            reason = strategy.refusal(case)  # type: ignore[arg-type]
            if reason is not None:
                print(f"NOT CLAIMED {strategy.name}: {reason}")
            elif not names or strategy.name in names:
                found += 1
                yield Run(chapter, spec, strategy, case)  # type: ignore[arg-type]
    if not found:
        raise AdapterError(f"no strategy of {', '.join(adapters)} claims this case")


def judge_record(options: argparse.Namespace) -> int:
    case, strategy, record = read_record(options.record)
    result = judge_update(Run("update", "(a record)", strategy, case), record)
    print_result(result)
    return 0 if result.verdict in OK else 1


def adapter_check(options: argparse.Namespace) -> int:
    with closing(Pools(options.nproc)) as pools:
        lines, ok = check_adapter(pools, options.adapter)
    print("\n".join(lines))
    return 0 if ok else 1


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
    except OSError as error:
        raise CaseError(f"{path}: {error.strerror}") from None
