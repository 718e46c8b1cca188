"""How far each rank has come, in a shared file that outlives a killed process."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from equivtests.cases.case import Case
from equivtests.cases.windows import Feed, Window

SETUP, SAVING, LOADING, IDLE, STARTING = -1, -2, -3, -4, -5
_PHASES = {
    SETUP: "during setup",
    SAVING: "while saving",
    LOADING: "while loading",
    IDLE: "between two runs",
    STARTING: "while starting",
}
_NUMBER = struct.Struct("q")


class Progress:
    """One number per rank: the update in progress (0, 1, …) or one of the negative phases."""

    def __init__(self, path: Path, world: int) -> None:
        if not path.exists():
            path.write_bytes(_NUMBER.pack(STARTING) * world)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _NUMBER.size * world)

    def set(self, rank: int, phase: int) -> None:
        _NUMBER.pack_into(self._memory, _NUMBER.size * rank, phase)

    def get(self, rank: int) -> int:
        return int(_NUMBER.unpack_from(self._memory, _NUMBER.size * rank)[0])

    def describe(self, rank: int) -> str:
        """Such as "while running update 1"."""
        phase = self.get(rank)
        return _PHASES.get(phase, f"while running update {phase}")


class WatchedFeed(Feed):
    """A feed that notes the update whose window was taken last."""

    def __init__(self, case: Case, rank: int, stop: int | None, progress: Progress) -> None:
        super().__init__(case, rank, stop)
        self.progress = progress

    def __next__(self) -> Window:
        window = super().__next__()
        self.progress.set(self.rank, window.update)
        return window
