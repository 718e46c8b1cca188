"""What is wrong with a rule, a case or an observation of an asynchronous run is said in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from equivtests.adapters.adapter import MANDATORY, Strategy
from equivtests.cases.case import Case, Semantics, dumps, loads
from equivtests.cases.layout import layout_of
from equivtests.cases.stale_grid import STALE_GRID
from equivtests.cases.staleness import Staleness
from equivtests.chapters.plan import problems_of
from equivtests.errors import CaseError
from equivtests.judge.check import Verdict
from equivtests.judge.checks import vacuity
from equivtests.judge.form import form_problems
from equivtests.judge.versions import live, stream, versions
from equivtests.judge.view import View
from equivtests.record.observation import Observation, Place, Record
from equivtests.reference.expectation import expect
from equivtests.reference.schedules import prescribed
from equivtests.reference.timeline import KIND_CODES
from equivtests.reference.versions import by_operation, live_by_stage, version_table

SHOWS = MANDATORY | {"timeline", "live"}


def in_grid(name: str, layout: str) -> Case:
    return next(row.make(layout_of(layout), 0) for row in STALE_GRID if row.name == name)


CHAIN = in_grid("stale-chain", "pp3")
SERVED = in_grid("arrivals-mlp", "w4")


def declares(rule: Any) -> Strategy:
    return Strategy(
        "mine", axes=frozenset({"pp"}), asynchronous="pipeline", schedule="1f1b", observes=SHOWS, semantics=rule
    )


def table(cell: Callable[[int, int], Any]) -> Callable[[Case], Semantics]:
    """A rule that gives a table, cell by cell."""
    return lambda case: stale(versions="table", table=rows(cell, case.updates, case.layout.pp))


def rows(cell: Callable[[int, int], Any], updates: int, stages: int) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(cell(t, s) for s in range(stages)) for t in range(updates))


def stale(**fields: Any) -> Semantics:
    return Semantics(staleness=Staleness(**fields))


# ------------------------------------------------------------------------------------------------ what is declared


DECLARED: dict[str, tuple[Any, str]] = {
    "no semantics": (
        Staleness(versions="stashing"),
        r"give Semantics\(…\) or a function from the case to it, not Staleness",
    ),
    "a function of none": (lambda case: None, "not NoneType"),
    "a function that raises": (
        lambda case: 1 / 0,
        "the function raised ZeroDivisionError on stale-chain-pp3: division by zero",
    ),
    "a function without argument": (lambda: Semantics(), "the function raised TypeError"),
    "an unknown scheme": (stale(versions="stash"), 'staleness.versions: expected one of .* got "stash"'),
    "a short table": (
        lambda c: stale(versions="table", table=rows(lambda t, s: (0, 0), 2, 3)),
        "needs 8 windows of 3 stage",
    ),
    "a narrow table": (
        lambda c: stale(versions="table", table=rows(lambda t, s: (0, 0), 8, 1)),
        "needs 8 windows of 3 stage",
    ),
    "an empty table": (stale(versions="table"), "staleness.table belongs to versions = table"),
    "numbers for rows": (table(lambda t, s: t), r"table\[0\]\[0\]: expected a list, got 0"),
    "empty rows": (table(lambda t, s: ()), r"staleness.table: \(forward, backward"),
    "floats": (table(lambda t, s: (0.5, 0.5)), r"table\[0\]\[0\]\[0\]: expected int, got 0.5"),
    "numpy's numbers": (table(lambda t, s: (np.int64(0), np.int64(0))), "in Python's own numbers"),
    "a later version": (table(lambda t, s: (t + 1, t)), "a version that is made after it"),
    "a negative version": (table(lambda t, s: (t - 1, t - 1)), r"staleness.table: \(forward, backward"),
    "a bound without arrivals": (stale(versions="stashing", bound=1), "staleness.bound is of arrivals"),
    "a drain beyond the case": (stale(versions="stashing", drains=(99,)), "there is no window 99, the case has 8"),
    "a drain that is no list": (stale(versions="stashing", drains=3), "staleness.drains: expected a list, got 3"),
    "arrivals in a pipeline": (stale(versions="arrivals"), "versions = arrivals needs asynchronous = server"),
}


@pytest.mark.parametrize("what", DECLARED)
def test_a_declared_rule_that_is_none_of_the_case_is_named_with_its_strategy(what: str) -> None:
    rule, words = DECLARED[what]
    with pytest.raises(CaseError, match=f"^strategy 'mine': semantics.*{words}"):
        declares(rule).contract(CHAIN)


def test_a_table_may_be_written_as_lists() -> None:
    found = declares(table(lambda t, s: [max(0, t - 2 + s)] * 2)).contract(CHAIN)
    assert found.staleness.table[3] == ((1, 1), (2, 2), (3, 3))


@pytest.mark.parametrize(
    ("field", "value", "known"),
    [
        ("asynchronous", "pipelin", "pipeline, server"),
        ("schedule", "1F1B", "1f1b, "),
        ("microbatches", "two", "any, multiple, one"),
    ],
)
def test_an_unknown_word_of_a_pipeline_is_refused(field: str, value: str, known: str) -> None:
    with pytest.raises(ValueError, match=f"strategy 'mine': {field}: unknown '{value}'; known are {known}"):
        Strategy("mine", **{field: value})  # type: ignore[arg-type]


def test_a_timeline_without_a_schedule_is_refused() -> None:
    """Versions could not be held to anything."""
    unheld = Strategy("mine", asynchronous="pipeline", observes=SHOWS)
    assert "names no schedule" in next(problems_of(unheld))
    assert not list(problems_of(declares(stale(versions="stashing"))))


# ------------------------------------------------------------------------------------------------ case files


def changed(case: Case, **fields: Any) -> str:
    return json.dumps(json.loads(dumps(case)) | fields)


FILES: dict[str, tuple[str, str]] = {
    "no server": (
        changed(SERVED, windows=[[[[3]] if r == u else [] for r in range(4)] for u in range(4)]),
        "the servers",
    ),
    "nobody is fed": (changed(SERVED, windows=[[[], [], [], []]]), "window 0 does not"),
    "two are fed": (changed(SERVED, windows=[[[[3]], [[2]], [], []]]), "window 0 does not"),
    "arrivals of nobody": (changed(CHAIN, semantics={"staleness": {"versions": "arrivals"}}), "asynchronous = server"),
    "a row of nothing": (
        changed(CHAIN, semantics={"staleness": {"versions": "table", "table": [[[], [], []]] * 8}}),
        "table",
    ),
    "a bound": (changed(CHAIN, semantics={"staleness": {"versions": "stashing", "bound": 1}}), "staleness.bound"),
    "a drain": (changed(CHAIN, semantics={"staleness": {"versions": "stashing", "drains": [9]}}), "no window 9"),
    "half an arrival": (
        changed(SERVED, semantics={"staleness": {"versions": "arrivals", "arrivals": [[0]]}}),
        "2 items",
    ),
}


@pytest.mark.parametrize("what", FILES)
def test_a_case_file_that_contradicts_itself_is_refused(what: str) -> None:
    text, words = FILES[what]
    with pytest.raises(CaseError, match=words):
        loads(text)


# ------------------------------------------------------------------------------------------------ what is shown


def record(change: Callable[[np.ndarray, int], Any], kind: str = "timeline") -> Record:
    """What the stages of a run with stashing ran, by update, and the versions that they kept; one kind changed."""
    orders, made = prescribed("1f1b", 3, 1, CHAIN.updates), version_table("stashing", 3, CHAIN.updates)
    used, kept = by_operation(made, orders), live_by_stage(made, orders)
    shown = Record(3)
    for rank, order in enumerate(orders):
        since: list[list[int]] = []
        for o in order:
            since.append([KIND_CODES[o.kind], o.stage, o.microbatch, used[o]])
            if o.kind == "B":
                for name, value in (("timeline", np.array(since)), ("live", np.array(kept[rank]))):
                    array = np.asarray(change(value, rank) if name == kind else value)
                    where = Place(array.shape)
                    shown.observations.append(Observation(name, name, rank, o.microbatch, None, where, "", array))
                since = []
    return shown


def said(shown: Record) -> list[str]:
    """What the checks of order, versions and copies say."""
    strategy = declares(stale(versions="stashing"))
    view = View(CHAIN, strategy, shown, expect(CHAIN, strategy.contract(CHAIN)))
    checks = [*stream(view, 0), *(check for u in view.updates for check in versions(view, u))]
    return [check.detail for check in (checks if any(check.detail for check in checks) else live(view)) if check.detail]


TIMELINES: dict[str, tuple[Callable[[np.ndarray, int], Any], str]] = {
    "flat": (lambda rows, rank: rows.reshape(-1), r"showed at update 0 a timeline of shape (16,); it is (n, 4)"),
    "a number": (lambda rows, rank: 3, "a timeline of shape ()"),
    "three columns": (lambda rows, rank: rows[:, :3], "3 columns; needed are kind code, stage"),
    "floats": (lambda rows, rank: rows + 0.5, "must be integers"),
    "a stage that is none": (lambda rows, rank: rows + [0, 9, 0, 0], "on stage 9; 1f1b without flush prescribes"),
    "a version that is not made": (lambda rows, rank: rows + [0, 0, 0, 5], "used weight version 5; stashing says 0"),
    "a negative version": (lambda rows, rank: rows - [0, 0, 0, 1], "weight version is -1; it must not be negative"),
    "nothing": (lambda rows, rank: np.array([]), "ran 0 operations"),
}


@pytest.mark.parametrize("what", TIMELINES)
def test_a_timeline_that_cannot_be_read_or_be_is_named(what: str) -> None:
    change, words = TIMELINES[what]
    assert words in said(record(change))[0]


def test_the_timeline_as_it_has_to_be_passes() -> None:
    assert said(record(lambda rows, rank: rows)) == []


def test_live_is_of_every_rank_and_needs_no_place() -> None:
    """It is no copy of one number: three stages keep 3, 2 and 1 versions."""
    problems = form_problems(CHAIN, declares(stale(versions="stashing")), record(lambda rows, rank: rows))
    assert not [line for line in problems if line.startswith(("live", "timeline"))]
    assert said(record(lambda most, rank: most.reshape(1), "live")) == []
    assert said(record(lambda most, rank: most + 1, "live"))[0].startswith("stage 0 kept 4 versions")


def test_a_version_that_an_empty_window_did_not_make_cannot_be_used() -> None:
    empty = CHAIN.replace(windows=(*CHAIN.windows[:1], (((0, 0),),), *CHAIN.windows[2:]))
    semantics = table(lambda t, s: (t, t))(empty)
    with pytest.raises(
        CaseError, match="update 2 applies window 2, whose weights are of an update that is not made yet"
    ):
        expect(empty, semantics)


@pytest.mark.parametrize(("updates", "verdict"), [(1, Verdict.INCONCLUSIVE), (2, Verdict.PASS)])
def test_a_run_that_is_too_short_to_tell_staleness_is_inconclusive(updates: int, verdict: Verdict) -> None:
    """All schemes make the same first update."""
    short, rule = CHAIN.replace(windows=CHAIN.windows[:updates]), stale(versions="stashing")
    (check,) = vacuity(View(short, declares(rule), Record(3), expect(short, rule)))
    assert check.verdict is verdict


@pytest.mark.parametrize(("arrivals", "verdict"), [(0, Verdict.INCONCLUSIVE), (1, Verdict.PASS)])
def test_arrivals_of_which_none_is_stale_or_out_of_order_are_inconclusive(arrivals: int, verdict: Verdict) -> None:
    """arrivals: how many updates each gradient is behind, where it can be."""
    order = tuple((window, max(0, window - arrivals)) for window in range(SERVED.updates))
    rule = stale(versions="arrivals", arrivals=order)
    (check,) = vacuity(View(SERVED, declares(rule), Record(4), expect(SERVED, rule)))
    assert check.verdict is verdict
