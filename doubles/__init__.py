"""Engines that are scripts: for tests, benchmarks, and servers without a model.

``scripted`` is an ``Engine`` of this package, whose tokens ``scripted_tokens`` chooses;
``guided`` finds texts that obey a guide; ``trtllm_service`` is a server that plays TensorRT-LLM's
gRPC service over any engine.
"""
