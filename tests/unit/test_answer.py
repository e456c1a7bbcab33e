"""From tokens to text: where a sequence ends, what of it is seen, and whose scores are told."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.random_cases import cut_anywhere, run_cases
from tests.helpers.scripted_text import asking
from trtllm_bls.text.answer import Answer, SequenceText, TextRules
from trtllm_bls.types import (
    EngineChunk,
    EngineMetrics,
    FinishReason,
    Sampling,
    SpeculationStats,
    TextChunk,
    TextRequest,
    TokenIds,
)

END = 99
STOP, LENGTH, END_ID = FinishReason.STOP, FinishReason.LENGTH, FinishReason.END_ID


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a request asks for and what ``TextRules`` adds, in one."""

    max_tokens: int = 100
    min_tokens: int = 0
    seed: int | None = None
    stop_words: tuple[str, ...] = ()
    include_stop: bool = False
    return_drafted: bool = False
    stop_sequences: tuple[TokenIds, ...] = ()
    echo_ids: TokenIds = ()
    accumulate: bool = False
    max_sequence_tokens: int | None = None

    def request(self, **more: Any) -> TextRequest:
        return asking(
            sampling=Sampling(min_tokens=self.min_tokens, seed=self.seed),
            stop_words=self.stop_words,
            include_stop=self.include_stop,
            return_drafted=self.return_drafted,
            **more,
        )

    def rules(self) -> TextRules:
        return TextRules(
            prompt_tokens=2,
            max_tokens=self.max_tokens,
            end_ids=(END,),
            stop_sequences=self.stop_sequences,
            echo_ids=self.echo_ids,
            accumulate=self.accumulate,
            max_sequence_tokens=self.max_sequence_tokens,
        )

    def sequence(self) -> SequenceText:
        return SequenceText(self.request(), self.rules(), Pieces())


RULES = Rules()
# One token, one piece of text: of no, one or several characters, or half a character.
PIECES = ["a", "b", "ab", "ba", "c", "", "abc", "<", "ä/2", "ä/2"]


class Pieces:
    """A detokenizer of ``PIECES``; two halves make an ä, a half alone comes out as U+FFFD."""

    def __init__(self) -> None:
        self._half = ""

    def feed(self, ids: TokenIds) -> str:
        return "".join(self._one(PIECES[token]) if token < len(PIECES) else "" for token in ids)

    def _one(self, piece: str) -> str:
        if piece == "ä/2":
            self._half, text = ("", "ä") if self._half else ("half", "")
            return text
        return self.flush() + piece

    def flush(self) -> str:
        text, self._half = "\ufffd" if self._half else "", ""
        return text


def chunk(*token_ids: int, **more: Any) -> EngineChunk:
    return EngineChunk(token_ids=token_ids, **more)


def told(rules: Rules, *chunks: EngineChunk) -> list[TextChunk]:
    """What a sequence makes of chunks, until it has ended; it ends once, on its last."""
    sequence, found = rules.sequence(), []
    for one in chunks:
        sequence.feed(one)
        found.append(sequence.emit() or NOTHING)
        if sequence.ending is not None:
            break
    assert [piece.ending is not None for piece in found] == [False] * (len(found) - 1) + [True]
    return found


NOTHING = TextChunk(text="")


def outcome(pieces: list[TextChunk]) -> tuple[str, Any, Any, int]:
    ending = pieces[-1].ending
    assert ending is not None
    text = "".join(piece.text for piece in pieces)
    return text, ending.finish_reason, ending.stop_reason, ending.completion_tokens


def plain(rules: Rules, tokens: TokenIds) -> tuple[str, Any, Any, int]:
    """The rules once more, the slow way: after each token, look at the whole text again."""
    text, count, detokenizer = "", 0, Pieces()
    for token in tokens:
        if token == END and count >= rules.min_tokens:
            break
        before, count = len(text), count + 1
        text += detokenizer.feed((token,))
        if (cut := _first_stop(rules, text, before, count)) is not None:
            return cut[0], STOP, cut[1], count
        if count == rules.max_tokens:
            break
    before = len(text)
    text += detokenizer.flush()
    if (cut := _first_stop(rules, text, before, count)) is not None:
        return cut[0], STOP, cut[1], count
    return text, LENGTH if count == rules.max_tokens else END_ID, None, count


def _first_stop(rules: Rules, text: str, after: int, count: int) -> tuple[str, str] | None:
    """The stop that first completes in the text beyond ``after``; the longest of several. As in
    vLLM, none completes in the text of the first ``min_tokens`` tokens."""
    if count <= rules.min_tokens:
        return None
    for end in range(after + 1, len(text) + 1):
        found = [word for word in rules.stop_words if text[:end].endswith(word)]
        if found:
            word = max(found, key=len)
            return text[:end] if rules.include_stop else text[: end - len(word)], word
    return None


