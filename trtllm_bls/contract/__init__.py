"""The wire contract: every tensor of the five models, spelled once.

``tensors`` defines what a row is, ``models`` holds the rows. Models, client, validation and the
checked-in ``config.pbtxt`` files (``configure.pbtxt``) follow these tables; nothing else in the
package spells a tensor's type, shape or bounds.
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
