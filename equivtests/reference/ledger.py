"""Closed forms of communication and memory. dtypes and the declared algorithm are parameters, never guessed.

Sources. Ring collectives: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations,
J. Parallel Distrib. Comput. 69 (2009) 117-124. Memory and communication of ZeRO: Rajbhandari, Rasley, Ruwase and He,
ZeRO: memory optimizations toward training trillion parameter models, SC 2020, sections 5 (memory), 7 (communication).

Payloads are counted as `record.observation.Collective` counts them: elements of the full tensor (the output of an
all-gather, the input of a reduce-scatter), padding included, by operation and by the axis of the layout whose ranks take
part. Scalars that frameworks exchange beside them (token totals, losses, norms) are not in the ledger. What travels on the
wire is derived from the payload with the ring forms. Models that are split over ranks: `reference.split_ledger`.

Bytes per rank are Fractions: sizes that the number of ranks does not divide are not rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from equivtests.cases.parameters import Parameter

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def _whole(least: int, **values: int) -> None:
    """Raise ValueError unless every value is an integer of at least `least`."""
    for name, value in values.items():
        if type(value) is not int or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


# ------------------------------------------------------------------------------------- ring collectives


def ring_all_reduce_bytes(size: int, ranks: int) -> Fraction:
    """Bytes that each rank sends, and receives, to all-reduce `size` bytes: 2 (P-1)/P · S."""
    return 2 * ring_shift_bytes(size, ranks)


def ring_shift_bytes(size: int, ranks: int) -> Fraction:
    """Bytes that each rank sends, and receives, in a reduce-scatter or an all-gather of a full tensor of `size` bytes.

    (P-1)/P · S: half of an all-reduce, which is the one followed by the other.
    """
    _whole(0, size=size)
    _whole(1, ranks=ranks)
    return Fraction(ranks - 1, ranks) * size


def ring_all_reduce_rounds(ranks: int) -> int:
    """Messages that each rank sends one after the other: P-1 to reduce and scatter, P-1 to gather."""
    _whole(1, ranks=ranks)
    return 2 * (ranks - 1)


def ring_all_reduce_seconds(size: int, ranks: int, latency: float, bandwidth: float) -> float:
    """2 (P-1) α + 2 (P-1)/P · S/B, with α in seconds per message and B in bytes per second and direction."""
    if latency < 0 or bandwidth <= 0:
        raise ValueError(f"latency must not be negative and bandwidth be positive, got {latency!r} and {bandwidth!r}")
    return ring_all_reduce_rounds(ranks) * latency + float(ring_all_reduce_bytes(size, ranks)) / bandwidth


def ring_chunks(elements: int, ranks: int) -> list[int]:
    """Elements of the parts that a ring cuts a vector into: as equal as can be, the first ones larger by one."""
    _whole(0, elements=elements)
    _whole(1, ranks=ranks)
    each, rest = divmod(elements, ranks)
    return [each + (chunk < rest) for chunk in range(ranks)]


def ring_messages(elements: int, ranks: int, rank: int) -> tuple[list[int], list[int]]:
    """Elements of the messages that a rank sends, and of those that it receives, to all-reduce a vector; none are empty.

    To reduce and scatter, rank r sends chunk r - s in round s and receives the one before; to gather, it sends r + 1 - s.
    Where chunks are equal, these are 2 (P-1)/P · elements each way. Patarasuk and Yuan, section 3.
    """
    chunks = ring_chunks(elements, ranks)
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank!r} of {ranks}: there is no such rank")
    numbers = [start - step for start in (rank, rank + 1) for step in range(ranks - 1)]
    sent, received = ([chunks[(number - shift) % ranks] for number in numbers] for shift in (0, 1))
    return [n for n in sent if n], [n for n in received if n]


def direct_all_reduce_bytes(size: int, ranks: int) -> int:
    """Bytes that each rank sends if it sends its whole tensor to every other rank."""
    _whole(0, size=size)
    _whole(1, ranks=ranks)
    return (ranks - 1) * size


def tensor_parallel_bytes(layers: int, size: int, ranks: int, all_reduces: int = 2) -> Fraction:
    """Bytes that each rank sends to all-reduce activations of `size` bytes (tokens · hidden) in every layer.

    all_reduces per layer: one forward and one backward for one pair of column and row shards; four for a transformer
    layer, whose attention and MLP are one pair each. Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3.
    """
    _whole(0, layers=layers, all_reduces=all_reduces)
    return layers * all_reduces * ring_all_reduce_bytes(size, ranks)


def pipeline_bytes(size: int, stages: int) -> int:
    """Bytes that a chain of stages sends, all ranks together, for activations of `size` bytes: there and back."""
    _whole(0, size=size)
    _whole(1, stages=stages)
    return 2 * size * (stages - 1)


_SENT: dict[str, Callable[[int, int], Fraction]] = {
    "all_reduce": ring_all_reduce_bytes,
    "reduce_scatter": ring_shift_bytes,
    "all_gather": ring_shift_bytes,
    "broadcast": ring_shift_bytes,
    "all_to_all": ring_shift_bytes,
    "send": lambda size, ranks: Fraction(size),
    "recv": lambda size, ranks: Fraction(0),
}
"""Bytes sent per rank by operation. A broadcast makes P-1 copies whatever its tree: on average (P-1)/P · S per rank."""


# --------------------------------------------------------------------------------- samples, tokens, ranks


def devices(data_parallel: int, tensor_parallel: int = 1, pipeline_parallel: int = 1) -> int:
    """Ranks of a mesh."""
    _whole(1, data_parallel=data_parallel, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel)
    return data_parallel * tensor_parallel * pipeline_parallel


def effective_batch(micro_batch: int, accumulation: int, data_parallel: int) -> int:
    """Examples per update. Tensor and pipeline ranks work on the same examples and do not count."""
    _whole(1, micro_batch=micro_batch, accumulation=accumulation, data_parallel=data_parallel)
    return micro_batch * accumulation * data_parallel


def token_weighted_mean(loss_sums: Sequence[float], valid_tokens: Sequence[int]) -> float | None:
    """Σ loss sums / Σ valid tokens over all ranks; None for a window without valid tokens, whose update is skipped."""
    _matching(loss_sums, valid_tokens)
    return sum(loss_sums) / sum(valid_tokens) if sum(valid_tokens) else None


def local_objectives(loss_sums: Sequence[float], valid_tokens: Sequence[int]) -> list[float] | None:
    """What each of W ranks differentiates, W · S_r / T, so that the average over ranks is the token-weighted mean."""
    _matching(loss_sums, valid_tokens)
    total = sum(valid_tokens)
    return [len(loss_sums) * part / total for part in loss_sums] if total else None


def _matching(loss_sums: Sequence[float], valid_tokens: Sequence[int]) -> None:
    if len(loss_sums) != len(valid_tokens) or not loss_sums:
        raise ValueError(f"one loss sum and one token count per rank: got {len(loss_sums)} and {len(valid_tokens)}")
    for rank, tokens in enumerate(valid_tokens):
        _whole(0, **{f"valid_tokens[{rank}]": tokens})


def averaged_gradient(rank_gradients: Sequence[Sequence[float]]) -> list[float]:
    """Elementwise mean over ranks."""
    return [sum(column) / len(rank_gradients) for column in zip(*rank_gradients, strict=True)]


def sgd_update(weights: Sequence[float], gradient: Sequence[float], learning_rate: float) -> list[float]:
    """w - lr · g, elementwise."""
    return [w - learning_rate * g for w, g in zip(weights, gradient, strict=True)]


Matrix = Sequence[Sequence[float]]


def linear(x: Sequence[float], weight: Matrix) -> list[float]:
    """x · W, with one row of W per element of x."""
    return [sum(a * w for a, w in zip(x, column, strict=True)) for column in zip(*weight, strict=True)]


def column_shard_outputs(x: Sequence[float], weight: Matrix, ranks: int) -> list[list[float]]:
    """By rank: x · (its columns of W). Concatenated they are x · W. Shoeybi et al., arXiv 1909.08053, section 3."""
    _, width = shard_shape((len(weight), len(weight[0])), 1, ranks)
    return [linear(x, [row[first : first + width] for row in weight]) for first in range(0, width * ranks, width)]


def row_shard_outputs(x: Sequence[float], weight: Matrix, ranks: int) -> list[list[float]]:
    """By rank: (its part of x) · (its rows of W). Their sum, not their mean, is x · W. The same source."""
    height, _ = shard_shape((len(weight), len(weight[0])), 0, ranks)
    parts = [slice(first, first + height) for first in range(0, height * ranks, height)]
    return [linear(x[part], weight[part]) for part in parts]


# ------------------------------------------------------------------------------------------------- memory

Stage = Literal["replicated", "zero1", "zero2", "zero3"]

_SHARDED: dict[Stage, tuple[str, ...]] = {
    "replicated": (),
    "zero1": ("optimizer",),
    "zero2": ("optimizer", "gradients"),
    "zero3": ("optimizer", "gradients", "weights"),
}


@dataclass(frozen=True)
class BytesPerParameter:
    """What one parameter costs without sharding. `optimizer` includes a master copy of the weights, if there is one."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def state_bytes(stage: Stage, parameters: int, each: BytesPerParameter, shards: int) -> Fraction:
    """Bytes that each of `shards` data-parallel ranks keeps: N · (whole parts + sharded parts / D). ZeRO, section 5."""
    _whole(0, parameters=parameters, weights=each.weights, gradients=each.gradients, optimizer=each.optimizer)
    _whole(1, shards=shards)
    if stage not in _SHARDED:
        raise ValueError(f"stage must be one of {', '.join(_SHARDED)}, got {stage!r}")
    cut = sum(getattr(each, part) for part in _SHARDED[stage])
    return parameters * (each.total - cut + Fraction(cut, shards))


