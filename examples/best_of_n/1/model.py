"""Best of n: several answers at once, of which a reward model chooses one."""

import asyncio

from trtllm_bls.pipeline import (
    PipelineDeployment,
    Request,
    Response,
    Step,
    StreamingModel,
    Tensor,
)


class TritonPythonModel(StreamingModel):
    """Streams each answer's reward as it is known, then the best answer."""

    inputs = (Tensor("prompt", "STRING", required=True), Tensor("n", "INT32"))
    outputs = (Tensor("reward", "FP32"), Tensor("text", "STRING"))
    parameters = {"most": 8}

    async def load(self, deployment: PipelineDeployment) -> None:
        self.llm, self.most = deployment.llm(), deployment.parameters["most"]

    async def answer(self, request: Request, response: Response) -> None:
        count = min(self.most, int(request["n"][0]) if "n" in request else 4)
        prompt = request.text("prompt")

        async def judged(seed: int) -> tuple[float, Step]:
            steps = self.llm.text(prompt, max_tokens=60, temperature=0.8, top_p=0.95, seed=seed)
            (said,) = await steps.answers()
            verdict = await request.infer("reward", {"text": said.text})
            reward = float(verdict["score"][0])
            await response.send({"reward": reward})
            return reward, said

        found = await asyncio.gather(*(judged(seed) for seed in range(count)))
        _, best = max(found, key=lambda each: each[0])
        await response.send({"text": best.text}, final=True)
