"""The whole suite without pytest: every declared run, on ranks of ours or on ranks that somebody else launched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from equivtests.chapters.certify import certify
from equivtests.chapters.plan import Plan
from equivtests.chapters.records import write_record
from equivtests.chapters.run import Result, Run
from equivtests.errors import EquivtestsError
from equivtests.judge.check import Verdict
from equivtests.ranks.pools import Runs
from equivtests.report import certificate
from equivtests.report.certificate import Selection
from equivtests.report.summary import summary


def campaign(
    plan: Plan,
    pools: Runs,
    selection: Callable[[], Selection],
    path: Path,
    keep: Path | None,
    say: Callable[[Result], None],
) -> tuple[bool, list[str]]:
    """Make all runs of a plan, write the certificate to `path`, and return (whether all passed, the closing lines).

    selection: asked after the runs, when the ranks have told their settings. keep: where records go. say: told every result.
    """
    results: list[dict[str, Any]] = []
    passed = bool(plan.runs)
    for run in plan.runs:
        result = outcome(pools, run, selection().threshold)
        say(result)
        passed = passed and result.verdict in (Verdict.PASS, Verdict.KNOWN)
        results.append(result.summary())
        keep_records(keep, result)
    data = certificate.certificate(selection(), plan, results)
    certificate.write(path, data)
    return passed, list(summary(plan, results, data, path))


def outcome(pools: Runs, run: Run, threshold: float) -> Result:
    """The result of a run; a case that the reference refuses is an ERROR that says so."""
    try:
        return certify(pools, run, threshold)
    except EquivtestsError as error:
        return Result(run, Verdict.ERROR, explanation=[f"{run.strategy.name} on {run.case.name}: {error}"])


def keep_records(directory: Path | None, result: Result) -> None:
    """Write the records of a run below a directory, if there is one."""
    if directory is None:
        return
    names = ("record",) if len(result.records) == 1 else tuple(f"record-{i}" for i in range(len(result.records)))
    for name, record in zip(names, result.records, strict=True):
        run = result.run
        write_record(directory / run.chapter / run.id / name, run.case, run.strategy, record)
