"""The case: one complete training situation as plain, frozen data with a strict and stable JSON form.

A window is written as nested tuples of valid-token counts, `windows[update][rank][microbatch][row]`, so that
unequal token counts, empty micro-batches, ranks without rows and short last windows are all visible in the data.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import types
import typing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from equivtests.cases.layout import Layout
from equivtests.cases.staleness import Staleness
from equivtests.errors import CaseError

SCHEMA = 1
LARGEST = sys.float_info.max
MAX_SAMPLES = 169  # what two tokens of the smallest vocabulary, and eight bits, can both number

FEATURES: dict[str, tuple[str, ...]] = {
    "balance": ("moe",),
    "batch_norm": ("mlp",),
    "bias": ("linear", "mlp", "gated_mlp", "gpt", "moe"),
    "conditional": ("mlp", "gpt", "moe"),
    "dropout": ("mlp", "gpt", "moe"),
    "extra_head": ("gpt", "moe"),
    "frozen": ("mlp", "gated_mlp", "gpt", "moe"),
    "gated": ("gpt", "moe"),
    "packed": ("gpt", "moe"),
    "pairs": ("mlp",),
    "qk_norm": ("gpt", "moe"),
    "running": ("mlp",),
    "shared_kv": ("gpt", "moe"),
    "smoothing": ("gpt", "moe"),
    "tied": ("gpt", "moe"),
    "transposed": ("linear", "mlp"),
    "unused": ("linear", "mlp", "gated_mlp", "gpt", "moe"),
    "z_loss": ("gpt", "moe"),
}
"""Switches that bugs hide behind, and the model families that have them."""

FEATURE_MEANING = {
    "balance": "an auxiliary loss on how evenly a router spreads the tokens of each row over its experts",
    "batch_norm": "the first activations are normalized by statistics over all rows of a micro-batch number, on all ranks",
    "bias": "biases beside the weights (never on attention keys or before a batch norm: that gradient is analytically zero)",
    "conditional": "a branch that only the first micro-batch of each rank uses",
    "dropout": "dropout with decisions keyed by (draw, sample id), the draw being the number of updates made",
    "extra_head": "a second prediction head with its own loss term",
    "frozen": "the first weight takes no gradient",
    "gated": "a feedforward of down(silu(gate) · up)",
    "packed": "several documents in a row: token 0 ends one; positions restart, and attention stays inside",
    "pairs": "a loss over pairs of samples that lie on different ranks",
    "qk_norm": "norms on queries and keys",
    "running": "a buffer with the running mean of the hidden activations",
    "shared_kv": "one key/value head for all query heads",
    "smoothing": "label smoothing in the token losses",
    "tied": "output head and embedding are one parameter",
    "transposed": "the first weight is stored transposed (not contiguous)",
    "unused": "a parameter that no forward pass touches: its gradient is absent, which is not zero",
    "z_loss": "an auxiliary loss on the log-partition, averaged over rows",
}


@dataclass(frozen=True)
class Model:
    """A tiny model. `inputs`, `outputs`: features of linear, mlp and gated_mlp; `depth`: layers, or factors of a chain.

    heads, kv_heads: attention heads of queries, and of keys and values (0: as many; the feature shared_kv: one).
    experts, top_k: of the layers of a moe, and how many of them take each token; capacity: most tokens of each row that an
    expert takes, the first ones (0: no limit).
    Family own: a user's model, whose class `own` names ("module:Class"); only `length` says something of it, too.
    """

    family: Literal["chain", "linear", "mlp", "gated_mlp", "gpt", "moe", "own"]
    width: int = 8
    depth: int = 2
    inputs: int = 5
    outputs: int = 3
    vocabulary: int = 13
    length: int = 8
    features: tuple[str, ...] = ()
    numbers: Literal["real", "dyadic"] = "real"
    own: str = ""
    heads: int = 2
    kv_heads: int = 0
    experts: int = 0
    top_k: int = 1
    capacity: int = 0
    LATER: ClassVar[frozenset[str]] = frozenset({"heads", "kv_heads", "experts", "top_k", "capacity"})

    @property
    def decoder(self) -> bool:
        """Whether it reads and predicts tokens, with attention."""
        return self.family in ("gpt", "moe")

    @property
    def kv(self) -> int:
        """Heads of keys and values."""
        return 1 if self.has("shared_kv") else self.kv_heads or self.heads

    @property
    def keeps_statistics(self) -> bool:
        """Whether it has buffers that follow its activations."""
        return self.has("running") or self.has("batch_norm")

    def has(self, feature: str) -> bool:
        return feature in self.features


@dataclass(frozen=True)
class Optimizer:
    """`schedule` holds the factor on `lr` of each update made (its last entry repeats).

    `clip` is the largest allowed norm of the whole model's gradient (None: no clipping), `clip_norm` its order.
    """

    name: Literal["sgd", "momentum", "adam", "adamw"] = "sgd"
    lr: float = 0.125
    momentum: float = 0.0
    betas: tuple[float, float] = (0.875, 0.96875)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay_vectors: bool = True
    schedule: tuple[float, ...] = (1.0,)
    clip: float | None = None
    clip_norm: Literal["2", "inf"] = "2"

    def rate(self, step: int) -> float:
        """Learning rate of the update number `step` (counted from 0, skipped windows not counted)."""
        return self.lr * self.schedule[min(step, len(self.schedule) - 1)]


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling: multiplied by 2 after every `growth_interval` updates that were made."""

    initial: float = 1024.0
    growth_interval: int = 2


