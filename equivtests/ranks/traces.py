"""What living and dead ranks left behind: stacks, collectives, output. Read by the parent, free of torch."""

from __future__ import annotations

import importlib.util
import json
import linecache
import os
import re
import signal
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

from equivtests.ranks.forkserver import Child

PATIENCE = 1.5
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_WAITS = re.compile(r"\.wait\(|wait_tensor\(|synchronize\(")
_RANKS = str(Path(__file__).parent)


def collect(directory: Path, living: dict[int, Child]) -> tuple[dict[int, str], dict[int, list[str]]]:
    """(Python stack, newest collectives) of every living rank, asked for with signals, stuck or not."""
    for child in living.values():
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            try:
                os.kill(child.pid, number)
            except ProcessLookupError:
                pass
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if all((directory / f"{r}.collectives").exists() and _stack_is_whole(directory, r) for r in living):
            break
        time.sleep(0.01)
    stacks = {rank: stack(directory, rank) for rank in living}
    return stacks, {rank: _collectives(directory, rank) for rank in living}


def stack(directory: Path, rank: int) -> str:
    """The Python stack of the rank's main thread, innermost frame first, or "" if there is none."""
    blocks = _read(directory / f"{rank}.stack").strip().split("\n\n")
    return next((block for block in reversed(blocks) if f'{_RANKS}/worker.py"' in block), blocks[-1])


def output(directory: Path, rank: int) -> str:
    """What the rank printed in its last run: the last 4000 characters."""
    return _read(directory / f"{rank}.log")[-4000:].strip()


def remains(directory: Path, rank: int) -> str:
    """What a dead rank left: the stack that faulthandler wrote at a fatal signal, and the end of its output."""
    parts = (stack(directory, rank), output(directory, rank))
    return "\n\n".join(part for part in parts if part)


def last_words(directory: Path, rank: int) -> str:
    """The line of a dead rank's output that says most: C++'s what(), else the last one."""
    lines = [line.strip() for line in output(directory, rank).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("what():")] or lines[-1:]
    return told[0].removeprefix("what():").strip()[:300] if told else ""


def _stack_is_whole(directory: Path, rank: int) -> bool:
    """faulthandler writes the main thread last; its outermost frame is the fork server's."""
    return "in main" in _read(directory / f"{rank}.stack").rsplit("\n\n", 1)[-1]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _collectives(directory: Path, rank: int) -> list[str]:
    try:
        return [str(line) for line in json.loads(_read(directory / f"{rank}.collectives"))]
    except ValueError:
        return []


# ---------------------------------------------------------------------------------------------- where a rank is


@dataclass(frozen=True)
class Doing:
    """What a rank is doing. `waits`: it is inside something that only ends when other ranks come."""

    waits: bool
    text: str


FINISHED = Doing(False, "finished")


def doing(stack_text: str) -> Doing:
    """Read a stack: the code of the adapter's side that is running, and what of torch it called."""
    called: list[str] = []
    for file, line, function in _FRAME.findall(stack_text):
        if not _is_foreign(file):
            return _at(file, int(line), function, called)
        if f"{os.sep}torch{os.sep}" in file:
            called.append(function if "distributed" in file or function == "_engine_run_backward" else "")
    return Doing(False, "outside of the adapter's code")


def _at(file: str, line: int, function: str, called: list[str]) -> Doing:
    place = f"{os.path.basename(file)}:{line} ({function})"
    distributed = [name for name in called if name and name != "wrapper"]
    if distributed:
        name = "backward" if distributed[-1] == "_engine_run_backward" else distributed[-1]
        return Doing(True, f"in {name} at {place}")
    return Doing(bool(_WAITS.search(linecache.getline(file, line))), f"at {place}")


def _is_foreign(file: str) -> bool:
    """Whether a file is torch's, Python's own, or the launcher's."""
    spec = importlib.util.find_spec("torch")
    homes = [*(spec.submodule_search_locations or [] if spec else []), _RANKS]
    standard = sysconfig.get_path("stdlib")
    if file.startswith("<frozen") or any(file.startswith(home + os.sep) for home in homes):
        return True
    return file.startswith(standard + os.sep) and "site-packages" not in file
