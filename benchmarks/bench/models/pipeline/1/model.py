"""Text in, text out with ``trtllm_bls.pipeline``: what a pipeline costs beside one by hand."""

from trtllm_bls.pipeline import Request, Response, StreamingModel, Tensor

ONE = (1, 1)  # as the other targets are asked


class TritonPythonModel(StreamingModel):
    inputs = (
        Tensor("text_input", "STRING", ONE, required=True),
        Tensor("max_tokens", "INT32", ONE, required=True),
        Tensor("stream", "BOOL", ONE),
        Tensor("add_special_tokens", "BOOL", ONE),
    )
    outputs = (Tensor("text_output", "STRING"),)

    async def load(self, deployment):
        self.llm = deployment.llm()

    async def answer(self, request: Request, response: Response) -> None:
        length = int(request["max_tokens"].item())
        prompt = request.text("text_input")
        async for step in self.llm.text(prompt, max_tokens=length, add_special_tokens=False):
            if step.text:
                await response.send({"text_output": step.text})
