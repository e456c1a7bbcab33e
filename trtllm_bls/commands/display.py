"""An answer on standard output: as text for people and pipes, or as JSON lines for programs."""

from __future__ import annotations

import codecs
import json
import sys
from dataclasses import asdict
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from trtllm_bls.client.events import Event
from trtllm_bls.commands.reply import Summary
from trtllm_bls.errors import TrtllmBlsError


class TextDisplay:
    """The text and nothing else, as it arrives.

    ``several`` sequences would run into each other, so they are shown one after another at the
    end. ``whole``: each event has all text so far instead of what is new.
    """

    def __init__(self, *, several: bool, whole: bool) -> None:
        self._several = several
        self._whole = whole
        self._texts: dict[tuple[int, int, int], str] = {}  # by batch row, sequence and beam

    def event(self, event: Event, at_ms: float) -> None:
        for beam, text in enumerate(event.texts):
            key = (event.batch_index, event.sequence_index, beam)
            before = self._texts.get(key, "")
            now = self._texts[key] = text if self._whole else before + text
            if not self._several:
                # A whole text that takes back what was shown begins a new line.
                new = now[len(before) :] if now.startswith(before) else f"\n{now}"
                click.echo(new, nl=False)

    def end(self, summary: Summary, failure: TrtllmBlsError | None) -> None:
        """Finish the line, or show the sequences held back."""
        if self._several:
            for number, (_, text) in enumerate(sorted(self._texts.items())):
                click.echo(f"--- {number} ---\n{text}")
        elif any(text and not text.endswith("\n") for text in self._texts.values()):
            click.echo()


class JsonDisplay:
    """One object per event and a last one of type ``summary``."""

    def event(self, event: Event, at_ms: float) -> None:
        """Show the event; ``at_ms`` is its arrival after sending."""
        told = {name: value for name, value in vars(event).items() if name != "received_at"}
        texts = told.pop("texts")
        beams = {"texts": texts} if len(texts) > 1 else {}
        told["outputs"] = {name: _plain(array) for name, array in event.outputs.items()}
        self._line(type="event", at_ms=round(at_ms, 3), text=event.text, **beams, **told)

    def end(self, summary: Summary, failure: TrtllmBlsError | None) -> None:
        self._line(type="summary", **asdict(summary), error=failure and str(failure))

    def _line(self, **values: Any) -> None:
        click.echo(json.dumps(values, ensure_ascii=not _writes_utf8(), allow_nan=False))


def _writes_utf8() -> bool:
    """Whether standard output can encode every character."""
    encoding = getattr(sys.stdout, "encoding", None)
    return encoding is not None and codecs.lookup(encoding).name == "utf-8"


def _plain(array: NDArray[Any]) -> Any:
    if array.dtype.kind == "O":
        array = np.char.decode(array.astype(bytes), "utf-8", "replace")
    elif array.dtype.kind == "f":  # JSON has no infinity
        finite = np.isfinite(array)
        array = array.astype(object)
        array[~finite] = None
    return array.tolist()
