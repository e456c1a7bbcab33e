"""Everyone who decides where a sequence ends decides the same, as the contract has it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest

from doubles.scripted import Script, _ScriptedSequence
from doubles.scripted_tokens import Choice
from tests.helpers.random_cases import cut_anywhere, run_cases
from tests.helpers.scripted_text import asking
from trtllm_bls.engines.embedded.batching import Sequence as EmbeddedSequence
from trtllm_bls.engines.embedded.sampling import Choice as EmbeddedChoice
from trtllm_bls.engines.trtllm_fields import sequence_ends
from trtllm_bls.speculative.progress import Progress
from trtllm_bls.text.answer import SequenceText, TextRules
from trtllm_bls.types import (
    EngineCapacity,
    EngineChunk,
    EngineRequest,
    FinishReason,
    Sampling,
    TokenIds,
)

VOCAB = 6
END: TypeAlias = tuple[TokenIds, FinishReason | None]


def plainly(request: EngineRequest, ids: TokenIds) -> END:
    """The contract once more, the slow way: after each id, look at all of them."""
    least = request.sampling.min_tokens or 0
    for place, token in enumerate(ids):
        if token == request.end_id and place >= least:
            return ids[:place], FinishReason.END_ID
        kept = ids[: place + 1]
        stops = any(kept[-len(stop) :] == stop for stop in request.stop_sequences)
        if stops and len(kept) >= least:
            return kept, FinishReason.STOP
        if len(kept) == request.max_tokens:
            return kept, FinishReason.LENGTH
    return ids, None


# --- those who decide: the pieces of one answer in, what is kept of it and why it ended out -----


class Letters:
    """A detokenizer; no stop word is ever in its text."""

    def feed(self, ids: Sequence[int]) -> str:
        return "x" * len(ids)

    def flush(self) -> str:
        return ""


def by_answer(request: EngineRequest, pieces: Sequence[TokenIds]) -> END:
    """Which looks for its stops in the text too, and so takes an id at a time."""
    text = asking(
        sampling=request.sampling,
        stop_words=tuple(f"<{place}>" for place in range(len(request.stop_sequences))),
    )
    rules = TextRules(
        prompt_tokens=1,
        max_tokens=request.max_tokens,
        end_ids=(request.end_id or 0,),
        stop_sequences=request.stop_sequences,
    )
    sequence = SequenceText(text, rules, Letters())  # type: ignore[arg-type]
    for piece in pieces:
        sequence.feed(EngineChunk(token_ids=piece))
    ids = tuple(token for piece in pieces for token in piece)
    ending = sequence.ending
    if ending is not None and ending.finish_reason is FinishReason.STOP:
        place = int((ending.stop_reason or "").strip("<>"))
        stop = request.stop_sequences[place]
        assert ids[: ending.completion_tokens][-len(stop) :] == stop
    reason = None if ending is None else ending.finish_reason
    return ids[: sequence.criteria.generated], reason


def by_speculation(request: EngineRequest, pieces: Sequence[TokenIds]) -> END:
    progress = Progress(request)
    for piece in pieces:
        progress.append(piece)
    return tuple(progress.ids[len(request.input_ids) :]), progress.finish


def by_ending_here(request: EngineRequest, pieces: Sequence[TokenIds]) -> END:
    """As for engines that do not know all ends."""
    (ends,), kept = sequence_ends(request), list[int]()
    for piece in pieces:
        for chunk in ends.feed(piece):
            kept += chunk.token_ids
            assert chunk.final is ends.done is (chunk.finish_reason is not None)
            if ends.done:
                return tuple(kept), chunk.finish_reason
    return tuple(kept), None


def by_embedded(request: EngineRequest, pieces: Sequence[TokenIds]) -> END:
    owner: Any = None
    sequence = EmbeddedSequence(
        request, 0, EngineCapacity(vocab_size=VOCAB, max_sequence_tokens=99), owner
    )
    for token in (token for piece in pieces for token in piece):
        if sequence.finish is None:
            sequence._take(EmbeddedChoice(token, 0.0, 0.0, True), None)
    return tuple(sequence.tokens[len(request.input_ids) :]), sequence.finish


def by_scripted(request: EngineRequest, pieces: Sequence[TokenIds]) -> END:
    class Sampler:
        def push(self, token: int) -> None:
            pass

    sampler: Any = Sampler()
    sequence = _ScriptedSequence(request, 0, sampler, Script(vocab_size=VOCAB))
    for token in (token for piece in pieces for token in piece):
        if not sequence.done:
            sequence._add(Choice(token, 0.0))
    return tuple(sequence._context[len(request.input_ids) :]), sequence._reason


DECIDE = [by_answer, by_speculation, by_ending_here, by_embedded, by_scripted]


@pytest.mark.parametrize("decide", DECIDE)
def test_a_sequence_ends_where_the_contract_says(
    decide: Callable[[EngineRequest, Sequence[TokenIds]], END],
) -> None:
    """However its ids are cut: by the end id, which is left out, by stops, limit and minimum."""
    seen = set()

    def case(chance: random.Random) -> None:
        def some(longest: int) -> TokenIds:
            return tuple(chance.randrange(VOCAB) for _ in range(chance.randint(1, longest)))

        request = EngineRequest(
            request_id="r",
            input_ids=(1,),
            max_tokens=chance.randint(1, 9),
            end_id=chance.choice((-1, 0, 0)),
            stop_sequences=tuple({some(3) for _ in range(chance.choice((0, 0, 1, 2)))}),
            sampling=Sampling(min_tokens=chance.choice((None, 1, 2, 5))),
        )
        ids = some(12)
        expected = plainly(request, ids)
        pieces = [ids[cut] for cut in cut_anywhere(chance, len(ids), 4)]
        assert decide(request, pieces) == expected
        seen.add(expected[1])

    run_cases(case, 1000)
    assert seen == {None, FinishReason.END_ID, FinishReason.STOP, FinishReason.LENGTH}
