"""``trtllm-bls configure``: a model repository for TensorRT-LLM's own C++ backend.

``versions`` knows which tensors a release has, ``engine_dir`` what an engine was built for,
``engine_parameters`` its parameters and what cannot go together, ``repository`` puts it all on
disk. Starts nothing.
"""

from trtllm_bls.configure.command import command

__all__ = ["command"]
