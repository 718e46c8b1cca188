"""Write docs/conformance.md from what `certify_frameworks.sh` left in a directory.

Usage: python scripts/conformance.py DIRECTORY docs/conformance.md

The directory holds `NAME-N.json` (the certificate of framework NAME on N ranks), `NAME.mutants` ("3 of 3") and `*.record`
(the first line that `equivtests judge` printed).
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

HERE = Path(__file__).parent
CERTIFICATE = re.compile(r"(\w+)-(\d+)\.json")

Run = dict[str, Any]


def certificates(directory: Path) -> list[tuple[int, dict[str, Any]]]:
    """(ranks, certificate), by framework and number of ranks."""
    found = [(CERTIFICATE.fullmatch(path.name), path) for path in sorted(directory.glob("*.json"))]
    return [(int(match.group(2)), json.loads(path.read_text())) for match, path in found if match]


def state(runs: list[Run]) -> str:
    """What is said of the runs of one strategy in one chapter."""
    verdicts = Counter(run["verdict"] for run in runs)
    known = [run["known"] for run in runs if run["known"]]
    if not runs:
        return "not claimed"
    if verdicts["PASS"] + len(known) < len(runs):
        return f"FAILED ({len(runs) - verdicts['PASS'] - len(known)} of {len(runs)})"
    words = [f"certified ({verdicts['PASS']})"] if verdicts["PASS"] else []
    for name, count in Counter("refused" if k["quantity"] == "error" else "known divergence" for k in known).items():
        words.append(f"{name} ({count})")
    return ", ".join(words)


def rows_of(ranks: int, data: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per strategy of a certificate."""
    rows = []
    for strategy, told in data["strategies"].items():
        runs = [run for run in data["runs"] if run["strategy"] == strategy]
        rules = sorted({rule.partition(":")[0] for run in runs for rule in run["semantics"]})
        left = Counter(item["reason"] for item in data["not_claimed"] if item["strategy"] == strategy)
        rows.append(
            {
                "framework": framework_of(data, runs),
                "strategy": strategy,
                "world": ranks,
                **{c: state([r for r in runs if r["chapter"] == c]) for c in ("update", "ledger")},
                "ratio": f"{max(told['worst'].values(), default=0.0):.2g}",
                "rule": "one device" if not rules else "its declared rule: " + ", ".join(rules),
                "left": "; ".join(f"{reason} ({count})" for reason, count in sorted(left.items())) or "none",
            }
        )
    return rows


def framework_of(data: dict[str, Any], runs: list[Run]) -> str:
    adapters = {run["adapter"] for run in runs} or set(data["frameworks"])
    return ", ".join(sorted({data["frameworks"][adapter] for adapter in adapters}))


def divergences(found: list[tuple[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Every declared divergence once, with the strategies and cases that show it and one command."""
    items: dict[tuple[str, str], dict[str, Any]] = {}
    for _, data in found:
        for run in data["runs"]:
            if run["known"]:
                key = (run["known"]["reason"], run["known"]["quantity"])
                framework = framework_of(data, [run])
                item = items.setdefault(key, {**run["known"], "framework": framework, "strategies": [], "cases": []})
                for name, value in (("strategies", run["strategy"]), ("cases", run["case"])):
                    if value not in item[name]:
                        item[name].append(value)
    return list(items.values())


def main(directory: Path, page: Path) -> int:
    """Exit status 1 if anything is not as declared."""
    found = certificates(directory)
    environment = found[0][1]["environment"]
    template = Environment(loader=FileSystemLoader(HERE), undefined=StrictUndefined).get_template("conformance.md.j2")
    page.write_text(
        template.render(
            environment=", ".join(f"{name} {environment[name]}" for name in ("python", "torch", "numpy", "machine")),
            rows=[row for ranks, data in found for row in rows_of(ranks, data)],
            mutants={p.stem: p.read_text().strip() for p in sorted(directory.glob("*.mutants"))},
            records={p.stem: p.read_text().strip() for p in sorted(directory.glob("*.record"))},
            divergences=divergences(found),
        ).rstrip()
        + "\n"
    )
    return 0 if all(data["complete"] for _, data in found) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
