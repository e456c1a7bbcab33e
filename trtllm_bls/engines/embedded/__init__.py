"""An in-flight-batching engine over a local Hugging Face checkpoint, in this process.

    engine  thread, submissions, delivery      batcher    which rows each step computes
    runner  one model's forward pass           sequence   one sequence, its end, its chunks
    attention  KV slots, attention over them   sampling   a row of logits to a token
    slots   what the slots hold, reuse         checkpoint loading, probing, sizing

Importing this package imports torch and transformers: only the engine's own process should.
"""

from trtllm_bls.engines.embedded.engine import EmbeddedEngine
from trtllm_bls.engines.embedded.settings import EmbeddedSettings
from trtllm_bls.engines.embedded.submission import Submission

__all__ = ["EmbeddedEngine", "EmbeddedSettings", "Submission"]
