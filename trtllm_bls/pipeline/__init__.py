"""Your own Triton model around a language model (docs/pipelines.md).

``StreamingModel`` is a Triton model that you write as one async function. ``connect`` gives the
same ``LLM`` to any asyncio program. ``testing`` runs a model without Triton.
"""

from trtllm_bls.errors import EngineError, InvalidRequest
from trtllm_bls.pipeline import testing
from trtllm_bls.pipeline.batching import BatchedStage, batched
from trtllm_bls.pipeline.content_parts import ContentPart
from trtllm_bls.pipeline.faces import Speech
from trtllm_bls.pipeline.language_model import LLM, Step, Steps
from trtllm_bls.pipeline.sessions import Session
from trtllm_bls.pipeline.streaming_model import (
    ChatRequest,
    PipelineDeployment,
    Request,
    Response,
    StreamingModel,
    connect,
)
from trtllm_bls.wire.contract import Tensor

__all__ = ["LLM", "EngineError", "InvalidRequest", "PipelineDeployment", "Request", "Response"]
__all__ += ["BatchedStage", "ContentPart", "Speech", "batched"]
__all__ += ["ChatRequest", "Session", "Step", "Steps", "StreamingModel", "Tensor", "connect"]
__all__ += ["testing"]
