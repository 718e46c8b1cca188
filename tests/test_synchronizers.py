"""Rings of messages, parameter servers and offloaded optimizers: who has which part, at sizes that ranks do not divide."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equivtests.adapters.adapter import Strategy
from equivtests.adapters.builtin import TEXTBOOK
from equivtests.adapters.context import Ranks
from equivtests.adapters.textbook.offload import Offload
from equivtests.adapters.textbook.ring_all_reduce import RingAllReduce
from equivtests.adapters.textbook.server import SHARES
from equivtests.cases.parameters import Parameter
from equivtests.chapters.certify import certify
from equivtests.chapters.plan import claims_of
from equivtests.chapters.run import Run
from equivtests.judge.check import Verdict
from equivtests.mutants.situations import EMPTY_SHARD, SHARDS_ADAM
from equivtests.ranks.pools import Pools
from equivtests.reference import ledger
from equivtests.reference.ledger import ring_messages

ranks_of_a_ring = st.integers(1, 9)
sizes = st.integers(0, 60)

# ----------------------------------------------------------------------------------------- ring all-reduce


@given(sizes, ranks_of_a_ring)
def test_what_a_rank_receives_is_what_the_one_before_it_sent(elements: int, ranks: int) -> None:
    """Two ends that disagree on the size of a chunk, or on whether it is empty, would wait for ever."""
    for rank in range(ranks):
        sent, _ = ring_messages(elements, ranks, rank)
        _, received = ring_messages(elements, ranks, (rank + 1) % ranks)
        assert sent == received and 0 not in sent


@given(sizes, ranks_of_a_ring)
def test_a_ring_moves_every_element_twice_past_every_rank_but_one(elements: int, ranks: int) -> None:
    """All ranks together; a single rank sends all but two chunks of it, in 2 (P - 1) rounds if no chunk is empty."""
    sent = [ring_messages(elements, ranks, rank)[0] for rank in range(ranks)]
    assert sum(map(sum, sent)) == ranks * ledger.ring_all_reduce_bytes(elements, ranks) == 2 * (ranks - 1) * elements
    assert all(len(own) <= ledger.ring_all_reduce_rounds(ranks) for own in sent)
    if elements >= ranks:
        assert {len(own) for own in sent} == {ledger.ring_all_reduce_rounds(ranks)}


@given(st.integers(0, 9), ranks_of_a_ring)
def test_a_rank_sends_its_part_exactly_where_chunks_are_equal(chunk: int, ranks: int) -> None:
    for rank in range(ranks):
        sent, received = ring_messages(chunk * ranks, ranks, rank)
        assert sum(sent) == sum(received) == ledger.ring_all_reduce_bytes(chunk * ranks, ranks)


@given(sizes, ranks_of_a_ring)
def test_the_closed_form_is_off_by_less_than_two_elements_where_chunks_are_not_equal(elements: int, ranks: int) -> None:
    for rank in range(ranks):
        sent, _ = ring_messages(elements, ranks, rank)
        assert abs(sum(sent) - ledger.ring_all_reduce_bytes(elements, ranks)) < 2


def test_messages_of_ten_elements_on_four_ranks() -> None:
    """By hand: chunks of 3, 3, 2, 2. Rank 1 sends chunks 1, 0, 3, then 2, 1, 0; it receives 0, 3, 2, then 1, 0, 3."""
    assert ledger.ring_chunks(10, 4) == [3, 3, 2, 2]
    assert ring_messages(10, 4, 1) == ([3, 3, 2, 2, 3, 3], [3, 2, 2, 3, 3, 2])


@given(sizes, ranks_of_a_ring)
def test_chunks_of_the_adapter_are_those_of_the_closed_form(elements: int, world: int) -> None:
    """They are views, so that what arrives lands in the bucket, and the empty ones are the last."""
    adapter, bucket = RingAllReduce(), torch.zeros(elements)
    adapter.ranks = Ranks(0, world)
    chunks = adapter.chunks(bucket)
    assert [chunk.numel() for chunk in chunks] == ledger.ring_chunks(elements, world)
    for number, chunk in enumerate(chunks):
        chunk += number + 1
    assert bucket.tolist() == [n + 1 for n, size in enumerate(ledger.ring_chunks(elements, world)) for _ in range(size)]


BAD_INPUT = [
    lambda: ledger.ring_chunks(-1, 2),
    lambda: ledger.ring_chunks(8, 0),
    lambda: ledger.ring_chunks(cast(Any, 8.0), 2),
    lambda: ledger.ring_chunks(8, cast(Any, 2.5)),
    lambda: ring_messages(8, 4, 4),
    lambda: ring_messages(8, 4, -1),
]


@pytest.mark.parametrize("call", BAD_INPUT)
def test_there_is_no_ring_of_no_ranks_or_of_parts_of_elements(call: Any) -> None:
    with pytest.raises(ValueError):
        call()


# ---------------------------------------------------------------------------------------- parameter servers

shapes = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6)


@given(shapes, st.integers(1, 5), st.sampled_from(sorted(SHARES)))
def test_every_element_is_served_by_one_rank(drawn: list[tuple[int, ...]], ranks: int, strategy: str) -> None:
    """A remainder that nobody serves would never be stepped, one that two serve would be stepped twice."""
    tensors = [(str(number), torch.zeros(shape)) for number, shape in enumerate(drawn)]
    shares = SHARES[strategy][0](tensors, ranks)
    for name, tensor in tensors:
        spans = sorted((p.start, p.stop) for share in shares for p in share if p.name == name)
        assert [n for start, stop in spans for n in range(start, stop)] == list(range(tensor.numel()))
    for share in shares:
        offsets = [(p.offset, p.offset + p.stop - p.start) for p in share]
        assert [start for start, _ in offsets] == [0, *(stop for _, stop in offsets)][: len(offsets)]


@given(shapes, st.integers(1, 5), st.sampled_from(sorted(SHARES)))
def test_shares_are_those_of_the_ledger(drawn: list[tuple[int, ...]], ranks: int, strategy: str) -> None:
    """What the ledger counts by its own rule of who has what."""
    shares, cut = SHARES[strategy]
    served = shares([(str(number), torch.zeros(shape)) for number, shape in enumerate(drawn)], ranks)
    laid = ledger.shards_of([Parameter(str(number), shape) for number, shape in enumerate(drawn)], ranks, cut)
    for share, expected in zip(served, laid.by_rank, strict=True):
        sizes = {piece.name: piece.stop - piece.start for piece in share}
        assert sizes == {name: size for name, size in expected.items() if size}


# ---------------------------------------------------------------------------------------- offloaded optimizers


def test_masters_are_copies_on_the_host_and_the_optimizer_has_nothing_else() -> None:
    """A master that shares its memory with the device's parameter makes copying back look right where it is not done."""
    adapter = Offload()
    adapter.setup(SHARDS_ADAM, Ranks(0, 2))
    masters = list(adapter.masters.values())
    assert masters and {master.device.type for master in masters} == {"cpu"}
    device = {p.untyped_storage().data_ptr() for p in adapter.module.parameters()}
    assert not device & {master.untyped_storage().data_ptr() for master in masters}
    stepped = [p for group in adapter.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in stepped} == {id(master) for master in masters}


# ---------------------------------------------------------------------------------------- more ranks than parameters


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with closing(Pools(4, deadline=120.0)) as standing:
        yield standing


def claimed(name: str) -> tuple[str, Strategy]:
    """The textbook adapter that has a strategy, and the strategy."""
    return next((spec, s) for spec in TEXTBOOK for s in claims_of(spec).strategies if s.name == name)


@pytest.mark.parametrize("name", ["ring", *SHARES, "offload-sharded"])
def test_ranks_may_have_no_part_at_all(pools: Pools, name: str) -> None:
    """Three elements on four ranks, with Adam: an empty chunk is no message, a rank without a share serves nothing."""
    spec, strategy = claimed(name)
    found = certify(pools, Run("update", spec, strategy, EMPTY_SHARD), confirm=False)
    assert found.verdict is Verdict.PASS, found.explanation
