"""Parameter servers that wait for no worker: which orders of arrival may be, and that a recorded one can be run again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equivtests.adapters.adapter import Strategy
from equivtests.adapters.textbook.async_server import RULES
from equivtests.cases.arrivals import declared, drawn, in_time, windows_by_worker
from equivtests.cases.case import Case, Layout, Model, Optimizer
from equivtests.cases.stale_grid import STALE_GRID, arrivals
from equivtests.cases.staleness import Staleness
from equivtests.chapters.plan import claims_of
from equivtests.chapters.records import read_record, write_record
from equivtests.chapters.replay import ordered, run_replay
from equivtests.chapters.run import Run
from equivtests.chapters.update import judge_update
from equivtests.errors import CaseError
from equivtests.explain.arrivals import dropped
from equivtests.judge.arrivals import Arrivals, broken_rules, disorder, settled
from equivtests.judge.arrivals import arrivals as check_arrivals
from equivtests.judge.check import Check, Verdict
from equivtests.judge.form import form_problems
from equivtests.judge.view import View
from equivtests.mutants.async_server import served
from equivtests.ranks.pools import Pools
from equivtests.record.observation import Observation, Place, Record
from equivtests.reference.expectation import expect

SPEC = "equivtests.adapters.textbook.async_server:AsyncServer"
GPT = Model("gpt", depth=1, features=("bias",))
CASE = served("by-hand", Model("linear"), Optimizer("sgd", lr=0.5))
LATE = ("refused", "dropped", "reweighted")


def strategy(name: str) -> Strategy:
    return next(s for s in claims_of(SPEC).strategies if s.name == name)


def in_grid(name: str) -> Case:
    return next(row.make(layout, 0) for row in STALE_GRID if row.name == name for layout in [Layout(4)])


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with closing(Pools(4, deadline=120.0)) as standing:
        yield standing


# ------------------------------------------------------------------------------------------------ orders that are drawn


@st.composite
def rules(draw: st.DrawFn) -> tuple[Case, int | None, str]:
    """A case with workers that take turns, a bound, and what becomes of late gradients."""
    workers, servers = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    windows, late = arrivals(workers, servers, draw(st.integers(1, 4))), draw(st.sampled_from(LATE))
    layout, seed = Layout(workers + servers), draw(st.integers(0, 10**6))
    case = Case("drawn", Model("linear"), windows, layout, accumulation=1, seed=seed, asynchronous="server")
    return case, draw(st.integers(0, 3) if late != "refused" else st.none() | st.integers(0, 3)), late


@given(rules())
def test_drawn_orders_keep_every_rule(given: tuple[Case, int | None, str]) -> None:
    """Every window once, a worker's own in order, no version that is not there or goes back, the bound where it holds."""
    case, bound, late = given
    staleness = drawn(case, bound, late)
    assert broken_rules(case, staleness, staleness.arrivals) == []
    assert all(holds for holds, _ in staleness.problems(case.updates, 1))
    assert staleness == drawn(case, bound, late)


@given(rules(), st.data())
def test_orders_that_cannot_be_are_refused(given: tuple[Case, int | None, str], data: st.DataObject) -> None:
    """A gradient processed twice, before an earlier one of its worker, or at a version that is not made yet."""
    case, bound, late = given
    staleness = drawn(case, bound, late)
    order = list(staleness.arrivals)
    update = data.draw(st.integers(0, len(order) - 1))
    window = order[update][0]
    future = [*order[:update], (window, update + 1), *order[update + 1 :]]
    assert any(u == update and "claims version" in words for u, words in disorder(case, staleness, tuple(future)))
    twice = [*order, order[update]]
    assert any("processed twice" in words for _, words in disorder(case, staleness, tuple(twice)))
    own = next(windows for windows in windows_by_worker(case).values() if window in windows)
    if len(own) > 1:
        back = tuple((w, v) if w not in own else (own[-1 - own.index(w)], v) for w, v in order)
        assert any("after window" in words for _, words in disorder(case, staleness, back))


def words_of(rule: Staleness, order: Arrivals) -> list[tuple[int, str]]:
    return list(disorder(CASE, rule, order))


IN_ORDER: Arrivals = tuple((window, window) for window in range(9))
FREE = Staleness("arrivals")


def changed(changes: dict[int, tuple[int, int]]) -> Arrivals:
    return tuple(changes.get(update, arrival) for update, arrival in enumerate(IN_ORDER))