def test_any_stops_in_any_chunks_end_where_the_plain_reading_does() -> None:
    """Text, reason, stop and count are a matter of tokens, never of how they were cut."""

    def case(chance: random.Random) -> None:
        tokens = tuple(chance.randrange(len(PIECES)) for _ in range(chance.randint(0, 12)))
        if chance.random() < 0.5:
            tokens += (END, 0, 1)
        elif not tokens:
            return
        words = ["".join(chance.choices("abcä<\ufffd", k=chance.randint(1, 3))) for _ in range(3)]
        rules = Rules(
            max_tokens=chance.randint(1, 14),
            min_tokens=chance.choice([0, 0, 2, 5]),
            stop_words=tuple(dict.fromkeys(words[: chance.randint(0, 3)])),
            include_stop=chance.random() < 0.3,
        )
        cuts = cut_anywhere(chance, len(tokens), 4)
        chunks = [chunk(*tokens[cut]) for cut in cuts] + [chunk(final=True)]
        assert outcome(told(rules, *chunks)) == plain(rules, tokens)

    assert run_cases(case, 1000) >= 1000


# --- the end --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "more", "reason", "stop"),
    [
        ({"final": True}, {}, END_ID, None),
        ({"final": True, "finish_reason": LENGTH}, {}, LENGTH, None),
        (
            {"final": True, "finish_reason": FinishReason.CANCELLED},
            {},
            FinishReason.CANCELLED,
            None,
        ),
        ({"final": True}, {"max_sequence_tokens": 4}, LENGTH, None),
        ({"final": True}, {"max_sequence_tokens": 5}, END_ID, None),
        ({"final": True}, {"stop_words": ("x",), "stop_sequences": ((0, 1),)}, STOP, "x"),
        ({"final": True}, {"stop_words": ("x",), "stop_sequences": ((1, 0),)}, END_ID, None),
        ({"final": True}, {"stop_words": ("x",), "stop_sequences": ((),)}, END_ID, None),
        ({"final": True, "finish_reason": STOP}, {}, STOP, None),
    ],
)
def test_the_reason_is_the_engines_own_or_follows_from_counts(
    last: dict[str, Any], more: dict[str, Any], reason: FinishReason, stop: str | None
) -> None:
    """A wire that does not say why leaves three possibilities, and the tokens tell which."""
    assert outcome(told(replace(RULES, **more), chunk(0, 1, **last))) == ("ab", reason, stop, 2)


def test_the_token_limit_ends_before_the_engine_says_so() -> None:
    """What an engine sends beyond the limit is neither shown nor counted."""
    rules = replace(RULES, max_tokens=2)
    assert outcome(told(rules, chunk(0), chunk(1, 4, 4))) == ("ab", LENGTH, None, 2)


def test_an_end_id_is_neither_shown_nor_counted_nor_anything_after_it() -> None:
    """Engines know one end id; the others arrive as tokens."""
    assert outcome(told(RULES, chunk(0, END, 1), chunk(1))) == ("a", END_ID, None, 1)


def test_an_end_id_before_min_tokens_is_a_token() -> None:
    """Counted and without text; only from min_tokens on does it end."""
    rules = replace(RULES, min_tokens=2)
    assert outcome(told(rules, chunk(0, END), chunk(END))) == ("a", END_ID, None, 2)


def test_half_a_character_is_shown_at_the_end_only() -> None:
    """It may still become whole until then."""
    pieces = told(RULES, chunk(0, 8), chunk(9, 8), chunk(final=True))
    assert [piece.text for piece in pieces] == ["a", "ä", "\ufffd"]


def test_held_back_text_leaves_at_the_end() -> None:
    """It could have become a stop and did not; so with the limit, the end id and a cancel."""
    rules = replace(RULES, stop_words=("abc",))
    for last in (chunk(final=True), chunk(END), chunk(final=True, finish_reason=LENGTH)):
        assert [piece.text for piece in told(rules, chunk(2), last)] == ["", "ab"]
    rules = replace(rules, max_tokens=1)
    assert [piece.text for piece in told(rules, chunk(2))] == ["ab"]


def test_what_the_flush_completes_may_be_a_stop() -> None:
    """The last half character comes out as U+FFFD, and that may be what was asked for."""
    rules = replace(RULES, stop_words=("\ufffd",))
    assert outcome(told(rules, chunk(0, 8), chunk(final=True))) == ("a", STOP, "\ufffd", 2)


def test_no_word_is_lost_after_the_end() -> None:
    """What is fed after the end changes nothing that was told."""
    sequence = replace(RULES, stop_words=("b",)).sequence()
    sequence.feed(chunk(0, 1, 4))
    told = sequence.ending
    assert told is not None and told.completion_tokens == 2
    sequence.feed(chunk(4, final=True))
    assert sequence.ending is told


