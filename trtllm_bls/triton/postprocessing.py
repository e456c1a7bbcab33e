"""The Triton model ``postprocessing``: token ids to text, one answer per request."""

from __future__ import annotations

from trtllm_bls.settings.parameters import Parameters, PostprocessingParameters
from trtllm_bls.text.tokenizer import load_tokenizer
from trtllm_bls.triton.request_server import ArraysFunction
from trtllm_bls.triton.served_model import ArraysModel
from trtllm_bls.triton.text_service import Postprocessor


class TritonPythonModel(ArraysModel):
    """Converts token ids to text."""

    def answer(self, parameters: Parameters) -> ArraysFunction:
        """See ``ArraysModel``."""
        settings = parameters.read(PostprocessingParameters)
        tokenizer = load_tokenizer(settings.tokenizer_dir)
        return Postprocessor(tokenizer, settings.skip_special_tokens, settings.limits).arrays
