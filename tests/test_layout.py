"""The mesh: every rank lies in one group per axis, copies are told apart, and labels say what a layout is."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from equivtests.cases.layout import ORDER, Layout, layout_of
from equivtests.cases.split_grid import SPLIT_GRID, layouts_of, split_named
from equivtests.reference.expectation import expect

AXES = ("dp", "cp", "tp", "pp", "ep", "edp")


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    degrees = {axis: draw(st.sampled_from((1, 2, 3))) for axis in ("dp", "cp", "tp", "pp")}
    assume(math.prod(degrees.values()) <= 16)
    data = degrees["dp"] * degrees["cp"]
    ep = draw(st.sampled_from([n for n in range(1, data + 1) if data % n == 0]))
    virtual = draw(st.sampled_from((1, 2))) if degrees["pp"] > 1 else 1
    split = math.prod(degrees.values()) > degrees["dp"] or ep > 1
    replicate = degrees["dp"] if split and draw(st.booleans()) else 1
    return Layout(**degrees, replicate=replicate, ep=ep, virtual=virtual, order=tuple(draw(st.permutations(ORDER))))


@given(layouts(), st.sampled_from(AXES))
def test_the_groups_of_an_axis_cover_every_rank_once(layout: Layout, axis: str) -> None:
    groups = layout.partition(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
    assert {len(group) for group in groups} == {layout.degree(axis)}


@given(layouts())
def test_two_ranks_of_one_group_differ_in_that_coordinate_alone(layout: Layout) -> None:
    for axis in ("dp", "cp", "tp", "pp"):
        for group in layout.partition(axis):
            at = [layout.at(rank) for rank in group]
            others = [{a: c[a] for a in ("dp", "cp", "tp", "pp") if a != axis} for c in at]
            assert all(other == others[0] for other in others)
            assert sorted(c[axis] for c in at) == list(range(layout.degree(axis)))


@given(layouts())
def test_experts_lie_on_consecutive_data_ranks_of_one_model_shard(layout: Layout) -> None:
    for group in layout.partition("ep"):
        data = sorted(layout.at(rank)["dp"] * layout.cp + layout.at(rank)["cp"] for rank in group)
        assert data == list(range(data[0], data[0] + layout.ep)) and data[0] % layout.ep == 0
        assert len({(layout.at(rank)["tp"], layout.at(rank)["pp"]) for rank in group}) == 1


@given(layouts(), st.sets(st.sampled_from(("tp", "pp", "ep"))))
def test_copies_are_as_many_as_the_ranks_that_hold_the_same(layout: Layout, cut: set[str]) -> None:
    copies = [layout.copy(rank, *sorted(cut)) for rank in range(layout.world)]
    assert len(set(copies)) == layout.world // math.prod(layout.degree(axis) for axis in cut)
    assert copies[0] == 0, "the first copy is the one that rank 0 holds part of"


@given(layouts())
def test_a_label_says_which_layout_it_is(layout: Layout) -> None:
    found = layout_of(layout.label)
    assert found is not None and found.label == layout.label and found.world == layout.world
    coordinates = ("dp", "cp", "tp", "pp", "ep", "replicate")
    assert all(
        layout.at(r)[a] == found.at(r)[a] or layout.degree(a) == 1 for r in range(layout.world) for a in coordinates
    )


@pytest.mark.parametrize("label", ["", "tp", "tp0", "dp2tp", "tp2-dp2", "w0", "pp2v", "dp2-by-dp-dp", "zp4"])
def test_what_is_no_label_is_no_layout(label: str) -> None:
    assert layout_of(label) is None


@pytest.mark.parametrize(("order", "group"), [(ORDER, (0, 1)), (("pp", "tp", "cp", "dp"), (0, 2))])
def test_the_rank_order_decides_which_ranks_form_a_group(order: tuple[str, ...], group: tuple[int, ...]) -> None:
    layout = Layout(dp=2, tp=2, order=order)  # type: ignore[arg-type]
    assert layout.group(0, "tp") == group and layout.name_of(0, group) == "tp"
    assert layout.name_of(0, (0, 3)) == "ranks 0, 3"


def test_all_ranks_of_one_model_are_fed_the_same_and_samples_are_not_multiplied() -> None:
    layout = Layout(dp=2, cp=2, tp=2)
    assert [layout.data_rank(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_stages_are_as_even_as_they_go_unless_the_layout_says() -> None:
    assert [list(r) for r in Layout(dp=1, pp=2, virtual=2).layers_of(6)] == [[0, 1], [2, 3], [4], [5]]
    assert [list(r) for r in Layout(dp=1, pp=2, stages=(0, 3)).layers_of(3)] == [[], [0, 1, 2]]


CASES = [(line, layout) for line in SPLIT_GRID for layout in layouts_of(line)]


@pytest.mark.parametrize(("line", "layout"), CASES, ids=lambda value: getattr(value, "name", "") or value.label)
def test_the_reference_accepts_every_case_of_the_split_grid(line, layout) -> None:
    """No ReLU kink, no router tie, no clip threshold nearby; what claims to be exact is proved to be."""
    case = line.make(layout, 0)
    assert case.name == f"{line.name}-{layout.label}" and split_named(case.name) == case
    assert case.exact == (expect(case, case.semantics).proof is not None)


def test_names_in_the_split_grid_are_distinct() -> None:
    names = [line.make(layout, 0).name for line, layout in CASES]
    assert len(set(names)) == len(names)
