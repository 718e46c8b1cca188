"""`python -m equivtests timeline`: what a schedule prescribes, how layers are cut, and what ranks really ran."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from commands import Ended, Home, together

from equivtests.cases.case import dumps
from equivtests.cases.split_grid import split_named
from equivtests.cli import main
from equivtests.reference.schedules import prescribed
from equivtests.reference.timeline import Costs, Timeline
from equivtests.report import timeline as picture

PIPELINES = '''
from equivtests.adapters.adapter import Claims
from equivtests.adapters.textbook.pipeline import PipelineParallel, pipeline_strategy
from equivtests.adapters.torch_adapter import SHOWN
from equivtests.reference.schedules import prescribed


class Pipeline(PipelineParallel):
    """Says 1f1b; what it then runs, or shows, is in its name."""

    schedule = "1f1b"

    def claims(self):
        return Claims((pipeline_strategy("mine", {"dp", "pp"}, "1f1b"),))


class Gpipe(Pipeline):
    def operations(self):
        return prescribed("gpipe", self.layout.pp, 1, len(self.batches))[self.pipe.index]


class Misshown(Pipeline):
    """One pipeline shows its operations in reverse, of the other one a rank shows nothing."""

    def show_update(self, observe, loss):
        def show(kind, *words, **more):
            if kind != "timeline" or self.ranks.rank != 3:
                observe(kind, *words, **more)

        if self.ranks.rank in (0, 2):
            self.ran.reverse()
        super().show_update(show, loss)


class Quiet(Pipeline):
    def claims(self):
        return Claims((pipeline_strategy("mine", {"dp", "pp"}, "1f1b", observes=SHOWN),))


class Broken(Pipeline):
    def operations(self):
        raise RuntimeError("no such operation")
'''


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    home = Home(tmp_path_factory.mktemp("home"), pipelines=PIPELINES)
    chain = split_named("chain-pp2")
    assert chain is not None
    empty = chain.replace(name="empty", windows=((((0,),),), *chain.windows))
    (home.directory / "empty.json").write_text(dumps(empty))
    yield home
    assert home.left() == []


@pytest.fixture(scope="module")
def ran(home: Home) -> dict[str, Ended]:
    words = {
        "textbook": "--strategy 1f1b --case chain-dp2-pp2 --update 1 --svg ran.svg",
        "gpipe": "--adapter pipelines:Gpipe --case chain-pp2 --strategy mine",
        "misshown": "--adapter pipelines:Misshown --case chain-dp2-pp2",
        "broken": "--adapter pipelines:Broken --case chain-pp2",
    }
    return together({n: (home, ("python", "-m", "equivtests", "timeline", *w.split())) for n, w in words.items()})


def table(timeline: Timeline, schedule: str, version: int = 0) -> str:
    return picture.text(timeline, schedule, {o: version for operations in timeline for o in operations})


# ------------------------------------------------------------------------------------ what is prescribed


PRESCRIBED = {
    "--schedule 1f1b --stages 4 --microbatches 8": ("1f1b", 4, 1, 8),
    "--schedule interleaved-1f1b --stages 8 --virtual 2 --microbatches 4": ("interleaved-1f1b", 4, 2, 4),
    "--schedule zbv --stages 4 --microbatches 3": ("zbv", 2, 2, 3),
}


@pytest.mark.parametrize("line", PRESCRIBED)
def test_what_a_schedule_prescribes_is_shown_and_drawn(line: str, capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    name, *numbers = PRESCRIBED[line]
    timeline = prescribed(name, *numbers)
    assert main(["timeline", *line.split(), "--svg", str(tmp_path / "a.svg")]) == 0
    assert capsys.readouterr().out == picture.text(timeline, name) + "\n"
    assert (tmp_path / "a.svg").read_text() == picture.svg(timeline, name)


def test_layers_are_cut_by_their_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", "--cut-by-cost", "3,1,1,1,0.5", "--stages", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "layers by stage: 1, 4 (layout.stages of a case)",
        "costs by stage: 3, 7/2",
    ]


@pytest.mark.parametrize(("layers", "stages"), [("3,1,1,1", (3, 3)), ("4,1,1,1", (4, 3))])
def test_a_schedule_is_timed_by_the_costs_of_its_stages(layers: str, stages: tuple[int, int], capsys) -> None:
    line = f"--cut-by-cost {layers} --stages 2 --schedule gpipe --microbatches 2"
    assert main(["timeline", *line.split()]) == 0
    shown = picture.text(prescribed("gpipe", 2, 1, 2), "gpipe", costs=Costs(stages=stages))
    assert capsys.readouterr().out.endswith(f"costs by stage: {stages[0]}, {stages[1]}\n{shown}\n")


REFUSED = {
    "": r"choose what to show: --schedule NAME .*",
    "--schedule 2f2b --stages 4 --microbatches 8": r"--schedule 2f2b: unknown; known are gpipe, 1f1b, .*",
    "--schedule 1f1b --stages 4": r"--schedule 1f1b needs --stages and --microbatches",
    "--schedule 1f1b --stages 4 --microbatches 0": r"1f1b: ranks, stages .* must be at least 1, got 4, 1, 0",
    "--schedule 1f1b --stages 4 --virtual 2 --microbatches 8": r"1f1b has 1 stage\(s\) per rank, got 2",
    "--schedule zbv --stages 3 --microbatches 8": r"--stages 3 does not make ranks of 2 stage\(s\) each; .*",
    "--schedule looped-bfs --stages 3 --virtual 0 --microbatches 8": r"--stages 3 does not make ranks of 0 stage.*",
    "--schedule dualpipev --stages 4 --microbatches 3": r"dualpipev needs at least as many micro-batches .*",
    "--schedule 1f1b --case chain-pp2": r"--schedule shows what is prescribed, .*: leave one out",
    "--strategy 1f1b": r"--strategy needs the --case that it is to run .*",
    "--strategy 1f1b --case chain-pp3x": r"no case 'chain-pp3x': write ROW-wWORLD such as .* or ROW-LAYOUT such as .*",
    "--strategy 1f1b --case chain-pp32": r"case 'chain-pp32': 32 stages, but only 4 layers: .*",
    "--strategy tp --case linear-tp2": r"strategy tp shows no timeline; `equivtests list` names the schedules",
    "--strategy tp --case chain-pp2": r"strategy tp does not claim case 'chain-pp2': .*",
    "--case chain-pp2": r"\d+ strategies claim the case: choose one with --adapter and --strategy",
    "--adapter pipelines:Quiet --case chain-pp2": r"strategy mine shows no timeline; .*",
    "--strategy 1f1b --case chain-pp2 --update 2": r"--update 2: chain-pp2 has the updates 0 to 1",
    "--strategy 1f1b --case empty.json": r"--update 0: it has no valid token, so that nothing runs; choose another",
    "--cut-by-cost 1,2 --stages 3": r"--cut-by-cost 1,2 --stages 3: 2 layers cannot be cut into 3 stages .*",
    "--cut-by-cost 1,2": r"--cut-by-cost 1,2 --stages None: 2 layers cannot be cut into 0 stages .*",
    "--cut-by-cost 1,x --stages 2": r"--cut-by-cost 1,x --stages 2: Invalid literal for Fraction: 'x'",
    "--cut-by-cost 1,0 --stages 2": r"--cut-by-cost 1,0 --stages 2: costs must be positive, .*",
    "--cut-by-cost 1/0 --stages 1": r"--cut-by-cost 1/0 --stages 1: .*",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_shown_is_refused_in_one_line(
    line: str, home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home.directory)
    monkeypatch.syspath_prepend(home.directory)
    assert main(["timeline", *line.split()]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert re.fullmatch("equivtests: " + REFUSED[line], output.err.strip()), output.err


# ---------------------------------------------------------------------------------------------- what ran


def test_every_pipeline_shows_what_it_ran_and_with_which_weights(ran: dict[str, Ended], home: Home) -> None:
    lines = ran["textbook"].ended_with(0).output
    shown = table(prescribed("1f1b", 2, 1, 4), "1f1b", version=1)
    for ranks in ("0, 2", "1, 3"):
        assert f"1f1b on chain-dp2-pp2, update 1, ranks {ranks}\n{shown}\n\n" in lines
    assert ran["textbook"].lines[-1].startswith("PASS         1f1b-chain-dp2-pp2  (worst ratios: ")
    pictures = [(home.directory / name).read_text() for name in ("ran.svg", "ran-1.svg")]
    assert pictures[0] == pictures[1] and pictures[0].startswith("<svg") and "weight version 1" in pictures[0]


def test_another_order_than_the_schedules_is_shown_as_it_ran_and_fails(ran: dict[str, Ended]) -> None:
    output = ran["gpipe"].ended_with(1).output
    assert table(prescribed("gpipe", 2, 1, 8), "1f1b") in output
    assert "mine on chain-pp2: update 0: schedule of pipeline of ranks 0, 1 differs first" in output
    assert "1f1b prescribes the backward of micro-batch 0 on stage 0" in output
    assert "reproduce: python -m equivtests run chain-pp2 --adapter pipelines:Gpipe --strategy mine" in output


def test_an_order_that_cannot_have_run_is_shown_without_times(ran: dict[str, Ended]) -> None:
    lines = ran["misshown"].ended_with(1).lines
    orders = prescribed("1f1b", 2, 1, 4)
    reverse = [" ".join(f"{o.microbatch}{o.kind}@0" for o in reversed(operations)) for operations in orders]
    assert lines[1:3] == [f"rank 0: {reverse[0]}", f"rank 1: {reverse[1]}"]
    assert lines[3].startswith("this timeline cannot be executed: rank 0: ")


def test_a_rank_that_shows_no_timeline_is_named(ran: dict[str, Ended]) -> None:
    lines = ran["misshown"].ended_with(1).lines
    at = lines.index("mine on chain-dp2-pp2, update 0, ranks 1, 3")
    assert lines[at + 1] == "no timeline: rank 3 showed no timeline"


def test_a_run_that_breaks_shows_its_error(ran: dict[str, Ended]) -> None:
    assert ran["broken"].ended_with(1).lines[0].startswith("ERROR        mine-chain-pp2")
    assert "no such operation" in ran["broken"].lines[1]
