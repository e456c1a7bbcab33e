"""An agent: the model may look things up, and then answers in a form that programs can read."""

import json

from trtllm_bls.pipeline import PipelineDeployment, Request, Response, StreamingModel, Tensor

LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "What is known of a thing.",
        "parameters": {"type": "object", "properties": {"thing": {"type": "string"}}},
    },
}
ANSWER = {
    "type": "object",
    "properties": {"answer": {"type": "string"}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
KNOWN = {"fox": "A small animal of the woods.", "bicycle": "It has two wheels."}
INSTRUCTION = "Answer now, as JSON."


class TritonPythonModel(StreamingModel):
    """Streams what it looks up, then one JSON object."""

    inputs = (Tensor("question", "STRING", required=True),)
    outputs = (Tensor("looked_up", "STRING"), Tensor("answer", "STRING"))
    parameters = {"turns": 4, "guided": True}  # guided decoding needs an engine that has it

    async def load(self, deployment: PipelineDeployment) -> None:
        self.llm, self.own = deployment.llm(), deployment.parameters

    async def answer(self, request: Request, response: Response) -> None:
        messages = [{"role": "user", "content": request.text("question")}]
        for _ in range(self.own["turns"]):
            (said,) = await self.llm.chat(messages, tools=[LOOK_UP], max_tokens=200).answers()
            messages.append(said.message)
            if not said.calls:
                break
            for call in said.calls:
                thing = str(call.arguments.get("thing", ""))
                await response.send({"looked_up": thing})
                messages.append(call.result(KNOWN.get(thing, "Nothing is known of it.")))
        messages.append({"role": "user", "content": INSTRUCTION})
        form = ANSWER if self.own["guided"] else None
        (said,) = await self.llm.chat(messages, max_tokens=200, json_schema=form).answers()
        answer = json.loads(said.text) if form else {"answer": said.text, "sure": False}
        await response.send({"answer": json.dumps(answer)}, final=True)
