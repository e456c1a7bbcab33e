"""Parameters of the models (``parameters`` in ``config.pbtxt``).

``models`` declares each of them once, ``declaration`` reads their texts. ``cpp_backend`` knows the
parameters of TensorRT-LLM's C++ backend, which are its own.
"""

from trtllm_bls.parameters.declaration import GIVEN, Parameters, is_true, parameters_in
from trtllm_bls.parameters.engine_choice import EngineChoice, EngineKind, parse_engine
from trtllm_bls.parameters.models import (
    DRAFT_MODEL_DIR,
    ENGINE_TLS_PIN,
    ENGINE_TRANSPORT,
    GRPC_URL,
    MAX_STREAMS,
    MODEL_DIR,
    STATUS_DIR,
    THREADS,
    BlsParameters,
    EngineParameters,
    PostprocessingParameters,
    PreprocessingParameters,
    check,
    parameters_of,
)

__all__ = [
    "DRAFT_MODEL_DIR",
    "ENGINE_TLS_PIN",
    "ENGINE_TRANSPORT",
    "GIVEN",
    "GRPC_URL",
    "MAX_STREAMS",
    "MODEL_DIR",
    "STATUS_DIR",
    "THREADS",
    "BlsParameters",
    "EngineChoice",
    "EngineKind",
    "EngineParameters",
    "Parameters",
    "PostprocessingParameters",
    "PreprocessingParameters",
    "check",
    "is_true",
    "parameters_in",
    "parameters_of",
    "parse_engine",
]
