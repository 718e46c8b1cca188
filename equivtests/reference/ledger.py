"""Closed forms of communication and memory. dtypes and the declared algorithm are parameters, never guessed.

Sources. Ring collectives: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations,
J. Parallel Distrib. Comput. 69 (2009) 117-124. Memory and communication of ZeRO: Rajbhandari, Rasley, Ruwase and He,
ZeRO: memory optimizations toward training trillion parameter models, SC 2020, sections 5 (memory), 7 (communication).

Payloads are counted as `record.observation.Collective` counts them: elements of the full tensor (the output of an
all-gather, the input of a reduce-scatter), padding included. Scalars that frameworks exchange beside them (token
totals, losses, norms) are not in the ledger. What travels on the wire is derived from the payload with the ring forms.

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


def direct_all_reduce_bytes(size: int, ranks: int) -> int:
    """Bytes that each rank sends if it sends its whole tensor to every other rank."""
    _whole(0, size=size)
    _whole(1, ranks=ranks)
    return (ranks - 1) * size


_SENT: dict[str, Callable[[int, int], Fraction]] = {
    "all_reduce": ring_all_reduce_bytes,
    "reduce_scatter": ring_shift_bytes,
    "all_gather": ring_shift_bytes,
    "broadcast": ring_shift_bytes,
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

Cut = Literal["flat", "rows", "tensors"]
"""How tensors are laid over ranks.