@dataclass(frozen=True)
class Precision:
    """`weights`: dtype of parameters and optimizer state; `compute`: of forward and backward; `reduce`: on the wire."""

    weights: Literal["float32", "float64"] = "float32"
    compute: Literal["float32", "float64", "bfloat16"] = "float32"
    reduce: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    loss_scale: LossScale | None = None

    @property
    def label(self) -> str:
        parts = (self.weights, self.compute, self.reduce)
        return self.weights if len(set(parts)) == 1 else "/".join(parts)


DOUBLE = Precision("float64", "float64", "float64")


@dataclass(frozen=True)
class Semantics:
    """The arithmetic contract of an update; each field is one decision, the defaults are those of one device.

    denominator: what the token losses are divided by before they are added up.
        window: the valid tokens of the whole window; microbatch: those of one micro-batch over all ranks, then a mean
        over micro-batches; rank: those of one rank's window, then a mean over ranks; rank-microbatch: those of one
        micro-batch of one rank, then a mean over micro-batches and ranks; rows: as the last, weighted by rows.
    auxiliary: the same choice for the auxiliary loss (z_loss, extra_head).
    reduction: mean: the average over ranks of W times the local part; sum: no division by W; local: none at all.
    accumulation: all: every micro-batch counts; last: only the newest one (earlier ones overwritten).
    clip_scope: global: the norm of the whole model; none: not clipped although the case asks for it.
    decay: declared: decay as the case says; all / none: every / no parameter decays.
    master: none: the optimizer steps the weights themselves; float32: it steps a float32 copy of them, from gradients cast
        to float32, and the weights are that copy cast back.
    staleness: which weights gradients are computed at, and when they are applied.
    """

    denominator: Literal["window", "microbatch", "rank", "rank-microbatch", "rows"] = "window"
    auxiliary: Literal["window", "microbatch", "rank", "rank-microbatch", "rows"] = "window"
    reduction: Literal["mean", "sum", "local"] = "mean"
    accumulation: Literal["all", "last"] = "all"
    clip_scope: Literal["global", "none"] = "global"
    decay: Literal["declared", "all", "none"] = "declared"
    master: Literal["none", "float32"] = "none"
    staleness: Staleness = Staleness()
    LATER: ClassVar[frozenset[str]] = frozenset({"staleness"})

    def describe(self) -> list[str]:
        """What differs from one device's semantics, as `field = value` lines."""
        return [
            f"{f.name} = {getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]


Rows = tuple[int, ...]
Windows = tuple[tuple[tuple[Rows, ...], ...], ...]


@dataclass(frozen=True)
class Case:
    """One training situation.

    `accumulation`: the configured number of micro-batches per rank and update; a window may have fewer, or unequal
    numbers. `magnitude`: a power of two on the loss. `semantics.denominator`: the span that the token total is taken over.
    `lengths`: sequence length by micro-batch number, over and over; (): model.length everywhere.
    `asynchronous`: what the windows are made for. pipeline: mini-batches that overlap in a pipeline which is never flushed;
    server: each window holds what one worker computes a gradient of, and ranks that are never fed are parameter servers.
    `worker`: the data rank that trains alone, as in local SGD: windows hold its own rows only; None: all ranks together.
    """

    name: str
    model: Model
    windows: Windows
    layout: Layout = field(default_factory=Layout)
    optimizer: Optimizer = field(default_factory=Optimizer)
    precision: Precision = field(default_factory=Precision)
    accumulation: int = 1
    magnitude: float = 1.0
    seed: int = 0
    semantics: Semantics = field(default_factory=Semantics)
    lengths: tuple[int, ...] = ()
    asynchronous: Literal["", "pipeline", "server"] = ""
    worker: int | None = None
    schema: int = SCHEMA
    LATER: ClassVar[frozenset[str]] = frozenset({"lengths", "asynchronous", "worker"})

    def __post_init__(self) -> None:
        validate(self)

    @property
    def updates(self) -> int:
        return len(self.windows)

    @property
    def exact(self) -> bool:
        """Whether the case claims the exact lane (the reference then proves it)."""
        return self.model.numbers == "dyadic"

    @property
    def save_after(self) -> int:
        """Number of windows after which the restore chapter saves: the middle one, never the last."""
        return max(1, self.updates // 2)

    def length(self, microbatch: int) -> int:
        """Sequence length of every micro-batch of this number."""
        return self.lengths[microbatch % len(self.lengths)] if self.lengths else self.model.length

    def tokens(self, update: int) -> int:
        """Valid tokens of a whole window."""
        return sum(n for rank in self.feeding(update) for micro in rank for n in micro)

    def feeding(self, update: int) -> tuple[tuple[Rows, ...], ...]:
        """By data rank, the micro-batches of a window; none of ranks that have no part in it."""
        ranks = self.windows[update]
        return ranks if self.worker is None else tuple(m if r == self.worker else () for r, m in enumerate(ranks))

    def replace(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)


def validate(case: Case) -> None:
    """Raise CaseError with the field and the remedy if the case is not one that every component understands."""
    for rule, message in _rules(case):
        if not rule:
            raise CaseError(f"case {case.name!r}: {message}")


def _power_of_two(x: float) -> bool:
    return x > 0 and math.frexp(x)[0] == 0.5


def _rules(case: Case) -> list[tuple[bool, str]]:
    model, layout, counts = case.model, case.layout, _counts(case)
    misplaced = [f for f in model.features if model.family not in FEATURES.get(f, ())]
    least = {"gpt": 2, "moe": 2, "own": 1}.get(model.family, 8)
    return [
        (bool(case.name), "name is empty"),
        (case.schema == SCHEMA, f"schema is {case.schema}; this version reads {SCHEMA}"),
        (not misplaced, f"model.features: {model.family} has no {', '.join(map(repr, misplaced))}"),
        (list(model.features) == sorted(set(model.features)), "model.features must be sorted and unique"),
        (min(model.width, model.depth, model.length, model.outputs) >= 1, "model sizes must be at least 1"),
        (model.inputs >= 2, "model.inputs must be at least 2"),
        *_decoder_rules(model),
        ((model.family == "own") == bool(model.own), "model.own names a class for family own, and for no other"),
        (model.length >= least, f"model.length must be at least {least} (it carries the sample id)"),
        (_trains(model), "model.features: frozen leaves nothing to train in an mlp of depth 1 without bias"),
        (
            not case.exact or model.family in ("chain", "linear", "mlp"),
            f"model.numbers: {model.family} has no exact arithmetic; use real",
        ),
        *layout.problems(model.depth),
        (bool(case.windows), "windows is empty; give at least one update"),
        (all(len(w) == layout.dp for w in case.windows), f"every window needs {layout.dp} ranks (layout.dp)"),
        (all(0 <= n <= model.length for n in counts), f"valid tokens must lie in 0..{model.length} (model.length)"),
        *_length_rules(case),
        *case.semantics.staleness.problems(case.updates, layout.stage_count),
        *_asynchronous_rules(case),
        (case.worker is None or 0 <= case.worker < layout.dp, f"worker must be one of {layout.dp} ranks (layout.dp)"),
        (len(counts) <= MAX_SAMPLES, f"{len(counts)} samples; a case holds at most {MAX_SAMPLES}"),
        (case.accumulation >= 1, "accumulation must be at least 1"),
        (_longest(case) <= case.accumulation, f"a rank has more micro-batches than accumulation {case.accumulation}"),
        (_power_of_two(case.magnitude), "magnitude must be a power of two"),
        (case.optimizer.lr > 0, "optimizer.lr must be positive"),
        (bool(case.optimizer.schedule), "optimizer.schedule is empty; use [1.0]"),
        (case.optimizer.clip is None or case.optimizer.clip > 0, "optimizer.clip must be positive or null"),
        (case.seed >= 0, "seed must not be negative"),
    ]


def _decoder_rules(model: Model) -> list[tuple[bool, str]]:
    """What holds of attention, vocabulary and experts."""
    heads, experts = model.heads, model.experts
    some = min(heads, model.kv_heads + 1, model.top_k, model.capacity + 1) >= 1
    fits = not model.decoder or not some or model.width % heads == 0
    shares = not some or heads % model.kv == 0
    moe = model.family == "moe"
    return [
        (some, "model.heads and top_k must be at least 1, kv_heads and capacity not negative"),
        (fits, f"model.width {model.width} of {model.family} must be divisible by its {heads} heads"),
        (shares, f"model.kv_heads {model.kv_heads} must divide the {heads} heads"),
        (not model.has("shared_kv") or model.kv_heads <= 1, "model.features: shared_kv is one head; drop kv_heads"),
        (not model.decoder or model.vocabulary >= 13, "model.vocabulary must be at least 13"),
        (not model.has("packed") or model.length >= 4, "model.length must be at least 4 for two documents (packed)"),
        (experts >= 2 if moe else experts == 0, "model.experts: a moe has at least 2, other families have none"),
        (model.top_k <= max(1, experts), f"model.top_k {model.top_k} must not exceed the {experts} experts"),
        (moe or model.capacity == 0, "model.capacity limits experts, which only a moe has"),
    ]


def _length_rules(case: Case) -> list[tuple[bool, str]]:
    """What holds where micro-batches have sequence lengths of their own."""
    fits = all(
        n <= case.length(k) for window in case.windows for rank in window for k, rows in enumerate(rank) for n in rows
    )
    longest = case.model.length
    return [
        (not case.lengths or case.model.family == "gpt", "lengths: only gpt ignores what is cut off; leave them out"),
        (all(2 <= n <= longest for n in case.lengths), f"lengths must lie in 2..{longest} (model.length)"),
        (fits, "valid tokens must not exceed the length of their micro-batch (lengths)"),
    ]


def _asynchronous_rules(case: Case) -> list[tuple[bool, str]]:
    """What holds where windows are made for asynchronous runs, and of rules that only some of these have."""
    served = case.asynchronous == "server"
    fed = [[rank for rank, batches in enumerate(window) if batches] for window in case.windows]
    several = next((window for window, ranks in enumerate(fed) if len(ranks) != 1), None) if served else None
    idle = case.layout.dp - len({rank for ranks in fed for rank in ranks})
    of_arrivals = case.semantics.staleness.versions == "arrivals"
    return [
        (several is None, f"asynchronous = server: every window feeds one worker, but window {several} does not"),
        (
            not served or idle > 0,
            "asynchronous = server: leave a rank that no window feeds; such ranks are the servers",
        ),
        (not of_arrivals or served, "staleness.versions = arrivals needs asynchronous = server"),
    ]


def _counts(case: Case) -> list[int]:
    return [n for window in case.windows for rank in window for micro in rank for n in micro]


def _trains(model: Model) -> bool:
    biased = model.has("bias") and not model.has("batch_norm")
    return not (model.family == "mlp" and model.has("frozen")) or model.depth > 1 or biased


def _longest(case: Case) -> int:
    return max((len(rank) for window in case.windows for rank in window), default=0)


# ---------------------------------------------------------------------------------------------- JSON


def to_json(value: Any) -> Any:
    """Plain JSON data of a case or of any of its parts."""
    return json.loads(json.dumps(_plain(value), default=sorted))


def _plain(value: Any) -> Any:
    """Dataclasses as dictionaries. Fields that a class names in LATER stand there only if they say something."""
    if not dataclasses.is_dataclass(value):
        return value
    later: frozenset[str] = getattr(value, "LATER", frozenset())
    kept = (f for f in dataclasses.fields(value) if f.name not in later or getattr(value, f.name) != f.default)
    return {f.name: _plain(getattr(value, f.name)) for f in kept}


def dumps(case: Case) -> str:
    """The one text form of a case: sorted keys, two spaces, a newline at the end."""
    return json.dumps(to_json(case), indent=2, sort_keys=True) + "\n"


def loads(text: str, where: str = "case") -> Case:
    """Read a case strictly. Raises CaseError naming the place for anything unknown, missing or of a wrong type."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CaseError(f"{where}: not JSON: {error}") from None
    return from_json(Case, data, where)


def from_json(kind: Any, data: Any, where: str) -> Any:
    """Convert JSON data to the annotated type `kind`, strictly. Raises CaseError."""
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(typing.cast(type, kind), data, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        _demand(any(data == a and type(data) is type(a) for a in arguments), where, f"one of {list(arguments)}", data)
        return data
    if origin in (typing.Union, types.UnionType):
        return None if data is None else from_json(next(a for a in arguments if a is not type(None)), data, where)
    if origin is tuple:
        return _read_tuple(arguments, data, where)
    if origin is frozenset:
        return frozenset(_read_tuple((arguments[0], Ellipsis), data, where))
    if kind is float:
        number = isinstance(data, (int, float)) and not isinstance(data, bool)
        _demand(number and -LARGEST <= data <= LARGEST, where, "a finite number", data)
        return float(data)
    _demand(type(data) is kind, where, f"{kind.__name__}", data)
    return data


def _demand(condition: bool, where: str, wanted: str, got: Any) -> None:
    if not condition:
        raise CaseError(f"{where}: expected {wanted}, got {json.dumps(got)[:80]}")


def _read_tuple(arguments: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    _demand(isinstance(data, list), where, "a list", data)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(from_json(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    _demand(len(data) == len(arguments), where, f"{len(arguments)} items", data)
    return tuple(from_json(a, item, f"{where}[{i}]") for i, (a, item) in enumerate(zip(arguments, data, strict=True)))


def _read_dataclass(kind: type, data: Any, where: str) -> Any:
    _demand(isinstance(data, dict), where, "an object", data)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise CaseError(f"{where}: unknown field {unknown[0]!r}; known are {', '.join(sorted(fields))}")
    required = {
        n for n, f in fields.items() if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    missing = sorted(required - set(data))
    if missing:
        raise CaseError(f"{where}: field {missing[0]!r} is missing")
    hints = typing.get_type_hints(kind)
    return kind(**{name: from_json(hints[name], value, f"{where}.{name}") for name, value in data.items()})
