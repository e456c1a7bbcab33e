"""Tokenizer directories: what is read from them, and what is refused with one clear line."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.helpers.loaded_tokenizers import copied, loaded
from tests.helpers.small_tokenizers import MAKERS, directory
from trtllm_bls.errors import InvalidRequest, TokenizerError
from trtllm_bls.text.tokenizer import Tokenizer, load_tokenizer
from trtllm_bls.types import ChatOptions

# --- text to ids ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", MAKERS)
def test_special_tokens_only_when_asked_for(family: str) -> None:
    """The same text, with and without what the tokenizer puts before it."""
    tokenizer = loaded(family)
    plain = tokenizer.encode("the dog", add_special_tokens=False)
    assert tokenizer.encode("the dog", add_special_tokens=True)[1:] == plain
    assert tokenizer.encode_word("the dog") == plain
    assert not tokenizer.special_ids & {*plain} - {0}


def test_a_second_bos_is_dropped_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """A prompt that spells the begin token itself still gets one; the log says it once."""
    tokenizer = load_tokenizer(directory("byte-level"))
    wanted = tokenizer.encode("the dog", add_special_tokens=True)
    with caplog.at_level(logging.WARNING):
        assert tokenizer.encode("<s>the dog", add_special_tokens=True) == wanted
        assert tokenizer.encode("<s><s>the dog", add_special_tokens=True) == wanted
    assert len(caplog.records) == 1


def test_one_bos_in_the_text_is_kept(bytes_made: Tokenizer) -> None:
    """A prompt already written with its begin token, encoded without adding any."""
    with_bos = bytes_made.encode("the dog", add_special_tokens=True)
    assert bytes_made.encode("<s>the dog", add_special_tokens=False) == with_bos


def test_a_prompt_longer_than_the_model_is_no_concern(bytes_made: Tokenizer) -> None:
    """Nothing is cut off here; the engine knows its limit."""
    assert bytes_made.decode(bytes_made.encode("fox " * 5000, True)) == "fox " * 5000


@pytest.mark.parametrize("family", MAKERS)
@pytest.mark.parametrize("text", ["", "\x00", "a\x00b", "\ufffe\uffff", "\U0010ffff", "\u200b"])
def test_odd_text_is_encoded(family: str, text: str) -> None:
    """NUL, noncharacters and nothing at all are text."""
    tokenizer = loaded(family)
    assert isinstance(tokenizer.encode(text, add_special_tokens=True), tuple)
    tokenizer.word_variants(text)


@pytest.mark.parametrize("text", ["a\ud83d", "\udc80", "\udfff\ud800"])
def test_lone_surrogates_are_refused(bytes_made: Tokenizer, text: str) -> None:
    """They are no text, and would crash the tokenizer; the error names field, value and mend."""
    said = r"'\\ud\w{3}' at character \d is half of a character \(a lone surrogate\); send both"
    with pytest.raises(InvalidRequest, match=f"^text_input: {said}"):
        bytes_made.encode(text, add_special_tokens=True)
    with pytest.raises(InvalidRequest, match=f"^stop_words: {said}"):
        bytes_made.encode_word(text)
    with pytest.raises(InvalidRequest, match=f"^bad_words: {said}"):
        bytes_made.word_variants(text)


@pytest.mark.parametrize("family", ["byte-level", "sentencepiece", "gemma"])
@pytest.mark.parametrize("word", ["dog", "fun", "lazy,", 'it"s', "狐"])
def test_a_bad_word_is_found_wherever_it_stands(family: str, word: str) -> None:
    """In the middle of a line and at its beginning, some variant ends the ids."""
    tokenizer = loaded(family)
    variants = tokenizer.word_variants(word)
    for before in ("The ", "The quick ", "x\n", "x\n "):
        ids = tokenizer.encode_word(before + word)
        assert any(ids[-len(variant) :] == variant for variant in variants), before


def test_variants_differ_and_none_covers_another(
    bytes_made: Tokenizer, pieces_made: Tokenizer
) -> None:
    """With and without a space; what ends with a shorter variant would forbid nothing new."""
    assert {*map(bytes_made.decode, bytes_made.word_variants("dog"))} == {"dog", " dog"}
    for tokenizer in (bytes_made, pieces_made):
        variants = tokenizer.word_variants("dog")
        assert len({*variants}) == len(variants) == 2
        assert not any(
            one != other and one[-len(other) :] == other for one in variants for other in variants
        )


def test_a_word_the_table_cannot_spell_has_no_variant() -> None:
    """To forbid the unknown token would forbid every unknown word."""
    tokenizer = load_tokenizer(directory("wordlevel"))
    assert tokenizer.word_variants("unheard-of") == ()
    assert len(tokenizer.word_variants("dogs")) == 1
    assert tokenizer.word_variants("") == ()


def test_many_begin_tokens_in_a_text_are_one(bytes_made: Tokenizer) -> None:
    """At a cost in proportion to their number, also where the text holds nothing else."""
    assert len(bytes_made.encode("<s>" * 50_000, add_special_tokens=True)) == 1


@pytest.mark.parametrize("words", [16_383, 16_384, 16_385, 70_000])
def test_very_many_ids_are_those_of_the_tokenizer_itself(bytes_made: Tokenizer, words: int) -> None:
    """They are packed in pieces on the way, also after begin tokens that are one too many."""
    text = "".join(" fox" if k % 3 else " dog" for k in range(words - 1))
    own = tokenizers.Tokenizer.from_file(str(directory("byte-level") / "tokenizer.json"))
    wanted = own.encode(text, add_special_tokens=True).ids
    assert len(wanted) >= words
    assert list(bytes_made.encode(text, add_special_tokens=True)) == wanted
    assert list(bytes_made.encode("<s>" + text, add_special_tokens=True)) == wanted
    assert list(bytes_made.encode_chat("<s>" + text)) == wanted


# --- chat -----------------------------------------------------------------------------------


def test_messages_become_the_models_own_prompt(bytes_made: Tokenizer) -> None:
    """The template of the directory decides; the answer's beginning is added on request."""
    messages = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho!"}]
    said = "<|user|>Hi?</s><|assistant|>Ho!</s>"
    assert bytes_made.render_chat(messages, ChatOptions(add_generation_prompt=False)) == said
    assert bytes_made.render_chat(messages) == said + "<|assistant|>"


