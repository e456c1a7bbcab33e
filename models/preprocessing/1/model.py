"""Text to token ids, for the ensemble.

The code stands in ``trtllm_bls/triton/preprocessing.py``.
"""

from trtllm_bls.triton.preprocessing import TritonPythonModel
