"""The Triton model ``preprocessing``: text to token ids, one answer per request."""

from __future__ import annotations

from trtllm_bls.settings.parameters import Parameters, PreprocessingParameters
from trtllm_bls.text.tokenizer import load_tokenizer
from trtllm_bls.triton.request_server import ArraysFunction
from trtllm_bls.triton.served_model import ArraysModel
from trtllm_bls.triton.text_service import Preprocessor


class TritonPythonModel(ArraysModel):
    """Converts text to token ids."""

    def answer(self, parameters: Parameters) -> ArraysFunction:
        """See ``ArraysModel``."""
        settings = parameters.read(PreprocessingParameters)
        tokenizer = load_tokenizer(settings.tokenizer_dir)
        return Preprocessor(tokenizer, settings.add_special_tokens, settings.limits).arrays
