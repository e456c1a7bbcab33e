"""Several engines of one model as one: each request goes to the one that does the least.

An engine that cannot be reached or asked, or has stalled, rests: no request is sent there until it
has told its capacity again. It is asked in the background, ever more rarely. A request that
has produced nothing yet is tried on the others; so is one whose engine's queue is full. One that
has produced tokens ends with the error, unless ``resume`` is on and it can be gone on with
elsewhere, or has all its tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from trtllm_bls.engines.base import ChunkStream, Engine, QueuedChunks
from trtllm_bls.engines.ends import SequenceEnds
from trtllm_bls.errors import EngineError, EngineStalled, EngineUnavailable, Overloaded
from trtllm_bls.types import EngineCapacity, EngineChunk, EngineRequest, Wants

_ASK_AGAIN_S = 1.0
_FIRST_REST_S, _LONGEST_REST_S = 1.0, 30.0  # doubled each time
_LOST = (EngineUnavailable, EngineStalled)

log = logging.getLogger(__name__)


class _Replica:
    """One engine: what it runs, and whether it may be given more."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sequences = 0
        self.capacity: EngineCapacity | None = None  # while it rests, and before it is first asked
        self.error: EngineError = EngineUnavailable(
            f"{engine.name}: not asked for its capacity yet"
        )
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = 0.0
        self._return: asyncio.Task[None] | None = None

    async def ask(self) -> None:
        """Have its capacity, or rest."""
        self._asked_at = asyncio.get_running_loop().time()
        try:
            self.capacity = await self.engine.capacity()
        except EngineError as error:
            self.rest(error)
        except Exception as error:  # bytes that are no message, say
            problem = f"{self.engine.name}: asking for its capacity failed: {error!r}"
            self.rest(EngineUnavailable(problem))

    def ask_now_and_then(self) -> None:
        """Ask beside the requests, which are not to wait for one of several engines."""
        idle = self._asking is None or self._asking.done()
        if idle and asyncio.get_running_loop().time() - self._asked_at > _ASK_AGAIN_S:
            self._asking = asyncio.create_task(self.ask())

    def rest(self, error: EngineError) -> None:
        """Take no more requests until it answers again."""
        if self._return is None or str(error) != str(self.error):
            log.warning("%s; no request goes there until it answers again", error)
        self.capacity, self.error = None, error
        self._return = self._return or asyncio.create_task(self._come_back())

    async def _come_back(self) -> None:
        seconds = _FIRST_REST_S
        while self.capacity is None:
            await asyncio.sleep(seconds)
            seconds = min(2 * seconds, _LONGEST_REST_S)
            await self.ask()
        self._return = None
        log.info("%s answers again", self.engine.name)

    async def close(self) -> None:
        for pending in (self._asking, self._return):
            if pending is not None:
                pending.cancel()
        await self.engine.close()


class ReplicatedEngine:
    """``engines`` as one ``Engine``, which closes them.

    ``resume``: a greedy or seeded request that has produced tokens goes on elsewhere, from its
    prompt and these tokens; a drawn one with other draws than it would have had.
    """

    def __init__(self, engines: Sequence[Engine], *, resume: bool = False) -> None:
        self.name = ",".join(engine.name for engine in engines)
        self.resume = resume
        self._replicas = [_Replica(engine) for engine in engines]
        self._opening: asyncio.Future[list[None]] | None = None
        self._of: list[EngineCapacity] = []  # whose least is the next
        self._least = EngineCapacity()

    async def capacity(self) -> EngineCapacity:
        """What all that can be reached can take. Raises ``EngineUnavailable`` if there is none."""
        known = self._known()
        if not known:
            if self._opening is None or self._opening.done():
                self._opening = asyncio.gather(*(replica.ask() for replica in self._replicas))
            await asyncio.shield(self._opening)
            known = self._known()
        if not known:
            raise self._replicas[0].error
        for replica in self._replicas:
            if replica.capacity is not None:
                replica.ask_now_and_then()
        if known != self._of:
            self._of, self._least = known, _least(known)
        return self._least

    def generate(self, request: EngineRequest) -> ChunkStream:
        """See ``Engine.generate``."""
        return _ReplicaChunks(self, request)

    async def close(self) -> None:
        """Close all engines."""
        if self._opening is not None:
            self._opening.cancel()
        await asyncio.gather(*(replica.close() for replica in self._replicas))

    def problems(self) -> dict[str, str]:
        """Why each engine takes no requests, by its name; an empty text if it does."""
        return {
            each.engine.name: "" if each.capacity is not None else str(each.error)
            for each in self._replicas
        }

    def _known(self) -> list[EngineCapacity]:
        return [each.capacity for each in self._replicas if each.capacity is not None]

    def choose(self, tried: Sequence[_Replica]) -> _Replica | None:
        """The least loaded engine that is there and was not ``tried``."""
        there = [each for each in self._replicas if each.capacity is not None and each not in tried]
        return min(there, key=lambda replica: replica.sequences, default=None)


