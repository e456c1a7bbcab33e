"""Text to sound: the language model's token ids are audio codes, which a vocoder makes sound of."""

from collections.abc import AsyncIterator

import numpy as np

from trtllm_bls.pipeline import (
    PipelineDeployment,
    Request,
    Response,
    Speech,
    StreamingModel,
    Tensor,
)

CODES = 8  # per call of the vocoder: the first sound needs so many, the rest arrives meanwhile
PITCHES = {"low": 0, "high": 300}  # of the voices


class TritonPythonModel(StreamingModel):
    """Streams 16 kHz samples while the language model still makes codes."""

    inputs = (Tensor("text", "STRING", required=True), Tensor("max_codes", "INT32"))
    outputs = (Tensor("pcm", "FP32", dims=(-1,)), Tensor("codes", "INT32"))
    speech = Speech(voices=tuple(PITCHES), rate=16_000)

    async def load(self, deployment: PipelineDeployment) -> None:
        self.llm = deployment.llm()

    async def answer(self, request: Request, response: Response) -> None:
        longest = int(request["max_codes"][0]) if "max_codes" in request else 200
        async for codes in self.codes(request.text("text"), longest):
            await response.send({"pcm": await self.sound(codes), "codes": len(codes)})

    async def speak(self, text: str, voice: str) -> AsyncIterator[np.ndarray]:
        async for codes in self.codes(text, 200):
            yield await self.sound([code + PITCHES[voice] for code in codes])

    async def codes(self, text: str, longest: int) -> AsyncIterator[list[int]]:
        codes: list[int] = []
        async for step in self.llm.text(text, max_tokens=longest):
            codes += step.ids
            while len(codes) >= CODES:
                yield codes[:CODES]
                del codes[:CODES]
        if codes:
            yield codes

    async def sound(self, codes: list[int]) -> np.ndarray:
        answer = await self.deployment.infer("vocoder", {"codes": codes})
        return answer["pcm"]
