"""Stop strings and stop sequences, in examples, then against the plainest reference."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.random_cases import CASES, cut_anywhere, run_cases
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.text import stopping
from trtllm_bls.text.stopping import MAX_STOP_CHARS, MAX_STOPS, Cut, StopMatcher, StoppingCriteria
from trtllm_bls.types import FinishReason


def feed_all(matcher: StopMatcher, *texts: str) -> list[Cut]:
    return [matcher.feed(text) for text in texts]


def test_a_stop_split_over_five_tokens_never_leaks() -> None:
    """What could grow into the stop is held, and never leaves once it has."""
    matcher = StopMatcher(["<end>"])
    said = feed_all(matcher, "Hello <", "e", "n", "d", "> and more")
    assert said == [Cut("Hello "), Cut(""), Cut(""), Cut(""), Cut("", "<end>")]


def test_a_false_beginning_is_released() -> None:
    """Text held for a stop leaves as soon as it cannot become one."""
    assert feed_all(StopMatcher(["<end>"]), "a<en", "ough>") == [Cut("a"), Cut("<enough>")]


def test_only_what_could_become_a_stop_is_held() -> None:
    """After a mismatch, a shorter suffix may still begin a stop."""
    assert feed_all(StopMatcher(["aab"]), "aaa", "c") == [Cut("a"), Cut("aac")]
    assert feed_all(StopMatcher(["aab"]), "aaa", "b") == [Cut("a"), Cut("", "aab")]


def test_a_stop_inside_one_token() -> None:
    """What follows the stop in the same text is dropped."""
    assert StopMatcher(["."]).feed("}.\n") == Cut("}", ".")


def test_the_stop_may_be_kept() -> None:
    """With ``include`` the text ends with the stop, not after it."""
    assert feed_all(StopMatcher(["END"], include=True), "to the E", "ND.") == [
        Cut("to the "),
        Cut("END", "END"),
    ]


def test_the_first_to_complete_wins() -> None:
    """Not the first to begin, nor the first of the list."""
    assert StopMatcher(["bcde", "cd"]).feed("abcde") == Cut("ab", "cd")


def test_the_longest_wins_at_the_same_end() -> None:
    """Two stops that end with the same character: the longer is cut."""
    assert StopMatcher(["b", "ab"]).feed("xab") == Cut("x", "ab")
    assert StopMatcher(["ab", "b"]).feed("xab") == Cut("x", "ab")


def test_stops_with_a_common_prefix() -> None:
    """One completes although the other could still grow."""
    assert feed_all(StopMatcher(["stop", "stopping"]), "sto", "pping") == [Cut(""), Cut("", "stop")]


@pytest.mark.parametrize("stop", ["\n\n", "終了。", "👩‍👧", "e\u0301", " ", '","', "\x00"])
def test_any_character_may_be_a_stop(stop: str) -> None:
    """Newlines, other scripts, joined emoji, quotes and NUL are text like any other."""
    matcher = StopMatcher([stop])
    said = feed_all(matcher, "ok", *stop)
    assert "".join(cut.text for cut in said) == "ok"
    assert said[-1].stop == stop


def test_nothing_follows_a_stop() -> None:
    """The sequence has ended: nothing is left to flush."""
    matcher = StopMatcher(["."])
    assert matcher.feed("a.b") == Cut("a", ".")
    assert matcher.flush() == ""


def test_flush_gives_what_was_held() -> None:
    """A sequence that ends otherwise loses no text."""
    matcher = StopMatcher(["</s>"])
    assert matcher.feed("x</s") == Cut("x")
    assert matcher.flush() == "</s"
    assert matcher.flush() == ""


def test_empty_strings_are_no_stops() -> None:
    """They would stop everything; upstream ignores them too."""
    assert feed_all(StopMatcher(["", ""]), "text") == [Cut("text")]


def test_a_stop_before_the_minimum_is_text() -> None:
    """While not armed, a completed stop is let through."""
    matcher = StopMatcher(["."])
    assert matcher.feed("a.b", armed=False) == Cut("a.b")
    assert matcher.feed(".") == Cut("", ".")


def test_a_stop_may_begin_before_the_minimum() -> None:
    """It has to complete after it, though."""
    matcher = StopMatcher(["END"])
    assert matcher.feed("theEN", armed=False) == Cut("the")
    assert matcher.feed("D") == Cut("", "END")


def test_a_stop_completed_early_is_not_found_again() -> None:
    """Held text may contain a stop that completed while not armed; only new ends count."""
    matcher = StopMatcher(["ab", "xabc"])
    assert matcher.feed("xab", armed=False) == Cut("")
    assert matcher.feed("d") == Cut("xabd")


def test_many_stops() -> None:
    """The largest list allowed, all of one prefix, finds the right one."""
    stops = [f"{'x' * 200}{index}!" for index in range(MAX_STOPS)]
    assert StopMatcher(stops).feed("y" + "x" * 201 + "42!") == Cut("yx", stops[42])


def test_too_many_stops_are_refused() -> None:
    """The error names the field and the limit; repeated stops count, since they cost as much."""
    stops = [str(index) for index in range(MAX_STOPS)]
    StopMatcher([*stops[1:], ""])
    for more in ("more", "0", ""):
        with pytest.raises(InvalidRequest, match=f"stop_words: 101 .* most {MAX_STOPS} ") as caught:
            StopMatcher([*stops, more])
        assert caught.value.field == "stop_words"


def test_a_stop_too_long_is_refused() -> None:
    """The error names the field and the limit."""
    StopMatcher(["x" * MAX_STOP_CHARS])
    with pytest.raises(InvalidRequest, match=f"stop_words: .* at most {MAX_STOP_CHARS} "):
        StopMatcher(["x" * (MAX_STOP_CHARS + 1)])


def test_matchers_with_the_same_stops_do_not_meddle() -> None:
    """They share what is computed from the stops, never what they have read."""
    one, other = StopMatcher(["ab"]), StopMatcher(["ab"])
    assert one.feed("a") == Cut("")
    assert other.feed("b") == Cut("b")


# --- against the reference ------------------------------------------------------------------


def reference(text: str, stops: list[str], include: bool, armed_from: int) -> Cut:
    """Look at every end in turn, and at every stop, longest first."""
    for end in range(armed_from + 1, len(text) + 1):
        for stop in sorted(filter(None, stops), key=len, reverse=True):
            if text[:end].endswith(stop):
                return Cut(text[: end if include else end - len(stop)], stop)
    return Cut(text)


def held_back(text: str, stops: list[str]) -> int:
    """The longest end of ``text`` that could still grow into a stop."""
    lengths = range(len(text), 0, -1)
    begins = (n for n in lengths if any(s.startswith(text[-n:]) and len(s) > n for s in stops))
    return next(begins, 0)


def check(texts: list[str], stops: list[str], include: bool, unarmed: int) -> None:
    """Feed ``texts``, the first ``unarmed`` of them below the minimum length."""
    matcher = StopMatcher(stops, include)
    seen = left = ""
    stop = None
    for index, text in enumerate(texts):
        cut = matcher.feed(text, armed=index >= unarmed)
        seen, left, stop = seen + text, left + cut.text, cut.stop
        if stop is not None:
            break
        assert len(seen) - len(left) == held_back(seen, stops), "holds no more than it must"
    left += matcher.flush()
    whole = "".join(texts)
    assert Cut(left, stop) == reference(whole, stops, include, len("".join(texts[:unarmed])))


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.text("ab\n", max_size=5), max_size=8),
    st.lists(st.text("ab\n", max_size=4), max_size=4),
    st.booleans(),
    st.integers(0, 4),
)
def test_small_texts_equal_the_reference(
    texts: list[str], stops: list[str], include: bool, unarmed: int
) -> None:
    """Whatever the stops and the chunks are; hypothesis shrinks what it finds."""
    check(texts, stops, include, unarmed)


def test_many_texts_equal_the_reference() -> None:
    """Counted: a third of all cases."""

    def case(chance: random.Random) -> None:
        letters = chance.choice(["ab", "abc", "aé你👍\n", "ENDend. "])
        text = "".join(chance.choices(letters, k=chance.randrange(24)))
        stops = [
            "".join(chance.choices(letters, k=chance.randrange(6)))
            for _ in range(chance.choice((1, 1, 2, 4, 20)))
        ]
        texts = [text[piece] for piece in cut_anywhere(chance, len(text), 5)]
        check(texts, stops, chance.random() < 0.3, chance.choice((0, 0, 1, 3)))

    assert run_cases(case, CASES // 3) >= CASES // 3


# --- token ids ------------------------------------------------------------------------------


def test_a_stop_sequence_is_found_wherever_it_ends() -> None:
    """One answer per id, also when a sequence begins inside a failed one."""
    criteria = StoppingCriteria(100, stop_sequences=[(1, 1, 2), (5,), ()])
    assert [stops(criteria, token_id) for token_id in (1, 1, 1, 2, 3, 5, 5)] == [
        *(False, False, False, True),
        *(False, True, True),
    ]


@pytest.mark.parametrize("sequences", [[(2,), (1, 2)], [(1, 2), (2,)]])
def test_of_stop_sequences_that_end_together_the_longest_is_told(
    sequences: list[tuple[int, ...]],
) -> None:
    """In whichever order they were named."""
    criteria = StoppingCriteria(100, stop_sequences=sequences)
    criteria.feed((1, 2))
    assert criteria.stop_sequence == (1, 2)


def test_no_stop_sequences() -> None:
    """Nothing ever stops."""
    criteria = StoppingCriteria(100)
    assert not any(stops(criteria, token_id) for token_id in range(5))


def stops(criteria: StoppingCriteria, token_id: int) -> bool:
    return criteria.feed((token_id,)) == ((token_id,), FinishReason.STOP)


def ends_with_one(token_ids: list[int], sequences: list[tuple[int, ...]]) -> bool:
    """The plainest reference: a look at the whole list."""
    return any(s and tuple(token_ids[-len(s) :]) == s for s in sequences)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.integers(0, 2), max_size=20),
    st.lists(st.lists(st.integers(0, 2), max_size=4).map(tuple), max_size=4),
)
def test_stop_sequences_equal_the_reference(
    token_ids: list[int], sequences: list[tuple[int, ...]]
) -> None:
    """Id by id, the watcher says what a look at the whole list says."""
    criteria = StoppingCriteria(100, stop_sequences=sequences)
    for length, token_id in enumerate(token_ids, start=1):
        assert stops(criteria, token_id) == ends_with_one(token_ids[:length], sequences)


def test_beginnings_of_long_stops_are_not_kept() -> None:
    """They take the square of a stop's length: 100 stops of 256 characters, 15 MB."""
    stopping._cached_beginnings.cache_clear()
    StopMatcher(("x" * 200, "y" * 57))
    assert stopping._cached_beginnings.cache_info().currsize == 0
    for _ in range(2):
        StopMatcher(("x" * 200, "y" * 56))
    assert stopping._cached_beginnings.cache_info()[:1] == (1,)
