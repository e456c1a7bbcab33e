"""Finished answers that later requests draft from: whose, for how long, and who can tell."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from doubles.scripted import Script, ScriptedEngine
from tests.helpers.scripted_pairs import engine_request as ask
from tests.helpers.scripted_pairs import ids, read
from tests.helpers.virtual_time import skipping_waits
from trtllm_bls.engines.routing import RoutingEngine
from trtllm_bls.speculative.ngrams import TIME_TO_LIVE_S, DraftMemories, DraftMemory
from trtllm_bls.speculative.options import DraftSource, SpeculationOptions
from trtllm_bls.types import SpeculationRequest
from trtllm_bls.wire.contract import MODELS

VOCAB, CODED, END = 2000, 1000, 0
TOKENS = 65536
INTRODUCTION = (71, 72, 73)  # as of "the password is"
LETTERS = tuple(range(10, 50))
SECRET, OTHER = (17, 42, 33, 10, 28, 49), (31, 12, 46, 25, 19, 38)


def obedient(context: Sequence[int]) -> int:
    """The first id says how many ids follow it; the answer is what those above ``CODED`` encode."""
    prompt = context[1 : 1 + context[0]]
    answer = [token - CODED for token in prompt if token >= CODED]
    place = len(context) - 1 - len(prompt)
    return answer[place] if place < len(answer) else END


@dataclass
class World:
    """A process that remembers the answers of its tenants."""

    engine: RoutingEngine
    figures: list[object]

    @classmethod
    def new(cls, memory_tokens: int = TOKENS) -> World:
        target = ScriptedEngine(obedient, Script(vocab_size=VOCAB, step_seconds=0.01))
        options = SpeculationOptions(draft_source=DraftSource.NGRAM, memory_tokens=memory_tokens)
        figures: list[object] = []
        engine = RoutingEngine(target, None, options, by_default=True, on_end=figures.append)
        return cls(engine, figures)

    async def say(
        self, tenant: str | None, answer: Sequence[int], before: Sequence[int] = (), **asked: int
    ) -> object:
        """Have the model answer so after ``before``; all figures of that request but times."""
        prompt = (*(token + CODED for token in answer), *before)
        request = ask(
            (len(prompt), *prompt),
            80,
            end_id=END,
            tenant=tenant,
            speculation=SpeculationRequest(**asked),
        )
        chunks = await read(self.engine, request)
        assert ids(chunks) == list(answer)
        parts = [(chunk.token_ids, chunk.final, chunk.finish_reason) for chunk in chunks]
        return parts, self.figures[-1]

    async def attack(self, tenant: str | None) -> tuple[tuple[int, ...], list[object]]:
        """Guess six tokens, one after another, by the number of accepted draft tokens; the best
        guess, and the figures of all 240 requests."""
        known: tuple[int, ...] = ()
        seen: list[object] = []
        for _ in SECRET:
            accepted = {}
            for letter in LETTERS:
                before = (*INTRODUCTION, *known)
                seen.append(await self.say(tenant, (letter, 60), before, num_draft_tokens=1))
                accepted[letter] = self.figures[-1].accepted  # type: ignore[attr-defined]
            known += (max(accepted, key=lambda letter: accepted[letter]),)
        return known, seen


async def attacked(secret: tuple[int, ...], victim: str, attacker: str) -> tuple[object, object]:
    """What ``attacker`` finds out in a process where ``victim`` was told ``secret``."""
    world = World.new()
    await world.say(victim, (80, 81, *INTRODUCTION, *secret, 82, 83))
    return await world.attack(attacker)


@skipping_waits
async def test_a_tenant_can_read_what_it_was_told_by_counting_accepted_tokens() -> None:
    """The attack works, so the test below can fail."""
    for secret in (SECRET, OTHER):
        assert (await attacked(secret, "mine", "mine"))[0] == secret


@skipping_waits
async def test_no_tenant_can_tell_what_another_was_told() -> None:
    """Every figure but times is the same whatever the secret is, of 240 requests."""
    found = [await attacked(secret, "victim", "attacker") for secret in (SECRET, OTHER)]
    assert found[0] == found[1]
    assert found[0][0] not in (SECRET, OTHER)


@pytest.mark.parametrize("tokens", [0, TOKENS])
@skipping_waits
async def test_nothing_is_remembered_without_an_identity_or_the_parameter(tokens: int) -> None:
    """Nor read: a tenant's memory is not for those whom nobody knows."""
    world = World.new(tokens)
    tenant = "known" if tokens == 0 else None
    await world.say(tenant, (80, 81, *INTRODUCTION, *SECRET))
    assert len(world.engine.shared.memories) == 0
    assert (await world.attack(tenant))[0] != SECRET