# --- what is seen ---------------------------------------------------------------------------


def test_the_prompt_comes_first_when_it_is_wanted() -> None:
    """Once, with the first chunk, and no stop is looked for in it."""
    rules = replace(RULES, echo_ids=(4, 1), stop_words=("cb",))
    pieces = told(rules, chunk(), chunk(0), chunk(final=True))
    assert [piece.text for piece in pieces] == ["cb", "a", ""]
    assert outcome(pieces)[3] == 1


def test_accumulated_text_is_all_so_far() -> None:
    """The echo included, and nothing that is still held back."""
    rules = replace(RULES, accumulate=True, echo_ids=(4,), stop_words=("abc",))
    pieces = told(rules, chunk(0), chunk(1), chunk(1), chunk(final=True))
    assert [piece.text for piece in pieces] == ["c", "", "cabb", "cabb"]  # the second: nothing sent


def test_the_ending_tells_what_was_used() -> None:
    """Prompt, seed and the engine's metrics, also those that came before the end was known."""
    metrics = EngineMetrics(total_draft_tokens=1)
    rules = replace(RULES, seed=5)
    last = told(rules, chunk(0, final=True, metrics=metrics))[-1]
    assert last.ending is not None
    assert (last.ending.prompt_tokens, last.ending.seed, last.metrics) == (2, 5, metrics)
    speculated = told(rules, chunk(0, final=True, speculation=SpeculationStats(rounds=1)))[-1]
    assert speculated.ending is not None and speculated.ending.seed is None


# --- scores ---------------------------------------------------------------------------------


def scored(*token_ids: int, **more: Any) -> EngineChunk:
    """Every token's log-prob is minus its id, its logits begin with its id."""
    logits = np.array([[token, 0] for token in token_ids]).reshape(-1, 2)
    return chunk(
        *token_ids,
        log_probs=tuple(float(-token) for token in token_ids),
        generation_logits=logits,
        **more,
    )


def scores(pieces: list[TextChunk]) -> tuple[list[list[float]], list[list[float]]]:
    """Log-probs as told (all so far) and the tokens whose logits each piece brings."""
    return (
        [[-p for p in piece.log_probs or ()] for piece in pieces],
        [[row[0] for row in piece.generation_logits or ()] for piece in pieces],
    )


def test_scores_wait_for_their_text() -> None:
    """Held-back text holds its scores back; log-probs are all so far, logits the new ones."""
    rules = replace(RULES, stop_words=("abc",))
    log_probs, logits = scores(told(rules, scored(4, 0), scored(1), scored(7), scored(final=True)))
    assert log_probs == [[4], [], [4, 0, 1, 7], [4, 0, 1, 7]]  # the second: nothing sent
    assert logits == [[4], [], [0, 1, 7], []]


def test_scores_of_half_a_character_wait_for_the_whole() -> None:
    """The first half has no text of its own yet; no row is lost in an empty piece."""
    pieces = told(RULES, scored(8), scored(9), scored(final=True))
    assert [piece.text for piece in pieces] == ["", "ä", ""]
    assert scores(pieces) == ([[], [8, 9], [8, 9]], [[], [8, 9], []])


def test_scores_of_half_a_character_are_cut_with_the_whole() -> None:
    """Where the stop is the character itself."""
    pieces = told(replace(RULES, stop_words=("ä",)), scored(0, 8), scored(9))
    assert outcome(pieces) == ("a", STOP, "ä", 3)
    assert scores(pieces) == ([[0], [0]], [[0], []])


def test_scores_of_a_token_without_text_come_with_the_next() -> None:
    """A special token that is not shown still has its place among the scores."""
    pieces = told(RULES, scored(0), scored(5), scored(1), scored(5), scored(final=True))
    assert scores(pieces)[1] == [[0], [], [5, 1], [], [5]]


def test_trimmed_text_takes_its_scores_along() -> None:
    """Tokens of the stop, and one that begins before it, are not among the scores."""
    rules = replace(RULES, stop_words=("bc",))
    pieces = told(rules, scored(4, 2, 4))
    assert outcome(pieces) == ("ca", STOP, "bc", 3)
    assert scores(pieces) == ([[4]], [[4]])
    kept = told(replace(rules, include_stop=True), scored(4, 2, 4))
    assert scores(kept) == ([[4, 2, 4]], [[4, 2, 4]])


def test_the_end_releases_every_score() -> None:
    """Nothing waits for text that cannot come; the sum is that of the told ones."""
    rules = replace(RULES, stop_words=("abc",), max_tokens=3)
    pieces = told(rules, scored(4), scored(0, 8))
    assert scores(pieces)[0][-1] == [4, 0, 8]
    assert pieces[-1].cum_log_prob == -12
    assert told(RULES, chunk(0, final=True))[-1].log_probs is None


