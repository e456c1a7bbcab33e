"""Parameters of the models (``parameters`` in ``config.pbtxt``).

``table`` says of every parameter what it may be, its default and what it does; the checked-in
``config.pbtxt`` files, ``--set`` and the environment variables of ``serve`` follow it. ``reading``
reads a model's own at load. ``python -m trtllm_bls.parameters`` prints ``docs/parameters.md``.
"""

from trtllm_bls.parameters.engine_choice import EngineChoice, EngineKind, parse_engine
from trtllm_bls.parameters.kinds import Parameter, is_true
from trtllm_bls.parameters.reading import (
    BlsParameters,
    EngineParameters,
    Parameters,
    request_limits,
)
from trtllm_bls.parameters.table import (
    DRAFT_MODEL_DIR,
    ENGINE_TLS_PIN,
    ENGINE_TRANSPORT,
    GIVEN,
    GRPC_URL,
    MAX_STREAMS,
    MODEL_DIR,
    STATUS_DIR,
    THREADS,
    check,
    rows_of,
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
    "Parameter",
    "Parameters",
    "check",
    "is_true",
    "parse_engine",
    "request_limits",
    "rows_of",
]