def test_each_rule_is_told_by_its_update_and_in_words() -> None:
    bounded = Staleness("arrivals", bound=1)
    assert words_of(FREE, IN_ORDER) == words_of(bounded, IN_ORDER) == []
    assert words_of(FREE, changed({4: (4, 5)})) == [(4, "window 4 claims version 5, but only 4 updates were made")]
    assert words_of(FREE, changed({4: (4, 0)})) == [
        (4, "window 4 was computed at version 0, an earlier one of its worker at 1")
    ]
    assert words_of(FREE, changed({4: (9, 4)})) == [(4, "window 9 was processed, but there are only 9")]
    assert words_of(bounded, changed({4: (4, 2)})) == [
        (4, "window 4 is 2 updates late, the bound is 1: no worker waited")
    ]
    assert words_of(bounded, changed({4: (4, 3)})) == []
    assert [check.detail for check in broken_rules(CASE, FREE, IN_ORDER[:7])] == [
        "no server showed which gradient update 7 processed"
    ]


def test_a_dropped_gradient_makes_no_version() -> None:
    """After it, the newest version is the number of updates that were made, not of gradients that came."""
    rule = Staleness("arrivals", bound=0, late="dropped")
    order = changed({1: (1, 0), 2: (2, 2)})
    assert words_of(rule, order)[0] == (2, "window 2 claims version 2, but only 1 updates were made")


@given(st.integers(0, 9), st.lists(st.integers(0, 9), max_size=5), st.none() | st.integers(0, 5))
def test_gradients_are_in_time_if_they_can_come_in_some_order(made: int, found: list[int], bound: int | None) -> None:
    """The oldest first is as good as any order."""
    found = [min(made, version) for version in found]
    some = any(
        all(made + place - version <= (np.inf if bound is None else bound) for place, version in enumerate(order))
        for order in permutations(found)
    )
    assert in_time(made, found, bound) == some


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("row", ["arrivals-mlp", "arrivals-gpt", "arrivals-momentum", "arrivals-adam"])
def test_every_case_of_the_grid_shows_what_its_rule_is_about(name: str, row: str) -> None:
    """Some gradient is stale; where late ones are dropped or reweighted, some are late; where workers wait, one waits."""
    case = in_grid(row)
    staleness = RULES[name](case).staleness
    expectation = expect(case, RULES[name](case))
    lags = [step.steps - version for step, (_, version) in zip(expectation.steps, staleness.arrivals, strict=True)]
    assert max(lags) > (staleness.bound or 0) or (staleness.late == "refused" and staleness.bound == max(lags))
    if name == "ps-async-bounded":
        workers = len(windows_by_worker(case))
        at_once = [version for window, version in staleness.arrivals if window < workers]
        assert workers == 2 or max(at_once) > 0, "every worker was answered at once"
    if name == "ps-async-drop":
        assert any(step.applies is None for step in expectation.steps)
    if name == "ps-async-reweighted":
        assert min(step.factor for step in expectation.steps) < 1


# ------------------------------------------------------------------------------------------------ the check


def shown(order: Arrivals, servers: tuple[int, ...] = (3,)) -> Record:
    """What servers show of an order of arrival."""
    found = [
        Observation("arrival", "arrival", rank, update, None, Place((2,), replica=rank), "int64", np.array(arrival))
        for update, arrival in enumerate(order)
        for rank in servers
    ]
    return Record(4, "cpu", found)


def judged(record: Record) -> list[Check]:
    semantics = declared(CASE)
    view = View(CASE, strategy("ps-async"), record, expect(CASE, semantics))
    return [check for update in range(CASE.updates) for check in check_arrivals(view, update)]


def test_the_declared_order_passes_and_every_other_fails_where_it_parts() -> None:
    order = declared(CASE).staleness.arrivals
    assert {check.verdict for check in judged(shown(order))} == {Verdict.PASS}
    for update in range(CASE.updates):
        window, version = order[update]
        for other in ((window, version + 1), ((window + 1) % CASE.updates, version)):
            found = judged(shown((*order[:update], other, *order[update + 1 :])))
            assert [check.update for check in found if check.verdict is Verdict.FAIL] == [update]


def test_servers_that_processed_different_gradients_fail() -> None:
    order = declared(CASE).staleness.arrivals
    record = shown(order, (2, 3))
    record.observations[3] = dataclasses.replace(record.observations[3], array=np.array((8, 0)))
    (failed,) = [check for check in judged(record) if check.verdict is Verdict.FAIL]
    assert failed.update == 1 and "ranks disagree" in failed.detail


def test_an_arrival_that_is_not_shown_or_no_pair_of_integers_fails() -> None:
    order = declared(CASE).staleness.arrivals
    assert [c.update for c in judged(shown(order[:5])) if c.verdict is Verdict.FAIL] == [5, 6, 7, 8]
    record = shown(order)
    record.observations[2] = dataclasses.replace(record.observations[2], array=np.array([1.0, 0.0]))
    assert [c.update for c in judged(record) if c.verdict is Verdict.FAIL] == [2]


