"""Several engines of one model as one: requests go by load and, with ``affinity``, by prompt.

Every engine has a circuit breaker, which is closed while the engine serves. An engine that cannot
be reached or does not state its capacity, or that stalls, opens it: no request is sent there. Each
breaker asks its engine for the capacity in the background, once a second, or after a pause that
doubles while the engine does not answer. The answer closes the breaker.

A request that has produced nothing is tried on the other engines, also when its engine's queue is
full. One that has produced tokens ends with its engine's error, unless ``resume`` is on and the
request can go on at another engine, or already has all of its tokens.
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

_ASK_AGAIN_S = Backoff(1.0, 30.0)  # the pause grows while an engine does not answer
_ENGINE_LOSSES = (EngineUnavailable, EngineStalled)
_BLOCK_TOKENS = 32  # engines keep the KV cache in blocks of this many tokens or more
_REMEMBERED_BLOCKS = 200_000
# The load that an engine which has a prompt's beginning may have beyond the least busy engine: so
# many sequences, or this share.
_EXTRA_SEQUENCES = 2
_EXTRA_SHARE = 0.25

log = logging.getLogger(__name__)


class _Replica:
    """An engine, its load, and its circuit breaker.

    The breaker is closed while ``capacity`` is known; ``error`` is the reason why it is open. It
    starts open.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_sequences = 0  # those that run on the engine
        self.capacity: EngineCapacity | None = None
        self.error: EngineError = EngineUnavailable(
            f"{engine.name}: not asked for its capacity yet"
        )
        self._asking: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    def ask(self) -> asyncio.Task[None]:
        """Ask the engine for its capacity, unless that is under way, and watch it from then on."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        return self._asking

    def open_breaker(self, error: EngineError) -> None:
        """Send no more requests there until the engine answers again."""
        if self.capacity is not None or str(error) != str(self.error):
            log.warning("%s; no request goes there until it answers again", error)
        self.capacity = None
        self.error = error

    async def _ask(self) -> None:
        try:
            capacity = await self.engine.capacity()
        except Exception as error:
            if not isinstance(error, EngineError):  # for example, bytes that are no message
                problem = f"{self.engine.name}: asking for its capacity failed: {error!r}"
                error = EngineUnavailable(problem)
            self.open_breaker(error)
        else:
            if self.capacity is None:
                log.info("%s answers", self.engine.name)
            self.capacity = capacity

    async def _watch(self) -> None:
        pause = _ASK_AGAIN_S.shortest
        while True:
            await asyncio.sleep(pause)
            await asyncio.wait({self.ask()})
            pause = _ASK_AGAIN_S.after(pause)
            if self.capacity is not None:
                pause = _ASK_AGAIN_S.shortest

    async def close(self) -> None:
        for pending in (self._asking, self._watching):
            if pending is not None:
                pending.cancel()
        await self.engine.close()


class ReplicatedEngine:
    """``engines`` as one ``Engine``, which closes them.

    ``resume``: a greedy or seeded request that has produced tokens goes on at another engine, whose
    prompt is the request's own and these tokens. A seeded one then has other draws than it would
    have had. ``affinity``: a request goes to the engine that last got the longest beginning of its
    prompt, unless that engine is much busier than another.
    """

    def __init__(
        self, engines: Sequence[Engine], *, resume: bool = False, affinity: bool = False
    ) -> None:
        self.name = ",".join(engine.name for engine in engines)
        self.resume = resume
        self._affinity = affinity
        self._by_beginning: dict[int, _Replica] = {}  # the engine that last got a beginning
        self._replicas = list(map(_Replica, engines))

    async def capacity(self) -> EngineCapacity:
        """Return the limits that all reachable engines share.

        Raises ``EngineUnavailable`` if no engine can be reached.
        """
        if not any(replica.capacity for replica in self._replicas):
            await asyncio.wait([replica.ask() for replica in self._replicas])
        capacities: list[EngineCapacity] = []
        for replica in self._replicas:
            if replica.capacity is not None:
                capacities.append(replica.capacity)
        if not capacities:
            raise self._replicas[0].error
        limits: dict[str, int | None] = {}
        for name in ("vocab_size", "max_sequence_tokens", "max_prompt_tokens", "max_draft_tokens"):
            values: list[int] = []
            for capacity in capacities:
                value = getattr(capacity, name)
                if value is not None:
                    values.append(value)
            limits[name] = min(values, default=None)
        one_step = None
        may_be_one_step = False
        tells_top_log_probs = True
        for capacity in capacities:
            if one_step is None:
                one_step = capacity.one_step
            may_be_one_step = may_be_one_step or capacity.may_be_one_step
            tells_top_log_probs = tells_top_log_probs and capacity.tells_top_log_probs
        return EngineCapacity(
            **limits,
            one_step=one_step,
            may_be_one_step=may_be_one_step,
            tells_top_log_probs=tells_top_log_probs,
            speculates=capacities[0].speculates,
        )

    def generate(self, request: EngineRequest) -> ChunkStream:
        """Generate as ``Engine.generate`` does."""
        return _ReplicaChunks(self, request)

    async def close(self) -> None:
        """Close all engines."""
        await asyncio.gather(*(replica.close() for replica in self._replicas))

    async def problems(self) -> dict[str, str]:
        """Return each engine's reason to take no requests, by its name; empty if it takes them."""
        with suppress(EngineError):
            await self.capacity()
        problems = {}
        for replica in self._replicas:
            problems[replica.engine.name] = ""
            if replica.capacity is None:
                problems[replica.engine.name] = str(replica.error)
        return problems

    def sequences(self) -> dict[str, int]:
        """Return the number of sequences that run on each engine, by its name."""
        return {replica.engine.name: replica.num_sequences for replica in self._replicas}

    def choose(self, excluded: Sequence[_Replica], prompt: PromptIds) -> _Replica | None:
        """Return an engine for a prompt, with a closed breaker and none of those ``excluded``."""
        available: list[_Replica] = []
        for replica in self._replicas:
            if replica.capacity is not None and replica not in excluded:
                available.append(replica)
        least_busy = min(available, key=lambda replica: replica.num_sequences, default=None)
        if least_busy is None or not self._affinity:
            return least_busy
        sequences = least_busy.num_sequences
        limit = sequences + max(_EXTRA_SEQUENCES, _EXTRA_SHARE * sequences)
        # A number for the first block of the prompt, for the first two, and so on.
        chosen = least_busy
        beginning = 0
        beginnings: list[int] = []
        for end in range(_BLOCK_TOKENS, len(prompt) + 1, _BLOCK_TOKENS):
            beginning = hash((beginning, tuple(prompt[end - _BLOCK_TOKENS : end])))
            beginnings.append(beginning)
            replica_with_beginning = self._by_beginning.get(beginning)
            if (
                replica_with_beginning in available
                and replica_with_beginning.num_sequences <= limit
            ):
                chosen = replica_with_beginning
        self._by_beginning.update(dict.fromkeys(beginnings, chosen))
        while len(self._by_beginning) > _REMEMBERED_BLOCKS:
            oldest = next(iter(self._by_beginning))
            del self._by_beginning[oldest]
        return chosen


