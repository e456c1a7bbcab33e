"""What is wrong with a checkpoint directory is said before it is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from trtllm_bls.bundled import DEMO
from trtllm_bls.errors import CheckpointError, TokenizerError
from trtllm_bls.text.checkpoint_dir import check_checkpoint, check_tokenizer

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 13910360\n"
WEIGHTS = "model.safetensors"
UNIGRAM = {"type": "Unigram", "vocab": [["piece", -1.0]] * 5000}
Damage = Callable[[Path], object]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO / "draft", tmp_path / "model"))


def writes(name: str, text: str) -> Damage:
    return lambda directory: (directory / name).write_text(text)


def removes(name: str) -> Damage:
    return lambda directory: (directory / name).unlink()


def changes(name: str, **values: object) -> Damage:
    return lambda directory: _rewrite(directory / name, **values)


ADAPTER = writes("adapter_config.json", "{}")


def _adapter_alone(directory: Path) -> None:
    ADAPTER(directory)
    (directory / WEIGHTS).rename(directory / "adapter_model.safetensors")
    (directory / "config.json").unlink()


def _rewrite(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (shutil.rmtree, "is not a directory"),
        (ADAPTER, r"an adapter, .* merge_and_unload.* or remove adapter_config\.json"),
        (_adapter_alone, r"an adapter, .*merge_and_unload, save_pretrained\)$"),
        (writes(WEIGHTS, POINTER), r"model\.safetensors is a git-LFS pointer.* `git lfs pull`"),
        (writes("tokenizer.json", POINTER), r"tokenizer\.json is a git-LFS pointer"),
        (removes("config.json"), r"has no config\.json"),
        (removes(WEIGHTS), r"has no weights"),
        (changes("config.json", vocab_size=100), r"ids up to \d+, its model 100 embeddings"),
        (changes("tokenizer.json", model=UNIGRAM), r"ids up to 4999, its model \d+ embeddings"),
        (writes("config.json", "{"), r"config\.json is not JSON"),
        (changes("config.json", vocab_size="x"), r"tokenizer\.json is not a model's \(invalid"),
        (changes("config.json", text_config=[1]), r"tokenizer\.json is not a model's"),
        (changes("tokenizer.json", model={"vocab": {"a": "b"}}), r"is not a model's"),
    ],
)
def test_a_damaged_checkpoint_is_one_line(checkpoint: Path, damage: Damage, said: str) -> None:
    """It begins with the directory and says what to do."""
    damage(checkpoint)
    with pytest.raises(CheckpointError, match=said) as caught:
        check_checkpoint(checkpoint)
    assert str(caught.value).startswith(str(checkpoint))
    assert "\n" not in str(caught.value)


def test_more_added_tokens_than_embeddings_are_usual(checkpoint: Path) -> None:
    """Published text models bring the image token of their family, or a padding token."""
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    added = {**tokenizer["added_tokens"][0], "id": 10**6, "content": "<image>"}
    _rewrite(checkpoint / "tokenizer.json", added_tokens=[*tokenizer["added_tokens"], added])
    check_checkpoint(checkpoint)


@pytest.mark.parametrize("name", ["target", "draft"])
def test_a_whole_checkpoint_passes(name: str) -> None:
    """The demo's own."""
    check_checkpoint(DEMO / name)
    check_tokenizer(DEMO / name)


def test_a_tokenizer_that_cannot_be_loaded_names_the_file(checkpoint: Path) -> None:
    """The library would speak of a package that does not help."""
    (checkpoint / "tokenizer.json").rename(checkpoint / "tokenizer.model")
    with pytest.raises(TokenizerError, match=r"tokenizer\.model alone: copy .*tokenizer\.json"):
        check_tokenizer(checkpoint)
    (checkpoint / "tokenizer.model").unlink()
    with pytest.raises(TokenizerError, match=r"has no tokenizer: copy .*tokenizer\.json"):
        check_tokenizer(checkpoint)
