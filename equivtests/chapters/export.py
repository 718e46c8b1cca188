"""A case as plain files, for a program that does not run our code: weights, data, and what each update is made of.

docs/records.md describes the directory, the mathematics of the models, and the record to write from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from equivtests.cases import numbers
from equivtests.cases.case import Case, dumps
from equivtests.cases.parameters import decays, initial, parameters
from equivtests.cases.windows import MicroBatch, window_of
from equivtests.errors import CaseError
from equivtests.reference.expectation import Step, expect
from equivtests.reference.update import BALANCE, EXTRA, PAIRS, Z

FORMAT = 1

TERMS = {
    "main": {"factor": 1.0, "per": "tokens"},
    "extra": {"factor": EXTRA, "per": "tokens"},
    "z": {"factor": Z, "per": "rows"},
    "pairs": {"factor": PAIRS, "per": "rows"},
    "balance": {"factor": BALANCE, "per": "rows"},
}
"""Factor of each loss term in the objective, and what the whole window's sum is divided by."""

TERM_OF = {"extra_head": "extra", "z_loss": "z", "pairs": "pairs", "balance": "balance"}
"""Features that bring a loss term of their own."""

README = """A training case of equivtests: {name}, for {world} ranks and {updates} updates.

case.json            the case; what record.json has to hold as "case"
initial.safetensors  the weights to start from, by name
feed.json            what is fed in every update, and what the update is made of; where every rank stands
feed-N.safetensors   the arrays of data rank N, under the keys that feed.json names{shared}

Train on it, write a record directory, and judge that:

    python -m equivtests check-record RECORD_DIR
    python -m equivtests judge RECORD_DIR

How: docs/records.md of equivtests.
"""
SHARED = "\n" + 21 * " " + 'ranks with the same "dp" in "coordinates" are fed the same samples'


def export(case: Case, directory: Path) -> None:
    """Write a case directory. Raises CaseError if there is something in it, or if the case could not be judged."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CaseError(f"{directory}: not an empty directory; name a new one")
    steps = expect(case, case.semantics).steps
    directory.mkdir(parents=True, exist_ok=True)
    dtype = np.dtype(case.precision.weights)
    weights = {name: value.astype(dtype) for name, value in initial(case).items()}
    (directory / "case.json").write_text(dumps(case))
    (directory / "initial.safetensors").write_bytes(save(weights))
    (directory / "feed.json").write_text(json.dumps(feed(case, steps), indent=1) + "\n")
    for data in range(case.layout.dp):
        (directory / f"feed-{data}.safetensors").write_bytes(save(dict(arrays_of(case, steps, data))))
    shared = SHARED if case.layout.splits else ""
    words = README.format(name=case.name, world=case.layout.world, updates=case.updates, shared=shared)
    (directory / "README.md").write_text(words)


def feed(case: Case, steps: list[Step]) -> dict[str, Any]:
    """What `feed.json` holds. coordinates: by rank, where it stands on every axis; "dp" is its data rank."""
    axes, layout = ("dp", "cp", "ep", "tp", "pp"), case.layout
    return {
        "format": FORMAT,
        "world": layout.world,
        "coordinates": [{axis: layout.at(rank)[axis] for axis in axes} for rank in range(layout.world)],
        "dtype": case.precision.weights,
        "parameters": [
            {"name": p.name, "shape": p.shape, "trained": p.trained, "decays": p.trained and decays(case, p.name)}
            for p in parameters(case.model)
        ],
        "loss_terms": {name: TERMS[name] for name in loss_terms(case)},
        "updates": [update_of(case, steps, update) for update in range(case.updates)],
    }


def loss_terms(case: Case) -> list[str]:
    return ["main", *(TERM_OF[feature] for feature in case.model.features if feature in TERM_OF)]


def update_of(case: Case, steps: list[Step], update: int) -> dict[str, Any]:
    """Totals of one window over all data ranks, the learning rate, and the micro-batches of every data rank."""
    windows = [window_of(case, update, data) for data in range(case.layout.dp)]
    batches = [batch for window in windows for batch in window.microbatches]
    step = steps[update]
    return {
        "update": update,
        "tokens": sum(batch.tokens for batch in batches),
        "rows": sum(batch.rows for batch in batches),
        "microbatches": max(len(window.microbatches) for window in windows),
        "skipped": step.skipped,
        "lr": None if step.skipped else step.rate,
        "ranks": [
            [microbatch_of(case, update, k, batch) for k, batch in enumerate(window.microbatches)] for window in windows
        ],
    }


def microbatch_of(case: Case, update: int, k: int, batch: MicroBatch) -> dict[str, Any]:
    """One micro-batch of one data rank: sizes, the flag of the conditional branch, and the keys of its arrays."""
    names = ("inputs", "targets", "valid", "ids", *(["dropout"] if case.model.has("dropout") else []))
    keys = {name: key_of(update, k, name) for name in names}
    return {"rows": batch.rows, "tokens": batch.tokens, "conditional": batch.conditional, **keys}


def key_of(update: int, k: int, name: str) -> str:
    return f"update-{update}.microbatch-{k}.{name}"


def arrays_of(case: Case, steps: list[Step], data: int) -> Iterator[tuple[str, np.ndarray]]:
    """(key, array) of all that a data rank is fed; floats in the dtype of the weights."""
    for update in range(case.updates):
        for k, batch in enumerate(window_of(case, update, data).microbatches):
            arrays = {"inputs": batch.inputs, "targets": batch.targets, "valid": batch.valid, "ids": batch.ids}
            if case.model.has("dropout"):
                arrays["dropout"] = kept(case, steps[update].steps, batch.ids)[:, : batch.valid.shape[1]]
            for name, array in arrays.items():
                cast = array.astype(case.precision.weights) if array.dtype.kind == "f" else array
                yield key_of(update, k, name), np.ascontiguousarray(cast)


def kept(case: Case, draw: int, ids: np.ndarray) -> np.ndarray:
    """What dropout keeps (scaled by 4/3), bool (rows, length, width), in the update after `draw` others."""
    model = case.model
    width = model.width if model.decoder or model.depth > 1 else model.outputs
    streams = [numbers.real(case.seed, f"dropout.{model.family}.{draw}.{i}", (model.length, width)) for i in ids]
    return np.array([stream < 0.5 for stream in streams], dtype=bool).reshape(len(ids), model.length, width)
