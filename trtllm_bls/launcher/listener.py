"""What a server reports to whoever started it; the base class ignores it."""

from __future__ import annotations

from trtllm_bls.launcher.logs import LogLine


class Listener:
    """Override what is of interest. ``log`` is called on another thread than the rest."""

    def log(self, line: LogLine) -> None:
        """The server or a model printed a line."""

    def warning(self, text: str) -> None:
        """Something is not as it should be, but the server can do without."""

    def starting(self, models: tuple[str, ...]) -> None:
        """The server process runs and loads these models."""

    def model_ready(self, model: str, ready: int) -> None:
        """One more model is ready; ``ready`` counts them."""
