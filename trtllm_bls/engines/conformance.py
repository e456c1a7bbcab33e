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

_KNOWN_TOKENS, _REQUESTS_AT_ONCE = 16, 32
_SECONDS = 120.0  # for one request
_SEEDED = Sampling(top_p=1.0, temperature=1.0, seed=7)
_said = attrgetter("token_ids", "finish_reason")
_DIGITS = Guide("regex", "[0-9]{4}")


async def examine(
    engine: Engine, prompt: TokenIds, decode: Callable[[Sequence[int]], str], eos_id: int
) -> AsyncIterator[tuple[str, str]]:
    """Each check's name, and ``ok``, ``refused: …`` or ``FAILED: …``."""
    capacity = await engine.capacity()
    plain = EngineRequest(request_id="a", input_ids=prompt, max_tokens=_KNOWN_TOKENS, end_id=-1)
    greedy = (await _ask(engine, plain))[0].token_ids
    sampled = _said((await _ask(engine, replace(plain, sampling=_SEEDED)))[0])
    one, two = greedy[4], greedy[4:6]
    at, pair = greedy.index(one), next(i for i in range(5) if greedy[i : i + 2] == two)
    too_long = prompt[:1] * ((capacity.max_sequence_tokens or 10**6) + 1)
    several = {"num_return_sequences": 2, "sampling": _SEEDED}
    least = {"end_id": one, "sampling": Sampling(min_tokens=_KNOWN_TOKENS)}
    best = {"wants": Wants(log_probs=True, top_log_probs=2)}
    guide = {"guide": _DIGITS, "end_id": eos_id}
    # A name, the fields of a request, what is looked at in each sequence, and what it is to be.
    checks: list[tuple[str, dict[str, Any], Callable[[Any], Any], Any]] = [
        ("a stream", {}, _said, (greedy, "length")),
        ("in one piece", {"streaming": False}, _said, (greedy, "length")),
        ("end_id", {"end_id": one}, _said, (greedy[:at], "end_id")),
        ("stop", {"stop_sequences": ((one,),)}, _said, (greedy[: at + 1], "stop")),
        ("stop of two tokens", {"stop_sequences": (two,)}, _said, (greedy[: pair + 2], "stop")),
        ("bad word", {"bad_sequences": (two[:1],)}, lambda c: one in c.token_ids, False),
        ("bias", {"embedding_bias": ((one, 1000.0),)}, _said, ((one,) * _KNOWN_TOKENS, "length")),
        ("min_p", {"sampling": Sampling(top_p=1.0, min_p=1.0)}, _said, (greedy, "length")),
        ("seed", {"sampling": _SEEDED}, _said, sampled),
        ("several", several, lambda c: len(c.token_ids), _KNOWN_TOKENS),
        ("min_tokens", least, lambda c: len(c.token_ids), _KNOWN_TOKENS),
        ("alternatives", best, lambda c: [each[0][0] for each in c.top_log_probs], [*greedy]),
        ("guide", guide, lambda c: re.sub("[0-9]", "0", decode(c.token_ids)), "0000"),
        ("cache_salt", {"cache_salt": CacheSalt("a")}, _said, (greedy, "length")),
        ("an id that is no token", {"input_ids": (2**31 - 1,)}, _said, None),
        ("a prompt that is too long", {"input_ids": too_long}, _said, None),
    ]
    for name, fields, look, expected in checks:
        yield name, await _verdict(engine, replace(plain, **fields), look, expected)
    stream = engine.generate(plain)
    await stream.wait()
    await stream.aclose()
    at_once = [_verdict(engine, plain, _said, (greedy, "length")) for _ in range(_REQUESTS_AT_ONCE)]
    yield (
        f"{_REQUESTS_AT_ONCE} at once, after one that left",
        "; ".join({*await asyncio.gather(*at_once)}),
    )
    last = (await _ask(engine, plain))[0]
    drafts = last.speculation or SpeculationStats()
    detail = f"{last.cached_tokens} of {len(prompt)} prompt tokens cached"
    yield "figures", f"{detail}, {drafts.accepted} of {drafts.drafted} drafted tokens accepted"


async def continued(engine: Engine, prompt: TokenIds, max_tokens: int, end_id: int) -> TokenIds:
    """The engine's own greedy ids."""
    request = EngineRequest(request_id="c", input_ids=prompt, max_tokens=max_tokens, end_id=end_id)
    return (await _ask(engine, request))[0].token_ids


async def _ask(engine: Engine, request: EngineRequest) -> list[EngineChunk]:
    """Each sequence of an answer, as one chunk."""
    async with aclosing(engine.generate(request)) as stream:
        chunks = [chunk async for chunk in stream]
    numbers = range(request.num_return_sequences)
    return [join_chunks([c for c in chunks if c.sequence_index == n]) for n in numbers]


async def _verdict(
    engine: Engine, request: EngineRequest, look: Callable[[EngineChunk], Any], expected: Any
) -> str:
    """``expected``: ``None`` where the request is to be refused."""
    try:
        chunks = await asyncio.wait_for(_ask(engine, request), _SECONDS)
    except InvalidRequest as error:
        return "ok" if expected is None else f"refused: {error}"
    except Exception as error:  # an engine may raise anything
        return f"FAILED: {type(error).__name__}: {error}"
    values = [look(chunk) for chunk in chunks]
    if look is _said and chunks[0].finish_reason is None and expected is not None:
        expected = (expected[0], None)  # a Triton model tells no reason
    right = values == [expected] * request.num_return_sequences
    return "ok" if right else f"FAILED: {values}, not {expected}"