def test_text_left_by_an_engines_own_stop_has_its_scores() -> None:
    """It stopped at ids that are no stop of ours, while we still held text back."""
    rules = replace(RULES, stop_words=("abc",))
    pieces = told(rules, scored(4), scored(2, final=True, finish_reason=STOP))
    assert [piece.text for piece in pieces] == ["c", "ab"]
    assert scores(pieces) == ([[4], [4, 2]], [[4], [2]])


def test_context_logits_and_metrics_are_on_every_chunk_from_the_first_on() -> None:
    """As TensorRT-LLM sends them. Logits of the prompt wait for no text."""
    logits, metrics = np.ones((2, 3)), EngineMetrics(total_draft_tokens=1)
    first = chunk(8, context_logits=logits, metrics=metrics)
    pieces = told(RULES, first, chunk(0), chunk(final=True))
    assert all(piece.context_logits is logits for piece in pieces)
    assert [piece.metrics for piece in pieces] == [metrics] * 3


def test_text_of_accepted_drafts_is_told_apart() -> None:
    """A round's chunk begins with the draft's tokens; the target's own follows. A draft's token
    keeps its mark when a stop that might complete holds its text back."""

    def counts(accepted: int) -> SpeculationStats:
        return SpeculationStats(rounds=1, drafted=9, accepted=accepted)

    chunks = (
        chunk(0),  # no round yet
        chunk(2, 1, 0, speculation=counts(2)),
        chunk(1, 4, speculation=counts(2)),  # plain tokens
        chunk(8, 7, speculation=counts(3)),  # a draft's half character shows no text
        chunk(0, final=True, speculation=counts(4)),
    )
    rules = replace(RULES, return_drafted=True)
    found = [(piece.text, piece.draft_spans) for piece in told(rules, *chunks)]
    expected = [
        ("a", ()),
        ("abba", ((0, 2), (2, 3))),
        ("bc", ()),
        ("\ufffd<", ()),
        ("a", ((0, 1),)),
    ]
    assert found == expected
    for stop in ("bx", "bax", "bbax"):
        held = told(replace(rules, stop_words=(stop,)), *chunks)
        shown = ["".join(p.text[a:b] for a, b in p.draft_spans) for p in held]
        assert "".join(shown) == "".join(p[0][a:b] for p in expected for a, b in p[1])
    assert all(not piece.draft_spans for piece in told(RULES, *chunks))
    (at_once,) = told(rules, chunk(2, 1, 0, final=True, speculation=counts(2)))
    assert at_once.draft_spans == ((0, 2), (2, 3))
    # The target's own token has no text, so the draft's text ends with the chunk's.
    to_the_end = told(rules, chunk(2, 5, speculation=counts(1)), chunk(0, final=True))
    assert [piece.draft_spans for piece in to_the_end] == [((0, 2),), ()]


# --- whether the engine has to be told ------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "ids", "final", "must"),
    [
        ({}, (0, END), False, False),  # the engine ends at its end ids by itself
        ({"min_tokens": 1}, (0, END), False, True),  # which were not sent along with a minimum
        ({"min_tokens": 1}, (0, END), True, False),
        ({"min_tokens": 1, "max_tokens": 2}, (0, 1), False, False),  # it counts by itself
        ({"stop_words": ("b",)}, (0, 1), False, True),
        ({"stop_words": ("b",)}, (0, 1), True, False),
        ({}, (0, 1), False, False),
    ],
)
def test_an_engine_that_would_work_on_must_be_cancelled(
    rules: dict[str, Any], ids: TokenIds, final: bool, must: bool
) -> None:
    """Once all sequences are done; any other cancel would race with its final response."""
    for sequences in (1, 2):
        made = replace(RULES, **rules)
        request = made.request(stream=True, num_return_sequences=sequences)
        answer = Answer(request, made.rules(), [Pieces() for _ in range(sequences)])
        for index in range(sequences):
            assert not answer.must_cancel
            answer.feed([chunk(*ids, final=final, sequence_index=index)])
        assert answer.must_cancel is must


def test_the_first_chunk_tells_what_was_cached_of_the_prompt() -> None:
    """An engine that goes on from a resumed request tells another number later."""
    rules = replace(RULES.rules(), expose_kv_cache_metrics=True)
    sequence = SequenceText(RULES.request(), rules, Pieces())
    for one in (chunk(0, cached_tokens=3), chunk(1, cached_tokens=7), chunk(final=True)):
        sequence.feed(one)
    assert sequence.ending is not None and sequence.ending.cached_tokens == 3