class _ReplicaChunks(ChunkStream):
    """A request on one engine, and after a failure on another as long as it may move."""

    def __init__(self, engine: ReplicatedEngine, request: EngineRequest) -> None:
        self._engine = engine
        self._request = request
        self._remembers = engine.resume and _can_resume(request)
        self._ids: list[int] = []
        self._has_begun = False
        self._past_replicas: list[_Replica] = []
        self._replica: _Replica | None = None
        replica = engine.choose((), request.input_ids)
        if replica is None:
            raise EngineUnavailable(f"{engine.name}: none of them can be reached")
        self._begin(replica)

    async def wait(self) -> None:
        while True:
            try:
                await self._stream.wait()
            except (*_ENGINE_LOSSES, Overloaded) as error:
                await self._move(error)
            else:
                return

    def take(self) -> list[EngineChunk]:
        chunks = self._stream.take()
        if chunks:
            self._has_begun = True
            if self._remembers:
                for chunk in chunks:
                    self._ids += chunk.token_ids
        return chunks

    async def aclose(self) -> None:
        self._release()
        await self._stream.aclose()

    def _begin(self, replica: _Replica) -> None:
        self._past_replicas.append(replica)
        request = self._request
        generated = len(self._ids)
        if generated:
            # A minimum of 0 is sent, too: an engine may take its absence for 1.
            min_tokens = max(0, (request.sampling.min_tokens or 0) - generated)
            seed = request.sampling.seed
            if seed is not None:
                # Another seed, so that no number is drawn twice.
                seed = (seed + generated) % (1 << 64)
            request = replace(
                request,
                input_ids=(*request.input_ids, *self._ids),
                max_tokens=request.max_tokens - generated,
                sampling=replace(request.sampling, min_tokens=min_tokens, seed=seed),
            )
        self._stream = replica.engine.generate(request)
        self._replica = replica
        replica.num_sequences += request.num_return_sequences

    async def _move(self, error: EngineError | Overloaded) -> None:
        """Begin the request on another engine, or end it here if only its final flag is missing.

        Raises ``error`` if there is no other engine or the request cannot move.
        """
        replica = self._replica
        self._release()
        if isinstance(error, EngineError) and replica is not None:
            replica.open_breaker(error)
        await self._stream.aclose()
        _, reason = StoppingCriteria.of(self._request).feed(tuple(self._ids))
        if reason is not None:
            ending = QueuedChunks()
            ending.put([EngineChunk(token_ids=(), final=True, finish_reason=reason)])
            ending.end()
            self._stream = ending
            return
        if self._has_begun and not self._remembers:
            raise error
        replacement = self._engine.choose(self._past_replicas, self._request.input_ids)
        if replacement is None:
            raise error
        log.info("%s goes on at %s", self._request.request_id, replacement.engine.name)
        self._begin(replacement)

    def _release(self) -> None:
        if self._replica is not None:
            self._replica.num_sequences -= self._request.num_return_sequences
            self._replica = None


def _can_resume(request: EngineRequest) -> bool:
    """Return true if the remaining answer depends on prompt and tokens so far alone."""
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
