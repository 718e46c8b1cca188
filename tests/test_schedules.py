"""Pipeline schedules: prescribed orders obey the rules, closed forms are what orders give, torch runs the same orders."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import product
from types import SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from equivtests.reference.schedules import SCHEDULES, placement, prescribed
from equivtests.reference.stages import cut_by_cost, ranks_of_stages
from equivtests.reference.timeline import (
    KIND_CODES,
    Costs,
    Operation,
    Timeline,
    peak_live,
    peak_live_by_stage,
    problems,
    simulate,
    timeline_of,
)
from equivtests.report import timeline as picture

RANKS, CHUNKS, MICROBATCHES = st.integers(1, 4), st.integers(1, 3), st.integers(1, 8)


def order_or_none(name: str, P: int, V: int, M: int) -> Timeline | None:
    try:
        return prescribed(name, P, V, M)
    except ValueError:
        return None


@st.composite
def runs(draw: st.DrawFn, names: tuple[str, ...] = tuple(SCHEDULES)) -> tuple[str, int, int, int]:
    """A schedule, P, V and M that it is defined for."""
    name = draw(st.sampled_from(names))
    chunks = SCHEDULES[name].chunks
    P, V, M = draw(RANKS), draw(st.just(chunks) if chunks else CHUNKS), draw(MICROBATCHES)
    assume(order_or_none(name, P, V, M) is not None)
    return name, P, V, M


COSTS = st.fractions(Fraction(1, 4), 8, max_denominator=4)
WHOLE = tuple(name for name, row in SCHEDULES.items() if not row.split)

# ---------------------------------------------------------------------------------------- prescribed orders


@given(runs())
def test_every_prescribed_order_obeys_the_rules(run: tuple[str, int, int, int]) -> None:
    name, P, V, M = run
    assert problems(prescribed(name, P, V, M), placement(name, P, V), M, SCHEDULES[name].split) == []


def test_every_schedule_has_an_order_from_its_least_number_of_microbatches_on() -> None:
    for name, row in SCHEDULES.items():
        for P in range(1, 5):
            V = row.chunks or 2
            assert order_or_none(name, P, V, row.least(P, V)) is not None, (name, P)


@pytest.mark.parametrize(
    ("name", "P", "V", "M", "words"),
    [
        ("gpipe", 2, 2, 4, "gpipe has 1 stage"),
        ("zbv", 2, 1, 4, "zbv has 2 stage"),
        ("1f1b", 0, 1, 4, "at least 1"),
        ("looped-bfs", 2, 1, 0, "at least 1"),
        ("interleaved-1f1b", 2, 2, 5, "5 micro-batches cannot be cut into 2 equal rounds"),
        ("zero-bubble", 3, 2, 7, "7 micro-batches cannot be cut into 2 equal rounds"),
        ("dualpipev", 2, 2, 3, r"as many micro-batches as stages \(4\), got 3"),
    ],
)
def test_numbers_that_a_schedule_is_not_defined_for_are_refused(name: str, P: int, V: int, M: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        prescribed(name, P, V, M)


def test_one_f_one_b_is_as_it_is_drawn() -> None:
    """Three ranks, four micro-batches, by hand."""
    orders = [[f"{o.kind}{o.microbatch}" for o in rank] for rank in prescribed("1f1b", 3, 1, 4)]
    assert orders == [
        ["F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"],
        ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"],
        ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"],
    ]


def test_stages_lie_in_a_loop_or_in_a_v() -> None:
    assert placement("interleaved-1f1b", 3, 2) == (0, 1, 2, 0, 1, 2)
    assert placement("zbv", 3, 2) == (0, 1, 2, 2, 1, 0)
    assert ranks_of_stages("v", 2, 3) == (0, 1, 1, 0, 0, 1)
    with pytest.raises(ValueError, match="at least 1 rank"):
        ranks_of_stages("loop", 2, 0)


# ---------------------------------------------------------------------------------------- torch's own orders

TORCH = {
    "interleaved-1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "looped-bfs": torch_schedules.ScheduleLoopedBFS,
    "zero-bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}
TORCH_KIND = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def torch_order(name: str, P: int, V: int, M: int) -> Timeline | None:
    """What torch's schedule prescribes for all ranks; None where it refuses. It needs no ranks to say so."""
    stage = SimpleNamespace(group_size=P, group_rank=0, num_stages=P * V, is_last=False, submod=torch.nn.Identity())
    try:
        schedule = TORCH[name](cast(Any, [stage] * V), M)
    except ValueError:
        return None
    actions = [[a for a in schedule.pipeline_order[rank] if a is not None] for rank in range(P)]
    single = [[part for action in rank for part in action.sub_actions or (action,)] for rank in actions]
    return tuple(
        tuple(
            Operation(TORCH_KIND[a.computation_type.name], a.stage_index, cast(int, a.microbatch_index)) for a in rank
        )
        for rank in single
    )


