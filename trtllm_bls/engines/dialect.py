"""What one deployed ``tensorrt_llm`` model declares: versions differ, so we look instead of guess.

Also the two things every caller over Triton needs: which outputs to ask for, and chunks in the
right order of finality from responses that only mark the end of the whole request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from trtllm_bls.contract import ENGINE
from trtllm_bls.errors import EngineError
from trtllm_bls.messages import Array, EngineChunk, EngineLimits, EngineMetrics, EngineRequest
from trtllm_bls.wire.engine import ChunkReader

# Older spellings are left out of the assumed form: two names of one option are never both sent.
_LAST_FORM = frozenset(t.name for t in ENGINE.inputs) - {"min_length", "random_seed"}
_PERF = tuple(field.name for field in fields(EngineMetrics))


@dataclass(frozen=True)
class Dialect:
    """The inputs, outputs and parameters of the engine in use; by default the last form's."""

    inputs: frozenset[str] = _LAST_FORM
    outputs: frozenset[str] = field(default_factory=lambda: frozenset(ENGINE.output_named))
    parameters: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Any) -> Dialect:
        """From Triton's ``ModelConfig`` message. Raises ``EngineError`` if not decoupled."""
        if not config.model_transaction_policy.decoupled:
            raise EngineError(
                f"model {config.name} is not decoupled; set model_transaction_policy.decoupled "
                "to true in its config.pbtxt"
            )
        parameters = {key: value.string_value for key, value in config.parameters.items()}
        inputs = frozenset(tensor.name for tensor in config.input)
        if _is_true(parameters.get("exclude_input_in_output")):
            inputs -= {"exclude_input_in_output"}  # nothing to ask for: it is so by default
        return cls(
            inputs=inputs,
            outputs=frozenset(tensor.name for tensor in config.output),
            parameters=parameters,
        )

    @property
    def limits(self) -> EngineLimits:
        """What the parameters tell of the engine's limits."""
        return EngineLimits(
            max_sequence_tokens=self._number("max_sequence_tokens") or None,
            max_draft_tokens=self._number("max_draft_len"),  # 0: it takes none
        )

    def prompt_included(self, request: EngineRequest) -> bool:
        """Whether a non-streaming answer to this request starts with the prompt."""
        if request.streaming or "exclude_input_in_output" in self.inputs:
            return False  # we always ask for exclusion where it can be asked for
        return not _is_true(self.parameters.get("exclude_input_in_output"))

    def outputs_for(self, request: EngineRequest) -> list[str]:
        """The outputs to ask for; nothing is sent that nobody reads."""
        wants = request.wants
        names = ["output_ids", "sequence_length"]
        if request.num_return_sequences > 1:
            names.append("sequence_index")
        if wants.log_probs:
            names += ["output_log_probs", "cum_log_probs"]
        names += ["context_logits"] if wants.context_logits else []
        names += ["generation_logits"] if wants.generation_logits else []
        names += _PERF if wants.perf_metrics else ()
        return [name for name in names if name in self.outputs]

    def _number(self, key: str) -> int | None:
        value = self.parameters.get(key, "")
        return int(value) if value.isdigit() else None


def _is_true(value: str | None) -> bool:
    return (value or "").lower() in ("true", "1")


class Responses:
    """The responses of one request, as chunks."""

    def __init__(self, request: EngineRequest, dialect: Dialect) -> None:
        self._reader = ChunkReader(request, dialect.prompt_included(request))
        self._unfinished = set(range(request.num_return_sequences))
        self._single = request.num_return_sequences == 1
        self._metrics: dict[int, EngineMetrics | None] = {}  # of sequences not known to have ended

    def chunks(self, arrays: Mapping[str, Array], last: bool) -> Iterator[EngineChunk]:
        """The chunks of one response; with ``last``, what is still missing to end everything."""
        if arrays:
            chunk = self._reader.chunk(arrays, final=last and self._single)
            if chunk.final:
                self._unfinished.discard(chunk.sequence_index)
            self._metrics[chunk.sequence_index] = chunk.metrics
            yield chunk
        if last:
            yield from self.rest()

    def rest(self) -> Iterator[EngineChunk]:
        """A closing chunk for each sequence that has had none, once the request has ended."""
        for index in sorted(self._unfinished):
            metrics = self._metrics.get(index)
            yield EngineChunk(token_ids=(), sequence_index=index, final=True, metrics=metrics)
        self._unfinished.clear()
