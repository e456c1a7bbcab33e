"""The shipped demo models: complete, small, and with a tokenizer that loses nothing."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

ASSETS = Path(__file__).resolve().parents[2] / "assets" / "demo"
MODELS = ("target", "draft")
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
LIMIT_BYTES = 16_000_000
TEXTS = (
    "What is machine learning?\n",
    "def f(a, b):\n    if a:\n\n        return  a*12\n\tpass \n",
    "एक, दो, तीन, चार, पाँच",
    "一、二、三 いち、に、さん 하나, 둘",
    "ثلاثة، أربعة Жили-были ёжик เจ็ด ένα",
    "👨‍👩‍👧‍👦 🇯🇵🇧🇷 👍🏽 🏳️‍🌈 1️⃣ ❤️",
    "  two blanks, a tab\t, trailing  ",
    "\r\n\x00\u2028\ufeff",
)


def read_json(model: str, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ASSETS / model / name).read_text(encoding="utf-8"))
    return content


def tensors(model: str) -> dict[str, Any]:
    """The header of a safetensors file: names, types and shapes."""
    with (ASSETS / model / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__")
    return header


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(ASSETS / "target")
    return loaded


@pytest.mark.parametrize("model", MODELS)
def test_files_are_there(model: str) -> None:
    """Each model is a whole folder in the Hugging Face layout."""
    assert {path.name for path in (ASSETS / model).iterdir()} == set(FILES)


def test_assets_are_small() -> None:
    """Everything that a clone pays for the demo."""
    assert sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()) <= LIMIT_BYTES


@pytest.mark.parametrize("model", MODELS)
def test_config_describes_the_weights(model: str) -> None:
    """A Llama in bf16 whose head is its embedding, as long as promised."""
    config, weights = read_json(model, "config.json"), tensors(model)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"]
    assert config["max_position_embeddings"] >= 2048
    assert config["head_dim"] % 8 == 0
    assert {entry["dtype"] for entry in weights.values()} == {"BF16"}
    assert "lm_head.weight" not in weights
    sizes = [config["vocab_size"], config["hidden_size"]]
    assert weights["model.embed_tokens.weight"]["shape"] == sizes
    last = f"model.layers.{config['num_hidden_layers'] - 1}.mlp.down_proj.weight"
    assert weights[last]["shape"] == [config["hidden_size"], config["intermediate_size"]]
    assert (
        len([name for name in weights if name.endswith("q_proj.weight")])
        == (config["num_hidden_layers"])
    )


def test_draft_costs_a_tenth() -> None:
    """Operations per token go with the weights, the shared embedding being the head."""

    def num_weights(model: str) -> int:
        total = 0
        for entry in tensors(model).values():
            size = 1
            for side in entry["shape"]:
                size *= side
            total += size
        return total

    assert num_weights("draft") * 10 <= num_weights("target")


def test_models_share_one_tokenizer() -> None:
    """Draft tokens are target tokens."""
    target, draft = (ASSETS / model / "tokenizer.json" for model in MODELS)
    assert target.read_bytes() == draft.read_bytes()
    assert read_json("target", "config.json")["vocab_size"] == (
        Tokenizer.from_file(str(target)).get_vocab_size()
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_end_token_is_set(model: str, file: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """The end token has one id everywhere."""
    assert tokenizer.eos_token == "<|end|>"
    assert read_json(model, file)["eos_token_id"] == tokenizer.eos_token_id
    assert read_json(model, file)["bos_token_id"] == tokenizer.bos_token_id


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Encoding loses nothing, in any script; one begin token is put in front."""
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in ids[1:]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_every_byte_has_a_token() -> None:
    """No text is unknown: each byte has a token of its own."""
    vocabulary = json.loads((ASSETS / "target" / "tokenizer.json").read_text())["model"]["vocab"]
    # The byte alphabet of GPT-2: printable bytes stand for themselves, others from 256 upwards.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    names = {byte: chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)}
    assert [byte for byte, name in names.items() if name not in vocabulary] == []


def test_some_characters_span_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Streaming has to hold back half characters, or the demo would not show that it can."""
    ids = tokenizer("तीन 👨‍👩‍👧‍👦", add_special_tokens=False)["input_ids"]
    assert any("\ufffd" in tokenizer.decode([token]) for token in ids)


def test_digits_are_single_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Arithmetic is learned digit by digit."""
    ids = tokenizer("1024", add_special_tokens=False)["input_ids"]
    assert [tokenizer.decode([token]) for token in ids] == ["1", "0", "2", "4"]


def test_chat_template_renders(tokenizer: PreTrainedTokenizerBase) -> None:
    """Roles become markers, texts are trimmed, an answer ends with the end token."""
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": " Hello \n"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "What is 12 * 9?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|begin|><|system|>\nBe kind.<|user|>\nHello<|assistant|>\nHello!<|end|>"
        "<|user|>\nWhat is 12 * 9?<|assistant|>\n"
    )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    markers = ("<|begin|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
    for marker in markers:
        assert tokenizer.convert_tokens_to_ids(marker) in ids


def test_prompt_lists_are_usable() -> None:
    """Each list has prompts, none twice; the demo shows an answer beyond ASCII."""
    lists = json.loads((ASSETS / "prompts.json").read_text(encoding="utf-8"))
    assert set(lists) == {"easy", "hard", "copy", "demo"}
    assert len(lists["demo"]) == 3
    assert any("Hindi" in prompt for prompt in lists["demo"])
    for prompts in lists.values():
        assert len(prompts) >= 3
        assert len(set(prompts)) == len(prompts)
        assert all(prompt.strip() for prompt in prompts)
