"""The command line: list, certify, run, timeline, explain-versions, reproduce, export, check-record, judge, shrink,
adapter-check, doctor.

Where a launcher (torchrun, srun, Ray) started this process as one of several, the commands that need ranks use those.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from equivtests import __version__
from equivtests.chapters.plan import use_model
from equivtests.cli import listing, options, records, runs, shrinking, timeline, versions
from equivtests.errors import EquivtestsError
from equivtests.ranks.launch import Launch, launch_of
from equivtests.ranks.leader import LaunchedPools, follow


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 if everything passed, 1 if something did not, 2 for bad input."""
    chosen = parser().parse_args(arguments)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # where adapters lie; `python -m` does the same
    try:
        if getattr(chosen, "model", ""):
            use_model(chosen.model)
        launch = launch_of(os.environ) if hasattr(chosen, "backend") else None
        return chosen.command(chosen) if launch is None else on_launched_ranks(launch, chosen)
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


def on_launched_ranks(launch: Launch, chosen: argparse.Namespace) -> int:
    """The process of rank 0 obeys the command line; all others obey it. All end with the same exit status."""
    if launch.rank > 0:
        return follow(launch, chosen.backend, chosen.device)
    chosen.pools = LaunchedPools(launch, chosen.backend, chosen.device, chosen.deadline)
    status = 2
    try:
        status = chosen.command(chosen)
        return status
    finally:
        chosen.pools.end(status)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="equivtests", description=__doc__)
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=about, description=about)
        sub.set_defaults(command=run)
        return sub

    listed = command("list", listing.list_everything, "show strategies, cases and compared quantities")
    listed.add_argument("--adapter", action="append", default=[], metavar="MODULE:CLASS")
    certifying = command("certify", runs.certify_all, "the whole suite, without pytest; also on ranks of a launcher")
    options.on_ranks(certifying)
    options.selection(certifying)
    running = command("run", runs.run_case, "run one case on every strategy that claims it")
    running.add_argument("case", metavar="CASE", help=options.CASE)
    options.on_ranks(running)
    running.add_argument("--keep-records", type=Path, metavar="DIR", help="keep what the ranks observed")
    timeline.add_options(command("timeline", timeline.show_timeline, "show what the ranks of a pipeline run, and when"))
    about = "show which weights the stages of an asynchronous pipeline use"
    versions.add_options(command("explain-versions", versions.explain_versions, about))
    replay = command("reproduce", runs.reproduce, "replay a fixture: with its mistake, or with an adapter of yours")
    replay.add_argument("fixture", metavar="FIXTURE.json")
    options.on_ranks(replay)
    judging = command("judge", records.judge_record, "judge a record directory, without processes")
    judging.add_argument("record", type=Path, metavar="RECORD_DIR")
    options.own_model(judging)
    exporting = command("export", records.export_case, "write a case as files, for a program of any kind")
    exporting.add_argument("directory", type=Path, metavar="CASE_DIR")
    exporting.add_argument("--case", required=True, metavar="CASE", help=options.CASE)
    options.own_model(exporting)
    complete = command("check-record", records.check_record, "name what is missing or malformed in a record directory")
    complete.add_argument("record", type=Path, metavar="RECORD_DIR")
    options.own_model(complete)
    checking = command("adapter-check", runs.adapter_check, "find out in seconds whether an adapter itself works")
    checking.add_argument("adapter", metavar="MODULE:CLASS")
    checking.add_argument("--nproc", type=int, default=2, help="ranks to try it on (default 2)")
    options.where(checking)
    smaller = command("shrink", shrinking.shrink_case, "make a failing case small")
    smaller.add_argument("case", metavar="CASE", help=options.CASE)
    smaller.add_argument("output", type=Path, metavar="SMALLER.json")
    options.on_ranks(smaller)
    command("doctor", listing.show_doctor, "print what this machine can run")
    return top
