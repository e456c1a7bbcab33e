"""Text in, text out: tokenises, streams, matches stop strings, cancels, uses drafts.

The code stands in ``trtllm_bls/triton/tensorrt_llm_bls.py``.
"""

from trtllm_bls.triton.tensorrt_llm_bls import TritonPythonModel
