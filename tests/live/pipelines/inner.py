"""Does as ``what`` says; ``chat`` tells who asks, and what a second pipeline was told of that."""

import asyncio
import json
from typing import ClassVar

from trtllm_bls.pipeline import StreamingModel, Tensor


class TritonPythonModel(StreamingModel):
    inputs = (Tensor("what", "STRING", required=True), Tensor("text", "STRING"))
    outputs = (Tensor("said", "STRING"),)
    options: ClassVar = {"top_docs": int}

    async def load(self, deployment):
        self.name, self.arrivals = deployment.name, 0
        if self.name == "first":  # its tokenizer takes 2.2 s of CPU
            self.llm = deployment.llm()

    async def answer(self, request, response):
        what, text = request.text("what"), request.text("text") if "text" in request else ""
        if what == "endless":
            async for part in request.stream(self.name, {"what": what}):
                await response.send({"said": part["said"]})
        elif what == "rendezvous":
            # All four callers have a place when the first of them calls; four more may come later.
            others = self.arrivals % 4
            four = self.arrivals - others + 4
            self.arrivals += 1
            while self.arrivals < four:
                await asyncio.sleep(0.01)
            async for part in request.stream(self.name, {"what": "tell"}):
                await response.send({"said": part["said"]})
        elif what == "tell":
            await response.send({"said": json.dumps(context_of(request))})
        elif what == "bls":
            inputs = {"text_input": text, "max_tokens": 30_000, "stream": True}
            async for part in request.stream("tensorrt_llm_bls", inputs, ["text_output"]):
                await response.send({"said": part["text_output"]})
        elif what == "say":
            async for step in self.llm.text(text, max_tokens=30_000):
                await response.send({"said": step.text})
        elif what.startswith("via "):
            other, _, rest = what.removeprefix("via ").partition(" ")
            async for part in request.stream(other, {"what": rest, "text": text}):
                await response.send({"said": part["said"]})
        elif what == "count":
            count = (await request.session.get() or 0) + 1
            await request.session.put(count)
            await response.send({"said": f"{count} {id(self)}"})

    async def chat(self, request):
        inner = None
        if self.name == "first":
            async for part in request.stream("second", {"what": "tell"}):
                inner = json.loads(part["said"][0])
        own = {"metadata": request.metadata, "user": request.user, "headers": request.headers}
        own |= {"options": request.options, "inner": inner}
        yield json.dumps({**context_of(request), **own})


def context_of(request):
    session = request.session.id if request.session else None
    return {
        "key": request.key,
        "salt": request.cache_salt,
        "trace": request.traceparent,
        "callers": list(request.callers),
        "session": session,
        "parameters": request.parameters,
        "limit": request.deadline,
    }
