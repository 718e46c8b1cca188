"""Record directories: what a run observed, as plain files. Nothing here executes what it reads.

A record directory holds `record.json` (format, case, strategy, world, device, start) and, written by every rank on its own,
`rank-N.json` and `rank-N.safetensors` (see `record.serialize`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from equivtests.adapters.adapter import MANDATORY, Strategy
from equivtests.cases.case import Case, from_json, to_json
from equivtests.errors import CaseError, RecordError
from equivtests.record.observation import Record
from equivtests.record.serialize import rank_from_bytes, rank_to_bytes

FORMAT = 2


@dataclass(frozen=True)
class Header:
    """What `record.json` holds."""

    format: int
    case: Case
    strategy: Strategy
    world: int
    device: Literal["cpu", "cuda"] = "cpu"
    start: int = 0


def write_record(directory: Path, case: Case, strategy: Strategy, record: Record) -> None:
    """Write a record directory (made if missing; the ranks of another record there are removed)."""
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("rank-*"):
        old.unlink()
    device = cast(Literal["cpu", "cuda"], record.device)
    if callable(strategy.semantics):
        strategy = replace(strategy, semantics=strategy.contract(case))  # the rule itself, of this case
    header = to_json(Header(FORMAT, case, strategy, record.world, device, record.start))
    (directory / "record.json").write_text(json.dumps(header, indent=1, sort_keys=True) + "\n")
    for rank in range(record.world):
        shown = [o for o in record.observations if o.rank == rank]
        text, arrays = rank_to_bytes(shown, record.collectives.get(rank))
        (directory / f"rank-{rank}.json").write_text(text)
        (directory / f"rank-{rank}.safetensors").write_bytes(arrays)


def read_record(directory: Path) -> tuple[Case, Strategy, Record]:
    """Read a record directory. Raises RecordError naming what is missing or malformed."""
    header = _header(directory)
    record = Record(header.world, header.device, start=header.start)
    for rank in range(header.world):
        text, arrays = (_content(directory / f"rank-{rank}.{kind}") for kind in ("json", "safetensors"))
        observations, collectives = rank_from_bytes(text, arrays, rank, header.case.updates, f"{directory}/")
        record.observations += observations
        if collectives is not None:
            record.collectives[rank] = collectives
    if (directory / f"rank-{header.world}.json").exists():
        words = f"the world is {header.world}, ranks count from 0: remove what another run left"
        raise RecordError(f"{directory}/rank-{header.world}.json: {words}")
    return header.case, header.strategy, record


def _header(directory: Path) -> Header:
    path = directory / "record.json"
    try:
        data = json.loads(path.read_text())
        if isinstance(data, dict) and data.get("format", FORMAT) != FORMAT:
            raise CaseError(f"format {data['format']}; this version reads {FORMAT}: write the record anew")
        header = from_json(Header, data, "record.json")
    except OSError:
        words = "a record directory holds record.json, and rank-N.json and rank-N.safetensors of every rank"
        raise RecordError(f"{path} cannot be read: {words}") from None
    except (ValueError, RecursionError, CaseError) as error:
        raise RecordError(f"{path}: {error}") from None
    problem = _problem(header)
    if problem:
        raise RecordError(f"{path}: {problem}")
    return header


def _problem(header: Header) -> str:
    """Why the parts of a header do not fit together, or ""."""
    silent = sorted(MANDATORY - header.strategy.observes)
    if silent:
        return f"strategy.observes lacks {', '.join(silent)}, which are mandatory"
    if not 0 <= header.start < header.case.updates:
        return f"start {header.start}, but the case has {header.case.updates} updates"
    if header.world != header.case.layout.world:
        return f"world {header.world}, but the case has {header.case.layout.world} ranks"
    return ""


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        raise RecordError(f"{path} is missing: every rank of the world writes one") from None
