"""Positions of sequences, shared out over ranks: each is somewhere, once, whatever the length."""

from __future__ import annotations

import pytest
import torch

from equivtests.adapters.textbook.lines import Line
from equivtests.adapters.textbook.shards import ShardedSequence, Shards
from equivtests.models.sequence import WholeSequence

WAYS = pytest.mark.parametrize("zigzag", [False, True], ids=["contiguous", "zigzag"])


def shards(ranks: int, zigzag: bool, index: int = 0) -> Shards:
    return Shards(Line(None, tuple(range(ranks)), index), zigzag)


@WAYS
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_position_is_on_one_rank_for_every_length(ranks: int, zigzag: bool) -> None:
    """A remainder that is dropped, or held twice, at lengths that the ranks do not divide."""
    for length in range(19):
        held = [shards(ranks, zigzag).positions(length, rank).tolist() for rank in range(ranks)]
        assert sorted(position for part in held for position in part) == list(range(length))
        assert all(part == sorted(part) for part in held)


@WAYS
def test_parts_put_together_are_in_the_order_of_the_sequence(zigzag: bool) -> None:
    """Gathered zigzag parts that are left in the order of ranks."""
    for length in range(1, 19):
        whole, cut = torch.arange(2 * length).view(2, length), shards(3, zigzag)
        parts = torch.cat([cut.cut(whole, 1, rank) for rank in range(3)], dim=1)
        assert torch.equal(cut.in_order(parts, 1), whole)


def test_zigzag_parts_are_equal_work_under_a_causal_mask() -> None:
    """The reason for dealing positions out in zigzag: contiguous parts are not."""
    work = {
        zigzag: {int((shards(4, zigzag).positions(16, rank) + 1).sum()) for rank in range(4)}
        for zigzag in (False, True)
    }
    assert len(work[True]) == 1
    assert len(work[False]) == 4


@WAYS
def test_the_masks_of_all_parts_are_the_rows_of_the_whole_mask(zigzag: bool) -> None:
    """Documents or positions that are numbered behind the cut; row 0 has documents of 3, 1 and 4 tokens."""
    tokens = torch.tensor([[5, 2, 0, 0, 7, 1, 0, 3], [1, 1, 1, 1, 1, 1, 1, 1]])
    documents = WholeSequence(packed=True).documents(tokens)
    assert documents is not None
    whole = (documents[:, :, None] == documents[:, None, :]).tril()
    for rank in range(3):
        part = shards(3, zigzag, rank)
        here = part.positions(8)
        mask = ShardedSequence(True, part).visible(tokens, here, torch.arange(8))
        assert torch.equal(mask[:, 0], whole[:, here])
