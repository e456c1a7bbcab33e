"""An engine that answers in words: what it says is a function of the prompt's text."""

from __future__ import annotations

from collections.abc import Callable

from doubles.scripted import Script, ScriptedEngine
from doubles.scripted_tokens import reciting
from trtllm_bls.engines.base import ChunkStream
from trtllm_bls.text.tokenizer import Tokenizer
from trtllm_bls.types import EngineRequest


class SpeakingEngine(ScriptedEngine):
    """Says ``answer(prompt)``, and ends; ``prompts``: the texts that it was asked."""

    def __init__(
        self, tokenizer: Tokenizer, answer: Callable[[str], str], script: Script | None = None
    ) -> None:
        script = script or Script(vocab_size=tokenizer.model_vocab_size)
        super().__init__(reciting((), 0), script)
        self.prompts: list[str] = []
        self._tokenizer = tokenizer
        self._answer = answer

    def generate(self, request: EngineRequest) -> ChunkStream:
        prompt = self._tokenizer.decode(request.input_ids, skip_special_tokens=False)
        self.prompts.append(prompt)
        ids = self._tokenizer.encode(self._answer(prompt), add_special_tokens=False)
        end = self._tokenizer.end_ids[0]
        self._rule = reciting(tuple(ids), len(request.input_ids), then=end)
        return super().generate(request)
