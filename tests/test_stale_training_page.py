"""docs/stale-training.md shows what its commands print, and its example works."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

import pytest
from commands import CHECKOUT, Ended, Home, together

PAGE = (CHECKOUT / "docs/stale-training.md").read_text()
EXAMPLE = (CHECKOUT / "docs/examples/my_stashing_pipeline.py").read_text()
STASH = "        stash = copy.deepcopy(self.module)"
SHARED = "        for kept, own in zip(stash.parameters(), self.module.parameters()): kept.data = own.data\n"
"""A mistake in one line: what is stashed are references, which the optimizer's steps change."""

SHOWN = re.findall(r"^    \$ python -m equivtests (.*)\n((?:    .*\n|\n(?=    ))*)", PAGE, re.M)
"""(command, what the page shows below it), of every command whose output it shows."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    assert EXAMPLE.count(STASH) == 1
    line = next(line for line in EXAMPLE.splitlines(keepends=True) if line.startswith(STASH))
    files = {"my_stashing_pipeline": EXAMPLE, "broken": EXAMPLE.replace(line, line + SHARED)}
    home = Home(tmp_path_factory.mktemp("home"), **files)
    yield home
    assert home.left() == []


@pytest.fixture(scope="module")
def ran(home: Home) -> dict[str, Ended]:
    return together({line: (home, ("python", "-m", "equivtests", *line.split())) for line, _ in SHOWN})


def without_numbers(text: str) -> str:
    """Rounding differs between processors."""
    return re.sub(r"-?\d+\.\d+(e[+-]\d+)?|\(worst ratios:[^)]*\)", "#", text)


def test_the_page_shows_the_output_of_commands() -> None:
    assert [line.split()[0] for line, _ in SHOWN] == ["explain-versions", "run", "run", "timeline"]


@pytest.mark.parametrize(("line", "shown"), SHOWN, ids=[line.split()[0] for line, _ in SHOWN])
def test_the_output_is_that_of_the_command(ran: dict[str, Ended], line: str, shown: str) -> None:
    printed = "\n".join(text.rstrip() for text in ran[line].output.splitlines())
    for part in textwrap.dedent(shown).strip().split("…\n"):
        assert without_numbers(part.strip("\n")) in without_numbers(printed)


@pytest.fixture(scope="module")
def example(home: Home) -> dict[str, Ended]:
    words = {
        "checked": "adapter-check my_stashing_pipeline:MyPipeline --nproc 3",
        "right": "run stale-mlp-pp3 --adapter my_stashing_pipeline:MyPipeline",
        "wrong": "run stale-mlp-pp3 --adapter broken:MyPipeline",
    }
    return together({name: (home, ("python", "-m", "equivtests", *line.split())) for name, line in words.items()})


def test_the_example_works_and_passes(example: dict[str, Ended]) -> None:
    assert "  my-stashing, pp3: works" in example["checked"].ended_with(0).lines
    assert example["right"].ended_with(0).output.startswith("PASS         my-stashing-stale-mlp-pp3  ")


def test_references_for_copies_in_the_example_are_found_by_the_gradient_and_named(example: dict[str, Ended]) -> None:
    failed = example["wrong"].ended_with(1).output
    assert "update 1: gradient of layers.0.weight differs first" in failed
    assert "the gradients are those of `versions = unstashed`" in failed
