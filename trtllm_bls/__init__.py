"""trtllm-bls: the layer between users and TensorRT-LLM on Triton."""

__version__ = "0.2.0"
