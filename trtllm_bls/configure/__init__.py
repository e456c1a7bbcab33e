"""``trtllm-bls configure``: a model repository for TensorRT-LLM's own C++ backend.

``versions`` knows which tensors a release has, ``backend`` which parameters and what they may be,
``engine_dir`` what an engine was built for, ``repository`` puts them on disk. Starts nothing.
"""

from trtllm_bls.configure.command import command

__all__ = ["command"]
