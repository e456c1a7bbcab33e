"""What the tests of speculation share: pairs of scripted engines, requests, a reader."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from doubles.scripted import Script, ScriptedEngine
from doubles.scripted_tokens import Rule, agreeing, hashed
from trtllm_bls.engines.base import Engine
from trtllm_bls.engines.routing import RoutingEngine
from trtllm_bls.speculative.learned import SpeculationShared
from trtllm_bls.speculative.options import SpeculationOptions
from trtllm_bls.types import (
    EngineCapacity,
    EngineChunk,
    EngineRequest,
    FinishReason,
    Sampling,
    SpeculationStats,
)

VOCAB = 12
GREEDY = Sampling(top_k=1)


class SpeculatingEngine(RoutingEngine):
    """A routing engine that speculates by default."""

    def __init__(self, target: Engine, draft: Engine, shared: SpeculationShared, **options: Any):
        self.ended: list[SpeculationStats] = []
        super().__init__(
            target,
            draft,
            SpeculationOptions(**options),
            by_default=True,
            on_end=self.ended.append,
            shared=shared,
        )

    @property
    def stats(self) -> SpeculationStats:
        """Of the latest request that has ended."""
        return self.ended[-1]


class TellsLess(ScriptedEngine):
    """A scripted engine that does not tell one of its limits, and keeps to it all the same."""

    def __init__(self, rule: Rule, script: Script, untold: str) -> None:
        super().__init__(rule, script)
        self._untold = untold

    async def capacity(self) -> EngineCapacity:
        return replace(await super().capacity(), **{self._untold: None})


class RedrawingEngine(ScriptedEngine):
    """A target that rejects each draft's first token, and then draws that very token if it would
    have chosen it; ``redrawn`` counts how often.

    So do runtimes that draw the replacement of a token, rejected by logits, from the whole
    distribution.
    """

    redrawn = 0

    async def _chunks(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        async with aclosing(super()._chunks(request)) as chunks:
            async for chunk in chunks:
                if request.draft is None or request.draft.logits is None:
                    yield chunk
                    continue
                self.redrawn += chunk.token_ids[:1] == request.draft.token_ids[:1]
                yield replace(chunk, token_ids=chunk.token_ids[:1])


@dataclass
class Pair:
    """A target and a draft model, with what their requests learn from one another."""

    target: ScriptedEngine
    draft: ScriptedEngine
    shared: SpeculationShared

    def speculative(self, **options: Any) -> SpeculatingEngine:
        return SpeculatingEngine(self.target, self.draft, self.shared, **options)

    @property
    def live(self) -> tuple[int, int]:
        return self.target.live, self.draft.live


def pair(rule: Rule, guess: Rule, draft: Script | None = None, **target: Any) -> Pair:
    """Engines that play ``rule`` and ``guess``, over ``VOCAB`` ids if not told otherwise."""
    script = Script(**{"vocab_size": VOCAB, **target})
    other = draft or Script(name="draft", vocab_size=script.vocab_size)
    return Pair(ScriptedEngine(rule, script), ScriptedEngine(guess, other), SpeculationShared())


def hashed_pair(rate: float = 0.7, words: int = 6, **target: Any) -> Pair:
    """A target that writes without pattern, and a draft that agrees at ``rate``."""
    rule = hashed(words)
    return pair(rule, agreeing(rule, rate, words), **target)


def engine_request(
    input_ids: Sequence[int] = (1, 2, 3, 1, 2), max_tokens: int = 12, **fields: Any
) -> EngineRequest:
    fields.setdefault("sampling", GREEDY)
    return EngineRequest(
        request_id="r", input_ids=tuple(input_ids), max_tokens=max_tokens, **fields
    )


async def read(engine: Engine, request: EngineRequest) -> list[EngineChunk]:
    await engine.capacity()
    async with aclosing(engine.generate(request)) as stream:
        return [chunk async for chunk in stream]


def ids(chunks: Sequence[EngineChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def told(chunks: Sequence[EngineChunk]) -> tuple[list[int], FinishReason | None]:
    """All ids and the reason of the end; checks that exactly the last chunk is final."""
    assert [chunk.final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    return ids(chunks), chunks[-1].finish_reason
