"""docs/stale-training.md shows what its commands print."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

import pytest
from commands import CHECKOUT, Ended, Home, together

PAGE = (CHECKOUT / "docs/stale-training.md").read_text()
SHOWN = re.findall(r"^    \$ python -m equivtests (.*)\n((?:    .*\n|\n(?=    ))*)", PAGE, re.M)
"""(command, what the page shows below it), of every command whose output it shows."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    home = Home(tmp_path_factory.mktemp("home"))
    yield home
    assert home.left() == []


@pytest.fixture(scope="module")
def ran(home: Home) -> dict[str, Ended]:
    return together({line: (home, ("python", "-m", "equivtests", *line.split())) for line, _ in SHOWN})


def without_numbers(text: str) -> str:
    """Rounding differs between processors."""
    return re.sub(r"-?\d+\.\d+(e[+-]\d+)?", "#", text)


def test_the_page_shows_the_output_of_commands() -> None:
    assert [line.split()[0] for line, _ in SHOWN] == ["explain-versions", "run", "timeline"]


@pytest.mark.parametrize(("line", "shown"), SHOWN, ids=[line.split()[0] for line, _ in SHOWN])
def test_the_output_is_that_of_the_command(ran: dict[str, Ended], line: str, shown: str) -> None:
    printed = "\n".join(text.rstrip() for text in ran[line].output.splitlines())
    for part in textwrap.dedent(shown).strip().split("…\n"):
        assert without_numbers(part.strip("\n")) in without_numbers(printed)
