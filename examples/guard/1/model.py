"""Reads an answer as it streams, and ends it where a classifier objects."""

from trtllm_bls.pipeline import Request, Response, StreamingModel, Tensor

LIMIT = 0.5  # of the classifier's score


class TritonPythonModel(StreamingModel):
    """Streams text that has been judged; ``finish_reason`` is ``guard`` where it was cut off."""

    inputs = (Tensor("text_input", "STRING", required=True), Tensor("max_tokens", "INT32"))
    outputs = (Tensor("text_output", "STRING"), Tensor("finish_reason", "STRING"))

    async def load(self, deployment):
        self.llm = deployment.llm()

    async def answer(self, request: Request, response: Response) -> None:
        longest = int(request["max_tokens"][0]) if "max_tokens" in request else None
        so_far, reason = "", ""
        async for step in self.llm.text(request.text("text_input"), max_tokens=longest):
            so_far, reason = so_far + step.text, step.finish_reason or ""
            verdict = await request.infer("classifier", {"text": so_far})
            if verdict["score"][0] > LIMIT:
                reason = "guard"
                break  # which frees the engine's slot when the request ends
            if step.text:
                await response.send({"text_output": step.text})
        await response.send({"text_output": "", "finish_reason": reason}, final=True)
