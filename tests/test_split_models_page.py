"""docs/split-models.md and the README show what their commands print, and the example that they show works."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

import pytest
from commands import CHECKOUT, Ended, Home, together

from equivtests.reference.schedules import prescribed
from equivtests.report import timeline as picture

PAGE = (CHECKOUT / "docs/split-models.md").read_text()
README = (CHECKOUT / "README.md").read_text()
EXAMPLE = (CHECKOUT / "docs/examples/my_tensor_parallel.py").read_text()
MISTAKE = "        dist.all_reduce(gradient, group=ctx.group)\n"
EQUIVTESTS = ("python", "-m", "equivtests")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    assert EXAMPLE.count(MISTAKE) == 1
    files = {"my_tensor_parallel": EXAMPLE, "broken": EXAMPLE.replace(MISTAKE, "")}
    home = Home(tmp_path_factory.mktemp("home"), **files)
    yield home
    assert home.left() == []


@pytest.fixture(scope="module")
def ran(home: Home) -> dict[str, Ended]:
    words = {
        "right": "run mlp-dp2-tp2 --adapter my_tensor_parallel:MyTensorParallel",
        "wrong": "run mlp-dp2-tp2 --adapter broken:MyTensorParallel",
        "checked": "adapter-check my_tensor_parallel:MyTensorParallel --nproc 4",
        "checked broken": "adapter-check broken:MyTensorParallel --nproc 4",
    }
    return together({name: (home, (*EQUIVTESTS, *line.split())) for name, line in words.items()})


def without_numbers(text: str) -> str:
    """Rounding differs between processors."""
    return re.sub(r"-?\d+\.\d+(e[+-]\d+)?", "#", text)


def test_the_example_passes(ran: dict[str, Ended]) -> None:
    assert ran["right"].ended_with(0).output.startswith("PASS         my-tp-mlp-dp2-tp2  ")


def test_adapter_check_tries_a_case_that_splits_the_model(ran: dict[str, Ended]) -> None:
    assert "  my-tp, dp2-tp2: works" in ran["checked"].ended_with(0).lines
    assert "  my-tp, dp2-tp2: runs, but differs:" in ran["checked broken"].ended_with(1).lines


def test_the_failure_of_the_example_is_shown_as_it_is_printed(ran: dict[str, Ended]) -> None:
    printed = textwrap.indent(ran["wrong"].ended_with(1).output, "    ")
    for document in (PAGE, README):
        assert without_numbers(printed) in without_numbers(document)


def test_the_timeline_of_the_page_is_that_of_its_command() -> None:
    timeline = prescribed("1f1b", 4, 1, 4)
    versions = {o: 0 for operations in timeline for o in operations}
    shown = textwrap.indent(picture.text(timeline, "1f1b", versions), "    ")
    assert f"    1f1b on gpt-pp4, update 0, ranks 0, 1, 2, 3\n{shown}\n" in PAGE
    drawn = (CHECKOUT / "docs/images/1f1b-gpt-pp4.svg").read_text()
    assert drawn == picture.svg(timeline, "1f1b", versions)


def test_what_the_page_says_of_the_example_stands_in_it() -> None:
    block = PAGE.partition("that others have not:\n")[2].partition("It passes:")[0]
    lines = [line.partition("  #")[0].strip() for line in block.splitlines() if line.strip()]
    assert len(lines) == 6 and [line for line in lines if line not in EXAMPLE] == []
