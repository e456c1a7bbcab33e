"""Speech tokens to sound, in the shape of CosyVoice 2: chunks that grow, flow, vocoder."""

from trtllm_bls.pipeline import PipelineDeployment, Request, Response, StreamingModel, Tensor

RATE = 16_000  # samples a second


class TritonPythonModel(StreamingModel):
    """Streams 16 kHz samples while the language model still makes speech tokens."""

    inputs = (Tensor("text", "STRING", required=True), Tensor("max_tokens", "INT32"))
    outputs = (Tensor("pcm", "FP32", dims=(-1,)), Tensor("offset", "INT32"))
    # Tokens of the first chunk, how each next one grows, and at most; and what flow looks ahead.
    parameters = {"first": 8, "growth": 2, "most": 64, "ahead": 3}

    async def load(self, deployment: PipelineDeployment) -> None:
        self.llm, self.own = deployment.llm(), deployment.parameters

    async def answer(self, request: Request, response: Response) -> None:
        longest = int(request["max_tokens"][0]) if "max_tokens" in request else 200
        tokens: list[int] = []
        offset, size = 0, self.own["first"]
        async for step in self.llm.text(request.text("text"), max_tokens=longest):
            tokens += step.ids
            while len(tokens) >= offset + size + self.own["ahead"]:
                await self.speak(tokens[: offset + size], offset, request, response)
                offset += size
                size = min(size * self.own["growth"], self.own["most"])
        if tokens[offset:]:
            await self.speak(tokens, offset, request, response)

    async def speak(
        self, tokens: list[int], offset: int, request: Request, response: Response
    ) -> None:
        """Sound of the tokens from ``offset`` on, of which flow sees those before, too."""
        flow = await request.infer("flow", {"tokens": tokens, "offset": offset})
        codes = flow["mel"][::2, 0].astype("int32")
        sound = await request.infer("vocoder", {"codes": codes})
        seconds = len(sound["pcm"]) / RATE  # a caller plays it for so long
        await response.send({"pcm": sound["pcm"], "offset": offset}, seconds=seconds)
