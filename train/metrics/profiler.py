"""A window of steps that JAX's profiler records; TensorBoard and ui.perfetto.dev show it."""

from pathlib import Path
from typing import Any

import jax

from train.config import ProfileConfig


class Profiler:
    """Starts and ends the profile of a run. The host waits for the devices at both ends of the window."""

    def __init__(self, config: ProfileConfig, folder: Path):
        self._first, self._last = config.start, config.start + config.steps - 1
        self._folder, self._is_on = folder, False

    def before(self, step: int, state: Any) -> None:
        """Starts the profile if the window begins with this step."""
        if step == self._first:
            jax.block_until_ready(state)
            jax.profiler.start_trace(str(self._folder))
            self._is_on = True

    def after(self, step: int, state: Any) -> str | None:
        """Ends the profile if the window ends with this step, and returns a line that says where it is."""
        if not self._is_on or step < self._last:
            return None
        jax.block_until_ready(state)
        self.close()
        return f"profile    steps {self._first} to {step}, in {self._folder}"

    def close(self) -> None:
        """Ends the profile of a run that stops within the window."""
        if self._is_on:
            jax.profiler.stop_trace()
            self._is_on = False
