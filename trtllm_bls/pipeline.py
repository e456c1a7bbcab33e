"""Your own Triton model around a language model (docs/pipelines.md).

``StreamingModel`` is a Triton model that you write as one async function. ``connect`` gives the
same ``LLM`` to any asyncio program. ``testing`` runs a model without Triton.
"""

from trtllm_bls.services import testing
from trtllm_bls.services.pipeline import (
    LLM,
    EngineError,
    InvalidRequest,
    PipelineDeployment,
    Request,
    Response,
    Step,
    Steps,
    StreamingModel,
    Tensor,
    connect,
)

__all__ = ["LLM", "EngineError", "InvalidRequest", "PipelineDeployment", "Request", "Response"]
__all__ += ["Step", "Steps", "StreamingModel", "Tensor", "connect", "testing"]
