"""A correct adapter whose rank 1 breaks in the second update, in the way that the strategy's name says."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from equivtests.adapters.adapter import Claims, Strategy
from equivtests.adapters.textbook.dp import DataParallel
from equivtests.adapters.torch_adapter import SHOWN
from equivtests.cases.windows import Window
from equivtests.record.observation import Observe

BREAKING_RANK = 1


class Breaking(DataParallel):
    def claims(self) -> Claims:
        return Claims(tuple(Strategy(name, observes=SHOWN) for name in ("works", "raises", "killed", "hangs")))

    def update(self, window: Window, observe: Observe) -> None:
        if self.ranks.rank == BREAKING_RANK and window.update == 1 and self.strategy != "works":
            getattr(self, self.strategy)()
        super().update(window, observe)

    def raises(self) -> None:
        raise ValueError("the weights are not mine")

    def killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def hangs(self) -> None:
        """Tells a test that it does, where the test asks for a sign."""
        if "BREAKING_SIGN" in os.environ:
            Path(os.environ["BREAKING_SIGN"]).touch()
        time.sleep(3600)
