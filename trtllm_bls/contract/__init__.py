"""The wire contract: every tensor of the five models, spelled once.

``tensors`` defines what is declared of a tensor, ``models`` declares them. The models, the client,
validation and the checked-in ``config.pbtxt`` files (``make generate``) follow from there. Nothing
else in the package spells a tensor's type, shape, bounds or releases.
"""

from trtllm_bls.contract.models import BLS, ENGINE, ENSEMBLE, MODELS, POSTPROCESSING, PREPROCESSING
from trtllm_bls.contract.tensors import Bounds, Model, Tensor

__all__ = [
    "BLS",
    "ENGINE",
    "ENSEMBLE",
    "MODELS",
    "POSTPROCESSING",
    "PREPROCESSING",
    "Bounds",
    "Model",
    "Tensor",
]
