"""No request costs more memory than a documented multiple of its size (docs/security.md).

Allocated bytes are counted, not time. ``LEAST`` is what any request costs, however small.
"""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest

from tests.helpers.scripted_text import Collected, orchestrator, saying, tokenizer
from tests.helpers.tiers import sample
from tests.helpers.waiting import run_async
from trtllm_bls.errors import TrtllmBlsError
from trtllm_bls.orchestrator.orchestrator import Defaults
from trtllm_bls.settings.request_limits import RequestLimits
from trtllm_bls.triton.tensors import engine_requests, text_requests
from trtllm_bls.triton.text_service import Postprocessor, Preprocessor
from trtllm_bls.types import EngineCapacity

LEAST = 200_000
LIMITS = RequestLimits(max_request_bytes=8 * 2**20)


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Yields what tells the most bytes that were allocated at once."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def text(value: str, **more: Any) -> dict[str, Any]:
    return {
        "text_input": np.array([[value.encode()]], np.object_),
        "max_tokens": np.array([[8]], np.int32),
        **more,
    }


def words(number: int, size: int) -> Any:
    array = np.empty((1, number), np.object_)
    array[0] = [f"{n:0{size}d}".encode() for n in range(number)]
    return array


def chat(messages: list[Any]) -> dict[str, Any]:
    spelled = json.dumps(messages).encode()
    return {
        "messages": np.array([[spelled]], np.object_),
        "max_tokens": np.array([[8]], np.int32),
    }


def ask_text(arrays: dict[str, Any]) -> None:
    """As ``tensorrt_llm_bls`` does, up to the engine's first token and its end."""
    engine = saying("one two three")

    async def run() -> None:
        for request in text_requests(arrays, "r", LIMITS):
            await orchestrator(engine, Defaults(limits=LIMITS)).run(request, Collected())

    run_async(run())


def ask_engine(arrays: dict[str, Any]) -> None:
    for request, _ in engine_requests(arrays, "r", None, LIMITS):
        LIMITS.check_logits(request.logit_rows(EngineCapacity()), 32_000)


def preprocess(arrays: dict[str, Any]) -> None:
    Preprocessor(tokenizer(), True, LIMITS).arrays(
        {"QUERY": arrays["text_input"], "REQUEST_OUTPUT_LEN": arrays["max_tokens"]}
    )


def postprocess(arrays: dict[str, Any]) -> None:
    Postprocessor(tokenizer(), True, LIMITS).arrays(arrays)


def ids(number: int, **more: Any) -> dict[str, Any]:
    return {
        "input_ids": np.arange(number, dtype=np.int32)[None] + 1000,
        "input_lengths": np.array([number], np.int32),
        "request_output_len": np.array([8], np.int32),
        **more,
    }


PROSE = "Hello world, this is text number 12. "
# What is asked, and how many times its size it may take; 256 sequences are some KB each.
KINDS: dict[str, tuple[Callable[[Any], None], dict[str, Any], int]] = {
    "a prompt that is tokenised": (ask_text, text(PROSE * 5000), 50),
    "the shortest tokens": (ask_text, text("é1" * 50_000), 50),
    "a prompt of blanks": (ask_text, text(" " * 200_000), 50),
    "a prompt above the limit": (ask_text, text("x" * (2**20 + 1)), 1),
    "a conversation": (ask_text, chat([{"role": "user", "content": PROSE}] * 4000), 50),
    "control tokens": (ask_text, chat([{"role": "user", "content": "<s>" * 40_000}]), 200),
    "deep JSON": (ask_text, {**chat([]), "messages": np.array([[b"[" * 200_000]], np.object_)}, 20),
    "many keys": (
        ask_text,
        chat([{"role": "user", "content": "x", **{f"k{n}": n for n in range(20_000)}}]),
        100,
    ),
    "words": (ask_text, text("Hi", stop_words=words(100, 256), bad_words=words(1000, 200)), 50),
    "256 sequences": (
        ask_text,
        text("Hi", num_return_sequences=np.array([256], np.int32)),
        200_000,
    ),
    "token ids": (ask_engine, ids(500_000), 20),
    "logits of many sequences": (
        ask_engine,
        ids(
            2000,
            num_return_sequences=np.array([256], np.int32),
            return_context_logits=np.array([True]),
            return_generation_logits=np.array([True]),
        ),
        20,
    ),
    "preprocessing": (preprocess, text(PROSE * 5000), 50),
    "postprocessing": (
        postprocess,
        {
            "TOKENS_BATCH": np.full((1, 1, 100_000), 70, np.int32),
            "SEQUENCE_LENGTH": np.array([[100_000]], np.int32),
        },
        40,
    ),
}
REFUSED = ("a prompt above the limit", "deep JSON", "logits of many sequences")


@pytest.mark.parametrize("kind", sample(KINDS))
def test_memory_is_a_bounded_multiple_of_what_was_sent(kind: str) -> None:
    """Whether the request is answered or refused."""
    ask, arrays, most = KINDS[kind]
    size = sum(
        sum(map(len, array.flat)) if array.dtype == np.object_ else array.nbytes
        for array in arrays.values()
    )
    tokenizer()
    with counted() as peak:
        with pytest.raises(TrtllmBlsError) if kind in REFUSED else nullcontext():
            ask(arrays)
        taken = peak()
    print(f"{kind}: {size} bytes, {taken / size:.1f} times")
    assert taken < LEAST + most * size
