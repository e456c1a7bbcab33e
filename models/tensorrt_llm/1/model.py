"""Token ids in, token ids out: the embedded engine, ``trtllm-serve`` or the LLM API.

The code stands in ``trtllm_bls/triton/tensorrt_llm.py``.
"""

from trtllm_bls.triton.tensorrt_llm import TritonPythonModel
