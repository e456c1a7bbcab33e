"""trtllm-bls: the layer between users and TensorRT-LLM on Triton."""

# The one place of the number; setup.cfg reads it here. docs/stability.md says when it is raised.
__version__ = "0.4.0"


def code_form() -> str:
    """Return ``compiled`` if mypyc compiled the path of tokens, else ``interpreted``."""
    from trtllm_bls import types

    return "interpreted" if str(types.__file__).endswith(".py") else "compiled"
