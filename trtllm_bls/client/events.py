"""What a caller reads: one event per response, one result per request.

Knows the names of the outputs that every caller wants; everything else is handed on as arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tritonclient.grpc import InferResult

from trtllm_bls.messages import Array


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
    outputs: Mapping[str, Array]
    received_at: float

    @property
    def text(self) -> str:
        """The first beam's text; empty where the response has none."""
        return self.texts[0] if self.texts else ""


def read_event(response: Any, received_at: float) -> Event:
    """The event of one ``ModelInferResponse``."""
    result = InferResult(response)
    arrays: dict[str, Array] = {
        output.name: result.as_numpy(output.name) for output in response.outputs
    }
    return Event(
        texts=_texts(arrays.pop("text_output", None)),
        sequence_index=_number(arrays.pop("sequence_index", None)) or 0,
        batch_index=_number(arrays.pop("batch_index", None)) or 0,
        final=is_final(response) is True,
        finish_reason=next(iter(_texts(arrays.pop("finish_reason", None))), None) or None,
        stop_reason=next(iter(_texts(arrays.pop("stop_reason", None))), None) or None,
        num_input_tokens=_number(arrays.pop("num_input_tokens", None)),
        num_output_tokens=_number(arrays.pop("num_output_tokens", None)),
        outputs=arrays,
        received_at=received_at,
    )


def is_final(response: Any) -> bool | None:
    """Whether the server marked the response as the request's last; ``None``: it did not say."""
    if "triton_final_response" not in response.parameters:
        return None
    return bool(response.parameters["triton_final_response"].bool_param)


def _texts(array: Array | None) -> tuple[str, ...]:
    if array is None:
        return ()
    return tuple(item.decode("utf-8", "replace") for item in array.reshape(-1))


def _number(array: Array | None) -> int | None:
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
        return next(
            (
                event.finish_reason
                for event in reversed(self.events)
                if event.finish_reason and (event.batch_index, event.sequence_index) == (0, 0)
            ),
            None,
        )
