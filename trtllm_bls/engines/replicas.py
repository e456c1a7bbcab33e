"""Several engines of one model as one: requests go by load and, with ``affinity``, by prompt.

Every engine has a circuit breaker, which is closed while the engine serves. An engine that cannot
be reached or asked for its capacity, or that stalls, opens it: no request is sent there. Every
engine is asked for its capacity in the background, once a second, or after a pause that doubles
while it does not answer. The answer closes the breaker.

A request that has produced nothing is tried on the other engines, also when its engine's queue is
full. One that has produced tokens ends with its engine's error, unless ``resume`` is on and the
request can be continued elsewhere, or already has all of its tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from trtllm_bls.engines.base import ChunkStream, Engine, QueuedChunks
from trtllm_bls.errors import EngineError, EngineStalled, EngineUnavailable, Overloaded
from trtllm_bls.text.stopping import StoppingCriteria
from trtllm_bls.types import Backoff, EngineCapacity, EngineChunk, EngineRequest, PromptIds, Wants

_ASK_AGAIN_S = Backoff(1.0, 30.0)  # The pause grows while an engine does not answer.
_LOST = (EngineUnavailable, EngineStalled)
# Engines keep the KV cache in blocks of this many tokens or more.
_BLOCK_TOKENS, _REMEMBERED_BLOCKS = 32, 200_000
# How much more than the least busy engine may run where a prompt's beginning is known: so many
# sequences, or this share.
_MORE_SEQUENCES, _MORE_SHARE = 2, 0.25

log = logging.getLogger(__name__)


class _Replica:
    """One engine, its load, and its circuit breaker.

    The breaker is closed while ``capacity`` is known; ``error`` says why it is open. Before the
    engine is first asked it is open, too.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sequences = 0  # that run there
        self.capacity: EngineCapacity | None = None
        self.error: EngineError = EngineUnavailable(
            f"{engine.name}: not asked for its capacity yet"
        )
        self._asking: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    def ask(self) -> asyncio.Task[None]:
        """Ask the engine for its capacity, unless that is under way; from then on it is watched."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        return self._asking

    def open_breaker(self, error: EngineError) -> None:
        """Send no more requests there until the engine answers again."""
        if self.capacity is not None or str(error) != str(self.error):
            log.warning("%s; no request goes there until it answers again", error)
        self.capacity, self.error = None, error

    async def _ask(self) -> None:
        try:
            capacity = await self.engine.capacity()
        except Exception as error:
            if not isinstance(error, EngineError):  # bytes that are no message, say
                problem = f"{self.engine.name}: asking for its capacity failed: {error!r}"
                error = EngineUnavailable(problem)
            self.open_breaker(error)
        else:
            if self.capacity is None:
                log.info("%s answers", self.engine.name)
            self.capacity = capacity

    async def _watch(self) -> None:
        pause = _ASK_AGAIN_S.first
        while True:
            await asyncio.sleep(pause)
            await asyncio.wait({self.ask()})
            closed = self.capacity is not None
            pause = _ASK_AGAIN_S.first if closed else _ASK_AGAIN_S.after(pause)

    async def close(self) -> None:
        for pending in (self._asking, self._watching):
            if pending is not None:
                pending.cancel()
        await self.engine.close()


class ReplicatedEngine:
    """``engines`` as one ``Engine``, which closes them.

    ``resume``: a greedy or seeded request that has produced tokens is continued on another engine,
    whose prompt is the request's own and these tokens. A seeded one then has other draws than it
    would have had. ``affinity``: a request goes to the engine that was last sent the longest
    beginning of its prompt, unless that engine is much busier than another.
    """

    def __init__(
        self, engines: Sequence[Engine], *, resume: bool = False, affinity: bool = False
    ) -> None:
        self.name = ",".join(engine.name for engine in engines)
        self.resume = resume
        self._affinity = affinity
        self._sent_to: dict[int, _Replica] = {}  # by a prompt's beginning
        self._replicas = [_Replica(engine) for engine in engines]

    async def capacity(self) -> EngineCapacity:
        """What every engine that can be reached can take. Raises ``EngineUnavailable`` if none
        can."""
        if not any(replica.capacity for replica in self._replicas):
            await asyncio.wait([replica.ask() for replica in self._replicas])
        known = [each.capacity for each in self._replicas if each.capacity is not None]
        if not known:
            raise self._replicas[0].error
        smallest: dict[str, int | None] = {}
        for name in ("vocab_size", "max_sequence_tokens", "max_prompt_tokens", "max_draft_tokens"):
            given = [value for each in known if (value := getattr(each, name)) is not None]
            smallest[name] = min(given, default=None)
        return EngineCapacity(
            **smallest,
            one_step=next((each.one_step for each in known if each.one_step is not None), None),
            may_be_one_step=any(each.may_be_one_step for each in known),
            tells_top_log_probs=all(each.tells_top_log_probs for each in known),
            speculates=known[0].speculates,
        )

    def generate(self, request: EngineRequest) -> ChunkStream:
        """See ``Engine.generate``."""
        return _ReplicaChunks(self, request)

    async def close(self) -> None:
        """Close all engines."""
        await asyncio.gather(*(replica.close() for replica in self._replicas))

    async def problems(self) -> dict[str, str]:
        """Why each engine takes no requests, by its name; an empty text if it does."""
        with suppress(EngineError):
            await self.capacity()
        states = [
            (replica.engine.name, replica.capacity, replica.error) for replica in self._replicas
        ]
        return {name: "" if capacity else str(error) for name, capacity, error in states}

    def sequences(self) -> dict[str, int]:
        """How many sequences each engine has been given that are not over, by its name."""
        return {replica.engine.name: replica.sequences for replica in self._replicas}

    def choose(self, tried: Sequence[_Replica], prompt: PromptIds) -> _Replica | None:
        """An engine whose breaker is closed and which was not ``tried``."""
        closed = [
            each for each in self._replicas if each.capacity is not None and each not in tried
        ]
        least = min(closed, key=lambda replica: replica.sequences, default=None)
        if least is None or not self._affinity:
            return least
        most = least.sequences + max(_MORE_SEQUENCES, _MORE_SHARE * least.sequences)
        # A number for the first block of the prompt, for the first two, and so on.
        chosen, beginning, beginnings = least, 0, []
        for end in range(_BLOCK_TOKENS, len(prompt) + 1, _BLOCK_TOKENS):
            beginning = hash((beginning, tuple(prompt[end - _BLOCK_TOKENS : end])))
            beginnings.append(beginning)
            known = self._sent_to.get(beginning)
            if known in closed and known.sequences <= most:
                chosen = known
        self._sent_to.update(dict.fromkeys(beginnings, chosen))
        while len(self._sent_to) > _REMEMBERED_BLOCKS:
            del self._sent_to[next(iter(self._sent_to))]  # the oldest
        return chosen


class _ReplicaChunks(ChunkStream):
    """One request, on one engine and after a failure on another, as long as it may move."""

    def __init__(self, engine: ReplicatedEngine, request: EngineRequest) -> None:
        self._engine = engine
        self._request = request
        self._remembers = engine.resume and _can_resume(request)
        self._ids: list[int] = []
        self._begun = False
        self._tried: list[_Replica] = []
        self._replica: _Replica | None = None
        first = engine.choose((), request.input_ids)
        if first is None:
            raise EngineUnavailable(f"{engine.name}: none of them can be reached")
        self._begin(first)

    async def wait(self) -> None:
        while True:
            try:
                await self._stream.wait()
            except (*_LOST, Overloaded) as error:
                await self._move(error)
            else:
                return

    def take(self) -> list[EngineChunk]:
        chunks = self._stream.take()
        if chunks:
            self._begun = True
            if self._remembers:
                for chunk in chunks:
                    self._ids += chunk.token_ids
        return chunks

    async def aclose(self) -> None:
        self._release()
        await self._stream.aclose()

    def _begin(self, replica: _Replica) -> None:
        self._tried.append(replica)
        request = self._request
        if generated := len(self._ids):
            least, seed = request.sampling.min_tokens or 0, request.sampling.seed
            sampling = replace(
                request.sampling,
                # Said aloud also where it is 0: an engine may take its absence for 1.
                min_tokens=max(0, least - generated),
                # Numbers that were drawn before are not drawn again.
                seed=None if seed is None else (seed + generated) % (1 << 64),
            )
            prompt, remaining = (*request.input_ids, *self._ids), request.max_tokens - generated
            request = replace(request, input_ids=prompt, max_tokens=remaining, sampling=sampling)
        self._stream = replica.engine.generate(request)
        self._replica = replica
        replica.sequences += request.num_return_sequences

    async def _move(self, error: EngineError | Overloaded) -> None:
        """Begin the request on another engine, or end it here if only its final flag is missing.

        Raises ``error`` where there is no other engine or the request cannot move.
        """
        replica = self._replica
        self._release()
        if isinstance(error, EngineError) and replica is not None:
            replica.open_breaker(error)
        await self._stream.aclose()
        _, reason = StoppingCriteria.of(self._request).feed(tuple(self._ids))
        if reason is not None:
            self._stream = last = QueuedChunks()
            end = EngineChunk(token_ids=(), final=True, finish_reason=reason)
            last.put([end])  # all that is missing
            last.end()
            return
        stays = self._begun and not self._remembers
        replacement = None if stays else self._engine.choose(self._tried, self._request.input_ids)
        if replacement is None:
            raise error
        log.info("%s goes on at %s", self._request.request_id, replacement.engine.name)
        self._begin(replacement)

    def _release(self) -> None:
        if self._replica is not None:
            self._replica.sequences -= self._request.num_return_sequences
            self._replica = None


def _can_resume(request: EngineRequest) -> bool:
    """Whether prompt and tokens so far are all that the rest of the answer depends on."""
    sampling = request.sampling
    return (
        request.num_return_sequences == 1
        and request.draft is None
        and (sampling.is_greedy or sampling.seed is not None)
        and sampling.top_p_decay in (None, 1.0)
        and all(len(stop) == 1 for stop in request.stop_sequences)
        and request.wants == Wants()
        and request.guide is None
        and request.adapter is None
        and not request.extras
    )
