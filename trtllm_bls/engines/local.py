"""The engine behind the Python model ``tensorrt_llm``, as its parameter ``engine`` says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from trtllm_bls.engines.base import Engine
from trtllm_bls.engines.llm_api import open_llm
from trtllm_bls.engines.trtllm_service.service_engine import TrtllmServiceEngine
from trtllm_bls.settings.parameters import EngineParameters, parse_engine


class VocabularyFacts(Protocol):
    """What an engine needs to know of the model's tokenizer: the id that ends a text, and how many
    ids the model has."""

    eos_id: int | None
    model_vocab_size: int


def local_engine(
    name: str, parameters: EngineParameters, tokenizer: Callable[[], VocabularyFacts]
) -> Engine:
    """The engine that the parameter ``engine`` names: ``embedded``, ``llm_api`` or
    ``trtllm://HOST:PORT``.

    ``tokenizer`` loads the model's tokenizer, which the embedded engine does not need. Raises
    ``SetupError``.
    """
    engine = parameters.engine
    if engine == "llm_api":
        return open_llm(name, parameters, lambda: tokenizer().model_vocab_size)
    if engine != "embedded":
        ((address, _),) = parse_engine(engine).addresses
        return TrtllmServiceEngine(
            address,
            eos_id=tokenizer().eos_id,
            vocab_size=tokenizer().model_vocab_size,
            max_sequence_tokens=parameters.max_sequence_tokens,
        )
    from trtllm_bls.engines.embedded import EmbeddedEngine  # needs torch

    return EmbeddedEngine(parameters, name)
