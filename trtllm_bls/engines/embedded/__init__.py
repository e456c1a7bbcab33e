"""An in-flight-batching engine over a local Hugging Face checkpoint, in this process.

    batching   sequences, the steps that compute them, the thread that runs steps
    sampling   from a step's rows of logits to tokens, all rows at once
    guides     grammars that an answer must follow
    model      loading a checkpoint, and proving that it is computed as it means
    runner     one step through the model: transformers' modules, llama or its graphs
    llama      the Llama family's forward pass       graphs     its steps as CUDA graphs
    attention  rows over the KV slots                slots      the KV slots

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