@pytest.mark.parametrize("name", TORCH)
def test_torch_prescribes_the_same_order(name: str) -> None:
    """torch also refuses rounds that are unequal where a rank has one stage only, and rounds do not matter."""
    compared = 0
    for P, V, M in product(
        range(1, 5), [SCHEDULES[name].chunks] if SCHEDULES[name].chunks else range(1, 4), range(1, 13)
    ):
        theirs, ours = torch_order(name, P, V, M), order_or_none(name, P, V, M)
        assert theirs == ours or (theirs is None and V == 1), (P, V, M)
        compared += theirs is not None
    assert compared >= 20


class Order:
    """Stands for a pipeline stage of torch that receives and sends nothing, and writes down what it is told to run."""

    def __init__(self, stage: int, stages: int) -> None:
        self.stage_index, self.num_stages = stage, stages
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.has_backward = True
        self.shown: list[Operation] = []

    def nothing(self, *_: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = perform_reduce_grad = nothing

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.shown.append(Operation("F", self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch: int, **_: Any) -> None:
        self.shown.append(Operation("B", self.stage_index, microbatch))


@pytest.mark.parametrize(
    ("name", "base"), [("gpipe", torch_schedules.ScheduleGPipe), ("1f1b", torch_schedules.Schedule1F1B)]
)
def test_torch_runs_the_same_order(name: str, base: Any) -> None:
    """These two run from their own loops, not from an order that they show."""

    class Alone(base):  # type: ignore[misc]
        def _initialize_stage(self, *_: Any, **__: Any) -> None:
            """Nothing to agree on with other ranks."""

    for P, M in product(range(1, 5), range(1, 9)):
        if SCHEDULES[name].least(P, 1) > M:
            with pytest.raises(ValueError, match="microbatches"):
                Alone(Order(0, P), M)
            continue
        stages = [Order(stage, P) for stage in range(P)]
        for stage in stages:
            Alone(stage, M)._step_microbatches([()] * M, [{}] * M)
        assert tuple(tuple(stage.shown) for stage in stages) == prescribed(name, P, 1, M)


# ------------------------------------------------------------------------------------- idle fraction, activations


@given(runs(WHOLE), COSTS, COSTS)
def test_closed_forms_of_the_idle_fraction_hold_for_any_cost_of_forward_and_backward(
    run: tuple[str, int, int, int], forward: Fraction, backward: Fraction
) -> None:
    name, P, V, M = run
    closed = SCHEDULES[name].idle_fraction(P, V, M)
    assert closed is not None
    assert simulate(prescribed(name, P, V, M), Costs(F=forward, B=backward)).idle == closed


@given(runs(("zero-bubble",)))
def test_the_closed_form_of_zero_bubble_holds_for_equal_costs(run: tuple[str, int, int, int]) -> None:
    name, P, V, M = run
    closed = SCHEDULES[name].idle_fraction(P, V, M)
    assert (closed is None) == (M < P)
    if closed is not None:
        assert simulate(prescribed(name, P, V, M)).idle == closed


def test_zero_bubble_idles_less_than_1f1b_at_the_same_cost() -> None:
    for P in range(2, 5):
        whole, halves = (simulate(prescribed(name, P, 1, 8)) for name in ("1f1b", "zero-bubble"))
        assert whole.busy == halves.busy and halves.idle < whole.idle


@given(runs())
def test_closed_forms_of_live_activations_are_those_of_the_order(run: tuple[str, int, int, int]) -> None:
    name, P, V, M = run
    closed = SCHEDULES[name].peak_live(P, V, M)
    assert closed in (None, peak_live(prescribed(name, P, V, M)))
    assert (closed is None) == (SCHEDULES[name].placement == "v")


@given(RANKS, MICROBATCHES)
def test_1f1b_keeps_fewer_activations_on_later_ranks_and_gpipe_all(P: int, M: int) -> None:
    assert peak_live(prescribed("gpipe", P, 1, M)) == (M,) * P
    assert peak_live(prescribed("1f1b", P, 1, M)) == tuple(min(M, P - s) for s in range(P))
    assert peak_live(prescribed("zero-bubble", P, 1, M)) == (min(M, P),) * P


def test_an_activation_lives_until_the_backward_for_weights() -> None:
    F, I, W = (lambda m, kind=kind: Operation(kind, 0, m) for kind in "FIW")  # noqa: E741
    assert peak_live(((F(0), I(0), F(1), W(0), I(1), W(1)),)) == (2,)
    assert peak_live(((F(0), I(0), W(0), F(1), I(1), W(1)),)) == (1,)


def test_stages_of_a_rank_are_counted_apart_and_together() -> None:
    timeline = prescribed("looped-bfs", 2, 2, 3)
    assert peak_live(timeline) == (6, 6) and peak_live_by_stage(timeline) == (3, 3, 3, 3)
    assert peak_live_by_stage(prescribed("interleaved-1f1b", 2, 2, 4)) == (4, 3, 2, 1)


def test_times_of_two_stages_by_hand() -> None:
    """GPipe, two micro-batches; the second stage costs three times as much."""
    timed = simulate(prescribed("gpipe", 2, 1, 2), Costs(stages=(1, 3)))
    starts = {f"{o.kind}{o.stage}{o.microbatch}": int(start) for o, start in timed.starts.items()}
    assert starts == {"F00": 0, "F01": 1, "F10": 1, "F11": 4, "B10": 7, "B11": 13, "B00": 13, "B01": 19}
    assert timed.makespan == 21 and timed.busy == (6, 18)
    assert timed.idle_by_rank == (Fraction(15, 21), Fraction(3, 21)) and timed.idle == Fraction(18, 42)


def test_what_cannot_be_simulated_is_refused() -> None:
    timeline = prescribed("gpipe", 2, 1, 2)
    with pytest.raises(ValueError, match="costs of 1 stages, but stage 1 runs"):
        simulate(timeline, Costs(stages=(1,)))
    with pytest.raises(ValueError, match="must be positive"):
        Costs(F=0)
    with pytest.raises(ValueError, match="none twice"):
        simulate(((), ()))
    with pytest.raises(ValueError, match="none twice"):
        simulate((timeline[0] * 2, timeline[1]))
    with pytest.raises(ValueError, match="cannot be executed: rank 1: .*micro-batch 0 on stage 1 waits for ever"):
        simulate(((), timeline[1]))
    with pytest.raises(
        ValueError, match="weights of micro-batch 0 on stage 0 waits for ever for the backward for inputs"
    ):
        simulate(((Operation("F", 0, 0), Operation("W", 0, 0), Operation("I", 0, 0)),))


# -------------------------------------------------------------------------------------------------- rules

F00, B00, B11 = Operation("F", 0, 0), Operation("B", 0, 0), Operation("B", 1, 1)
Change = Callable[[list[Operation]], object]


def broken(rank: int, change: Change, name: str = "gpipe", V: int = 1) -> list[str]:
    """Problems of two ranks and two micro-batches after the order of one rank was changed."""
    orders = [list(operations) for operations in prescribed(name, 2, V, 2)]
    change(orders[rank])
    return problems(tuple(map(tuple, orders)), placement(name, 2, V), 2, SCHEDULES[name].split)


def exchange(first: Operation, second: Operation) -> Change:
    def change(order: list[Operation]) -> None:
        a, b = order.index(first), order.index(second)
        order[a], order[b] = order[b], order[a]

    return change


def replace(old: Operation, *new: Operation) -> Change:
    def change(order: list[Operation]) -> None:
        at = order.index(old)
        order[at : at + 1] = new

    return change


RULES: dict[str, tuple[int, Change, list[str]]] = {
    "an unknown kind": (
        0,
        lambda order: order.append(Operation("X", 0, 0)),
        ["rank 0: X of micro-batch 0 on stage 0: kind X is none of F, B, which this schedule has"],
    ),
    "a stage that does not exist": (
        1,
        lambda order: order.append(Operation("F", 2, 0)),
        ["rank 1: forward of micro-batch 0 on stage 2: the stages are 0 to 1"],
    ),
    "a micro-batch that does not exist": (
        1,
        lambda order: order.append(Operation("F", 1, 2)),
        ["rank 1: forward of micro-batch 2 on stage 1: the micro-batches are 0 to 1"],
    ),
    "a stage of another rank": (
        0,
        lambda order: order.append(Operation("F", 1, 0)),
        [
            "rank 0: forward of micro-batch 0 on stage 1: this stage lies on rank 1",
            "rank 1: micro-batch 0 on stage 1: forward ran 2 times",
        ],
    ),
    "a forward twice": (
        0,
        lambda order: order.insert(0, F00),
        ["rank 0: micro-batch 0 on stage 0: forward ran 2 times"],
    ),
    "a backward twice": (
        0,
        lambda order: order.append(B00),
        ["rank 0: micro-batch 0 on stage 0: backward ran 2 times"],
    ),
    "a forward never": (0, replace(F00), ["rank 0: micro-batch 0 on stage 0: forward never ran"]),
    "a backward never": (1, replace(B11), ["rank 1: micro-batch 1 on stage 1: backward never ran"]),
    "a backward before its forward": (
        0,
        exchange(F00, B00),
        ["rank 0: backward of micro-batch 0 on stage 0 ran before its forward"],
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_named_with_stage_microbatch_and_rank(rule: str) -> None:
    rank, change, words = RULES[rule]
    assert broken(rank, change) == words


I10, W10 = Operation("I", 1, 0), Operation("W", 1, 0)
SPLIT_RULES: dict[str, tuple[Change, list[str]]] = {
    "weights before inputs": (
        exchange(I10, W10),
        ["rank 1: backward for weights of micro-batch 0 on stage 1 ran before its backward for inputs"],
    ),
    "inputs never": (replace(I10), ["rank 1: micro-batch 0 on stage 1: backward for inputs never ran"]),
    "weights never": (replace(W10), ["rank 1: micro-batch 0 on stage 1: backward for weights never ran"]),
    "weights twice": (replace(W10, W10, W10), ["rank 1: micro-batch 0 on stage 1: backward for weights ran 2 times"]),
    "whole and halves": (
        replace(W10, W10, Operation("B", 1, 0)),
        ["rank 1: micro-batch 0 on stage 1: both a full backward and a part of one ran"],
    ),
}


@pytest.mark.parametrize("rule", SPLIT_RULES)
def test_a_broken_rule_of_split_backwards_is_named(rule: str) -> None:
    change, words = SPLIT_RULES[rule]
    assert broken(1, change, "zero-bubble") == words


def test_a_split_backward_is_refused_where_the_schedule_has_none_and_a_whole_one_is_not_where_it_has() -> None:
    halves, whole = prescribed("zero-bubble", 2, 1, 2), prescribed("1f1b", 2, 1, 2)
    assert problems(whole, (0, 1), 2, split=True) == []
    (first, *_) = problems(halves, (0, 1), 2, split=False)
    assert (
        first
        == "rank 0: backward for inputs of micro-batch 0 on stage 0: kind I is none of F, B, which this schedule has"
    )


def test_ranks_that_wait_for_each_other_are_named() -> None:
    """Rank 0 wants the gradient of micro-batch 1 before it starts the forward of 1; each rank alone looks right."""
    F, B = (lambda stage, m, kind=kind: Operation(kind, stage, m) for kind in "FB")
    timeline = (F(0, 0), B(0, 0), F(0, 1), B(0, 1)), (F(1, 0), F(1, 1), B(1, 0), B(1, 1))
    assert problems(timeline, (0, 1), 2, split=False) == [
        "rank 0: backward of micro-batch 0 on stage 0 waits for ever for the backward of micro-batch 0 on stage 1",
        "rank 1: forward of micro-batch 1 on stage 1 waits for ever for the forward of micro-batch 1 on stage 0",
    ]


def test_a_missing_rank_is_named() -> None:
    timeline = prescribed("gpipe", 2, 1, 2)
    assert problems(timeline[:1], (0, 1), 2, split=False) == [
        "the stages lie on 2 ranks, but 1 ranks have run operations"
    ]


# -------------------------------------------------------------------------------------------- observations


def rows_of(timeline: Timeline, version: int = 0) -> list[Any]:
    """What ranks that ran so would show."""
    return [
        np.array([(KIND_CODES[o.kind], o.stage, o.microbatch, version) for o in rank], dtype=np.int64)
        for rank in timeline
    ]


@given(runs(), st.integers(0, 3))
def test_a_timeline_that_ranks_have_shown_is_the_one_they_ran(run: tuple[str, int, int, int], version: int) -> None:
    timeline = prescribed(*run)
    assert timeline_of(rows_of(timeline, version)) == (timeline, {o: version for rank in timeline for o in rank})


def test_an_operation_that_was_shown_twice_stays_in_the_timeline() -> None:
    timeline, versions = timeline_of([[(0, 0, 0, 5), (1, 0, 0, 5), (1, 0, 0, 6)]])
    assert versions[B00] == 5
    assert problems(timeline, (0,), 1, split=False) == ["rank 0: micro-batch 0 on stage 0: backward ran 2 times"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ((4, 0, 0, 0), "rank 1, row 1: kind code is 4; known are 0 forward, 1 backward, 2 backward for inputs"),
        ((0, -1, 0, 0), "rank 1, row 1: stage is -1; it must not be negative"),
        ((0, 0, -2, 0), "rank 1, row 1: micro-batch is -2"),
        ((0, 0, 0, -3), "rank 1, row 1: weight version is -3"),
        ((0, 0, 0), "rank 1, row 1: 3 columns; needed are kind code, stage, micro-batch, weight version"),
        ((0, 0, 0.5, 0), "rank 1, row 1: .* must be integers"),
        (np.zeros(4), "rank 1, row 1: .* must be integers"),
        (3, "rank 1, row 1: 3 must be integers"),
    ],
)
def test_a_malformed_row_is_named(row: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        timeline_of([[], [(0, 0, 0, 0), row]])


# ------------------------------------------------------------------------------------------------- layers


def every_cut(layers: int, stages: int) -> list[tuple[int, ...]]:
    return [cut for cut in product(range(1, layers + 1), repeat=stages) if sum(cut) == layers]


def order_of_cuts(costs: list[int], cut: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
    """Most expensive stage; sum of squares of the numbers of layers; earlier stages first."""
    ends = [sum(cut[: n + 1]) for n in range(len(cut))]
    stages = [sum(costs[end - size : end]) for end, size in zip(ends, cut, strict=True)]
    return max(stages), sum(n * n for n in cut), tuple(-n for n in cut)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=7), st.integers(1, 4))
def test_layers_are_cut_as_the_best_of_all_cuts(costs: list[int], stages: int) -> None:
    assume(stages <= len(costs))
    assert cut_by_cost(costs, stages) == min(every_cut(len(costs), stages), key=lambda cut: order_of_cuts(costs, cut))


def test_equal_layers_are_cut_evenly_with_more_in_earlier_stages() -> None:
    assert cut_by_cost([0.1] * 7, 4) == (2, 2, 2, 1)
    assert cut_by_cost([8, 1, 1, 1, 1, 4], 3) == (1, 3, 2)


@pytest.mark.parametrize("stages", [0, 3])
def test_layers_that_cannot_be_cut_are_refused(stages: int) -> None:
    with pytest.raises(ValueError, match="2 layers cannot be cut"):
        cut_by_cost([1, 1], stages)


# ------------------------------------------------------------------------------------------------ pictures


def test_a_timeline_in_text() -> None:
    assert picture.text(prescribed("1f1b", 2, 1, 2), "1f1b").splitlines() == [
        "1f1b: 2 ranks, 1 stage(s) per rank, 2 micro-batches",
        "",
        "rank  0   1   2   3   4   5   6   7   8",
        "   0  0F  1F  ..  ..  0B  --  ..  1B  --",
        "   1  ..  0F  0B  --  1F  1B  --  ..  ..",
        "",
        "micro-batch, kind (F forward, B backward); -- the same goes on; .. idle",
        "idle fraction: 1/3 (0.333); closed form of 1f1b at equal costs: 1/3 (0.333)",
        "idle fraction by rank: 1/3 (0.333), 1/3 (0.333)",
        "most live activations by rank: 2, 1",
        "most live activations by stage: 2, 1",
    ]


def test_a_timeline_in_text_with_stages_versions_and_broken_costs() -> None:
    """A slot is what all times are multiples of. Every operation may have used other weights."""
    timeline = prescribed("zbv", 1, 2, 1)
    versions = {operation: n for n, operation in enumerate(timeline[0])}
    costs = Costs(F=Fraction(1, 2), I=Fraction(3, 4), W=Fraction(1, 4))
    shown = picture.text(timeline, "zbv", versions, costs).splitlines()
    assert " ".join(shown[3].split()) == "0 0:0F@0 -- 1:0F@1 -- 1:0I@2 -- -- 1:0W@3 0:0I@4 -- -- 0:0W@5"
    assert shown[5].startswith("stage:micro-batch, kind@weight version (F forward, I backward for inputs, ")
    assert shown[6] == "idle fraction: 0"


NAMESPACE = "{http://www.w3.org/2000/svg}"


@given(runs(), st.booleans())
def test_a_picture_is_xml_that_names_every_operation_with_its_time(run: tuple[str, int, int, int], known: bool) -> None:
    timeline = prescribed(*run)
    versions = {o: o.microbatch % 2 for rank in timeline for o in rank} if known else None
    root = ElementTree.fromstring(picture.svg(timeline, run[0], versions))
    titles = [group.findtext(f"{NAMESPACE}title") for group in root.iter(f"{NAMESPACE}g")]
    timed = simulate(timeline)
    assert titles == [
        f"{o}, time {timed.starts[o]} to {timed.ends[o]}" + (f", weight version {versions[o]}" if versions else "")
        for rank in timeline
        for o in rank
    ]
    assert root.attrib["role"] == "img" and root.find(f"{NAMESPACE}title") is not None


@pytest.mark.parametrize("costs", [Costs(), Costs(F=Fraction(1, 2), B=Fraction(5, 4), I=Fraction(3, 4))])
def test_boxes_of_a_picture_are_as_long_as_their_operations_and_do_not_overlap(costs: Costs) -> None:
    timeline = prescribed("dualpipev", 2, 2, 5)
    root = ElementTree.fromstring(picture.svg(timeline, "dualpipev", costs=costs))
    boxes = [cast(ElementTree.Element, g.find(f"{NAMESPACE}rect")).attrib for g in root.iter(f"{NAMESPACE}g")]
    operations = [operation for rank in timeline for operation in rank]
    assert len({int(box["width"]) / costs.of(o) for box, o in zip(boxes, operations, strict=True)}) == 1
    for y in {box["y"] for box in boxes}:
        spans = sorted((int(box["x"]), int(box["x"]) + int(box["width"])) for box in boxes if box["y"] == y)
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
        assert spans[-1][1] <= int(root.attrib["width"])


def test_a_picture_escapes_what_it_is_given_and_has_the_same_bytes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, "a<b&c", SCHEDULES["gpipe"])
    timeline = prescribed("gpipe", 2, 1, 2)
    drawn = picture.svg(timeline, "a<b&c")
    assert str(ElementTree.fromstring(drawn).findtext(f"{NAMESPACE}title")).startswith("a<b&c: ")
    assert drawn == picture.svg(timeline, "a<b&c")
