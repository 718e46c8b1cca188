"""`python -m equivtests explain-versions`, and version tables as text and as pictures."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from equivtests.cases.staleness import SCHEME_MEANING
from equivtests.cli import main
from equivtests.cli.versions import FORMULAS, OTHER_NAMES
from equivtests.reference.versions import RULES, Table, Used, version_table
from equivtests.report import versions as report


def explained(line: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["explain-versions", *line.split()]) == 0
    return capsys.readouterr().out.splitlines()


def written(path: Path, table: object) -> Path:
    path.write_text(json.dumps(table))
    return path


# ------------------------------------------------------------------------------------------------ a scheme

PIPEDREAM = """
pipedream (stashing): stages: 4, mini-batches: 8
each stage uses the newest weights that it has, for both passes of a mini-batch (PipeDream)
W_s(t+1) = W_s(t) - lr · ∂_s f_t(W_0(v_0(t)), …, W_{P-1}(v_{P-1}(t))), v_s(t) = max(0, t - (P-1-s))

       mini-batch
stage  0  1  2  3  4  5  6  7
    0  0  0  0  0  1  2  3  4
    1  0  0  0  1  2  3  4  5
    2  0  0  1  2  3  4  5  6
    3  0  1  2  3  4  5  6  7

v: weights after v updates of the stage, in both passes

