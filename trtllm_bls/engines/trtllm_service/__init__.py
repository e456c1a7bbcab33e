"""TensorRT-LLM's gRPC service, ``trtllm-serve --grpc``: ``service_engine`` and its messages."""
