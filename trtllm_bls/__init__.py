"""trtllm-bls: the layer between users and TensorRT-LLM on Triton."""

# The one place of the number; setup.cfg reads it here. docs/stability.md says when it is raised.
__version__ = "0.4.0"