most live versions by stage, in 1F1B order without flushes: 4, 3, 2, 1
updates behind by stage, in the steady state, from mini-batch 3 on: 3, 2, 1, 0
parts from newest (synchronous) at update 2 (index 1)
parts from vertical-sync at update 2 (index 1)
parts from two-buffered at update 2 (index 1)
parts from unstashed at update 2 (index 1)
parts from predicted at update 3 (index 2)
"""


def test_a_scheme_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    lines = explained("--schedule pipedream --stages 4 --minibatches 8", capsys)
    assert lines == PIPEDREAM.strip().splitlines()


@pytest.mark.parametrize("name", [*RULES, *OTHER_NAMES])
def test_every_name_shows_the_table_of_its_scheme_in_words_and_as_a_formula(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scheme = OTHER_NAMES.get(name, name)
    lines = explained(f"--schedule {name} --stages 3 --minibatches 6", capsys)
    assert lines[1] == SCHEME_MEANING[scheme] and lines[2].endswith(FORMULAS[scheme])
    assert "\n".join(lines).count(report.text(version_table(scheme, 3, 6))) == 1
    assert len([line for line in lines if line.startswith(("parts from ", "cannot be told apart from "))]) == 5


@pytest.mark.parametrize("scheme", RULES)
def test_the_formula_of_a_scheme_gives_its_table(scheme: str) -> None:
    """The first expression is the forward version; what else there is of v_s(t) = … is words."""
    expression = re.match(r"v_s\(t\) = (t$|max\(.*?\)+(?= |$))", FORMULAS[scheme])
    assert expression is not None
    P, M = 4, 9
    for t, row in enumerate(version_table(scheme, P, M)):
        assert [used.forward for used in row] == [eval(expression[1], {"t": t, "s": s, "P": P}) for s in range(P)]


def line_of(lines: list[str], beginning: str) -> str:
    (found,) = [line for line in lines if line.startswith(beginning)]
    return found.removeprefix(beginning)


def test_schemes_that_these_numbers_cannot_tell_apart_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    lines = explained("--schedule 2bw --stages 2 --minibatches 9", capsys)
    assert "cannot be told apart from vertical-sync with these numbers" in lines
    lines = explained("--schedule 2bw --stages 3 --minibatches 9", capsys)
    assert "parts from vertical-sync at update 3 (index 2)" in lines
    lines = explained("--schedule pipedream --stages 3 --minibatches 1", capsys)
    assert len([line for line in lines if line.startswith("cannot be told apart from ")]) == 5


def test_a_missing_stash_that_linear_stages_hide_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """tests/test_versions.py shows the same of the gradients."""
    lines = explained("--schedule no-stashing --stages 2 --minibatches 5", capsys)
    assert "parts from stashing at update 2 (index 1); where the first stage is one linear layer, never" in lines
    lines = explained("--schedule no-stashing --stages 3 --minibatches 5", capsys)
    assert "parts from stashing at update 2 (index 1)" in lines


def test_staleness_of_both_passes_is_shown_where_they_differ(capsys: pytest.CaptureFixture[str]) -> None:
    lines = explained("--schedule unstashed --stages 3 --minibatches 5", capsys)
    steady = "updates behind by stage, in the steady state, from mini-batch "
    assert line_of(lines, steady) == "2 on: forward 2, 1, 0; backward 0, 0, 0"
    lines = explained("--schedule stashing --stages 4 --minibatches 3", capsys)
    assert line_of(lines, steady) == "3 on (not reached): 3, 2, 1, 0"


def test_synchronous_training_flushes_and_keeps_one_version(capsys: pytest.CaptureFixture[str]) -> None:
    lines = explained("--schedule gpipe --stages 3 --minibatches 4 --microbatches 5", capsys)
    assert lines[0] == "gpipe (newest): stages: 3, mini-batches: 4, micro-batches of each: 5"
    assert "most live versions by stage, in 1F1B order, flushed after every mini-batch: 1, 1, 1" in lines


def test_predictions_are_not_counted_as_versions_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    lines = explained("--schedule spectrain --stages 3 --minibatches 6", capsys)
    counted = line_of(lines, "most live versions by stage, in 1F1B order without flushes: ")
    assert counted == "3, 2, 1; predictions from them, one for each mini-batch in flight, not counted"


def test_two_buffered_counts_groups_of_micro_batches(capsys: pytest.CaptureFixture[str]) -> None:
    for words, group in (("", 4), (" --microbatches 6", 6)):
        lines = explained(f"--schedule pipedream-2bw --stages 4 --minibatches 5{words} --timeline", capsys)
        assert lines[0].endswith(f"stages: 4, mini-batches: 5, micro-batches of each: {group}")
        assert "most live versions by stage, in 1F1B order without flushes: 2, 2, 2, 2" in lines
        assert f"1f1b: 4 ranks, 1 stage(s) per rank, {5 * group} micro-batches" in lines


def test_the_timeline_shows_the_version_behind_every_pass(capsys: pytest.CaptureFixture[str]) -> None:
    lines = explained("--schedule unstashed --stages 2 --minibatches 3 --timeline", capsys)
    ranks = [line.split()[1:] for line in lines if line.startswith(("   0  0F", "   1  .."))]
    passes = [[word for word in rank if "@" in word] for rank in ranks]
    assert passes == [
        ["0F@0", "1F@0", "0B@0", "2F@1", "1B@1", "2B@2"],
        ["0F@0", "0B@0", "1F@1", "1B@1", "2F@2", "2B@2"],
    ]


def test_the_timeline_of_synchronous_training_drains(capsys: pytest.CaptureFixture[str]) -> None:
    lines = explained("--schedule 1f1b --stages 2 --minibatches 2 --timeline", capsys)
    (first,) = [line.split()[1:] for line in lines if line.startswith("   0  0F@0")]
    assert first == ["0F@0", "..", "..", "..", "0B@0", "--", "1F@1", "..", "..", "..", "1B@1", "--"]


# ------------------------------------------------------------------------------------------------ own tables


def test_a_table_of_ones_own_is_explained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Half of vertical sync: the second stage stays one version behind what it has."""
    rows = [[[max(0, t - 2), max(0, t - 2)], [max(0, t - 1), max(0, t - 1)]] for t in range(6)]
    lines = explained(f"--table {written(tmp_path / 'half.json', rows)}", capsys)
    assert lines[0] == f"{tmp_path}/half.json: stages: 2, mini-batches: 6"
    assert "most live versions by stage, in 1F1B order without flushes: 3, 2" in lines
    assert "updates behind by stage, mini-batches 2 to 5: 2, 1" in lines
    assert "parts from vertical-sync at update 3 (index 2)" in lines


