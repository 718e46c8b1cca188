"""The command timeline: what a pipeline schedule prescribes, or what the ranks of a pipeline really ran."""

from __future__ import annotations

import argparse
from contextlib import closing
from fractions import Fraction
from pathlib import Path

from equivtests.cases.layout import Group
from equivtests.chapters.certify import certify
from equivtests.chapters.run import Result, Run
from equivtests.cli.options import case_of, on_ranks, only_run, pools_of
from equivtests.cli.runs import OK, print_result
from equivtests.errors import AdapterError, CaseError
from equivtests.judge.schedule import Versions, pipeline_of
from equivtests.judge.versions import observed_versions, pipelines, run_of
from equivtests.judge.view import View
from equivtests.reference.expectation import expect
from equivtests.reference.schedules import SCHEDULES, prescribed
from equivtests.reference.stages import cut_by_cost
from equivtests.reference.timeline import EQUAL, Costs, Timeline
from equivtests.reference.versions import table_of
from equivtests.report.timeline import orders, svg, text
from equivtests.report.versions import text as version_text

WHAT = (
    "choose what to show: --schedule NAME --stages S --microbatches M (what it prescribes), "
    "--strategy NAME --case CASE (what ranks run), or --cut-by-cost COSTS --stages S (layers of stages)"
)


def add_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--schedule", metavar="NAME", help=f"what a schedule prescribes: {', '.join(SCHEDULES)}")
    sub.add_argument("--stages", type=int, metavar="S", help="stages of the whole model, over all ranks")
    sub.add_argument("--virtual", type=int, metavar="V", help="stages of each rank (default: the schedule's, or 1)")
    sub.add_argument("--microbatches", type=int, metavar="M", help="micro-batches of an update")
    costs = "costs of the layers, C,C,…: cut them into stages whose most expensive one costs least"
    sub.add_argument("--cut-by-cost", metavar="COSTS", help=costs)
    sub.add_argument("--case", metavar="CASE", help="run it, with --strategy: a case of the grid, or a case file")
    sub.add_argument("--update", type=int, default=0, metavar="U", help="update to show of what ran (default 0)")
    sub.add_argument("--svg", type=Path, metavar="FILE", help="also write a picture; FILE-1, … of further pipelines")
    on_ranks(sub)


def show_timeline(options: argparse.Namespace) -> int:
    if options.schedule and (options.strategy or options.case):
        raise CaseError("--schedule shows what is prescribed, --strategy and --case show what ran: leave one out")
    if options.strategy or options.case:
        return show_what_ran(options)
    if not options.schedule and not options.cut_by_cost:
        raise CaseError(WHAT)
    costs = costs_of_stages(options) if options.cut_by_cost else EQUAL
    if options.schedule:
        timeline = prescribed_by(options)
        print(text(timeline, options.schedule, costs=costs))
        if options.svg:
            options.svg.write_text(svg(timeline, options.schedule, costs=costs))
    return 0


# ------------------------------------------------------------------------------------ what is prescribed


