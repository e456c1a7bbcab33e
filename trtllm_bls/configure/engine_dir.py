"""What a TensorRT-LLM engine directory says of the engine; the engine itself is not opened."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_bls.configure.versions import parse_version
from trtllm_bls.errors import SettingsError
from trtllm_bls.parameters.cpp_backend import Version

_LOGITS = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}
# The bits of ``speculative_decoding_mode`` in config.json, in TensorRT-LLM's order.
_MODES = (
    "none",
    "draft_tokens_external",
    "medusa",
    "lookahead_decoding",
    "explicit_draft_tokens",
    "eagle",
    "ngram",
    "user_provided",
    "save_hidden_states",
    "auto",
)
EXTERNAL_DRAFTS = "draft_tokens_external"


@dataclass(frozen=True, kw_only=True)
class EngineDir:
    """One engine; ``None`` and an empty version where the directory does not tell.

    ``ranks`` counts the engine files, one per GPU. ``paged_context`` is what reuse of the KV cache,
    chunked context and verification of drafts need. ``mode`` is the engine's way to speculate.
    """

    path: Path
    ranks: int = 1
    version: str = ""
    logits: str = "FP32"
    vocab_size: int | None = None  # its embeddings, padding included
    max_batch_size: int | None = None
    max_sequence_tokens: int | None = None
    max_input_tokens: int | None = None  # named by engines before 0.11 alone
    max_step_tokens: int | None = None  # the rows of one forward pass
    max_draft_tokens: int | None = None
    mode: str = ""
    paged_context: bool | None = None

    def release(self) -> Version | None:
        """Of TensorRT-LLM; raises ``SettingsError`` where ``version`` is none."""
        return parse_version(self.version, f"{self.path}: version") if self.version else None

    @property
    def takes_drafts(self) -> bool:
        """Whether a request may bring a draft, as far as the directory tells."""
        fits = self.mode in ("", EXTERNAL_DRAFTS) and self.max_draft_tokens != 0
        return fits and self.paged_context is not False

    def max_prompt_tokens(self, chunked: bool) -> int | None:
        """The longest prompt: one more token must fit behind it, and one forward pass if whole."""
        longest = self.max_input_tokens
        if longest is None and self.max_sequence_tokens is not None:
            longest = self.max_sequence_tokens - 1
        step = None if chunked else self.max_step_tokens
        return min((n for n in (longest, step) if n), default=None)


def read_engine(option: str, directory: Path, check: bool) -> EngineDir:
    """Raises ``SettingsError`` naming ``option`` if ``check`` finds no engine there.

    Without ``check`` the directory may be on another machine; what is there is still read.
    """
    path = Path(os.path.abspath(directory))  # as the server will see it: links stay links
    file = path / "config.json"
    ranks = len(list(path.glob("rank*.engine")))
    if check:
        for missing, there in (
            ("no such directory", path.is_dir()),
            ("no config.json in it; name the directory trtllm-build wrote", file.is_file()),
            ("no rank*.engine in it; name the directory trtllm-build wrote", ranks > 0),
        ):
            if not there:
                raise SettingsError(f"{option} {directory}: {missing}")
    if not file.is_file():
        return EngineDir(path=path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        build = config.get("build_config", {})
        pretrained = config.get("pretrained_config", {})
        logits = pretrained.get("logits_dtype", "float32")
        plugins = build.get("plugin_config", {})
    except (OSError, ValueError, AttributeError) as error:
        raise SettingsError(f"{option} {directory}: config.json cannot be read: {error}") from error
    if logits not in _LOGITS:
        raise SettingsError(
            f"{option} {directory}: its logits are {logits}; build it with --logits_dtype float32"
        )
    return EngineDir(
        path=path,
        ranks=ranks or 1,
        version=str(config.get("version", "")),
        logits=_LOGITS[logits],
        vocab_size=pretrained.get("vocab_size"),
        max_batch_size=build.get("max_batch_size"),
        max_sequence_tokens=_longest(build),
        max_input_tokens=None if build.get("max_seq_len") else build.get("max_input_len"),
        max_step_tokens=build.get("max_num_tokens"),
        max_draft_tokens=build.get("max_draft_len"),
        mode=_mode(build.get("speculative_decoding_mode")),
        paged_context=plugins.get("use_paged_context_fmha"),
    )


def _longest(build: dict[str, Any]) -> int | None:
    if build.get("max_seq_len"):
        return int(build["max_seq_len"])
    before_0_11 = [int(build.get(key) or 0) for key in ("max_input_len", "max_output_len")]
    return sum(before_0_11) if all(before_0_11) else None


def _mode(value: Any) -> str:
    """The mode's name; empty where config.json has none."""
    if not isinstance(value, int) or value < 1:
        return str(value or "").rpartition(".")[2].lower()
    bit = value.bit_length() - 1
    return _MODES[bit] if bit < len(_MODES) else f"mode_{value}"
