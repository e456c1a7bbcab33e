"""Checks that a directory is a Hugging Face checkpoint which can be served as it stands.

The checks read names, first bytes and JSON, so they take milliseconds where loading takes minutes.
They find mistakes that the libraries pass over in silence or report in other words. Imports no
library.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trtllm_bls.errors import CheckpointError, TokenizerError

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
# Beginnings of the names of files that end like weights and are none.
_NO_WEIGHTS = ("adapter_", "training_args")
_TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt")  # any of them is enough


def check_checkpoint(directory: Path) -> None:
    """Check that configuration and weights are there, and nothing that would be ignored.

    Raises ``CheckpointError``, one line that begins with the directory.
    """
    advice = "it must be a Hugging Face checkpoint"
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; {advice}")
    files = [*sorted(directory.glob("*.safetensors")), *sorted(directory.glob("*.bin"))]
    weights = [file for file in files if not file.name.startswith(_NO_WEIGHTS)]
    adapter = directory / "adapter_config.json"
    if adapter.is_file():
        advice = "merge it into its base model (peft: merge_and_unload, save_pretrained)"
        if weights:
            advice += f", or remove {adapter.name} to serve the weights without it"
        raise CheckpointError(f"{directory} holds an adapter, which would be ignored: {advice}")
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} has no config.json; {advice}")
    files = [*weights, *sorted(directory.glob("*.json")), directory / "tokenizer.model"]
    for file in filter(Path.is_file, files):
        with file.open("rb") as stream:
            if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
                problem = f"{file.name} is a git-LFS pointer, not the file: run `git lfs pull`"
                raise CheckpointError(f"{directory}: {problem}")
    if not weights:
        raise CheckpointError(f"{directory} has no weights (*.safetensors or *.bin)")
    # Added tokens are not counted: published checkpoints have a few more of them than embeddings,
    # and a request that uses one is refused by the engine.
    try:
        size = _vocab_size(_json(directory / "config.json"))
        vocabulary = (_json(directory / "tokenizer.json").get("model") or {}).get("vocab") or ()
        ids: Iterable[int] = range(len(vocabulary))
        if isinstance(vocabulary, dict):
            ids = vocabulary.values()
        largest = int(max(ids, default=0))
    except (ValueError, TypeError, AttributeError) as error:
        problem = f"config.json or tokenizer.json is not a model's ({one_line(error)})"
        raise CheckpointError(f"{directory}: {problem}; {advice}") from error
    if size and largest >= size:
        problem = f"its tokenizer has ids up to {largest}, its model {size} embeddings"
        advice = "use the tokenizer that the model was trained with"
        raise CheckpointError(f"{directory}: {problem}: {advice}")


def check_tokenizer(directory: Path) -> None:
    """Check that the installed packages can load the directory's tokenizer.

    Raises ``TokenizerError`` if there is none, or ``tokenizer.model`` alone without the package
    sentencepiece.
    """
    if any((directory / name).is_file() for name in _TOKENIZERS):
        return
    advice = "copy the model's tokenizer.json into it"
    if not (directory / "tokenizer.model").is_file():
        raise TokenizerError(f"{directory} has no tokenizer: {advice}")
    if importlib.util.find_spec("sentencepiece") is None:
        advice += ", or run `pip install sentencepiece`"
        raise TokenizerError(f"{directory} has tokenizer.model alone: {advice}")


def _json(file: Path) -> dict[str, Any]:
    """Return a file's JSON object; empty without a file. Raises ``CheckpointError``."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.parent}: {file.name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file.parent}: {file.name} is not a JSON object")
    return content


def generation_eos(path: Path) -> tuple[int, ...]:
    """Return the end ids that generation_config.json names. Raises ``TokenizerError``."""
    with _readable(path, "generation_config.json") as config:
        ids = config.get("eos_token_id")
        if ids is None:
            return ()
        if not isinstance(ids, list):
            ids = [ids]
        return tuple(map(int, ids))


def config_vocab_size(path: Path) -> int:
    """Return the model's number of logits, or 0 if its configuration is not in the directory.

    Raises ``TokenizerError``.
    """
    with _readable(path, "config.json") as config:
        return _vocab_size(config)


def _vocab_size(config: dict[str, Any]) -> int:
    return int((config.get("text_config") or config).get("vocab_size") or 0)


@contextmanager
def _readable(path: Path, name: str) -> Iterator[dict[str, Any]]:
    """Read a JSON object, and raise ``TokenizerError`` if it cannot be read or used."""
    try:
        yield _json(path / name)
    except (CheckpointError, OSError, ValueError, TypeError, AttributeError) as error:
        problem = f"{name} cannot be read ({one_line(error)})"
        raise TokenizerError(f"{path}: {problem}; mend or remove it") from error


def one_line(error: BaseException) -> str:
    """Return the first line of a library's error, or the kind of an error without text."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
