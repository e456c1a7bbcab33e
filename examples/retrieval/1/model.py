"""Answers from passages: embeds the question, finds the nearest passages, cites them."""

import numpy as np

from trtllm_bls.pipeline import Request, Response, StreamingModel, Tensor

PASSAGES = (
    "The fox is a small animal that lives in woods and hunts mice.",
    "Machine learning finds rules in examples instead of being told them.",
    "A bicycle has two wheels, and its rider drives it with pedals.",
)
NEAREST = 2


class TritonPythonModel(StreamingModel):
    """Streams the answer's text, then the passages that it was made from."""

    inputs = (Tensor("question", "STRING", required=True),)
    outputs = (Tensor("text", "STRING"), Tensor("citation", "STRING", dims=(-1,)))

    async def load(self, deployment):
        self.llm = deployment.llm()
        self.vectors = None  # of the passages, once the first request needs them

    async def answer(self, request: Request, response: Response) -> None:
        question = request.text("question")
        if self.vectors is None:
            self.vectors = await self.embedded(request, *PASSAGES)
        scores = self.vectors @ (await self.embedded(request, question))[0]
        found = [PASSAGES[index] for index in np.argsort(-scores)[:NEAREST]]
        messages = [{"role": "user", "content": "\n".join([*found, question])}]
        async for step in self.llm.chat(messages, max_tokens=100):
            if step.text:
                await response.send({"text": step.text})
        await response.send({"citation": found}, final=True)

    async def embedded(self, request: Request, *texts: str):
        vectors = await request.infer("embedder", {"texts": texts})
        return vectors["vectors"]
