"""Fixtures: minimized failing cases as small JSON files that anyone can replay."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from equivtests.cases.case import Case, from_json, to_json
from equivtests.errors import CaseError

FORMAT = 1


@dataclass(frozen=True)
class Fixture:
    """A case on which `faulty` (an adapter, "package.module:Class") fails first by `quantity` and `correct` passes.

    mistake: what is wrong, in one line. source: where it really happened.
    """

    name: str
    mistake: str
    source: str
    chapter: Literal["update", "restore", "replay", "ledger"]
    faulty: str
    correct: str
    strategy: str
    quantity: str
    case: Case
    format: int = FORMAT


def dumps(fixture: Fixture) -> str:
    return json.dumps(to_json(fixture), indent=1, sort_keys=True) + "\n"


def read(path: Path) -> Fixture:
    """Read a fixture strictly. Raises CaseError naming file and field."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise CaseError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise CaseError(f"{path}: not JSON: {error}") from None
    fixture = from_json(Fixture, data, str(path))
    if fixture.format != FORMAT:
        raise CaseError(f"{path}: format {fixture.format}; this version reads {FORMAT}")
    for spec in (fixture.faulty, fixture.correct):
        if not spec.startswith("equivtests."):
            raise CaseError(
                f"{path}: adapter {spec!r} is not one of equivtests: run the case with --adapter {spec} instead"
            )
    return fixture


def find(name: str) -> Path:
    """The path itself, or a fixture of that name among those that come with the package."""
    path = Path(name)
    if path.exists():
        return path
    carried = Path(str(resources.files("equivtests"))) / "fixtures" / f"{path.stem}.json"
    if carried.exists():
        return carried
    raise CaseError(f"{name}: no such fixture here, and none of that name comes with the package")
