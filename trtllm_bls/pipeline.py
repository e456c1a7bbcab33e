"""Your own Triton model around a language model (docs/pipelines.md).

``StreamingModel`` is a Triton model that you write as one async function. ``connect`` gives the
same ``LLM`` to any asyncio program. ``testing`` runs a model without Triton.
"""

from trtllm_bls.services import testing
from trtllm_bls.services.llm import LLM, Step, Steps, connect
from trtllm_bls.services.streaming_model import (
    EngineError,
    InvalidRequest,
    PipelineDeployment,
    Request,
    Response,
    StreamingModel,
    Tensor,
)

__all__ = [
    "LLM",
    "EngineError",
    "InvalidRequest",
    "PipelineDeployment",
    "Request",
    "Response",
    "Step",
    "Steps",
    "StreamingModel",
    "Tensor",
    "connect",
    "testing",
]