class _ReplicaChunks(ChunkStream):
    """One request, on one engine after the other as long as it may move."""

    def __init__(self, engine: ReplicatedEngine, request: EngineRequest) -> None:
        self._engine = engine
        self._request = request
        self._remembers = engine.resume and _can_resume(request)
        self._ids: list[int] = []
        self._begun = self._ended = False
        self._tried: list[_Replica] = []
        self._replica: _Replica | None = None
        first = engine.choose(())
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
                    self._ended = chunk.final
        else:
            self._release()
        return chunks

    async def aclose(self) -> None:
        self._release()
        await self._stream.aclose()

    def _begin(self, replica: _Replica) -> None:
        self._tried.append(replica)
        request = _rest(self._request, self._ids) if self._ids else self._request
        self._stream = replica.engine.generate(request)
        self._replica = replica
        replica.sequences += request.num_return_sequences

    async def _move(self, error: EngineError | Overloaded) -> None:
        """To another engine, unless only the final flag is missing; raises ``error`` where there is
        none, or the request has to stay."""
        replica = self._replica
        self._release()
        if isinstance(error, EngineError) and replica is not None:
            replica.rest(error)
        await self._stream.aclose()
        end = SequenceEnds(self._request, 0).feed(tuple(self._ids))
        if end.final and not self._ended:
            self._stream = last = QueuedChunks()
            last.put([replace(end, token_ids=())])  # all that is missing
            last.end()
            return
        stays = self._begun and (not self._remembers or self._ended)
        other = None if stays else self._engine.choose(self._tried)
        if other is None:
            raise error
        log.info("%s goes on at %s", self._request.request_id, other.engine.name)
        self._begin(other)

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
        and not request.extras
    )


def _rest(request: EngineRequest, ids: Sequence[int]) -> EngineRequest:
    """What is left of a request that has produced ``ids``."""
    sampling, made = request.sampling, len(ids)
    least, seed = sampling.min_tokens, sampling.seed
    return replace(
        request,
        input_ids=(*request.input_ids, *ids),
        max_tokens=request.max_tokens - made,
        sampling=replace(
            sampling,
            min_tokens=None if least is None else max(0, least - made),
            # Numbers that were drawn before are not drawn again.
            seed=None if seed is None else (seed + made) % (1 << 64),
        ),
    )


def _least(capacities: Sequence[EngineCapacity]) -> EngineCapacity:
    """What each of several engines can take."""

    def smallest(name: str) -> int | None:
        given = [value for each in capacities if (value := getattr(each, name)) is not None]
        return min(given, default=None)

    sizes = ("vocab_size", "max_sequence_tokens", "max_prompt_tokens", "max_draft_tokens")
    return EngineCapacity(
        **{name: smallest(name) for name in sizes},
        one_step=next((each.one_step for each in capacities if each.one_step is not None), None),
        may_be_one_step=any(each.may_be_one_step for each in capacities),
        tells_top_log_probs=all(each.tells_top_log_probs for each in capacities),
        speculates=capacities[0].speculates,
    )
