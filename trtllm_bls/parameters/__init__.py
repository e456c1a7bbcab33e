"""Parameters of the models (``parameters`` in ``config.pbtxt``).

``models`` declares each of them once, ``declaration`` reads their texts. ``cpp_backend`` knows the
parameters of TensorRT-LLM's C++ backend, which are its own.
"""

from trtllm_bls.parameters.declaration import GIVEN as GIVEN
from trtllm_bls.parameters.declaration import Parameters as Parameters
from trtllm_bls.parameters.declaration import is_true as is_true
from trtllm_bls.parameters.declaration import parameters_in as parameters_in
from trtllm_bls.parameters.engine_choice import EngineChoice as EngineChoice
from trtllm_bls.parameters.engine_choice import EngineKind as EngineKind
from trtllm_bls.parameters.engine_choice import parse_engine as parse_engine
from trtllm_bls.parameters.models import DRAFT_MODEL_DIR as DRAFT_MODEL_DIR
from trtllm_bls.parameters.models import ENGINE_TLS_PIN as ENGINE_TLS_PIN
from trtllm_bls.parameters.models import ENGINE_TRANSPORT as ENGINE_TRANSPORT
from trtllm_bls.parameters.models import GRPC_URL as GRPC_URL
from trtllm_bls.parameters.models import MAX_STREAMS as MAX_STREAMS
from trtllm_bls.parameters.models import MODEL_DIR as MODEL_DIR
from trtllm_bls.parameters.models import STATUS_DIR as STATUS_DIR
from trtllm_bls.parameters.models import THREADS as THREADS
from trtllm_bls.parameters.models import BlsParameters as BlsParameters
from trtllm_bls.parameters.models import EngineParameters as EngineParameters
from trtllm_bls.parameters.models import PostprocessingParameters as PostprocessingParameters
from trtllm_bls.parameters.models import PreprocessingParameters as PreprocessingParameters
from trtllm_bls.parameters.models import check as check
from trtllm_bls.parameters.models import own_grpc_url as own_grpc_url
from trtllm_bls.parameters.models import parameters_of as parameters_of
from trtllm_bls.parameters.models import share_of as share_of
