"""Images before a TensorRT-LLM engine: an encoder's vectors stand where the prompt has an image."""

from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any

import numpy as np

from trtllm_bls.pipeline import (
    ChatRequest,
    InvalidRequest,
    PipelineDeployment,
    StreamingModel,
    batched,
)

MARK = "<image>"  # in the prompt, until the ids of an image's vectors take its place


class TritonPythonModel(StreamingModel):
    """Answers conversations with images in them, over OpenAI's and Anthropic's APIs."""

    accepts = {"image"}

    async def load(self, deployment: PipelineDeployment) -> None:
        self.llm = deployment.llm()

    @batched(max_size=8, max_wait_ms=5)
    async def encode(self, images: list[bytes]) -> np.ndarray:
        answer = await self.deployment.infer("image_encoder", {"images": images})
        return answer["vectors"]

    async def chat(self, request: ChatRequest) -> AsyncIterator[object]:
        for image in request.parts:
            if image.url:
                raise InvalidRequest("messages", "send images as data: URLs; none is fetched")
        vectors = await self.encode.many([image.data for image in request.parts])
        ids = self.prompt(request, [len(rows) for rows in vectors])
        options: dict[str, Any] = {"max_tokens": request.options.get("max_tokens")}
        if vectors:
            table = np.concatenate(vectors)
            options["extras"] = {"prompt_embedding_table": table, "prompt_vocab_size": len(table)}
            # An engine that reuses KV blocks tells images apart by this number alone.
            options["prompt_table_extra_id"] = int(sha256(table.tobytes()).hexdigest()[:12], 16)
        async for step in self.llm.generate(ids, **options):
            yield step

    def prompt(self, request: ChatRequest, lengths: list[int]) -> list[int]:
        """Return the prompt's ids, with as many for each image as it has vectors."""
        messages = request.texts(lambda part: MARK)
        text = self.llm.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        first, *others = text.split(MARK)
        if len(others) != len(lengths):
            raise InvalidRequest("messages", f"a text has {MARK}, which stands for an image")
        ids = self.llm.encode(first)
        row = self.llm.first_table_id  # the engine reads it as the first row of the table
        for length, piece in zip(lengths, others, strict=True):
            ids += range(row, row + length)
            row += length
            ids += self.llm.encode(piece)
        return ids
