"""Is a directory a Hugging Face checkpoint that can be served as it stands?

Looks at names, at first bytes and at JSON, so it takes milliseconds where loading takes minutes,
and it finds what the libraries pass over in silence or report in other words. Imports no library.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trtllm_bls.errors import CheckpointError, TokenizerError

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_NO_WEIGHTS = ("adapter_", "training_args")  # files of weights' endings that begin so
_TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt")  # any of them is enough


def check_checkpoint(directory: Path) -> None:
    """Configuration and weights are there, and nothing beside them that would be ignored.

    Raises ``CheckpointError``, one line that begins with the directory.
    """
    mend = "it must be a Hugging Face checkpoint"
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; {mend}")
    files = [*sorted(directory.glob("*.safetensors")), *sorted(directory.glob("*.bin"))]
    weights = [file for file in files if not file.name.startswith(_NO_WEIGHTS)]
    adapter = directory / "adapter_config.json"
    if adapter.is_file():
        how = "merge it into its base model (peft: merge_and_unload, save_pretrained)"
        if weights:
            how += f", or remove {adapter.name} to serve the weights without it"
        raise CheckpointError(f"{directory} holds an adapter, which would be ignored: {how}")
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} has no config.json; {mend}")
    files = [*weights, *sorted(directory.glob("*.json")), directory / "tokenizer.model"]
    for file in filter(Path.is_file, files):
        with file.open("rb") as stream:
            if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
                what = f"{file.name} is a git-LFS pointer, not the file: run `git lfs pull`"
                raise CheckpointError(f"{directory}: {what}")
    if not weights:
        raise CheckpointError(f"{directory} has no weights (*.safetensors or *.bin)")
    # Added tokens are not counted: published checkpoints have a few more of them than embeddings,
    # and a request that uses one is refused by the engine.
    try:
        size = _vocab_size(_json(directory / "config.json"))
        vocabulary = (_json(directory / "tokenizer.json").get("model") or {}).get("vocab") or ()
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        largest = int(max(ids, default=0))
    except (ValueError, TypeError, AttributeError) as error:
        what = f"config.json or tokenizer.json is not a model's ({one_line(error)})"
        raise CheckpointError(f"{directory}: {what}; {mend}") from error
    if size and largest >= size:
        what = f"its tokenizer has ids up to {largest}, its model {size} embeddings"
        mend = "use the tokenizer that the model was trained with"
        raise CheckpointError(f"{directory}: {what}: {mend}")


def check_tokenizer(directory: Path) -> None:
    """A tokenizer that can be loaded by the packages that are installed.

    Raises ``TokenizerError`` where there is none, or nothing but ``tokenizer.model`` and no
    sentencepiece.
    """
    if any((directory / name).is_file() for name in _TOKENIZERS):
        return
    mend = "copy the model's tokenizer.json into it"
    if not (directory / "tokenizer.model").is_file():
        raise TokenizerError(f"{directory} has no tokenizer: {mend}")
    if importlib.util.find_spec("sentencepiece") is None:
        mend += ", or run `pip install sentencepiece`"
        raise TokenizerError(f"{directory} has tokenizer.model alone: {mend}")


def _json(file: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none. Raises ``CheckpointError``."""
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
    """The end ids that generation_config.json names; raises ``TokenizerError``."""
    with _readable(path, "generation_config.json") as config:
        ids = config.get("eos_token_id")
        if ids is None:
            return ()
        return tuple(map(int, ids if isinstance(ids, list) else [ids]))


def config_vocab_size(path: Path) -> int:
    """The model's own count of logits, where its configuration lies here too; else 0.

    Raises ``TokenizerError``.
    """
    with _readable(path, "config.json") as config:
        return _vocab_size(config)


def _vocab_size(config: dict[str, Any]) -> int:
    return int((config.get("text_config") or config).get("vocab_size") or 0)


@contextmanager
def _readable(path: Path, name: str) -> Iterator[dict[str, Any]]:
    """A JSON object; what it cannot be read or used for is a ``TokenizerError``."""
    try:
        yield _json(path / name)
    except (CheckpointError, OSError, ValueError, TypeError, AttributeError) as error:
        problem = f"{name} cannot be read ({one_line(error)})"
        raise TokenizerError(f"{path}: {problem}; mend or remove it") from error


def one_line(error: BaseException) -> str:
    """The first line of what a library says, or the kind of error where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
