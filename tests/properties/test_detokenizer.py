"""Streamed text is the tokenizer's own text, for every family, wherever the ids are cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache, partial
from itertools import groupby

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from tests.helpers.loaded_tokenizers import FAMILIES, Counted, loaded, stream
from tests.helpers.random_cases import CASES, cut_anywhere, run_cases
from tests.helpers.small_tokenizers import CORPUS
from trtllm_bls.text.detokenizer import (
    MAX_HELD_IDS,
    ByteTableDetokenizer,
    WindowDetokenizer,
    byte_level,
)
from trtllm_bls.text.tokenizer import Tokenizer

BYTE_FALLBACK = ("sentencepiece", "gemma")
BROKEN = "\ufffd"


@cache
def spelled(family: str) -> dict[str, int]:
    tokenizer = loaded(family)
    return {str(tokenizer.token(i)): i for i in range(tokenizer.vocab_size)}


# --- examples -------------------------------------------------------------------------------


def test_a_character_comes_with_the_token_that_ends_it() -> None:
    """Nothing, not even a replacement mark, leaves before its last byte is there."""
    detokenizer = loaded("sentencepiece").detokenizer()
    smile = [spelled("sentencepiece")[f"<0x{byte:02X}>"] for byte in "🦊".encode()]
    assert stream(detokenizer, smile) == ["", "", "", "🦊", ""]


def test_a_byte_level_character_comes_with_its_last_byte() -> None:
    """The same where tokens spell bytes as letters."""
    ids = loaded("byte-level").encode_word("🦊")
    assert len(ids) > 1
    *begin, last, rest = stream(loaded("byte-level").detokenizer(), ids)
    assert "".join(begin) == rest == ""
    assert last == "🦊"


def test_every_byte_has_one_letter_and_other_letters_are_text() -> None:
    """The alphabet is that of the tokenizers package; an added token may have letters beyond it."""
    alphabet = ByteLevel.alphabet()
    spelled_bytes = [byte_level(letter) for letter in alphabet]
    assert sorted(spelled_bytes) == [bytes([byte]) for byte in range(256)]
    for letter in map(chr, range(0x250)):
        if letter not in alphabet:
            assert byte_level("a" + letter) == ("a" + letter).encode()


@pytest.mark.parametrize("family", ["byte-level", "sentencepiece"])
def test_an_unfinished_character_is_flushed_as_replacement(family: str) -> None:
    """Nothing is dropped silently: the end of the text shows that bytes were left."""
    ids = loaded(family).encode_word("fun 🦊")[:-1]
    text = "".join(stream(loaded(family).detokenizer(), ids))
    assert text == loaded(family).decode(ids)
    assert text.startswith("fun ")
    assert set(text[4:]) == {BROKEN}


@pytest.mark.parametrize("family", ["sentencepiece", "unigram"])
def test_the_leading_space_of_the_first_word_is_no_text(family: str) -> None:
    """The completion is the decode of the generated ids alone; only its first space goes."""
    ids = loaded(family).encode_word("the dog the dog")
    assert "".join(stream(loaded(family).detokenizer(), ids)) == "the dog the dog"


def test_the_bytes_of_a_first_token_are_those_of_its_text() -> None:
    """A space that is dropped is none of them. A byte that is part of no character is told as it
    is, and not as the mark that replaces it."""
    table = spelled("sentencepiece")
    for tokens, told in (
        (("<0xFF>",), [(BROKEN, b"\xff")]),
        (("<0xC3>", "<0xA9>"), [("", b"\xc3"), ("é", b"\xa9")]),
        (("\u2581", "<0xC3>", "<0xA9>"), [("", b""), ("", b"\xc3"), ("é", b"\xa9")]),
    ):
        detokenizer = loaded("sentencepiece").detokenizer()
        assert [detokenizer.feed_one(table[token]) for token in tokens] == told


def test_only_the_first_space_is_stripped() -> None:
    """A completion that begins with more spaces keeps the others."""
    space = spelled("sentencepiece")["▁"]
    assert stream(loaded("sentencepiece").detokenizer(), [space] * 3) == ["", " ", " ", ""]


def test_special_tokens_leave_no_trace_when_skipped() -> None:
    """Not even inside a character, as in the tokenizer's own decode."""
    tokenizer = loaded("sentencepiece")
    first, *others = tokenizer.encode_word("🦊")[1:]
    ids = [first, tokenizer.eos_id, *others]
    assert "".join(stream(tokenizer.detokenizer(), ids)) == "🦊" == tokenizer.decode(ids)