def model_shard(parameters: int, tensor_parallel: int = 1, pipeline_parallel: int = 1) -> Fraction:
    """Parameters of one model shard, cut evenly over tensor and pipeline ranks."""
    _whole(0, parameters=parameters)
    return Fraction(parameters, devices(1, tensor_parallel, pipeline_parallel))


def shard_shape(shape: tuple[int, ...], dimension: int, shards: int) -> tuple[int, ...]:
    """Shape of one of `shards` equal parts along a dimension. Raises ValueError if it does not divide."""
    _whole(1, shards=shards)
    if shape[dimension] % shards:
        raise ValueError(f"{shards} shards do not divide dimension {dimension} of {shape}")
    return tuple(n // shards if d == dimension % len(shape) else n for d, n in enumerate(shape))


# ------------------------------------------------------------------------------------ cutting tensors

Cut = Literal["tensors", "first", "turns", "flat", "aligned", "each", "rows"]
"""How the tensors of a unit are laid over ranks.

tensors: whole tensors, largest first, each to the rank with the fewest elements so far (ZeroRedundancyOptimizer).
first: all on the first rank. turns: whole tensors, each to the rank after the last one's (parameter servers).
flat: what is trained end to end in one vector, padded to a multiple of the ranks. aligned: the same for all that the
unit holds, every tensor starting at a multiple of 16 bytes (FullyShardedDataParallel with use_orig_params). rows: each
tensor in chunks along dimension 0, its number of rows padded to a multiple of the ranks (fully_shard). each: each tensor
flattened, its number of elements padded to a multiple of the ranks (DeepSpeed's stage 3).
"""
ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class Shards:
    """One unit on its ranks. by_rank: elements of each parameter on each rank; full: of all together, with padding."""

    by_rank: list[dict[str, int]]
    full: int


def shards_of(parameters: Sequence[Parameter], ranks: int, cut: Cut, align: int = 1) -> Shards:
    """Lay the parameters of one unit over ranks. align: elements that starts are a multiple of, for cut "aligned"."""
    _whole(1, ranks=ranks, align=align)
    if cut in WHOLE_TENSORS:
        parts = WHOLE_TENSORS[cut](parameters, ranks)
        return Shards([{p.name: p.size for p in part} for part in parts], _size(parameters))
    if cut in ("rows", "each"):
        rows = {p.name: p.size // p.shape[0] if cut == "rows" else 1 for p in parameters}
        each = [_chunks({p.name: (0, p.size)}, p.size, ranks, row=rows[p.name]) for p in parameters]
        by_rank = [{n: size for one in each for n, size in one.by_rank[rank].items()} for rank in range(ranks)]
        return Shards(by_rank, sum(one.full for one in each))
    spans = _spans(parameters, align if cut == "aligned" else 1)
    return _chunks(spans, max((stop for _, stop in spans.values()), default=0), ranks)


def _size(parameters: Sequence[Parameter]) -> int:
    """Elements without padding."""
    return sum(p.size for p in parameters)


def _spans(parameters: Sequence[Parameter], align: int) -> dict[str, tuple[int, int]]:
    """(start, stop) of tensors laid end to end, each at the next multiple of `align`."""
    spans, end = {}, 0
    for parameter in parameters:
        start = math.ceil(end / align) * align
        end = start + parameter.size
        spans[parameter.name] = (start, end)
    return spans


def _chunks(spans: dict[str, tuple[int, int]], total: int, ranks: int, row: int = 1) -> Shards:
    """`total` elements in one equal chunk per rank, cut at multiples of `row`."""
    chunk = math.ceil(total / (row * ranks)) * row
    by_rank = []
    for low in range(0, ranks * chunk, chunk) if chunk else [0] * ranks:
        by_rank.append({n: max(0, min(stop, low + chunk) - max(start, low)) for n, (start, stop) in spans.items()})
    return Shards(by_rank, chunk * ranks)


def partition(parameters: Sequence[Parameter], ranks: int) -> list[list[Parameter]]:
    """Whole parameters per rank: largest first, each to the rank with the fewest elements (the first of equals).

    ZeroRedundancyOptimizer does so for one parameter group after the other, which is the same if no parameter of a
    later group is larger than one of an earlier group.
    """
    parts: list[list[Parameter]] = [[] for _ in range(ranks)]
    for parameter in sorted(parameters, key=lambda p: p.size, reverse=True):
        min(parts, key=_size).append(parameter)
    return parts


def all_on_the_first(parameters: Sequence[Parameter], ranks: int) -> list[list[Parameter]]:
    """Everything on the first rank, nothing on the others."""
    return [list(parameters), *([] for _ in range(ranks - 1))]


def by_turns(parameters: Sequence[Parameter], ranks: int) -> list[list[Parameter]]:
    """Whole parameters per rank, dealt out one by one."""
    return [list(parameters[rank::ranks]) for rank in range(ranks)]


WHOLE_TENSORS: dict[Cut, Callable[[Sequence[Parameter], int], list[list[Parameter]]]] = {
    "tensors": partition,
    "first": all_on_the_first,
    "turns": by_turns,
}
"""The cuts that leave tensors whole: which of them every rank has."""


# ------------------------------------------------------------------------- expected collectives of an update


@dataclass(frozen=True)
class LedgerInput:
    """What the forms depend on.

    world = shard · replicate ranks. microbatches: times per update that each rank runs forward and backward (ranks with
    fewer micro-batches are padded with empty ones where the algorithm communicates in each). gather, reduce: dtypes
    of weights and of gradients on the wire. units: names of the parameters of each module that is wrapped on its own;
    all others are the root's. unused: names of trained parameters that no forward pass touches. rank: whose collectives they
    are, where ranks do not all issue the same.
    """

    parameters: tuple[Parameter, ...]
    shard: int
    replicate: int = 1
    microbatches: int = 1
    gather: str = "float32"
    reduce: str = "float32"
    cut: Cut = "tensors"
    units: tuple[frozenset[str], ...] = ()
    unused: frozenset[str] = frozenset()
    rank: int = 0

    def __post_init__(self) -> None:
        _whole(1, shard=self.shard, replicate=self.replicate)
        _whole(0, microbatches=self.microbatches)
        unknown = self.inner.union(self.unused) - {p.name for p in self.parameters}
        if unknown:
            raise ValueError(f"units, unused: no parameter {', '.join(sorted(unknown))}")

    @property
    def world(self) -> int:
        return self.shard * self.replicate

    @property
    def trained(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.trained)

    @property
    def touched(self) -> tuple[Parameter, ...]:
        """Parameters that have a gradient."""
        return tuple(p for p in self.trained if p.name not in self.unused)

    @property
    def inner(self) -> frozenset[str]:
        """Names of the parameters that are not the root's."""
        return frozenset().union(*self.units)

    @property
    def reduced(self) -> tuple[Parameter, ...]:
        """What the gradients that are reduced cover: all that is trained, with zeros for what has no gradient.

        fully_shard (rows) leaves out what has no gradient; FullyShardedDataParallel (aligned) reduces whole units.
        """
        if self.cut == "rows":
            return self.touched
        if self.cut != "aligned":
            return self.trained
        units = self.split(self.parameters)
        return tuple(p for unit in units if any(p.trained for p in unit) for p in unit)

    def split(self, parameters: Sequence[Parameter]) -> list[list[Parameter]]:
        """Parameters by unit, the root last."""
        names = [*self.units, {p.name for p in self.parameters} - self.inner]
        return [[p for p in parameters if p.name in unit] for unit in names]

    def full(self, parameters: Sequence[Parameter]) -> int:
        """Elements of tensors that are gathered or reduced over the shard group, padding included."""
        return sum(unit.full for unit in self._shards(parameters))

    def owned(self, parameters: Sequence[Parameter], rank: int, counted: Sequence[Parameter]) -> int:
        """Elements of the `counted` among the parameters that lie on `rank` if all are sharded, without padding."""
        local = [unit.by_rank[rank % self.shard] for unit in self._shards(parameters)]
        return sum(own.get(p.name, 0) for own in local for p in counted)

    def _shards(self, parameters: Sequence[Parameter]) -> list[Shards]:
        align = ALIGNMENT // ITEM_BYTES[self.gather]
        return [shards_of(unit, self.shard, self.cut, align) for unit in self.split(parameters)]


@dataclass(frozen=True)
class Payload:
    """`elements` of dtype per update and rank, over groups of `ranks`. count: in so many operations; None: in any number."""

    elements: int
    dtype: str
    ranks: int
    count: int | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return self.elements * ITEM_BYTES[self.dtype]


Travel = tuple[str, str]
"""Operation, named as in torch.distributed (all_reduce, reduce_scatter, all_gather, broadcast, all_to_all, send, recv); and
over which of the axes of `cases.layout.Layout` ("shard", "tp", several as "dp cp")."""

Expected = dict[Travel, Payload]


def sent_bytes(expected: Expected) -> Fraction:
    """Bytes that each rank sends per update if the operations are evenly cut rings. ZeRO, section 7."""
    return sum((_SENT[operation](p.size, p.ranks) for (operation, _), p in expected.items()), start=Fraction(0))


def _all_reduce(given: LedgerInput, times: int = 1) -> Expected:
    """Data parallelism with no_sync: trained gradients once per update, however many micro-batches."""
    return {("all_reduce", "dp"): Payload(times * given.full(given.reduced), given.reduce, given.world)}


def _all_reduce_per_microbatch(given: LedgerInput) -> Expected:
    """Data parallelism that synchronizes in every backward pass."""
    return _all_reduce(given, given.microbatches)


def _scatter(given: LedgerInput, times: int) -> Expected:
    """Gradients reduced to their owners `times` times; the shards are then all-reduced over their replicas, if any."""
    elements = times * given.full(given.reduced)
    scattered = {("reduce_scatter", "shard"): Payload(elements, given.reduce, given.shard)}
    if given.replicate == 1:
        return scattered
    return scattered | {("all_reduce", "replicate"): Payload(elements // given.shard, given.reduce, given.replicate)}


def _gather(given: LedgerInput, elements: int) -> Expected:
    return {("all_gather", "shard"): Payload(elements, given.gather, given.shard)}


def _zero1_reduce_scatter(given: LedgerInput) -> Expected:
    """Accumulated gradients are scattered once; the weights that the optimizer changed are gathered."""
    return _scatter(given, 1) | _gather(given, given.full(given.trained))


def _zero1_all_reduce(given: LedgerInput) -> Expected:
    """torch's ZeroRedundancyOptimizer under DDP: every parameter it was given is broadcast by its owner."""
    return _all_reduce(given) | {("broadcast", "dp"): Payload(given.full(given.trained), given.gather, given.world)}


def _zero2(given: LedgerInput) -> Expected:
    """Full gradients are never kept, so that they are scattered in every micro-batch; weights are gathered once."""
    return _scatter(given, given.microbatches) | _gather(given, given.full(given.trained))


def _zero3(given: LedgerInput) -> Expected:
    """Every micro-batch gathers all weights, frozen ones too, for the forward pass and again for the backward pass."""
    gathered = 2 * given.microbatches * given.full(given.parameters)
    return _scatter(given, given.microbatches) | _gather(given, gathered)


def _fsdp_full(given: LedgerInput) -> Expected:
    """As zero3, except that the root's own parameters stay gathered from forward to backward (FSDP and fully_shard)."""
    inner = [p for p in given.parameters if p.name in given.inner]
    gathered = given.microbatches * (given.full(given.parameters) + given.full(inner))
    return _scatter(given, given.microbatches) | _gather(given, gathered)


def _fsdp_grad_op(given: LedgerInput) -> Expected:
    """SHARD_GRAD_OP, reshard_after_forward=False: all weights stay gathered from forward to backward."""
    gathered = given.microbatches * given.full(given.parameters)
    return _scatter(given, given.microbatches) | _gather(given, gathered)


def _ring(given: LedgerInput) -> Expected:
    """The all-reduce of trained gradients, once per update, as messages round a ring of all ranks."""
    directions = ring_messages(given.full(given.reduced), given.world, given.rank)
    return _messages(given, *directions)


def _parameter_server(given: LedgerInput) -> Expected:
    """Every rank sends its gradients, and every server its weights, to all others; `cut` says what each serves.

    Li et al. 2014, Scaling distributed machine learning with the parameter server, section 2.2. Both travel in one dtype.
    """
    served = [given.owned(given.trained, rank, given.trained) for rank in range(given.world)]
    own, others = served[given.rank], [n for rank, n in enumerate(served) if rank != given.rank and n]
    answers = [own] * (given.world - 1) if own else []
    return _messages(given, [*others, *answers], [*answers, *others])


def _messages(given: LedgerInput, sent: list[int], received: list[int]) -> Expected:
    """Messages of so many elements between the data-parallel ranks."""
    return {
        (operation, "dp"): Payload(sum(sizes), given.reduce, given.world, len(sizes))
        for operation, sizes in (("send", sent), ("recv", received))
    }


EXPECTED: dict[str, Callable[[LedgerInput], Expected]] = {
    "all-reduce": _all_reduce,
    "ring": _ring,
    "parameter-server": _parameter_server,
    "all-reduce-per-microbatch": _all_reduce_per_microbatch,
    "zero1-reduce-scatter": _zero1_reduce_scatter,
    "zero1-all-reduce": _zero1_all_reduce,
    "zero2": _zero2,
    "zero3": _zero3,
    "fsdp-full": _fsdp_full,
    "fsdp-grad-op": _fsdp_grad_op,
}
"""What one update communicates, by declared algorithm; with replicate > 1 in the hybrid form (HSDP)."""


# -------------------------------------------------------------------------------------- persistent memory

PARTS = ("weights", "gradients", "state")


@dataclass(frozen=True)
class Kept:
    """Bytes that a rank keeps of one part: at least without padding, at most with it; whole: of the unsharded part."""

    least: int
    most: int
    whole: int


def persistent_bytes(
    given: LedgerInput, rank: int, sharded: frozenset[str], each: BytesPerParameter
) -> dict[str, Kept]:
    """What `rank` keeps from one micro-batch to the next, by part, scalars (step counters) not counted.

    sharded: which of `PARTS` are cut over the shard group, as `given.cut` says. Frozen parameters have weights only.
    Ranks are numbered so that a shard group is consecutive.
    """
    unknown = sharded - set(PARTS)
    if unknown or not 0 <= rank < given.world:
        raise ValueError(f"sharded {sorted(sharded)}, rank {rank} of {given.world}: no such part or rank")
    sizes = {"weights": each.weights, "gradients": each.gradients, "state": each.optimizer}
    return {part: _kept(given, rank, part, part in sharded, size) for part, size in sizes.items()}


def _kept(given: LedgerInput, rank: int, part: str, sharded: bool, size: int) -> Kept:
    """`size` bytes per element. Flat vectors may keep room for padding and for what has no gradient."""
    kept, laid = (given.parameters, given.parameters) if part == "weights" else (given.touched, given.reduced)
    whole, most = _size(kept), given.full(laid)
    if not sharded:
        return Kept(size * whole, size * most, size * whole)
    own = given.owned(laid, rank, kept)
    return Kept(size * own, size * (own if given.cut in WHOLE_TENSORS else most // given.shard), size * whole)
