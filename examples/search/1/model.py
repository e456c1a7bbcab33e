"""Vectors and an order of documents behind OpenAI's API, from an embedding model of the server."""

import numpy as np

from trtllm_bls.pipeline import PipelineDeployment, StreamingModel, batched


class TritonPythonModel(StreamingModel):
    """Answers ``/v1/embeddings`` and ``/v1/rerank``."""

    dimensions = (64, 128)  # what vectors may be cut to, beside their own 256

    async def load(self, deployment: PipelineDeployment) -> None:
        """Nothing: the embedder is another model."""

    @batched(max_size=32, max_wait_ms=2)
    async def embed(self, texts: list[str]) -> np.ndarray:
        answer = await self.deployment.infer("embedder", {"texts": texts})
        return answer["vectors"]

    async def rerank(self, query: str, documents: list[str]) -> np.ndarray:
        vectors = np.array(await self.embed.many([query, *documents]))
        return vectors[1:] @ vectors[0]