def test_special_tokens_are_text_when_asked_for() -> None:
    """``skip_special_tokens=False`` shows them, as decode does."""
    tokenizer = loaded("byte-level")
    ids = tokenizer.encode("a fox", add_special_tokens=True)
    assert stream(tokenizer.detokenizer(skip_special_tokens=False), ids)[0] == "<s>"
    assert stream(tokenizer.detokenizer(skip_special_tokens=True), ids)[0] == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_outside_the_table_have_no_text(family: str) -> None:
    """An engine's table may be padded beyond the tokenizer's; that never ends a stream."""
    tokenizer = loaded(family)
    word = tokenizer.encode_word("dog")
    ids = [-1, *word[:1], tokenizer.vocab_size + 7, 2**31, 2**70, *word[1:], -(2**40)]
    assert "".join(stream(tokenizer.detokenizer(), ids)) == tokenizer.decode(word)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_replacement_mark_for_sound_text(family: str) -> None:
    """Whatever the stream has shown at any moment, it is the beginning of the sound text."""
    tokenizer = loaded(family)
    for sample in CORPUS:
        ids = tokenizer.encode_word(sample)
        whole, shown = tokenizer.decode(ids), ""
        assert BROKEN not in whole
        for text in stream(tokenizer.detokenizer(), ids):
            shown += text
            assert whole.startswith(shown)
        assert shown == whole


# --- the rule, many times -------------------------------------------------------------------


def some_ids(tokenizer: Tokenizer, family: str, chance: random.Random) -> list[int]:
    """Real text, random text, random ids or random single bytes; specials anywhere."""
    kind = chance.randrange(4)
    if kind == 0:
        ids = list(tokenizer.encode_word(chance.choice(CORPUS)))
        begin = chance.randrange(len(ids))
        ids = ids[begin : begin + chance.randrange(30)]
    elif kind == 1:
        letters = chance.choices("".join(CORPUS), k=chance.randrange(12))
        ids = list(tokenizer.encode_word("".join(letters)))
    elif kind == 2:
        ids = chance.choices(range(-1, tokenizer.vocab_size + 2), k=chance.randrange(12))
    else:
        single = [i for token, i in spelled(family).items() if is_byte(token) or len(token) == 1]
        ids = chance.choices(single, k=chance.randrange(12))
    if chance.random() < 0.2:
        ids.insert(chance.randrange(len(ids) + 1), chance.choice(sorted(tokenizer.added_ids)))
    return ids


def is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x")


