"""An offloaded optimizer one update behind: the host steps while the device passes the next window.

Ren et al. 2021, ZeRO-Offload: democratizing billion-scale model training, section 5.2, one-step delayed parameter update,
here from the first window on. In update u the host steps the masters with the gradient of window u-1, in a thread of its
own, while the device computes the gradient of window u at the weights that entered the update; then the new weights are
copied to the device. Update 0 makes no step, and the gradient of the last window is never applied.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from equivtests.adapters.adapter import Claims
from equivtests.adapters.context import Ranks
from equivtests.adapters.textbook.dp import TEXTBOOK_FEATURES, TEXTBOOK_OBSERVES
from equivtests.adapters.textbook.offload import Offload
from equivtests.cases.case import Case, Semantics
from equivtests.cases.staleness import Staleness
from equivtests.cases.windows import Window
from equivtests.record.observation import Observe


class DelayedOffload(Offload):
    """A gradient, reduced and clipped, waits on the host until the next window is passed."""

    def claims(self) -> Claims:
        claims = super().claims()
        (like,) = claims.strategies
        delayed = replace(
            like,
            name="offload-delayed",
            variant=False,
            features=TEXTBOOK_FEATURES,
            denominators=frozenset({"window"}),
            semantics=Semantics(staleness=Staleness(delay=1)),
            updates=3,
            loss_scale=False,
            observes=TEXTBOOK_OBSERVES - {"buffer", "loss_scale"},
            algorithm=None,
        )
        return replace(claims, strategies=(delayed,))

    def setup(self, case: Case, ranks: Ranks) -> None:
        super().setup(case, ranks)
        self.waiting: dict[str, Tensor] = {}

    # ------------------------------------------------------------------ one update

    def update(self, window: Window, observe: Observe) -> None:
        self.window = window
        with ThreadPoolExecutor(1, "host") as self.host:
            self.begin_step(observe)
            super().update(window, observe)

    def begin_step(self, observe: Observe) -> None:
        """Let the host step with the gradient that waits, if one does."""
        self.stepping = bool(self.waiting)
        if self.stepping:
            self.show_rate(observe)
            self.give_gradients()
            self.stepped = self.host.submit(self.step_on_host)

    def give_gradients(self) -> None:
        """The gradient that waits becomes that of the masters."""
        for name, parameter, _ in self.device_parameters():
            self.masters[parameter].grad = self.waiting.get(name)
        self.waiting = {}

    def advance(self, observe: Observe) -> None:
        """This window's gradient is ready; its step is made in the next update."""
        self.stream.draw += 1

    def after_window(self, update: int) -> None:
        self.end_step()
        self.keep_gradients()

    def end_step(self) -> None:
        """Wait for the host; then the device's parameters, the schedule and the step counter move."""
        if self.stepping:
            self.stepped.result()
            self.parameters_back()
            self.step_scheduler()
            self.steps += 1

    def keep_gradients(self) -> None:
        """Move this window's gradients to the host; an empty window has none."""
        self.gradients_out()
        held = ((name, self.masters[p].grad) for name, p, _ in self.device_parameters())
        self.waiting = {name: gradient for name, gradient in held if gradient is not None}

    # ------------------------------------------------------------------ checkpoints

    def save_tensors(self, directory: Path) -> None:
        super().save_tensors(directory)
        if self.ranks.rank == 0:
            save_file(self.waiting, directory / "waiting.safetensors")

    def load_tensors(self, directory: Path) -> None:
        super().load_tensors(directory)
        self.waiting = load_file(directory / "waiting.safetensors")
