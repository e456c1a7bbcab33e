"""Answers from passages: embeds the question, finds the nearest passages, cites them.

It also answers OpenAI's APIs, behind a guard: a classifier reads the answer as it streams.
"""

from collections.abc import AsyncIterator

import numpy as np

from trtllm_bls.pipeline import (
    ChatRequest,
    PipelineDeployment,
    Request,
    Response,
    StreamingModel,
    Tensor,
)

PASSAGES = (
    "The fox is a small animal that lives in woods and hunts mice.",
    "Machine learning finds rules in examples instead of being told them.",
    "A bicycle has two wheels, and its rider drives it with pedals.",
)


class TritonPythonModel(StreamingModel):
    """Streams the answer's text, then the passages that it was made from."""

    inputs = (Tensor("question", "STRING", required=True),)
    outputs = (Tensor("text", "STRING"), Tensor("citation", "STRING", dims=(-1,)))
    parameters = {"nearest": 2, "limit": 0.5}

    async def load(self, deployment: PipelineDeployment) -> None:
        self.llm, self.own = deployment.llm(), deployment.parameters

    async def warm_up(self, deployment: PipelineDeployment) -> None:
        answer = await deployment.infer("embedder", {"texts": PASSAGES})
        self.vectors = answer["vectors"]

    async def found(self, request: Request, question: str) -> list[str]:
        answer = await request.infer("embedder", {"texts": [question]})
        scores = self.vectors @ answer["vectors"][0]
        return [PASSAGES[index] for index in np.argsort(-scores)[: self.own["nearest"]]]

    async def answer(self, request: Request, response: Response) -> None:
        question = request.text("question")
        found = await self.found(request, question)
        messages = [{"role": "user", "content": "\n".join([*found, question])}]
        async for step in self.llm.chat(messages, max_tokens=100):
            if step.text:
                await response.send({"text": step.text})
        await response.send({"citation": found}, final=True)

    async def chat(self, request: ChatRequest) -> AsyncIterator[object]:
        *before, last = request.messages
        found = await self.found(request, last["content"])
        asked = {**last, "content": "\n".join([*found, last["content"]])}
        said = ""
        async for step in self.llm.chat([*before, asked], **request.options):
            said += step.text
            verdict = await request.infer("classifier", {"text": said})
            if verdict["score"][0] > self.own["limit"]:
                yield {"refusal": "I cannot say more about that."}
                return
            yield step
        for text in found:
            yield {"annotation": {"type": "file_citation", "filename": text, "index": len(said)}}