@pytest.mark.parametrize("scheme", RULES)
def test_a_scheme_that_is_written_out_cannot_be_told_apart_from_itself(
    scheme: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [[[u.forward, u.backward, u.ahead] for u in row] for row in version_table(scheme, 3, 6)]
    lines = explained(f"--table {written(tmp_path / 'own.json', rows)}", capsys)
    called = "newest (synchronous)" if scheme == "newest" else scheme
    assert [line for line in lines if line.startswith("cannot")] == [
        f"cannot be told apart from {called} with these numbers"
    ]


def test_a_table_that_a_pipeline_without_flushes_cannot_run_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = written(tmp_path / "eager.json", [[[0, 0], [0, 0]], [[1, 1], [1, 1]]])
    lines = explained(f"--table {path}", capsys)
    assert line_of(lines, "live versions by stage: unknown, for it cannot run in 1F1B order without flushes: ") == (
        "the forward of micro-batch 1 on stage 0 uses weight version 1; the newest there is 0"
    )


ONE = [[[0, 0], [0, 0]]]
FORM = r"not a table: \[mini-batch\]\[stage\] = \[forward, backward\] or \[forward, backward, ahead\]"
REFUSED_TABLES = {
    "newer": ([*ONE, [[0, 0], [0, 2]]], "", r"mini-batch 1: .* a window cannot use a version that is made after it"),
    "negative": ([*ONE, [[0, 0], [0, -1]]], "", r"mini-batch 1: staleness.table: \(forward, backward\[, ahead\]\)"),
    "one": ([[[0], [0, 0]]], "", r"mini-batch 0: staleness.table: \(forward, backward\[, ahead\]\)"),
    "uneven": ([*ONE, [[0, 0]]], "", r"mini-batch 1 has 1 stage\(s\), needed are 2"),
    "stages": (ONE, "--stages 3", r"mini-batch 0 has 2 stage\(s\), needed are 3"),
    "none": (ONE, "--stages 0", r"mini-batch 0 has 2 stage\(s\), needed are 0"),
    "length": (ONE, "--minibatches 4", r"1 mini-batch\(es\), but --minibatches 4"),
    "empty": ([], "", FORM),
    "no-stages": ([[]], "", FORM),
    "no-versions": ([[[]]], "", FORM),
    "words": ([[["0", "0"]]], "", FORM),
    "truth": ([[[False, False]]], "", FORM),
    "object": ({"0": [[0, 0]]}, "", FORM),
}


@pytest.mark.parametrize("name", REFUSED_TABLES)
def test_a_table_that_cannot_be_is_refused_in_one_line(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table, line, words = REFUSED_TABLES[name]
    path = written(tmp_path / "t.json", table)
    assert refused(f"--table {path} {line}", capsys).startswith(f"{path}: ")
    assert re.fullmatch(words, refused(f"--table {path} {line}", capsys).removeprefix(f"{path}: "))


def refused(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["explain-versions", *line.split()]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    return output.err.strip().removeprefix("equivtests: ")


def test_a_file_that_is_no_table_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert refused(f"--table {tmp_path}/none.json", capsys) == f"{tmp_path}/none.json: No such file or directory"
    for text, words in (("{", "not JSON: "), ("[" * 100_000, "not JSON: ")):
        (tmp_path / "t.json").write_text(text)
        assert refused(f"--table {tmp_path}/t.json", capsys).startswith(f"{tmp_path}/t.json: {words}")


REFUSED = {
    "": r"choose what to explain: --schedule NAME --stages P --minibatches M, or --table FILE .*",
    "--schedule 2bw --table t.json": r"choose what to explain: .*",
    "--schedule pipedreams --stages 4 --minibatches 8": r"--schedule pipedreams: unknown; known are newest, stashing, .*",
    "--schedule table --stages 4 --minibatches 8": r"--schedule table: unknown; .*",
    "--schedule 2bw --stages 4": r"--schedule 2bw needs --stages and --minibatches",
    "--schedule 2bw --minibatches 4": r"--schedule 2bw needs --stages and --minibatches",
    "--schedule 2bw --stages 0 --minibatches 4": r"--schedule 2bw: stages and mini-batches must be at least 1, got 0 and 4",
    "--schedule 2bw --stages 4 --minibatches -1": r"--schedule 2bw: stages and .* must be at least 1, got 4 and -1",
    "--schedule 2bw --stages 4 --minibatches 8 --microbatches 3": (
        r"--microbatches 3: two-buffered with 4 stages needs groups of at least 4"
    ),
    "--schedule gpipe --stages 4 --minibatches 8 --microbatches 0": (
        r"--microbatches 0: newest with 4 stages needs groups of at least 1"
    ),
    "--schedule pipedream --stages 4 --minibatches 8 --microbatches 2": (
        r"--microbatches 2: with stashing every micro-batch makes an update; leave it out"
    ),
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_explained_is_refused_in_one_line(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.fullmatch(REFUSED[line], refused(line, capsys))


# -------------------------------------------------------------------------------------- beside what was observed

TABLE: Table = ((Used(0, 0), Used(0, 0)), (Used(0, 0, 1), Used(1, 1)), (Used(1, 2), Used(2, 2)))
OBSERVED = {(0, 0): (0, 0), (0, 1): (0, 0), (0, 2): (1, 1), (1, 0): (0, 0), (1, 2): (1, 2), (7, 7): (7, 7)}


def test_cells_that_differ_from_the_table_are_marked_and_those_that_are_missing() -> None:
    lines = report.text(TABLE, OBSERVED).splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["stage", "0", "1", "2"],
        ["0", "0", "0+1", "1!1/2"],
        ["1", "0", "1?", "1/2!2"],
    ]
    assert lines[5:] == list(report.legend(TABLE, OBSERVED)) and len(lines[5:]) == 5


def test_what_was_observed_as_prescribed_reads_like_the_table_alone() -> None:
    seen = {(s, t): (u.forward, u.backward) for t, row in enumerate(TABLE) for s, u in enumerate(row)}
    assert report.text(TABLE, seen) == report.text(TABLE)
    assert report.svg(TABLE, "a", seen) == report.svg(TABLE, "a")


# ---------------------------------------------------------------------------------------------------- pictures

SVG = "{http://www.w3.org/2000/svg}"


def boxes(picture: str) -> list[ElementTree.Element]:
    """The groups of a picture, one per cell, stage by stage."""
    return list(ElementTree.fromstring(picture).iter(f"{SVG}g"))


def fills(box: ElementTree.Element) -> list[str]:
    return [rect.get("fill", "") for rect in box.iter(f"{SVG}rect")][:2]


def test_the_picture_of_a_scheme_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = explained(f"--schedule pipedream --stages 4 --minibatches 8 --svg {tmp_path}/a.svg", capsys)
    picture = (tmp_path / "a.svg").read_text()
    assert picture == report.svg(version_table("stashing", 4, 8), lines[0])
    assert len(boxes(picture)) == 4 * 8


def test_every_box_has_the_colours_of_its_versions_and_says_them() -> None:
    colours = report.COLOURS
    found = boxes(report.svg(version_table("unstashed", 3, 12), "unstashed"))
    third, last = found[2], found[11]
    assert fills(third) == [colours[0], colours[2]]
    assert fills(last) == [colours[9 % len(colours)], colours[11 % len(colours)]]
    assert third.findtext(f"{SVG}title") == "stage 0, mini-batch 2: forward pass version 0, backward pass version 2"
    assert third.findtext(f"{SVG}text") == "0/2"


def test_boxes_that_differ_have_a_border_of_their_own_and_show_what_was_used() -> None:
    found = boxes(report.svg(TABLE, "table", OBSERVED))
    marked = [
        n for n, box in enumerate(found) if report.MARK in {rect.get("stroke") for rect in box.iter(f"{SVG}rect")}
    ]
    assert marked == [2, 5]
    assert fills(found[5]) == [report.COLOURS[1], report.COLOURS[2]]
    assert (
        found[5].findtext(f"{SVG}title", "").endswith("forward pass version 1, backward pass version 2; prescribed: 2")
    )


def test_a_picture_says_what_it_shows_to_those_who_do_not_see_it() -> None:
    top = ElementTree.fromstring(report.svg(TABLE, "a < b & c", OBSERVED))
    assert top.get("role") == "img" and top.get("aria-labelledby") == "title description"
    assert top.findtext(f"{SVG}title") == "a < b & c"
    assert (top.findtext(f"{SVG}desc") or "").startswith("stage 0: 0, 0+1, 1!1/2; stage 1: 0, 1?, 1/2!2; v: ")


@pytest.mark.parametrize(("P", "M"), [(1, 1), (2, 3), (4, 30)])
def test_everything_lies_inside_the_picture(P: int, M: int) -> None:
    top = ElementTree.fromstring(report.svg(version_table("predicted", P, M), "predicted"))
    width, height = (int(top.get(side, "")) for side in ("width", "height"))
    for rect in top.iter(f"{SVG}rect"):
        x, y, w, h = (int(rect.get(name, "0")) for name in ("x", "y", "width", "height"))
        assert x + w <= width and y + h <= height
    for text in top.iter(f"{SVG}text"):
        before = len(text.text or "") * report.CHARACTER // (2 if text.get("text-anchor") == "middle" else 1)
        assert int(text.get("x", "")) + before <= width and int(text.get("y", "")) < height