@skipping_waits
async def test_an_answer_that_came_before_is_drafted_whole() -> None:
    """What it is for: the second time takes a few passes of the target."""
    world, answer = World.new(), tuple(range(100, 170))
    target = world.engine.target
    assert isinstance(target, ScriptedEngine)
    for _ in range(2):  # n-grams have to prove themselves first
        await world.say("a", answer)
    before = len(target.requests)
    await world.say("a", answer)
    assert len(target.requests) - before < 10
    for other in ("b", None):
        await world.say(other, answer)
        assert world.figures[-1].accepted == 0  # type: ignore[attr-defined]


@skipping_waits
async def test_an_answer_that_fails_or_is_left_is_not_remembered() -> None:
    """It is not what the model had to say."""
    world = World.new()
    answer = tuple(token + CODED for token in range(100, 170))
    stream = world.engine.generate(ask((len(answer), *answer), 80, end_id=END, tenant="a"))
    await stream.wait()
    await stream.aclose()
    await asyncio.sleep(0)
    memory = world.engine.shared.memories.of("a", TOKENS)
    assert memory is not None and memory.texts(0.0) == []


def remembered(memory: DraftMemory, now: float) -> list[int]:
    return [token for text in memory.texts(now)[::-1] for token in text.ids]


def test_the_oldest_answers_make_room() -> None:
    """Half of them at a time; of an answer that is too long, the end stays."""
    memory = DraftMemory(8)
    for token in range(5):
        memory.add((token, token), 0.0)
    assert remembered(memory, 0.0) == [2, 2, 3, 3, 4, 4]
    memory.add(range(10, 20), 0.0)
    assert remembered(memory, 0.0) == [4, 4, 16, 17, 18, 19]


def test_answers_are_forgotten_with_time() -> None:
    """None is ever read that is older than its time to live."""
    memory = DraftMemory(TOKENS)
    memory.add((1,), 0.0)
    memory.add((2,), TIME_TO_LIVE_S / 2 - 1)
    memory.add((3,), TIME_TO_LIVE_S / 2)
    assert remembered(memory, TIME_TO_LIVE_S - 1) == [1, 2, 3]
    assert remembered(memory, TIME_TO_LIVE_S) == [3]
    assert remembered(memory, 1.5 * TIME_TO_LIVE_S) == []


@pytest.mark.parametrize("tokens", range(1, 20))
def test_no_more_than_the_parameter_is_kept(tokens: int) -> None:
    """However small it is."""
    memory = DraftMemory(tokens)
    for _ in range(5):
        memory.add(range(100), 0.0)
        assert len(remembered(memory, 0.0)) <= tokens


def test_memories_are_bounded_by_bytes() -> None:
    """Those unused for longest go first; a memory that is used stays."""
    one = DraftMemory(TOKENS)
    one.add(range(TOKENS), 0.0)
    ((_, ids, index),) = one._generations
    arrays = [ids, *index._heads.values(), *index._previous.values()]
    assert one.num_bytes == sum(4 * len(each) for each in arrays)
    memories = DraftMemories(4 * one.num_bytes)
    for number in range(50):
        for tenant in ("used", str(number)):
            memory = memories.of(tenant, TOKENS)
            assert memory is not None
            memories.add(memory, range(TOKENS), float(number))
            assert memories._num_bytes == sum(m.num_bytes for m in memories._memories.values())
            assert memories._num_bytes <= 4 * one.num_bytes
    assert 1 < len(memories) <= 4 and "used" in memories._memories


def test_the_memory_of_a_key_that_is_not_used_goes_with_time() -> None:
    """With the next answer of any key; a request that still runs may add to its own."""
    memories = DraftMemories()
    idle = [memories.of(str(number), TOKENS) for number in range(5)]
    for memory in filter(None, idle):
        memories.add(memory, (1, 2, 3), 0.0)
    assert len(memories) == 5
    for memory in (memories.of("another", TOKENS), idle[0]):
        assert memory is not None
        memories.add(memory, (1, 2, 3), 2 * TIME_TO_LIVE_S)
    assert [*memories._memories] == ["another"]
    assert memories._num_bytes == sum(memory.num_bytes for memory in memories._memories.values())


def test_no_tensor_names_a_tenant() -> None:
    """Over Triton nobody is authenticated, so no request has an identity."""
    names = {tensor.name for model in MODELS for tensor in model.inputs}
    assert not {name for name in names if "tenant" in name}
