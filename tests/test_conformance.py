"""The conformance page says what the certificates say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import conformance  # noqa: E402

KNOWN = {
    "quantity": "loss",
    "reason": "it is so",
    "link": "https://example.org",
    "documented": True,
    "command": "see it",
}


def run(verdict: str = "PASS", chapter: str = "update", case: str = "a-w2", **changes: Any) -> dict[str, Any]:
    usual = {"adapter": "m:A", "strategy": "s", "semantics": [], "known": None}
    return usual | {"chapter": chapter, "verdict": verdict, "case": case} | changes


def certificate(*runs: dict[str, Any], complete: bool = True) -> dict[str, Any]:
    return {
        "complete": complete,
        "environment": dict.fromkeys(("python", "torch", "numpy", "machine"), "x"),
        "frameworks": {"m:A": "framework 1.0"},
        "strategies": {"s": {"worst": {"loss": 1.234}}},
        "runs": list(runs),
        "not_claimed": [{"strategy": "s", "case": "b-w2", "reason": "feature tied"}],
    }


REFUSED = run("KNOWN DIVERGENCE", known=KNOWN | {"quantity": "error"})
DIFFERS = run("KNOWN DIVERGENCE", known=KNOWN)


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([], "not claimed"),
        ([run(), run()], "certified (2)"),
        ([run(), DIFFERS], "certified (1), known divergence (1)"),
        ([REFUSED], "refused (1)"),
        ([run(), run("FAIL"), run("ERROR")], "FAILED (2 of 3)"),
        ([run("INCONCLUSIVE")], "FAILED (1 of 1)"),
    ],
)
def test_the_words_of_a_chapter(runs: list[dict[str, Any]], words: str) -> None:
    assert conformance.state(runs) == words


def written(tmp_path: Path, *runs: dict[str, Any], complete: bool = True) -> tuple[int, list[str]]:
    """(exit status, lines of the page) for one framework on two ranks."""
    (tmp_path / "framework-2.json").write_text(json.dumps(certificate(*runs, complete=complete)))
    (tmp_path / "framework.mutants").write_text("3 of 3\n")
    (tmp_path / "a program.record").write_text("PASS  my-record\n")
    page = tmp_path / "page.md"
    status = conformance.main(tmp_path, page)
    return status, page.read_text().splitlines()


def test_the_page_has_a_row_for_every_strategy_and_tells_how_to_see_a_divergence(tmp_path: Path) -> None:
    status, lines = written(tmp_path, run(semantics=["denominator = rank: words"]), run(chapter="ledger"), DIFFERS)
    row = next(line for line in lines if line.startswith("| framework 1.0 | `s`"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2:5] == ["2", "certified (1), known divergence (1)", "certified (1)"]
    assert cells[5:] == ["1.2", "its declared rule: denominator = rank", "feature tied (1)"]
    assert "| framework | 3 of 3 |" in lines and "| a program | PASS  my-record |" in lines
    assert "    see it" in lines and any("The framework documents this." in line for line in lines)
    assert status == 0


def test_what_is_not_as_declared_fails(tmp_path: Path) -> None:
    status, lines = written(tmp_path, run("FAIL"), complete=False)
    assert status == 1 and any("FAILED (1 of 1)" in line for line in lines)