flat: each tensor flattened and padded to a multiple of the ranks. rows: chunks along dimension 0, the number of rows
padded to a multiple of the ranks (torch's fully_shard). tensors: whole tensors, largest first, each to the rank with
the fewest elements so far (torch's ZeroRedundancyOptimizer).
"""


def padded(parameter: Parameter, shards: int, cut: Cut) -> int:
    """Elements of the full tensor, padding included."""
    if cut == "tensors":
        return parameter.size
    unit = parameter.size // parameter.shape[0] if cut == "rows" else 1
    return math.ceil(parameter.size / (unit * shards)) * unit * shards


def owned(parameters: Sequence[Parameter], shards: int, rank: int, cut: Cut) -> int:
    """Elements that lie on `rank` (of `shards`), without padding."""
    if cut == "tensors":
        return sum(p.size for p in partition(parameters, shards)[rank])
    chunks = [(p.size, padded(p, shards, cut) // shards) for p in parameters]
    return sum(min(max(size - rank * chunk, 0), chunk) for size, chunk in chunks)


def partition(parameters: Sequence[Parameter], ranks: int) -> list[list[Parameter]]:
    """Whole parameters per rank: largest first, each to the rank with the fewest elements (the first of equals)."""
    parts: list[list[Parameter]] = [[] for _ in range(ranks)]
    for parameter in sorted(parameters, key=lambda p: p.size, reverse=True):
        min(parts, key=lambda part: sum(p.size for p in part)).append(parameter)
    return parts


# ------------------------------------------------------------------------- expected collectives of an update


@dataclass(frozen=True)
class LedgerInput:
    """What the forms depend on.

    world = shard · replicate ranks. microbatches: times per update that each rank runs forward and backward (ranks with
    fewer micro-batches are padded with empty ones where the algorithm communicates in each). gather, reduce: dtypes
    of weights and of gradients on the wire. root: names of parameters held by the outermost wrapped module itself.
    unused: names of trained parameters that no forward pass touches.
    """

    parameters: tuple[Parameter, ...]
    shard: int
    replicate: int = 1
    microbatches: int = 1
    gather: str = "float32"
    reduce: str = "float32"
    cut: Cut = "flat"
    root: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        _whole(1, shard=self.shard, replicate=self.replicate)
        _whole(0, microbatches=self.microbatches)
        unknown = (self.root | self.unused) - {p.name for p in self.parameters}
        if unknown:
            raise ValueError(f"root, unused: no parameter {', '.join(sorted(unknown))}")

    @property
    def world(self) -> int:
        return self.shard * self.replicate

    @property
    def trained(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.trained)

    def whole(self, parameters: Sequence[Parameter]) -> int:
        """Elements without padding."""
        return sum(p.size for p in parameters)

    def full(self, parameters: Sequence[Parameter]) -> int:
        """Elements of tensors that are gathered or reduced over the shard group, padding included."""
        return sum(padded(p, self.shard, self.cut) for p in parameters)


@dataclass(frozen=True)
class Payload:
    """`elements` of dtype per update and rank, over groups of `ranks`."""

    elements: int
    dtype: str
    ranks: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.elements * ITEM_BYTES[self.dtype]


Expected = dict[str, Payload]
"""By operation, named as in torch.distributed: all_reduce, reduce_scatter, all_gather, broadcast."""


def sent_bytes(expected: Expected) -> Fraction:
    """Bytes that each rank sends per update if the operations are evenly cut rings. ZeRO, section 7."""
    return sum((_SENT[operation](p.size, p.ranks) for operation, p in expected.items()), start=Fraction(0))


def _all_reduce(given: LedgerInput) -> Expected:
    """Data parallelism with no_sync: trained gradients once per update, however many micro-batches."""
    return {"all_reduce": Payload(given.whole(given.trained), given.reduce, given.world)}


def _all_reduce_per_microbatch(given: LedgerInput) -> Expected:
    """Data parallelism that synchronizes in every backward pass."""
    elements = given.microbatches * given.whole(given.trained)
    return {"all_reduce": Payload(elements, given.reduce, given.world)}


def _reduce_scatter(given: LedgerInput, times: int) -> Payload:
    return Payload(times * given.full(given.trained), given.reduce, given.shard)


def _all_gather(given: LedgerInput, elements: int) -> Payload:
    return Payload(elements, given.gather, given.shard)


def _zero1_reduce_scatter(given: LedgerInput) -> Expected:
    """Accumulated gradients are scattered once; the weights that the optimizer changed are gathered."""
    gathered = _all_gather(given, given.full(given.trained))
    return {"reduce_scatter": _reduce_scatter(given, 1), "all_gather": gathered}


def _zero1_all_reduce(given: LedgerInput) -> Expected:
    """torch's ZeroRedundancyOptimizer under DDP: every parameter, frozen ones too, is broadcast by its owner."""
    broadcast = Payload(given.whole(given.parameters), given.gather, given.world)
    return {**_all_reduce(given), "broadcast": broadcast}


def _zero2(given: LedgerInput) -> Expected:
    """Full gradients are never kept, so that they are scattered in every micro-batch; weights are gathered once."""
    gathered = _all_gather(given, given.full(given.trained))
    return {"reduce_scatter": _reduce_scatter(given, given.microbatches), "all_gather": gathered}


def _zero3(given: LedgerInput) -> Expected:
    """Every micro-batch gathers all weights for the forward pass and again for the backward pass."""
    gathered = _all_gather(given, 2 * given.microbatches * given.full(given.parameters))
    return {"reduce_scatter": _reduce_scatter(given, given.microbatches), "all_gather": gathered}


def _fsdp_reduce_scatter(given: LedgerInput) -> Payload:
    """In every micro-batch; fully_shard leaves out parameters without a gradient, where others reduce zeros."""
    reduced = [p for p in given.trained if p.name not in given.unused]
    return Payload(given.microbatches * given.full(reduced), given.reduce, given.shard)


def _fsdp_full(given: LedgerInput) -> Expected:
    """fully_shard: as zero3, except that the root's own parameters stay gathered from forward to backward."""
    inner = [p for p in given.parameters if p.name not in given.root]
    elements = given.full(given.parameters) + given.full(inner)
    gathered = _all_gather(given, given.microbatches * elements)
    return {"reduce_scatter": _fsdp_reduce_scatter(given), "all_gather": gathered}


def _fsdp_grad_op(given: LedgerInput) -> Expected:
    """fully_shard with reshard_after_forward=False: weights stay gathered from forward to backward."""
    gathered = _all_gather(given, given.microbatches * given.full(given.parameters))
    return {"reduce_scatter": _fsdp_reduce_scatter(given), "all_gather": gathered}


def _hsdp(given: LedgerInput) -> Expected:
    """fsdp-full within each shard group, and an all-reduce of each rank's scattered gradients over the replicas."""
    scattered = _fsdp_reduce_scatter(given).elements // given.shard
    return {**_fsdp_full(given), "all_reduce": Payload(scattered, given.reduce, given.replicate)}


EXPECTED: dict[str, Callable[[LedgerInput], Expected]] = {
    "all-reduce": _all_reduce,
    "all-reduce-per-microbatch": _all_reduce_per_microbatch,
    "zero1-reduce-scatter": _zero1_reduce_scatter,
    "zero1-all-reduce": _zero1_all_reduce,
    "zero2": _zero2,
    "zero3": _zero3,
    "fsdp-full": _fsdp_full,
    "fsdp-grad-op": _fsdp_grad_op,
    "hsdp": _hsdp,
}
"""What one update communicates, by declared algorithm."""


# -------------------------------------------------------------------------------------- persistent memory


def persistent_bytes(given: LedgerInput, rank: int, sharded: frozenset[str], each: BytesPerParameter) -> dict[str, int]:
    """Bytes that `rank` keeps between updates, padding and scalars (step counters) not counted.

    sharded: which of "weights", "gradients", "state" are cut over the shard group, as `given.cut` says. Frozen
    parameters have weights only. Ranks are numbered so that a shard group is consecutive.
    """
    unknown = sharded - {"weights", "gradients", "state"}
    if unknown or not 0 <= rank < given.world:
        raise ValueError(f"sharded {sorted(sharded)}, rank {rank} of {given.world}: no such part or rank")
    parts = {
        "weights": (given.parameters, each.weights),
        "gradients": (given.trained, each.gradients),
        "state": (given.trained, each.optimizer),
    }
    return {
        part: size * (_local(given, kept, rank) if part in sharded else given.whole(kept))
        for part, (kept, size) in parts.items()
    }


def _local(given: LedgerInput, parameters: Sequence[Parameter], rank: int) -> int:
    return owned(parameters, given.shard, rank % given.shard, given.cut)
