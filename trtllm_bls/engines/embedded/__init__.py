"""An in-flight-batching engine over a local Hugging Face checkpoint, in this process.

    engine  sequences, steps, the thread      model  loading, KV slots, one forward pass
    guides  grammars that an answer must follow

Importing this package imports torch and transformers: only the engine's own process should.
"""

from trtllm_bls.errors import SetupError

try:
    from trtllm_bls.engines.embedded.batching import EmbeddedEngine
except ModuleNotFoundError as error:
    if error.name not in ("torch", "safetensors"):
        raise
    raise SetupError(
        f"the embedded engine needs {error.name}: run `pip install 'trtllm-bls[embedded]'`"
    ) from None

__all__ = ["EmbeddedEngine"]