def test_where_any_order_is_right_the_record_says_which_it_was() -> None:
    free = dataclasses.replace(declared(CASE), staleness=FREE)
    found, wrong = settled(CASE, free, shown(IN_ORDER))
    assert found.staleness.arrivals == IN_ORDER and not wrong
    _, wrong = settled(CASE, free, shown(changed({4: (3, 3)})))
    assert [(check.update, check.detail) for check in wrong] == [(4, "the gradient of window 3 was processed twice")]


# ------------------------------------------------------------------------------------------------ on ranks


@pytest.mark.parametrize("name", ["ps-async-bounded", "ps-async-drop"])
def test_the_verdict_and_the_result_do_not_depend_on_delays(pools: Pools, name: str) -> None:
    """Other seeds draw other delays; the machine adds its own. What stands in the certificate is the same every time."""
    summaries = []
    for seed in (0, 0, 1):
        case = in_grid("arrivals-adam").replace(seed=seed)
        result = run_replay(pools, Run("replay", SPEC, strategy(name), case))
        assert result.verdict is Verdict.PASS, result.explanation
        summaries.append(result.summary())
    assert all(summary == summaries[0] for summary in summaries)


def test_a_free_run_is_judged_by_its_own_order_also_from_files(pools: Pools, tmp_path: Path) -> None:
    run = ordered(Run("update", SPEC, strategy("ps-async"), in_grid("arrivals-gpt")), ())
    record = pools.run(run.job()).record
    assert record is not None
    assert judge_update(run, record).verdict is Verdict.PASS
    contract, wrong = settled(run.case, run.contract, record)
    assert not wrong and len(contract.staleness.arrivals) == run.case.updates
    write_record(tmp_path, run.case, run.strategy, record)
    case, kept, again = read_record(tmp_path)
    assert form_problems(case, kept, again) == []
    assert judge_update(Run("update", SPEC, kept, case), again).verdict is Verdict.PASS


def test_an_order_of_ones_own_is_run_as_it_is_named(pools: Pools) -> None:
    """One worker goes through all its windows before the others' gradients, which are then as late as can be."""
    order = ((2, 0), (5, 1), (8, 2), (0, 0), (3, 4), (6, 5), (1, 0), (4, 7), (7, 8))
    run = ordered(Run("update", SPEC, strategy("ps-async"), in_grid("arrivals-adam")), order)
    record = pools.run(run.job()).record
    assert record is not None
    result = judge_update(run, record)
    assert result.verdict is Verdict.PASS, result.explanation
    assert settled(run.case, run.contract, record)[0].staleness.arrivals == order


def test_a_window_without_a_valid_token_makes_no_update(pools: Pools) -> None:
    """Its worker pushes nothing but the fact, and the servers' counters stay."""
    windows = list(arrivals(2, 2, 2))
    windows[1] = ((), ((0, 0),), (), ())
    case = Case("empty-window", GPT, tuple(windows), Layout(4), accumulation=1, asynchronous="server")
    run = Run("update", SPEC, strategy("ps-async"), case)
    record = pools.run(run.job()).record
    assert record is not None
    result = judge_update(run, record)
    assert result.verdict is Verdict.PASS, result.explanation
    assert max(int(o.array) for o in record.of("step")) == 3


def test_three_ranks_are_enough(pools: Pools) -> None:
    case = served("three-ranks", GPT, Optimizer("sgd", lr=0.5), workers=2, servers=1)
    run = Run("update", SPEC, strategy("ps-async"), case)
    record = pools.run(run.job()).record
    assert record is not None
    assert judge_update(run, record).verdict is Verdict.PASS


def test_a_case_without_servers_is_refused() -> None:
    with pytest.raises(CaseError, match="asynchronous = server: leave a rank that no window feeds"):
        served("everyone", Model("linear"), Optimizer(), workers=4, servers=0)


def test_a_window_that_several_workers_share_is_refused() -> None:
    case = in_grid("arrivals-mlp")
    with pytest.raises(CaseError, match="every window feeds one worker, but window 0 does not"):
        case.replace(windows=((((3,),), ((4,),), (), ()), *case.windows[1:]))


def test_dropped_updates_are_told_from_empty_ones() -> None:
    case = in_grid("arrivals-mlp")
    semantics = RULES["ps-async-drop"](case)
    view = View(case, strategy("ps-async-drop"), Record(4), expect(case, semantics))
    late = [u for u in range(case.updates) if dropped(view, u)]
    assert late == [u for u, step in enumerate(view.expectation.steps) if step.applies is None]
