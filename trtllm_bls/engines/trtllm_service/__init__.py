"""TensorRT-LLM's TrtllmService as an engine."""

from trtllm_bls.engines.trtllm_service.engine import TrtllmServiceEngine as TrtllmServiceEngine
