"""The Triton model ``tensorrt_llm_bls``: text in, text out, through the orchestrator."""

from __future__ import annotations

from trtllm_bls.settings.parameters import BlsParameters
from trtllm_bls.triton.request_server import Call
from trtllm_bls.triton.served_model import ServedModel
from trtllm_bls.triton.text_service import TextService


class TritonPythonModel(ServedModel):
    """Serves all streams in one instance. Requests never wait for each other."""

    def make(self, parameters: BlsParameters) -> None:
        """See ``ServedModel``."""
        self._service = TextService(
            self.deployment.orchestrator,
            limits=parameters.limits,
            exclude_input=parameters.exclude_input_in_output,
            llmapi=parameters.tensors == "llmapi",
        )
        self.prepare_batch = self._service.prepare_batch

    async def handle(self, call: Call) -> None:
        """See ``ServedModel``."""
        await self._service.handle(call)
