"""The engine behind the Python model ``tensorrt_llm``, as its parameter ``engine`` says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trtllm_bls.engines.base import Engine
from trtllm_bls.engines.llm_api import open_llm
from trtllm_bls.engines.trtllm_service import ServiceSettings, TrtllmServiceEngine


def local_engine(
    name: str,
    engine: str,
    model_dir: Path,
    sizes: Mapping[str, Any],
    eos_id: Callable[[], int | None],
) -> Engine:
    """``sizes`` are the model's parameters that are numbers; ``eos_id`` gives the tokenizer's,
    where a service is asked. Raises ``SetupError``."""
    if engine == "llm_api":
        return open_llm(name, model_dir, sizes)
    if engine != "embedded":
        longest = sizes.get("max_sequence_tokens")
        settings = ServiceSettings(eos_id=eos_id(), max_sequence_tokens=longest)
        return TrtllmServiceEngine(engine.removeprefix("trtllm://"), settings)
    from trtllm_bls.engines.embedded import EmbeddedEngine, EmbeddedSettings  # needs torch

    return EmbeddedEngine(model_dir, EmbeddedSettings(name=name, **sizes))
