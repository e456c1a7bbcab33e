"""Streams what a decoupled model of the same server streams; ``once`` asks for one response."""

import asyncio

from trtllm_bls.pipeline import StreamingModel, Tensor


class TritonPythonModel(StreamingModel):
    inputs = (Tensor("what", "STRING", required=True), Tensor("once", "INT32"))
    outputs = (Tensor("said", "STRING"),)

    async def answer(self, request, response):
        if request.text("what") == "left behind":
            words = {"text_input": [["the fox runs " * 50]], "max_tokens": int32(200)}
            self.task = asyncio.ensure_future(read(request, words | {"stream": [[True]]}))
            await asyncio.sleep(0)  # in which the task begins its call
            return
        inputs = {"text_input": [["the fox runs"]], "max_tokens": int32(20), "stream": [[True]]}
        if "once" in request:
            await request.infer(request.text("what"), inputs)
        async for part in request.stream(request.text("what"), inputs, ["text_output"]):
            if part["text_output"][0]:
                await response.send({"said": part["text_output"]})


async def read(request, inputs):
    async for _ in request.stream("tensorrt_llm_bls", inputs):
        pass


def int32(value):
    import numpy

    return numpy.array([[value]], numpy.int32)
