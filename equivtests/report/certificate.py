"""The certificate: the machine-readable result of a whole run. It holds no time and no path, so two runs agree."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

from equivtests import __version__
from equivtests.chapters.plan import Plan
from equivtests.judge.tolerance import THRESHOLD
from equivtests.own import claim
from equivtests.report.tally import tally, total

SCHEMA = 1


@dataclass(frozen=True)
class Selection:
    """What the user asked for, and the determinism settings that the ranks reported."""

    nproc: int
    backend: str
    device: str
    tier: str
    adapters: tuple[str, ...]
    strategies: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    threshold: float = THRESHOLD
    settings: dict[str, str] = field(default_factory=dict)
    model: str = ""


def certificate(selection: Selection, plan: Plan, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Plain data. `complete` is true only if everything declared ran and passed, or differs as declared."""
    rows = tally(plan, results)
    return {
        "schema": SCHEMA,
        "equivtests": __version__,
        "claim": claim(plan.model) or "full",
        "complete": bool(rows) and all(row.complete for row in rows if row.counts["declared"]),
        "threshold": {"value": selection.threshold, "default": THRESHOLD, "loosened": selection.threshold > THRESHOLD},
        "selection": asdict(selection),
        "environment": environment(),
        "frameworks": plan.frameworks,
        "strategies": {row.strategy: {"counts": row.counts, "worst": row.worst} for row in rows},
        "all": {"counts": total(rows).counts, "worst": total(rows).worst},
        "runs": sorted(results, key=lambda r: (r["strategy"], r["chapter"], r["case"])),
        "not_claimed": [asdict(left) for left in plan.not_claimed],
        "unmatched": plan.unmatched,
        "too_large": [{"case": name, "needs": f"--nproc {world}"} for name, world in plan.too_large],
    }


def environment() -> dict[str, str]:
    """Versions and the machine's kind; what a number can depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def write(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
