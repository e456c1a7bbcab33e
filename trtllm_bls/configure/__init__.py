"""``trtllm-bls configure``: a model repository for TensorRT-LLM's own C++ backend; and ``recipe``.

``versions`` knows which tensors a release has, ``engine_dir`` what an engine was built for,
``engine_parameters`` its parameters and what cannot go together, ``options`` what the command line
sets, ``existing`` what a repository says that is there already, ``launch`` how several ranks are
started; ``repository`` puts it all on disk. ``recipe`` and ``build_flags`` say how an engine is
built. Starts nothing.
"""

from trtllm_bls.configure.command import command

__all__ = ["command"]