def prescribed_by(options: argparse.Namespace) -> Timeline:
    """The timeline of a schedule. Raises CaseError for one that does not exist, or is not defined for the numbers."""
    name, stages, count = options.schedule, options.stages, options.microbatches
    if name not in SCHEDULES:
        raise CaseError(f"--schedule {name}: unknown; known are {', '.join(SCHEDULES)}")
    if stages is None or count is None:
        raise CaseError(f"--schedule {name} needs --stages and --microbatches")
    virtual = (SCHEDULES[name].chunks or 1) if options.virtual is None else options.virtual
    if virtual < 1 or stages % virtual:
        raise CaseError(f"--stages {stages} does not make ranks of {virtual} stage(s) each; choose another --virtual")
    try:
        return prescribed(name, stages // virtual, virtual, count)
    except ValueError as error:
        raise CaseError(str(error)) from None


def costs_of_stages(options: argparse.Namespace) -> Costs:
    """Costs of the stages that the layers make; says how they are cut."""
    try:
        layers = [Fraction(word) for word in options.cut_by_cost.split(",")]
        sizes = cut_by_cost(layers, options.stages or 0)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        costs = Costs(stages=tuple(sum(layers[i : i + n]) for i, n in zip(starts, sizes, strict=True)))
    except (ValueError, ZeroDivisionError) as error:
        raise CaseError(f"--cut-by-cost {options.cut_by_cost} --stages {options.stages}: {error}") from None
    print(f"layers by stage: {', '.join(map(str, sizes))} (layout.stages of a case)")
    print(f"costs by stage: {', '.join(map(str, costs.stages))}")
    return costs


# ---------------------------------------------------------------------------------------------- what ran


def show_what_ran(options: argparse.Namespace) -> int:
    """Run a case, and show the timeline of every pipeline. Exit status as of `run`."""
    if not options.case:
        raise CaseError("--strategy needs the --case that it is to run (cases: `equivtests list`)")
    run = only_run(options, case_of(options))
    refuse_without_timeline(run, options.update)
    with closing(pools_of(options, run.case.layout.world)) as pools:
        result = certify(pools, run, confirm=False)
    for record in result.records[:1]:
        view = View(run.case, run.strategy, record, expect(run.case, run.contract))
        if run.case.asynchronous:
            show_stale_run(view, options.svg)
            continue
        for number, ranks in enumerate(run.case.layout.partition("pp")):
            show_pipeline(view, options.update, ranks, options.svg and numbered(options.svg, number))
    print_result(result)
    return status_of(result)


def status_of(result: Result) -> int:
    return 0 if result.verdict in OK else 1


def refuse_without_timeline(run: Run, update: int) -> None:
    """Raise for a run that will show no timeline of this update."""
    if run.strategy.schedule is None or "timeline" not in run.strategy.observes:
        raise AdapterError(f"strategy {run.strategy.name} shows no timeline; `equivtests list` names the schedules")
    if not 0 <= update < run.case.updates:
        raise CaseError(f"--update {update}: {run.case.name} has the updates 0 to {run.case.updates - 1}")
    if expect(run.case, run.contract).steps[update].skipped:
        raise CaseError(f"--update {update}: it has no valid token, so that nothing runs; choose another")


def show_pipeline(view: View, update: int, ranks: Group, picture: Path | None) -> None:
    print(f"{view.strategy.name} on {view.case.name}, update {update}, ranks {', '.join(map(str, ranks))}")
    try:
        timeline, versions = pipeline_of(view, update, ranks)
    except ValueError as error:
        print(f"no timeline: {error}\n")
        return
    print(drawn(timeline, str(view.strategy.schedule), versions, picture), end="\n\n")


def show_stale_run(view: View, picture: Path | None) -> None:
    """The whole run of pipelines that are never flushed: its timeline, and the versions, prescribed beside observed."""
    table = table_of(view.case, view.expectation.semantics.staleness)
    for number, ranks in enumerate(pipelines(view)):
        print(f"{view.strategy.name} on {view.case.name}, all updates, ranks {', '.join(map(str, ranks))}")
        try:
            timeline, versions = run_of(view, ranks)
        except ValueError as error:
            print(f"no timeline: {error}\n")
            continue
        print(drawn(timeline, "", versions, picture and numbered(picture, number)), end="\n\n")
        print(version_text(table, observed_versions(view, ranks)), end="\n\n")


def drawn(timeline: Timeline, schedule: str, versions: Versions, picture: Path | None) -> str:
    """The table; of ranks that would wait for each other for ever, and yet ended, only their operations."""
    try:
        table = text(timeline, schedule, versions)
        if picture is not None:
            picture.write_text(svg(timeline, schedule, versions))
    except ValueError as error:
        return f"{orders(timeline, versions)}\n{error}"
    return table


def numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-{number}{path.suffix}") if number else path
