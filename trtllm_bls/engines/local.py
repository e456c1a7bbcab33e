"""The engine behind the Python model ``tensorrt_llm``, as its parameter ``engine`` says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from trtllm_bls.engines.base import Engine
from trtllm_bls.engines.llm_api import open_llm
from trtllm_bls.engines.trtllm_service import ServiceSettings, TrtllmServiceEngine


class Tokenizer(Protocol):
    """What is asked of a tokenizer."""

    eos_id: int | None
    model_vocab_size: int


def local_engine(
    name: str,
    engine: str,
    model_dir: Path,
    sizes: Mapping[str, Any],
    tokenizer: Callable[[], Tokenizer],
) -> Engine:
    """``sizes`` are the model's parameters that are numbers; ``tokenizer`` loads the model's, which
    the embedded engine does not need. Raises ``SetupError``."""
    if engine == "llm_api":
        return open_llm(name, model_dir, sizes, lambda: tokenizer().model_vocab_size)
    if engine != "embedded":
        settings = ServiceSettings(
            eos_id=tokenizer().eos_id,
            vocab_size=tokenizer().model_vocab_size,
            max_sequence_tokens=sizes.get("max_sequence_tokens"),
        )
        return TrtllmServiceEngine(engine.removeprefix("trtllm://"), settings)
    from trtllm_bls.engines.embedded import EmbeddedEngine, EmbeddedSettings  # needs torch

    return EmbeddedEngine(model_dir, EmbeddedSettings(name=name, **sizes))
