"""The target's engine, of the kind and at the addresses that parameter ``engine`` names."""

from __future__ import annotations

from dataclasses import replace

from trtllm_bls.engines.base import Engine
from trtllm_bls.engines.replicas import ReplicatedEngine
from trtllm_bls.engines.triton import Route, TritonEngine
from trtllm_bls.engines.trtllm_service import ServiceSettings, TrtllmServiceEngine
from trtllm_bls.parameters import BlsParameters, EngineKind
from trtllm_bls.tokenizer import Tokenizer


def target_engine(parameters: BlsParameters, route: Route, tokenizer: Tokenizer) -> Engine:
    """The engine, or those, that parameter ``engine`` names."""
    choice = parameters.engine
    if choice is None:
        return TritonEngine(parameters.target, route)
    settings = ServiceSettings(
        eos_id=tokenizer.eos_id,
        vocab_size=tokenizer.model_vocab_size,
        max_sequence_tokens=parameters.engine_max_sequence_tokens,
        stall_seconds=parameters.stall_seconds,
    )
    engines: list[Engine] = []
    for url, model in choice.addresses:
        if choice.kind is EngineKind.TRTLLM:
            engines.append(TrtllmServiceEngine(url, settings, route.tls))
        elif choice.kind is EngineKind.TRITON_GRPC:
            engines.append(TritonEngine(model, replace(route, transport="grpc", url=url)))
        else:
            engines.append(TritonEngine(model, route))
    if len(engines) == 1:
        return engines[0]
    return ReplicatedEngine(engines, resume=parameters.engine_resume)


def is_service(parameters: BlsParameters) -> bool:
    """Whether the engine is TensorRT-LLM's gRPC service, which verifies no drafts."""
    return parameters.engine is not None and parameters.engine.kind is EngineKind.TRTLLM
