"""Requests whose answers are known beforehand, for ``trtllm-bls conformance``.

An engine is compared with its own greedy answer to the same prompt, so any model will do.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from operator import attrgetter
from typing import Any

from trtllm_bls.engines.base import Engine, join_chunks
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.types import (
    CacheSalt,
    EngineChunk,
    EngineRequest,
    Guide,
    Sampling,
    SpeculationStats,
    TokenIds,
    Wants,
)

_NUM_TOKENS = 16  # tokens of each answer
_REQUESTS_AT_ONCE = 32
_SECONDS = 120.0  # for one request
_SEEDED = Sampling(top_p=1.0, temperature=1.0, seed=7)
_ids_and_reason = attrgetter("token_ids", "finish_reason")
_DIGITS = Guide("regex", "[0-9]{4}")


async def examine(
    engine: Engine, prompt: TokenIds, decode: Callable[[Sequence[int]], str], eos_id: int
) -> AsyncIterator[tuple[str, str]]:
    """Yield each check's name, and ``ok``, ``refused: …`` or ``FAILED: …``."""
    capacity = await engine.capacity()
    plain = EngineRequest(request_id="a", input_ids=prompt, max_tokens=_NUM_TOKENS, end_id=-1)
    greedy = (await _ask(engine, plain))[0].token_ids
    sampled = _ids_and_reason((await _ask(engine, replace(plain, sampling=_SEEDED)))[0])
    token = greedy[4]
    pair = greedy[4:6]
    token_place = greedy.index(token)
    pair_place = 0
    while greedy[pair_place : pair_place + 2] != pair:
        pair_place += 1
    too_long = prompt[:1] * ((capacity.max_sequence_tokens or 10**6) + 1)
    sequences = {"num_return_sequences": 2, "sampling": _SEEDED}
    minimum = {"end_id": token, "sampling": Sampling(min_tokens=_NUM_TOKENS)}
    alternatives = {"wants": Wants(log_probs=True, top_log_probs=2)}
    guide = {"guide": _DIGITS, "end_id": eos_id}
    # A name, the fields of a request, the part of each sequence that is checked, and its value.
    checks: list[tuple[str, dict[str, Any], Callable[[Any], Any], Any]] = [
        ("a stream", {}, _ids_and_reason, (greedy, "length")),
        ("in one piece", {"streaming": False}, _ids_and_reason, (greedy, "length")),
        ("end_id", {"end_id": token}, _ids_and_reason, (greedy[:token_place], "end_id")),
        (
            "stop",
            {"stop_sequences": ((token,),)},
            _ids_and_reason,
            (greedy[: token_place + 1], "stop"),
        ),
        (
            "stop of two tokens",
            {"stop_sequences": (pair,)},
            _ids_and_reason,
            (greedy[: pair_place + 2], "stop"),
        ),
        ("bad word", {"bad_sequences": (pair[:1],)}, lambda c: token in c.token_ids, False),
        (
            "bias",
            {"embedding_bias": ((token, 1000.0),)},
            _ids_and_reason,
            ((token,) * _NUM_TOKENS, "length"),
        ),
        (
            "min_p",
            {"sampling": Sampling(top_p=1.0, min_p=1.0)},
            _ids_and_reason,
            (greedy, "length"),
        ),
        ("seed", {"sampling": _SEEDED}, _ids_and_reason, sampled),
        ("several", sequences, lambda c: len(c.token_ids), _NUM_TOKENS),
        ("min_tokens", minimum, lambda c: len(c.token_ids), _NUM_TOKENS),
        ("alternatives", alternatives, _likeliest_ids, [*greedy]),
        ("guide", guide, lambda c: re.sub("[0-9]", "0", decode(c.token_ids)), "0000"),
        ("cache_salt", {"cache_salt": CacheSalt("a")}, _ids_and_reason, (greedy, "length")),
        ("an id that is no token", {"input_ids": (2**31 - 1,)}, _ids_and_reason, None),
        ("a prompt that is too long", {"input_ids": too_long}, _ids_and_reason, None),
    ]
    for name, fields, look, expected in checks:
        yield name, await _verdict(engine, replace(plain, **fields), look, expected)
    stream = engine.generate(plain)
    await stream.wait()
    await stream.aclose()
    at_once = []
    for _ in range(_REQUESTS_AT_ONCE):
        at_once.append(_verdict(engine, plain, _ids_and_reason, (greedy, "length")))
    yield (
        f"{_REQUESTS_AT_ONCE} at once, after one that left",
        "; ".join({*await asyncio.gather(*at_once)}),
    )
    answer = (await _ask(engine, plain))[0]
    drafts = answer.speculation or SpeculationStats()
    detail = f"{answer.cached_tokens} of {len(prompt)} prompt tokens cached"
    yield "figures", f"{detail}, {drafts.accepted} of {drafts.drafted} drafted tokens accepted"


async def continued(engine: Engine, prompt: TokenIds, max_tokens: int, end_id: int) -> TokenIds:
    """Return the engine's own greedy ids."""
    request = EngineRequest(request_id="c", input_ids=prompt, max_tokens=max_tokens, end_id=end_id)
    return (await _ask(engine, request))[0].token_ids


async def _ask(engine: Engine, request: EngineRequest) -> list[EngineChunk]:
    """Return each sequence of an answer, as one chunk."""
    sequences: dict[int, list[EngineChunk]] = {}
    for index in range(request.num_return_sequences):
        sequences[index] = []
    async with aclosing(engine.generate(request)) as stream:
        async for chunk in stream:
            if chunk.sequence_index in sequences:
                sequences[chunk.sequence_index].append(chunk)
    return list(map(join_chunks, sequences.values()))


def _likeliest_ids(chunk: EngineChunk) -> list[int]:
    return [place[0][0] for place in chunk.top_log_probs or ()]


async def _verdict(
    engine: Engine, request: EngineRequest, look: Callable[[EngineChunk], Any], expected: Any
) -> str:
    """Return a check's outcome. ``expected``: ``None`` if the engine must refuse the request."""
    try:
        chunks = await asyncio.wait_for(_ask(engine, request), _SECONDS)
    except InvalidRequest as error:
        if expected is None:
            return "ok"
        return f"refused: {error}"
    except Exception as error:  # an engine may raise anything
        return f"FAILED: {type(error).__name__}: {error}"
    values = list(map(look, chunks))
    if look is _ids_and_reason and chunks[0].finish_reason is None and expected is not None:
        expected = (expected[0], None)  # a Triton model gives no reason
    if values == [expected] * request.num_return_sequences:
        return "ok"
    return f"FAILED: {values}, not {expected}"
