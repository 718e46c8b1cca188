"""The adapter contract. It knows numpy arrays, no torch.

An adapter class is made without arguments, once per run and rank. The suite sets `strategy`, then calls `setup`,
`run` (which by default loops over `update`) and, for the restore chapter, `save` or `load`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from equivtests.cases.case import FEATURES, Case, Model, Semantics
from equivtests.cases.declared import declared
from equivtests.cases.layout import ORDER, Layout
from equivtests.cases.windows import Feed, Window
from equivtests.record.observation import KINDS, Observe
from equivtests.reference.ledger import EXPECTED, Cut
from equivtests.reference.schedules import SCHEDULES
from equivtests.reference.split_ledger import SPLIT_EXPECTED

if TYPE_CHECKING:
    from equivtests.adapters.context import Ranks

ALL_AXES = frozenset({"dp", "cp", "tp", "pp", "ep"})
ALL_FAMILIES = frozenset({"chain", "linear", "mlp", "gated_mlp", "gpt", "moe", "own"})
PLAIN_FEATURES = frozenset({"bias", "frozen", "qk_norm", "shared_kv", "tied", "transposed"})
LEAST_MICROBATCHES: dict[str, Callable[[int], int]] = {
    "any": lambda stages: 0,
    "one": lambda stages: 1,
    "multiple": lambda stages: 1,
    "stages": lambda stages: stages,
    "twice": lambda stages: 2 * stages,
}
"""The fewest micro-batches of a window, by `Strategy.microbatches`, of pipeline ranks."""

ALL_OPTIMIZERS = frozenset({"sgd", "momentum", "adam", "adamw"})
MANDATORY = frozenset({"inputs", "loss", "gradient", "weight"})


@dataclass(frozen=True)
class KnownDivergence:
    """A declared deviation. `case` is matched against case names (a shell pattern), `quantity` is the one that fails.

    Quantity "error": the run breaks; `message` is part of what it then says. documented: whether the framework's own
    documentation says that it is so.
    """

    case: str
    quantity: str
    reason: str
    link: str
    message: str = ""
    documented: bool = False


@dataclass(frozen=True)
class Strategy:
    """What an adapter promises of one strategy. Closed by default: only what is listed is run.

    axes: the parallel axes of the layouts that it is for, of dp, cp, tp, pp and ep. It is run on layouts in which just the
    others than dp have more than one rank, and dp too where it is named. data_ranks: the fewest ranks of dp.
    virtual: stages that a pipeline rank may have. schedule: row of `reference.schedules.SCHEDULES` that a pipeline follows.
    microbatches: how many it takes: any number, one, at least as many as pipeline ranks, at least twice as many, or
    multiples of the pipeline ranks.
    asynchronous: it runs cases that are made so (`Case.asynchronous`), and no others. updates: the fewest windows that show
    its semantics. drains: a checkpoint finishes all work in flight, after which staleness begins anew (else it is saved).
    variant: it differs in one decision from another strategy of the suite; by default it runs the quick cases, at night all.
    replays: it can run free, and in an order of arrival that was recorded: as `case.semantics.staleness.arrivals` says.
    equal_rows: all micro-batches of a window have equal numbers of rows, on every rank.
    uneven: sizes that are cut may be such that the ranks do not divide them. turned: the axes of a layout may be
    nested in another order than the usual one. lengths: micro-batches may have sequence lengths of their own.
    precisions: labels such as "float32", "float64", "float32/bfloat16/float32" (`Precision.label`).
    clips: orders of the norm that clipping may use; schedules, decays: whether learning-rate schedules and weight decay are
    supported. denominators: the values of `Semantics.denominator` that a case may ask for.
    semantics: the contract that the framework follows instead of the default, where it documents another; a function of the
    case where it depends on that (a version table of the user's own).
    ragged: ranks may have unequal numbers of micro-batches.
    replicates: layouts with `replicate` > 1 are possible. shards: what is cut over the ranks: weights, gradients, state.
    arithmetic: "torch" if weights are updated by torch's for-loop or foreach optimizers (judged bitwise), else "own".
    observes: kinds that every run shows. algorithm: row of `reference.ledger.EXPECTED` that the collectives follow, or
    rows of `reference.split_ledger.SPLIT_EXPECTED` joined by "+" where models are split, or None (not claimed). cut: how
    what is sharded is cut, as `reference.ledger.Cut` says. units: what is wrapped on its own: the whole model, or every
    layer and the rest as the root.
    """

    name: str
    worlds: frozenset[int] = frozenset({1, 2, 3, 4})
    axes: frozenset[str] = frozenset({"dp"})
    data_ranks: int = 1
    virtual: frozenset[int] = frozenset({1})
    schedule: str | None = None
    microbatches: Literal["any", "one", "stages", "twice", "multiple"] = "any"
    asynchronous: Literal["", "pipeline", "server"] = ""
    updates: int = 1
    drains: bool = False
    replays: bool = False
    variant: bool = False
    equal_rows: bool = False
    uneven: bool = True
    turned: bool = True
    lengths: bool = True
    families: frozenset[str] = ALL_FAMILIES
    features: frozenset[str] = PLAIN_FEATURES
    optimizers: frozenset[str] = ALL_OPTIMIZERS
    precisions: frozenset[str] = frozenset({"float32", "float64"})
    denominators: frozenset[str] = frozenset({"window"})
    semantics: Semantics | Callable[[Case], Semantics] | None = None
    loss_scale: bool = False
    clips: frozenset[str] = frozenset({"2", "inf"})
    schedules: bool = True
    decays: bool = True
    ragged: bool = True
    replicates: bool = False
    restores: bool = False
    shards: frozenset[str] = frozenset()
    arithmetic: Literal["torch", "own"] = "torch"
    observes: frozenset[str] = MANDATORY
    algorithm: str | None = None
    cut: Cut = "tensors"
    units: Literal["model", "layers"] = "model"
    known: tuple[KnownDivergence, ...] = ()

    def __post_init__(self) -> None:
        parts = self.algorithm.split("+") if self.algorithm else []
        words = (
            ("asynchronous", [self.asynchronous] if self.asynchronous else [], ("pipeline", "server")),
            ("schedule", [self.schedule] if self.schedule else [], SCHEDULES),
            ("microbatches", [self.microbatches], LEAST_MICROBATCHES),
            ("algorithm", parts, SPLIT_EXPECTED if len(parts) > 1 else [*EXPECTED, *SPLIT_EXPECTED]),
            ("axes", self.axes, ALL_AXES),
            ("families", self.families, ALL_FAMILIES),
            ("features", self.features, FEATURES),
            ("optimizers", self.optimizers, ALL_OPTIMIZERS),
            ("observes", self.observes, KINDS),
            ("shards", self.shards, ("weights", "gradients", "state")),
        )
        for field_name, used, known in words:
            unknown = sorted(set(used) - set(known))
            if unknown:
                words_known = ", ".join(sorted(known))
                raise ValueError(
                    f"strategy {self.name!r}: {field_name}: unknown {unknown[0]!r}; known are {words_known}"
                )

    def meant_for(self, layout: Layout, asynchronous: str = "") -> bool:
        """Whether such cases are in this strategy's grid at all; what it then refuses is listed as not claimed."""
        fits = layout.splits == self.axes - {"dp"} and layout.dp >= self.data_ranks
        return fits and asynchronous == self.asynchronous

    def refusal(self, case: Case) -> str | None:
        """Why this strategy does not claim the case, or None if it does."""
        model, precision, optimizer = case.model, case.precision, case.optimizer
        extra = sorted(set(model.features) - self.features)
        reasons = (
            (case.layout.world not in self.worlds, f"world size {case.layout.world}"),
            *self._refused_layouts(case),
            (model.family not in self.families, f"model {model.family}"),
            (bool(extra), f"feature {', '.join(extra)}"),
            (optimizer.name not in self.optimizers, f"optimizer {optimizer.name}"),
            (precision.label not in self.precisions, f"precision {precision.label}"),
            (precision.loss_scale is not None and not self.loss_scale, "loss scaling"),
            (
                optimizer.clip is not None and optimizer.clip_norm not in self.clips,
                f"clipping by norm {optimizer.clip_norm}",
            ),
            (len(set(optimizer.schedule)) > 1 and not self.schedules, "a learning-rate schedule"),
            (optimizer.weight_decay > 0 and not self.decays, "weight decay"),
            (case.semantics.denominator not in self.denominators, f"denominator {case.semantics.denominator}"),
            (case.layout.replicate > 1 and not self.replicates, "replicated shards"),
            (not self.ragged and is_ragged(case), "unequal numbers of micro-batches per rank"),
            (self.semantics is not None and case.exact, "tolerance zero, which is proved for the default rule only"),
        )
        return next((reason for applies, reason in reasons if applies), None)

    def _refused_layouts(self, case: Case) -> Iterator[tuple[bool, str]]:
        """(whether it applies, reason) for what a layout, and micro-batches, may be like."""
        layout, counts = case.layout, {len(rank) for window in case.windows for rank in window}
        yield not layout.axes <= self.axes, f"axis {', '.join(sorted(layout.axes - self.axes))}"
        meant = self.meant_for(layout, self.asynchronous)
        yield not meant, f"layout {layout.label}: it is for axes {', '.join(sorted(self.axes))}"
        yield case.asynchronous != self.asynchronous, f"windows made for {KINDS_OF_CASES[case.asynchronous]}"
        yield case.updates < self.updates, f"fewer than {self.updates} updates, which cannot show its rule"
        yield layout.virtual not in self.virtual, f"{layout.virtual} stages per pipeline rank"
        yield self.microbatches == "one" and max(counts) > 1, "windows of more than one micro-batch"
        least = LEAST_MICROBATCHES[self.microbatches](layout.pp)
        yield min(counts) < least, f"fewer than {least} micro-batches for {layout.pp} pipeline ranks"
        divides = self.microbatches != "multiple" or all(n % layout.pp == 0 for n in counts)
        yield not divides, f"numbers of micro-batches that {layout.pp} pipeline ranks do not divide"
        yield self.equal_rows and unequal_rows(case), "micro-batches with unequal numbers of rows"
        yield bool(case.lengths) and not self.lengths, "sequence lengths that change with the micro-batch"
        yield layout.order != ORDER and not self.turned, "a mesh in another rank order"
        uncut = undivided(case) if not self.uneven else ""
        yield bool(uncut), f"{uncut} that {layout.tp} tensor ranks do not divide"

    def contract(self, case: Case) -> Semantics:
        """The semantics that a run of this strategy is judged by; an order of arrival may be the case's own.

        Raises CaseError where what it declares is no rule of the case.
        """
        if self.semantics is None or case.semantics.staleness.versions == "arrivals":
            return case.semantics
        return declared(self.semantics, case, f"strategy {self.name!r}: semantics")


KINDS_OF_CASES = {
    "": "synchronous updates",
    "pipeline": "a pipeline that is never flushed",
    "server": "workers and parameter servers",
}


def is_ragged(case: Case) -> bool:
    """Whether some window gives ranks unequal numbers of micro-batches."""
    return any(len({len(rank) for rank in window}) > 1 for window in case.windows)


def unequal_rows(case: Case) -> bool:
    """Whether the micro-batches of some window have unequal numbers of rows."""
    return any(len({len(rows) for rank in window for rows in rank}) > 1 for window in case.windows)


def undivided(case: Case) -> str:
    """Sizes of the model that its tensor ranks do not divide, in words, or ""."""
    sizes = {f"{name} {size}": size for name, size in cut_sizes(case.model).items()}
    return ", ".join(name for name, size in sizes.items() if size % case.layout.tp)


def cut_sizes(model: Model) -> dict[str, int]:
    """The sizes that tensor parallelism cuts, by name."""
    if model.family in ("gpt", "moe"):
        return {
            "heads": model.heads,
            "key/value heads": model.kv,
            "hidden width": 2 * model.width,
            "vocabulary": model.vocabulary,
        }
    if model.family == "linear":
        return {"inputs": model.inputs, "outputs": model.outputs}
    return {"width": model.width}


@dataclass(frozen=True)
class Claims:
    """Strategies of an adapter, and what it needs of the processes it runs in.

    isolation "case": fresh processes for every run (process-wide singletons). group "own": the framework initializes its
    processes itself, no torch process group is made (`Ranks.agree` helps to meet). preload: modules that are imported once
    before ranks are forked, which makes fresh processes cheap; they must not start threads or touch devices when imported.
    mutants: modules that plant mistakes in this adapter; `--mutants` shows that they are found.
    """

    strategies: tuple[Strategy, ...]
    isolation: Literal["pool", "case"] = "pool"
    framework: str = ""
    notes: tuple[str, ...] = field(default=())
    group: Literal["torch", "own"] = "torch"
    preload: tuple[str, ...] = ()
    mutants: tuple[str, ...] = ()


class Adapter:
    """Base of all adapters. Override `claims`, `setup` and either `update` or `run`; `save` and `load` to be restored.

    own_models: whether the module comes from `models.build.build`, so that one of a user's own can take its place. Where it
    does not, no strategy claims family own.
    """

    strategy: str = ""
    feed: Feed
    own_models: bool = False

    def claims(self) -> Claims:
        """What this adapter supports. Called in the main process too, so it must not need ranks."""
        raise TypeError(f"{type(self).__name__}.claims() is not written: return Claims((Strategy(...),))")

    def setup(self, case: Case, ranks: Ranks) -> None:
        """Build or translate the model from the canonical weights (`cases.parameters.initial`)."""
        raise TypeError(f"{type(self).__name__}.setup() is not written: build the model and the optimizer there")

    def update(self, window: Window, observe: Observe) -> None:
        """Make one optimizer update from this rank's micro-batches and show what it was made of."""
        raise TypeError(f"{type(self).__name__}.update() is not written: override update() or run()")

    def run(self, feed: Feed, observe: Observe) -> None:
        """Train until the feed ends. Show weights entering the first update here, too."""
        for window in feed:
            self.update(window, observe)

    def save(self, directory: Path) -> None:
        """Write a checkpoint, the framework's own way. All ranks call it with the same directory."""
        raise TypeError(f"{type(self).__name__}.save() is not written, yet the strategy claims restores=True")

    def load(self, directory: Path) -> None:
        """Continue from a checkpoint, after `setup`, in fresh ranks; `self.feed` must be moved to its position."""
        raise TypeError(f"{type(self).__name__}.load() is not written, yet the strategy claims restores=True")
