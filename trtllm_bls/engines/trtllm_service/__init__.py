"""TensorRT-LLM's TrtllmService as an engine."""

from __future__ import annotations

from trtllm_bls.engines.trtllm_service.engine import ServiceSettings, TrtllmServiceEngine

__all__ = ["ServiceSettings", "TrtllmServiceEngine"]
