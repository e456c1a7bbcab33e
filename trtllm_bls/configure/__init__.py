"""``trtllm-bls configure``: a model repository for TensorRT-LLM's own C++ backend; and ``recipe``.

``command`` is the command line and reads the repository that ``--from`` names. ``repository``
checks the options and writes the files, with ``engine`` for TensorRT-LLM's releases and one engine,
and ``pbtxt`` for the form of a configuration. ``recipe`` prints
how an engine is built, ``generate`` writes what is generated in the source tree. No process is
started here.
"""

from trtllm_bls.configure.command import command

__all__ = ["command"]
