"""Commands about files of cases and records, which start no ranks: export, check-record, judge."""

from __future__ import annotations

import argparse
from dataclasses import replace

from equivtests.chapters.export import export
from equivtests.chapters.ledger import judge_ledger_run
from equivtests.chapters.records import read_record
from equivtests.chapters.run import Run
from equivtests.chapters.update import judge_update
from equivtests.cli.options import case_of
from equivtests.cli.runs import OK, print_result
from equivtests.judge.form import form_problems


def export_case(options: argparse.Namespace) -> int:
    case = case_of(options)
    export(case, options.directory)
    print(f"{options.directory}: {case.name}, {case.updates} updates on {case.layout.world} ranks")
    return 0


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
