"""What a caller reads: one event per response, one result per request.

Outputs that every caller needs become fields; all others stay arrays by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from numpy.typing import NDArray

from trtllm_bls.wire.engine_client import is_final, output_arrays


@dataclass(frozen=True, kw_only=True)
class Event:
    """One response of the server.

    ``text`` is that of the first beam; ``texts`` has one string per beam, none in a response
    without text. ``final`` marks the last response of the whole request, which may be empty.
    ``finish_reason`` comes with the last response of a sequence, from servers that tell.
    ``outputs`` holds all other tensors as sent, batch dimension included. ``received_at`` is
    ``time.perf_counter()`` at arrival, in seconds.
    """

    texts: tuple[str, ...] = ()
    sequence_index: int = 0
    batch_index: int = 0
    final: bool = False
    finish_reason: str | None = None
    stop_reason: str | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    outputs: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    received_at: float

    @property
    def text(self) -> str:
        """The first beam's text; empty where the response has none."""
        return self.texts[0] if self.texts else ""


def read_event(response: Any, received_at: float) -> Event:
    """The event of one ``ModelInferResponse``."""
    arrays = dict(output_arrays(response))
    return Event(
        texts=_texts(arrays.pop("text_output", None)),
        sequence_index=_number(arrays.pop("sequence_index", None)) or 0,
        batch_index=_number(arrays.pop("batch_index", None)) or 0,
        final=is_final(response),
        finish_reason=next(iter(_texts(arrays.pop("finish_reason", None))), None) or None,
        stop_reason=next(iter(_texts(arrays.pop("stop_reason", None))), None) or None,
        num_input_tokens=_number(arrays.pop("num_input_tokens", None)),
        num_output_tokens=_number(arrays.pop("num_output_tokens", None)),
        outputs=arrays,
        received_at=received_at,
    )


def _texts(array: NDArray[Any] | None) -> tuple[str, ...]:
    if array is None:
        return ()
    return tuple(item.decode("utf-8", "replace") for item in array.reshape(-1))


def _number(array: NDArray[Any] | None) -> int | None:
    return None if array is None or array.size == 0 else int(array.reshape(-1)[0])


@dataclass(frozen=True, kw_only=True)
class Result:
    """A whole answer. ``started_at`` is when the request was sent, on the events' clock."""

    request_id: str
    started_at: float
    events: tuple[Event, ...]

    @cached_property
    def texts(self) -> Mapping[tuple[int, int], str]:
        """Each sequence's text (first beam), by batch index and sequence index."""
        texts: dict[tuple[int, int], str] = {}
        for event in self.events:
            if event.texts:
                key = (event.batch_index, event.sequence_index)
                texts[key] = texts.get(key, "") + event.text
        return texts

    @property
    def text(self) -> str:
        """The first sequence's text."""
        return self.texts.get((0, 0), "")

    @property
    def finish_reason(self) -> str | None:
        """Why the first sequence ended; ``None`` where the server does not tell."""
        first = [e for e in self.events if (e.batch_index, e.sequence_index) == (0, 0)]
        return next((e.finish_reason for e in reversed(first) if e.finish_reason), None)
