"""One rank's observations as JSON text and safetensors bytes, and back.

This is the form of `rank-N.json` and `rank-N.safetensors` in a record directory, and what ranks on other machines send.
Reading executes nothing and needs no torch. What is malformed is refused with its place and a remedy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from equivtests.cases.case import from_json
from equivtests.errors import CaseError, RecordError
from equivtests.record.observation import KINDS, SINGLE, Collective, Observation, Place, form_problem

NAMED_BY_KIND = (SINGLE - {"bytes"}) | {"inputs"}
"""Kinds of which there is one thing per update: an entry may leave out the name, which is the kind."""

LARGEST = 2**24  # elements; no tensor of a case comes near, and a few bytes of JSON must not cost gigabytes
MOST_DIMENSIONS = 8

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Tags of the dtypes of safetensors that are read. Arrays of bfloat16 are kept as uint16."""


@dataclass(frozen=True)
class PlaceEntry:
    """A `Place` with defaults. shape: that of the array. replica: the rank for a whole tensor, 0 for a part of one."""

    shape: tuple[int, ...] | None = None
    box: tuple[tuple[int, int], ...] | None = None
    interval: tuple[int, int] | None = None
    replica: int | None = None
    partial: Literal["", "sum", "mean"] = ""
    parts: int = 0


@dataclass(frozen=True)
class Entry:
    """One observation without its values. name: the kind, where there is one thing of it. place: a whole copy.

    dtype: that of the array; "bfloat16" turns an array of uint16 into one. array: its key in the safetensors file, by
    default the position of the entry, counted from 0.
    """

    kind: str
    update: int
    name: str | None = None
    microbatch: int | None = None
    place: PlaceEntry | None = None
    dtype: str | None = None
    array: str | None = None


@dataclass(frozen=True)
class RankFile:
    """What `rank-N.json` holds. collectives: in the order they were issued; None if they were not recorded."""

    entries: tuple[Entry, ...]
    collectives: tuple[Collective, ...] | None = None


Arrays = dict[str, dict[str, Any]]
"""dtype (as safetensors calls it), shape and data by key."""


# ---------------------------------------------------------------------------------------------- writing


def rank_to_bytes(
    observations: Iterable[Observation], collectives: Iterable[Collective] | None = None
) -> tuple[str, bytes]:
    """(text of `rank-N.json`, bytes of `rank-N.safetensors`) of the observations and collectives of one rank."""
    shown = list(observations)
    entries = [json.dumps(_entry(o), default=int) for o in shown]
    text = '{"entries": [\n' + ",\n".join(entries) + "\n]"
    if collectives is not None:
        text += ', "collectives": [\n' + ",\n".join(json.dumps(asdict(c), default=int) for c in collectives) + "\n]"
    return text + "}\n", save({str(i): np.asarray(o.array, order="C") for i, o in enumerate(shown)})


def _entry(o: Observation) -> dict[str, Any]:
    place = {key: value for key, value in asdict(o.place).items() if value not in (None, "")}
    entry = {"kind": o.kind, "name": o.name, "update": o.update, "microbatch": o.microbatch, "dtype": o.dtype}
    return {key: value for key, value in entry.items() if value is not None} | {"place": place}


# ---------------------------------------------------------------------------------------------- reading


def rank_from_bytes(
    text: str | bytes, arrays: bytes, rank: int, updates: int | None = None, where: str = ""
) -> tuple[list[Observation], list[Collective] | None]:
    """(observations, collectives or None) of one rank, from what `rank_to_bytes` or a stranger wrote.

    `updates`: number of updates of the case, if known. `where`: put before the file names in messages. Raises RecordError.
    """
    name, found = f"{where}rank-{rank}.json", _arrays(arrays, f"{where}rank-{rank}.safetensors")
    try:
        content = from_json(RankFile, json.loads(text), name)
    except CaseError as error:
        raise RecordError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{name}: not JSON: {error}") from None
    observations = [_observation(entry, i, rank, found, updates, name) for i, entry in enumerate(content.entries)]
    return observations, None if content.collectives is None else list(content.collectives)


def _arrays(content: bytes, name: str) -> Arrays:
    try:
        return dict(deserialize(content))
    except SafetensorError as error:
        raise RecordError(f"{name} is not a safetensors file: {error}") from None


def _observation(entry: Entry, i: int, rank: int, arrays: Arrays, updates: int | None, file: str) -> Observation:
    name = entry.name or (entry.kind if entry.kind in NAMED_BY_KIND else "")
    where = f"{file}: entries[{i}] ({entry.kind} {name})"
    if entry.kind not in KINDS:
        raise RecordError(f"{where}: unknown kind; known are {', '.join(KINDS)}")
    if not name:
        raise RecordError(f"{where}: name is missing: say which {entry.kind} it is")
    if entry.update < 0 or (updates is not None and entry.update > updates):
        last = f"0 to {updates}" if updates is not None else "counted from 0"
        raise RecordError(f"{where}: update {entry.update}, but the case's are {last}")
    array, tag = _array(entry, str(i), arrays, where)
    place = _place(entry.place or PlaceEntry(), array, rank)
    problem = form_problem(entry.kind, array) or _place_problem(entry.place, place, array)
    if problem:
        raise RecordError(f"{where}: {problem}")
    return Observation(entry.kind, name, rank, entry.update, entry.microbatch, place, tag, array)


def _array(entry: Entry, position: str, arrays: Arrays, where: str) -> tuple[np.ndarray, str]:
    """The array of an entry and its dtype tag."""
    key = position if entry.array is None else entry.array
    if key not in arrays:
        raise RecordError(f"{where}: no array {key!r} in the rank's safetensors file; name its key in `array`")
    stored = arrays[key]
    if stored["dtype"] not in DTYPES:
        raise RecordError(f"{where}: array of {stored['dtype']}; known are {', '.join(DTYPES)}")
    tag = DTYPES[stored["dtype"]]
    array = np.frombuffer(stored["data"], dtype="uint16" if tag == "bfloat16" else tag).reshape(stored["shape"])
    if entry.dtype not in (None, tag, "bfloat16" if tag == "uint16" else tag):
        raise RecordError(f"{where}: array of {tag}, but the entry says {entry.dtype}; dtype may be left out")
    return array, entry.dtype or tag


def _place(entry: PlaceEntry, array: np.ndarray, rank: int) -> Place:
    whole = entry.box is None and entry.interval is None
    replica = (rank if whole and not entry.partial else 0) if entry.replica is None else entry.replica
    shape = array.shape if entry.shape is None else entry.shape
    return Place(shape, entry.box, entry.interval, replica, entry.partial, entry.parts)


def _place_problem(entry: PlaceEntry | None, place: Place, array: np.ndarray) -> str:
    """Why the array cannot lie there, or ""."""
    part = place.box is not None or place.interval is not None
    if part and (entry is None or entry.shape is None):
        return "place has a box or an interval, but no shape: give the shape of the whole tensor"
    if place.box is not None and place.interval is not None:
        return "place has a box and an interval: give one of them"
    if place.problem:
        return place.problem
    if len(place.shape) > MOST_DIMENSIONS or max(math.prod(place.shape), *place.shape, 0) > LARGEST:
        return f"place of shape {place.shape}: no tensor of a case is as large"
    if array.size != place.size:
        return f"array of {array.size} elements at a place of {place.size} (shape {place.shape})"
    return ""
