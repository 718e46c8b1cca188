"""Records on disk: JSON for what was observed, safetensors for the arrays. Nothing here executes what it reads.

A record directory holds `record.json` (case, strategy, world, device and one entry per observation) and one
`rank-N.safetensors` per rank, whose keys are the positions of the entries.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from equivtests.adapters.adapter import MANDATORY, Strategy
from equivtests.cases.case import Case, from_json, to_json
from equivtests.errors import CaseError, RecordError
from equivtests.record.observation import KINDS, Observation, Place, Record, form_problem

FORMAT = 1


@dataclass(frozen=True)
class Entry:
    """One observation without its array."""

    kind: str
    name: str
    rank: int
    update: int
    place: Place
    dtype: str
    microbatch: int | None = None


@dataclass(frozen=True)
class Contents:
    """What `record.json` holds."""

    format: int
    case: Case
    strategy: Strategy
    world: int
    entries: tuple[Entry, ...]
    device: Literal["cpu", "cuda"] = "cpu"
    start: int = 0


def write_record(directory: Path, case: Case, strategy: Strategy, record: Record) -> None:
    """Write a record directory (made if missing)."""
    directory.mkdir(parents=True, exist_ok=True)
    entries = tuple(
        Entry(o.kind, o.name, o.rank, o.update, o.place, o.dtype, o.microbatch) for o in record.observations
    )
    device = cast(Literal["cpu", "cuda"], record.device)
    contents = Contents(FORMAT, case, strategy, record.world, entries, device, record.start)
    (directory / "record.json").write_text(json.dumps(to_json(contents), indent=1, sort_keys=True) + "\n")
    for rank in range(record.world):
        arrays = {str(i): np.asarray(o.array, order="C") for i, o in enumerate(record.observations) if o.rank == rank}
        save_file(arrays, directory / f"rank-{rank}.safetensors")


def read_record(directory: Path) -> tuple[Case, Strategy, Record]:
    """Read a record directory. Raises RecordError naming what is missing or malformed."""
    contents = _contents(directory)
    arrays = [_arrays(directory / f"rank-{rank}.safetensors") for rank in range(contents.world)]
    updates = contents.case.updates
    observations = [_observation(directory, i, entry, arrays, updates) for i, entry in enumerate(contents.entries)]
    silent = sorted(MANDATORY - contents.strategy.observes)
    if silent:
        raise RecordError(
            f"{directory / 'record.json'}: strategy.observes lacks {', '.join(silent)}, which are mandatory"
        )
    record = Record(contents.world, contents.device, observations, start=contents.start)
    return contents.case, contents.strategy, record


def _contents(directory: Path) -> Contents:
    path = directory / "record.json"
    try:
        contents = from_json(Contents, json.loads(path.read_text()), "record.json")
    except OSError:
        raise RecordError(
            f"{path} cannot be read: a record directory holds record.json and rank-N.safetensors"
        ) from None
    except (ValueError, RecursionError, CaseError) as error:
        raise RecordError(f"{path}: {error}") from None
    if contents.format != FORMAT:
        raise RecordError(f"{path}: format {contents.format}; this version reads {FORMAT}")
    if not 0 <= contents.start < contents.case.updates:
        raise RecordError(f"{path}: start {contents.start}, but the case has {contents.case.updates} updates")
    if contents.world != contents.case.layout.world:
        raise RecordError(f"{path}: world {contents.world}, but the case has {contents.case.layout.world} ranks")
    return contents


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(path)
    except OSError:
        raise RecordError(f"{path} is missing: every rank of the world writes one") from None
    except SafetensorError as error:
        raise RecordError(f"{path} is not a safetensors file: {error}") from None


def _observation(directory: Path, i: int, e: Entry, arrays: list[dict[str, np.ndarray]], updates: int) -> Observation:
    where = f"{directory / 'record.json'}: entries[{i}] ({e.kind} {e.name} of rank {e.rank})"
    if e.kind not in KINDS:
        raise RecordError(f"{where}: unknown kind; known are {', '.join(KINDS)}")
    if not 0 <= e.rank < len(arrays) or str(i) not in arrays[e.rank]:
        raise RecordError(f"{where}: no array {i} in rank-{e.rank}.safetensors")
    array: Any = arrays[e.rank][str(i)]
    if not 0 <= e.update <= updates:
        raise RecordError(f"{where}: update {e.update}, but the case has {updates} (0 to {updates} may be entered)")
    if str(array.dtype) != ("uint16" if e.dtype == "bfloat16" else e.dtype):
        raise RecordError(f"{where}: array of {array.dtype}, but the entry says {e.dtype}")
    if form_problem(e.kind, array):
        raise RecordError(f"{where}: {form_problem(e.kind, array)}")
    if e.place.problem:
        raise RecordError(f"{where}: {e.place.problem}")
    if array.size != e.place.size:
        raise RecordError(f"{where}: array of {array.size} elements at a place of {e.place.size}")
    return Observation(e.kind, e.name, e.rank, e.update, e.microbatch, e.place, e.dtype, array)
