"""Token ids to text, for the ensemble.

The code stands in ``trtllm_bls/triton/postprocessing.py``.
"""

from trtllm_bls.triton.postprocessing import TritonPythonModel
