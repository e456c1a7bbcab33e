"""Text to sound: the language model's token ids are audio codes, which a vocoder makes sound of."""

from trtllm_bls.pipeline import Request, Response, StreamingModel, Tensor

CODES = 8  # per call of the vocoder: the first sound needs so many, the rest arrives meanwhile


class TritonPythonModel(StreamingModel):
    """Streams 16 kHz samples while the language model still makes codes."""

    inputs = (Tensor("text", "STRING", required=True), Tensor("max_codes", "INT32"))
    outputs = (Tensor("pcm", "FP32", dims=(-1,)), Tensor("codes", "INT32"))

    async def load(self, deployment):
        self.llm = deployment.llm()

    async def answer(self, request: Request, response: Response) -> None:
        longest = int(request["max_codes"][0]) if "max_codes" in request else 200
        codes: list[int] = []
        async for step in self.llm.text(request.text("text"), max_tokens=longest):
            codes += step.ids
            while len(codes) >= CODES:
                await self.speak(codes[:CODES], request, response)
                del codes[:CODES]
        if codes:
            await self.speak(codes, request, response)

    async def speak(self, codes: list[int], request: Request, response: Response) -> None:
        sound = await request.infer("vocoder", {"codes": codes})
        await response.send({"pcm": sound["pcm"], "codes": len(codes)})