def test_without_a_template_messages_are_refused() -> None:
    """The caller learns what to send instead."""
    tokenizer = load_tokenizer(directory("byte-level", chat=False))
    with pytest.raises(InvalidRequest, match=r"^messages: .* no chat template; send text_input$"):
        tokenizer.render_chat([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    "messages",
    [
        [],
        {},
        "hello",
        None,
        7,
        ["hello"],
        [None],
        [[]],
        [{}],
        [{"content": "no role"}],
        [{"role": None, "content": ""}],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": {"text": "x"}}],
        [{"role": "user", "content": "good"}, {"role": ["user"], "content": "bad"}],
    ],
)
def test_malformed_messages_are_refused(bytes_made: Tokenizer, messages: Any) -> None:
    """Whatever JSON can hold, the answer is one line on ``messages``."""
    with pytest.raises(InvalidRequest, match=r"^messages: [^\n]+$"):
        bytes_made.render_chat(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[9]['role'] }}",
        "{% if %}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_a_template_that_fails_is_the_requests_error(tmp_path: Path, template: str) -> None:
    """Templates are programs that refuse what they do not like; the line says why."""
    config = json.loads((directory("byte-level") / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    tokenizer = load_tokenizer(copied(tmp_path, tokenizer_config=config))
    with pytest.raises(InvalidRequest, match=r"^messages: the chat template refuses them: [^\n]+$"):
        tokenizer.render_chat([{"role": "user", "content": "Hi"}])


# --- the table and the ends -----------------------------------------------------------------


def test_ids_outside_the_table_have_no_token(bytes_made: Tokenizer) -> None:
    """``decode`` leaves them out, as they may be an engine's padding."""
    size = bytes_made.vocab_size
    assert bytes_made.token(size - 1) == "<|assistant|>"
    assert [bytes_made.token(i) for i in (-1, size, 2**31, 2**80)] == [None] * 4
    word = bytes_made.encode_word("dog")
    assert bytes_made.decode([-5, *word, size, 2**80]) == "dog"


@pytest.mark.parametrize(("named", "more"), [(None, ()), (3, (3,)), ([3, 4, 3], (3, 4)), ([], ())])
def test_every_end_id_is_known(tmp_path: Path, named: Any, more: tuple[int, ...]) -> None:
    """generation_config.json may name none, one or several; the tokenizer's own comes first."""
    tokenizer = load_tokenizer(copied(tmp_path, generation_config={"eos_token_id": named}))
    eos = tokenizer.encode_word("</s>")
    assert tokenizer.end_ids == (*eos, *more)
    assert (tokenizer.eos_id,) == eos
    assert (tokenizer.pad_id,) == tokenizer.encode_word("<|pad|>")


@pytest.mark.parametrize(
    ("config", "more"),
    [
        ({"vocab_size": 5000}, 5000),
        ({"text_config": {"vocab_size": 5000}, "vocab_size": 1}, 5000),
        ({"vocab_size": 1}, 0),
        ({}, 0),
    ],
)
def test_a_model_may_have_more_logits_than_its_tokenizer_has_tokens(
    tmp_path: Path, bytes_made: Tokenizer, config: dict[str, Any], more: int
) -> None:
    """Padded embeddings: a bias must be as long as those."""
    config |= {"model_type": "llama"}
    tokenizer = load_tokenizer(copied(tmp_path, config=config))
    assert tokenizer.vocab_size == bytes_made.vocab_size
    assert tokenizer.model_vocab_size == (more or bytes_made.vocab_size)


@pytest.mark.parametrize(
    ("files", "ends"),
    [({"generation_config": {"eos_token_id": [9, 7]}}, (9, 9, (9, 7))), ({}, (None, None, ()))],
)
def test_a_tokenizer_without_eos_takes_the_models(
    tmp_path: Path, files: dict[str, Any], ends: tuple[Any, ...]
) -> None:
    """And pads with it, if it has no pad token either; some models end only by length."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    tokenizer = load_tokenizer(copied(tmp_path, tokenizer_config=config, **files))
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.end_ids) == ends


def test_the_fingerprint_tells_tables_apart(tmp_path: Path, bytes_made: Tokenizer) -> None:
    """Draft and target must mean the same by every id; one exchanged pair of tokens is seen."""
    same = load_tokenizer(copied(tmp_path / "same"))
    assert same.fingerprint == bytes_made.fingerprint
    path = copied(tmp_path / "other")
    table = json.loads((path / "tokenizer.json").read_text())
    vocab = table["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    (path / "tokenizer.json").write_text(json.dumps(table))
    assert load_tokenizer(path).fingerprint != bytes_made.fingerprint


# --- loading --------------------------------------------------------------------------------


def test_a_missing_directory(tmp_path: Path) -> None:
    """The line has the directory; a name is never looked up on a network."""
    with pytest.raises(TokenizerError, match=r"^gpt2: no such directory"):
        load_tokenizer("gpt2")
    with pytest.raises(TokenizerError, match=r"nowhere: no such directory"):
        load_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize("name", [None, "tokenizer.model"])
def test_a_directory_without_a_tokenizer_file(tmp_path: Path, name: str | None) -> None:
    """What the library says of a lone tokenizer.model would not help."""
    path = copied(tmp_path)
    (path / "tokenizer.json").unlink()
    if name is not None:
        (path / name).write_text("sentencepiece")
    with pytest.raises(TokenizerError, match=f"^{path} has .*: copy the model's tokenizer.json"):
        load_tokenizer(path)


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", "null", '{"model": {}}', "\x00"])
def test_an_unusable_tokenizer_file(tmp_path: Path, content: str) -> None:
    """Empty, cut off or something else: one line with the directory and the mend."""
    path = copied(tmp_path)
    (path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: cannot be loaded")
    assert line.endswith("copy tokenizer.json and tokenizer_config.json of the model into it")
    assert "\n" not in line


@pytest.mark.parametrize(
    "content", ["", "[]", "7", '{"eos_token_id": "x"}', '{"eos_token_id": {}}']
)
def test_an_unusable_generation_config(tmp_path: Path, content: str) -> None:
    """End ids are never guessed: the file is named, with the mend."""
    path = copied(tmp_path)
    (path / "generation_config.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"generation_config.json .*; mend or remove it$"):
        load_tokenizer(path)


SILENT = """
import sys
from trtllm_bls.text.tokenizer import load_tokenizer
assert "transformers" not in sys.modules, "imported before it is needed"
tokenizer = load_tokenizer(sys.argv[1])
assert len(tokenizer.encode("longer than the model", False)) > 4
assert "torch" not in sys.modules, "torch was imported, or is still hidden"
"""


def test_loading_imports_no_torch_and_says_nothing(tmp_path: Path) -> None:
    """With a model's config.json beside it, which alone would bring torch in."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    own = json.loads((directory("sentencepiece") / "tokenizer_config.json").read_text())
    own["model_max_length"] = 4
    path = copied(tmp_path, "sentencepiece", config=config, tokenizer_config=own)
    done = subprocess.run(
        [sys.executable, "-c", SILENT, str(path)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
