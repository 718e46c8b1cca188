"""Commands that run cases on ranks: certify, run, reproduce, adapter-check."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from equivtests.adapters.adapter import Strategy
from equivtests.adapters.builtin import BUILTIN
from equivtests.campaign import campaign
from equivtests.cases.fixture import Fixture, find, read
from equivtests.chapters.certify import certify
from equivtests.chapters.check_adapter import check_adapter
from equivtests.chapters.plan import claims_of, plan
from equivtests.chapters.records import write_record
from equivtests.chapters.run import Chapter, Result, Run, seating_of
from equivtests.cli.options import case_of, pools_of, repeating, runs_of
from equivtests.errors import AdapterError, CaseError
from equivtests.judge.check import Verdict
from equivtests.ranks.leader import LaunchedPools
from equivtests.report.certificate import Selection
from equivtests.report.tally import RATIOS

OK = (Verdict.PASS, Verdict.KNOWN)


def certify_all(options: argparse.Namespace) -> int:
    """All runs that the options declare, a line for each, and the certificate."""
    adapters, seeds = tuple(options.adapter) or BUILTIN, tuple(range(options.seeds))
    with closing(pools_of(options, options.nproc)) as pools:
        launched = isinstance(pools, LaunchedPools)
        chosen = (adapters, options.tier, pools.nproc, options.strategy, seeds, options.model, launched)
        declared = plan(*chosen)

        def selection() -> Selection:
            where = (pools.nproc, options.backend, options.device, options.tier, adapters, tuple(options.strategy))
            return Selection(*where, seeds, options.threshold, pools.settings, options.model)

        passed, lines = campaign(declared, pools, selection, options.certificate, options.keep_records, print_result)
    print("\n".join(lines))
    return 0 if passed else 1


def run_case(options: argparse.Namespace) -> int:
    return run_all(options, runs_of(options, case_of(options)), options.keep_records)


def run_all(options: argparse.Namespace, runs: list[Run], records: Path | None = None) -> int:
    with closing(pools_of(options, max(run.case.layout.world for run in runs))) as pools:
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
        return run_all(options, list(claimed(options, fixture)))
    strategy = next((s for s in claims_of(fixture.faulty).strategies if s.name == fixture.strategy), None)
    if strategy is None:
        raise CaseError(f"{options.fixture}: {fixture.faulty} has no strategy {fixture.strategy!r}")
    command = f"python -m equivtests reproduce {options.fixture}"
    run = Run(fixture.chapter, fixture.faulty, strategy, fixture.case, command=command)
    with closing(pools_of(options, run.case.layout.world)) as pools:
        result = certify(pools, run)
    print(f"{fixture.name}: {fixture.mistake} ({fixture.source})")
    print_result(result)
    first = result.first
    shown = result.verdict is Verdict.FAIL and first is not None and first.quantity == fixture.quantity
    print("reproduced" if shown else f"not reproduced: expected FAIL by {fixture.quantity}")
    return 0 if shown else 1


def claimed(options: argparse.Namespace, fixture: Fixture) -> Iterable[Run]:
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
                seating, command = seating_of(claims), repeating(options, strategy.name)
                yield Run(fixture.chapter, spec, strategy, fixture.case, seating, command)
    if not found:
        raise AdapterError(f"no strategy of {', '.join(options.adapter)} claims this case")


def chapter_refusal(strategy: Strategy, chapter: Chapter) -> str | None:
    """Why a strategy is not judged in a chapter."""
    if chapter == "restore" and not strategy.restores:
        return "restoring"
    if chapter == "replay" and not strategy.replays:
        return "replaying"
    if chapter == "ledger" and strategy.algorithm is None:
        return "the ledger: it declares no algorithm"
    return None


def adapter_check(options: argparse.Namespace) -> int:
    with closing(pools_of(options, options.nproc)) as pools:
        lines, ok = check_adapter(pools, options.adapter)
    print("\n".join(lines))
    return 0 if ok else 1


def print_result(result: Result) -> None:
    worst = result.judgement.worst()
    ratios = ", ".join(f"{q} {worst[q]:.2g}" for q in RATIOS if q in worst)
    print(f"{result.verdict:12} {result.run.id}" + (f"  (worst ratios: {ratios})" if ratios else ""))
    for line in result.explanation:
        print(f"  {line}")
    if result.verdict is Verdict.PASS and result.run.cannot_tell:
        scheme = result.run.contract.staleness.versions
        print(f"  this case cannot tell {scheme} from {', '.join(result.run.cannot_tell)}")
