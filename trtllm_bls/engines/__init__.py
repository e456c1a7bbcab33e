"""Engines: everything that runs token ids through a model.

The floors, from below; a module imports from lower floors only (setup.cfg, `lint-imports`):

1. ``base``: the protocol that the orchestrator knows, and the streams of chunks.
2. ``request_checks`` (can an engine run a request?), ``grammars`` (for guided decoding) and
   ``sampling``; above them ``trtllm_fields`` (requests and the ends of sequences in the terms of
   today's TensorRT-LLM).
3. The engines. Over a wire: ``triton_model`` (a Triton model over gRPC) and ``trtllm_service``
   (TensorRT-LLM's gRPC service). In this process: ``embedded`` (torch) and ``llm_api``
   (TensorRT-LLM's LLM API).
4. Choices among them: ``routing`` (a target with drafts) and ``replicas`` (several engines as
   one). Above them ``opening`` makes an engine of parameters, and ``conformance`` sends any of them
   requests whose answers are known.
"""