def byte_runs(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[tuple[bool, list[str]]]:
    """The tokens that have text, in runs of byte tokens and of others."""
    tokens = (tokenizer.token(i) for i in ids if not (skip and i in tokenizer.special_ids))
    known = (token for token in tokens if token is not None)
    return [(single, list(run)) for single, run in groupby(known, is_byte)]


def with_fallback(
    tokenizer: Tokenizer, ids: list[int], skip: bool, strip: bool
) -> tuple[str, bool]:
    """What byte-fallback text should be; and whether a run mixes characters with stray bytes."""
    text, mixed = "", False
    for single, tokens in byte_runs(tokenizer, ids, skip):
        if not single:
            text += "".join(tokens).replace("▁", " ")
            continue
        escaped = bytes(int(t[3:5], 16) for t in tokens).decode("utf-8", "surrogateescape")
        stray = [c for c in escaped if "\udc80" <= c <= "\udcff"]
        mixed = mixed or 0 < len(stray) < len(escaped)
        text += "".join(BROKEN if c in stray else c for c in escaped)
    return text[strip and text.startswith(" ") :], mixed


def all_ways(chance: random.Random, ids: list[int]) -> dict[str, list[slice]]:
    return {
        "one by one": [slice(i, i + 1) for i in range(len(ids))],
        "at once": [slice(None)],
        "in pieces": cut_anywhere(chance, len(ids), chance.choice((2, 5, 20, 70))),
    }


@pytest.mark.parametrize("kind", ["chosen", "window"])
@pytest.mark.parametrize("family", FAMILIES)
def test_many_ids_at_once_are_as_one_by_one(family: str, kind: str) -> None:
    """The same text is certain and the same is held, wherever the ids are cut, broken bytes too."""
    tokenizer = loaded(family)

    def case(chance: random.Random) -> None:
        ids = [
            i for _ in range(chance.randrange(1, 5)) for i in some_ids(tokenizer, family, chance)
        ]
        if chance.random() < 0.3:  # more of one id than are ever held, broken bytes among them
            begin = chance.randrange(len(ids) + 1)
            ids[begin:begin] = [chance.choice(ids or [1])] * chance.randrange(100)
        skip = chance.random() < 0.7
        make = partial(WindowDetokenizer, tokenizer, skip)
        if kind != "window":
            make = partial(tokenizer.detokenizer, skip)
        said = {}
        for way, pieces in all_ways(chance, ids).items():
            detokenizer = make()
            certain = "".join([detokenizer.feed(ids[piece]) for piece in pieces])
            said[way] = certain, detokenizer.flush()
        assert said["at once"] == said["in pieces"] == said["one by one"], ids

    run_cases(case, CASES // (12 * len(FAMILIES)))


@pytest.mark.parametrize("size", range(1, 3 * MAX_HELD_IDS))
def test_the_window_holds_an_unfinished_character_after_any_number_of_ids(size: int) -> None:
    """However many ids come in one call, a character they begin is not shown as broken."""
    tokenizer = loaded("byte-level")
    fox = list(tokenizer.encode_word("🦊"))
    ids = [*tokenizer.encode_word("x") * size, *fox]
    detokenizer = WindowDetokenizer(tokenizer, True)
    assert detokenizer.feed(ids[:-1]) == "x" * size
    assert detokenizer.feed(ids[-1:]) + detokenizer.flush() == "🦊"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_stream_is_the_decode(family: str) -> None:
    """Counted: two thirds of all cases. The one exception is spelled out in ``with_fallback``."""
    tokenizer = loaded(family)
    exceptions = 0

    def case(chance: random.Random) -> None:
        nonlocal exceptions
        ids = some_ids(tokenizer, family, chance)
        skip = chance.random() < 0.7
        detokenizer = tokenizer.detokenizer(skip)
        pieces = [detokenizer.feed(ids[piece]) for piece in cut_anywhere(chance, len(ids), 4)]
        text = "".join(pieces) + detokenizer.flush()
        if family in BYTE_FALLBACK:
            expected, mixed = with_fallback(tokenizer, ids, skip, family == "sentencepiece")
            assert text == expected, ids
            exceptions += mixed
            if mixed:
                return
        assert text == tokenizer.decode(ids, skip), ids

    wanted = -(-2 * CASES // (3 * len(FAMILIES)))
    run = run_cases(case, wanted)
    assert run >= wanted
    assert exceptions < run / 2, "most byte runs are compared with decode itself"


# --- bounds ---------------------------------------------------------------------------------


def test_families_get_the_detokenizer_that_fits() -> None:
    """Tables wherever tokens spell bytes; the window for the others."""
    kinds = {family: type(loaded(family).detokenizer()) for family in FAMILIES}
    others = ("wordpiece", "wordlevel", "suffix", "unigram")
    assert {f for f, kind in kinds.items() if kind is WindowDetokenizer} == set(others)
    assert {f for f, kind in kinds.items() if kind is ByteTableDetokenizer} == {*FAMILIES} - set(
        others
    )


@pytest.mark.parametrize("family", ["byte-level", "sentencepiece"])
def test_broken_bytes_are_shown_at_once(family: str) -> None:
    """Bytes that can become no character hold nothing back: one mark each."""
    token = {"byte-level": "ÿ", "sentencepiece": "<0xFF>"}[family]
    ids = [spelled(family)[token]] * 50
    assert stream(loaded(family).detokenizer(), ids) == [*[BROKEN] * 50, ""]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_window_is_exact_for_sound_text(family: str) -> None:
    """It needs no table: the safe choice for any tokenizer."""
    tokenizer = loaded(family)
    for sample in CORPUS:
        ids = tokenizer.encode_word(sample)
        assert "".join(stream(WindowDetokenizer(tokenizer, True), ids)) == tokenizer.decode(ids)


def test_the_window_holds_broken_bytes_for_a_while_only() -> None:
    """After so many ids they are no unfinished character, and are shown as they stand."""
    detokenizer = WindowDetokenizer(loaded("byte-level"), True)
    texts = stream(detokenizer, [spelled("byte-level")["ÿ"]] * 100)
    assert len("".join(texts)) == 100
    assert texts[MAX_HELD_IDS] == BROKEN * (MAX_HELD_IDS + 1)


@pytest.mark.parametrize("silent", ["skipped", "unknown"])
def test_the_window_keeps_its_place_through_silence(silent: str) -> None:
    """Ids without text are no context: the word after many of them is not a first word."""
    tokenizer = loaded("wordpiece")
    dog = tokenizer.encode_word("dogs")
    mute = tokenizer.pad_id if silent == "skipped" else tokenizer.vocab_size + 9
    ids = [*dog, *[mute] * 3 * MAX_HELD_IDS, *dog]
    assert "".join(stream(WindowDetokenizer(tokenizer, True), ids)) == "dogs dogs"


@pytest.mark.parametrize("token", ["ÿ", "a", "<s>"])
def test_the_window_costs_the_same_for_every_id(token: str) -> None:
    """The ids it decodes stay in proportion to those fed, broken bytes and silence included."""
    counted = Counted(loaded("byte-level"))
    stream(WindowDetokenizer(counted, True), [spelled("byte-level")[token]] * 3000)
    assert counted.decoded <= 3000 * 2 * (MAX_HELD_IDS + 1)


def test_the_window_does_not_grow_with_mute_tokens() -> None:
    """Tokens of the table that have no text cost no more than others."""

    class Mute(Counted):
        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
            super().decode(token_ids, skip_special_tokens)
            return ""

    counted = Mute(loaded("byte-level"))
    assert set(stream(WindowDetokenizer(counted, True), [1] * 3000)) == {""}
    assert counted.decoded <= 3000 * 2 * (MAX_HELD_IDS + 1)
