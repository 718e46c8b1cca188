"""From the counts of a case to the arrays of its samples, and back from what a model was fed to sample ids."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from equivtests.cases import numbers
from equivtests.cases.case import MAX_SAMPLES, Case, Model
from equivtests.own import loaded

ID_BITS = 8
DOCUMENT_END = 0
"""The token that ends a document in a packed row; the next position begins another one."""


@dataclass(frozen=True)
class MicroBatch:
    """What one rank feeds forward at once; N rows of L positions.

    inputs, targets of gpt and moe: int64 (N, L); else float64 (N, L, features) and (N, L, outputs).
    A user's own model has samples of its own: inputs and targets are N of them, stacked.
    valid: bool (N, L). ids: int64 (N,), for the dropout stream only. conditional: whether the optional branch is on.
    """

    inputs: np.ndarray
    targets: np.ndarray
    valid: np.ndarray
    ids: np.ndarray
    conditional: bool

    @property
    def rows(self) -> int:
        return len(self.ids)

    @property
    def tokens(self) -> int:
        return int(self.valid.sum())


@dataclass(frozen=True)
class Window:
    """One rank's micro-batches of one update, `update` counted from 0."""

    update: int
    microbatches: tuple[MicroBatch, ...]


def sample_ids(case: Case, update: int, rank: int, microbatch: int) -> list[int]:
    """Ids of the samples in one micro-batch: samples are numbered through the case in reading order."""
    first = 0
    for u, window in enumerate(case.windows):
        for r, micros in enumerate(window):
            for k, rows in enumerate(micros):
                if (u, r, k) == (update, rank, microbatch):
                    return list(range(first, first + len(rows)))
                first += len(rows)
    raise IndexError((update, rank, microbatch))


def window_of(case: Case, update: int, rank: int) -> Window:
    """The micro-batches that the data-parallel rank `rank` is to feed for `update`."""
    micros = case.windows[update][rank]
    batches = [
        micro_batch(case.model, case.seed, sample_ids(case, update, rank, k), list(rows), k == 0, case.length(k))
        for k, rows in enumerate(micros)
    ]
    return Window(update, tuple(batches))


def micro_batch(
    model: Model, seed: int, ids: list[int], counts: list[int], conditional: bool, length: int | None = None
) -> MicroBatch:
    """Arrays of the samples with the given ids and numbers of valid tokens, cut to their first `length` positions."""
    length = model.length if length is None else length
    samples = [_cut(model, sample(model, seed, i), length) for i in ids]
    valid = np.zeros((len(ids), length), dtype=bool)
    for row, (i, count) in enumerate(zip(ids, counts, strict=True)):
        valid[row, numbers.ranking(seed, f"valid.{i}", length)[:count]] = True
    empty_x, empty_y = _cut(model, sample(model, seed, 0), length)
    return MicroBatch(
        inputs=np.stack([x for x, _ in samples]) if samples else empty_x[None][:0],
        targets=np.stack([y for _, y in samples]) if samples else empty_y[None][:0],
        valid=valid,
        ids=np.array(ids, dtype=np.int64),
        conditional=conditional and bool(ids),
    )


def _cut(model: Model, arrays: tuple[np.ndarray, np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
    """The first positions of a sample; what the axes of a user's own samples mean is not known."""
    inputs, targets = arrays
    return arrays if model.own else (inputs[:length], targets[:length])


def empty_micro_batch(case: Case) -> MicroBatch:
    """A micro-batch without rows, for a rank that has to take part in a collective without data."""
    return micro_batch(case.model, case.seed, [], [], False)


@lru_cache(maxsize=4096)
def sample(model: Model, seed: int, sample_id: int) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, targets) of one sample. The id stands in the inputs: base-V digits for tokens, bits for the others."""
    if model.own:
        return loaded(model.own).sample(sample_id)
    if model.decoder:
        return _tokens(model, seed, sample_id)
    draw = numbers.ternary if model.numbers == "dyadic" else numbers.real
    bits = (sample_id >> np.arange(ID_BITS)) & 1
    width, height = (1, 1) if model.family == "chain" else (model.inputs, model.outputs)
    inputs = draw(seed, f"inputs.{sample_id}", (model.length, width))
    inputs[:ID_BITS, 0] = bits if model.family != "chain" else 1 + bits
    return inputs, draw(seed, f"targets.{sample_id}", (model.length, height))


def _tokens(model: Model, seed: int, sample_id: int) -> tuple[np.ndarray, np.ndarray]:
    """A row of tokens and what follows each, int64 (L,). Packed rows have a document's end (token 0) inside."""
    drawn = numbers.integers(seed, f"tokens.{sample_id}", model.length + 1, model.vocabulary)
    drawn[0], drawn[1] = sample_id % model.vocabulary, sample_id // model.vocabulary
    if model.has("packed"):
        drawn[2 + numbers.integers(seed, f"document.{sample_id}", 1, model.length - 3)[0]] = DOCUMENT_END
    return drawn[:-1], drawn[1:]


def decode_ids(model: Model, inputs: np.ndarray) -> np.ndarray:
    """Sample ids, int64 (N,), read from the inputs that reached a forward pass.

    Samples of a user's own model are recognized by their content; other content is `own.UNKNOWN`.
    """
    if model.own:
        return loaded(model.own).numbers(inputs, MAX_SAMPLES)
    if model.decoder:
        return (inputs[:, 0] + inputs[:, 1] * model.vocabulary).astype(np.int64)
    bits = inputs[:, :ID_BITS, 0].astype(np.int64) - (1 if model.family == "chain" else 0)
    return bits @ (1 << np.arange(ID_BITS))


class Feed:
    """The data loader of one rank. Its position is state that a checkpoint has to hold."""

    def __init__(self, case: Case, rank: int, stop: int | None = None) -> None:
        self.case, self.rank = case, rank
        self.stop = case.updates if stop is None else stop
        self.position = 0

    def seek(self, position: int) -> None:
        """Continue with the window of update `position`."""
        self.position = position

    def ahead(self, update: int) -> Window | None:
        """The window of an update that is not due yet, or None after the end of the case; the position stays.

        For a pipeline that is kept full: it takes windows before the updates that they are of, also beyond `stop`.
        """
        if update >= self.case.updates:
            return None
        return window_of(self.case, update, self.case.layout.data_rank(self.rank))

    def __len__(self) -> int:
        """Number of windows that are still to come."""
        return max(0, self.stop - self.position)

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Window:
        if self.position >= self.stop:
            raise StopIteration
        window = window_of(self.case, self.position, self.case.layout.data_rank(self.rank))
        self.position += 1
        return window
