"""No engine ignores a field of ``Sampling`` in silence: it obeys or refuses it by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.embedded_steps import VOCAB, checkpoint
from tests.helpers.waiting import run_async
from tests.helpers.wire_tensors import LAST_FORM
from trtllm_bls.engines.embedded import EmbeddedEngine
from trtllm_bls.engines.embedded.sampling import TokenRules, choose
from trtllm_bls.engines.llm_api import LlmApiEngine
from trtllm_bls.engines.triton_model import request_inputs
from trtllm_bls.engines.trtllm_service.service_engine import service_request
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.settings.parameters import EngineParameters
from trtllm_bls.text.stopping import StoppingCriteria
from trtllm_bls.types import EngineCapacity, EngineRequest, Sampling
from trtllm_bls.wire.contract import ENGINE

CAPACITY = EngineCapacity(vocab_size=VOCAB)
# Values that no engine takes for its default. With them the request is sampled, and more than one
# beam is refused.
VALUES: dict[str, Any] = {
    "temperature": 0.7,
    "top_k": 3,
    "top_p": 0.8,
    "top_p_min": 0.1,
    "top_p_decay": 0.9,
    "top_p_reset_id": 5,
    "min_p": 0.2,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.4,
    "no_repeat_ngram_size": 2,
    "min_tokens": 2,
    "seed": 7,
    "beam_width": 2,
    "length_penalty": 0.5,
    "early_stopping": True,
    "beam_search_diversity_rate": 0.6,
}
OF_BEAMS = {"length_penalty", "early_stopping", "beam_search_diversity_rate"}
NAMES = [field.name for field in fields(Sampling)]


def request(sampling: Sampling) -> EngineRequest:
    return EngineRequest(
        request_id="r", input_ids=(1, 2), max_tokens=4, end_id=0, sampling=sampling
    )


def sampled(kind: type[Sampling] = Sampling, **more: Any) -> Sampling:
    """What nobody takes for greedy."""
    return kind(**{"top_k": 2, "top_p": 0.5} | more)


# --- what each engine makes of the fields: something that shows each one that it obeys ----------


def by_triton(sampling: Sampling) -> Any:
    """The inputs sent to a Triton model, by gRPC or by BLS."""
    made = request_inputs(request(sampling), LAST_FORM, VOCAB)
    return [(name, array.tolist()) for name, _, array in made]


def by_service(sampling: Sampling) -> Any:
    """The message sent to TrtllmService; the server's own end id is the request's."""
    return service_request(request(sampling), "r", 0, CAPACITY)[0]


def by_llm_api(sampling: Sampling) -> Any:
    """The parameters given to the LLM API."""
    given: list[Any] = []

    def generate_async(prompt: Any, *, sampling_params: Any, streaming: bool) -> Any:
        given.append(sampling_params)
        raise ValueError("enough")

    api, llm = SimpleNamespace(SamplingParams=dict), SimpleNamespace(generate_async=generate_async)

    async def run() -> None:
        engine = LlmApiEngine("llm", api, llm, CAPACITY)
        stream = engine.generate(request(sampling))
        with pytest.raises(InvalidRequest, match="enough"):
            await stream.wait()

    run_async(run())
    return given


def by_embedded(sampling: Sampling) -> Any:
    """The fields that are looked at while tokens are chosen, of those that are set."""

    async def run() -> None:
        with EmbeddedEngine(
            EngineParameters(model_dir=checkpoint(), max_batch=1, threads=1)
        ) as engine:
            assert [chunk async for chunk in engine.generate(request(sampling))]

    run_async(run())
    with recording() as (seen, kind):
        asked = kind(**vars(sampling))
        rules = TokenRules(request(asked), 0, VOCAB)
        for token in (5, 6):
            choose(torch.arange(VOCAB, dtype=torch.float32)[None], rules.rows(), log_probs=False)
            rules.push(token)
        StoppingCriteria(4, min_tokens=asked.min_tokens).feed((5,))
    return {name for name in seen if vars(sampling).get(name) is not None}


@contextmanager
def recording() -> Iterator[tuple[set[str], type[Sampling]]]:
    """A ``Sampling`` that notes which of its fields are read."""
    seen: set[str] = set()

    class Recording(Sampling):
        def __getattribute__(self, name: str) -> Any:
            seen.add(name)
            return super().__getattribute__(name)

    yield seen, Recording


ENGINES = [by_triton, by_service, by_llm_api, by_embedded]


def obeys_or_refuses(engine: Callable[[Sampling], Any], name: str, asked: Sampling) -> None:
    """Raises ``AssertionError`` where ``engine`` does neither with the field ``name``."""
    tensors = {tensor.name for tensor in ENGINE.inputs if tensor.key == name}
    others = {key: value for key, value in vars(asked).items() if key != name}
    without = type(asked)(**others)
    try:
        made = engine(asked)
    except InvalidRequest as error:
        assert error.field in {name, *tensors}, f"{name} is refused as {error.field}"
        return
    if engine is by_embedded and name in OF_BEAMS:
        return  # they mean nothing without beam search, which is refused
    assert made != engine(without), f"{name} is ignored"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_every_field_is_obeyed_or_refused_by_name(
    engine: Callable[[Sampling], Any], name: str
) -> None:
    """A field that is new needs its value in ``VALUES``, and each engine's word on it."""
    more = {"top_p_decay": 0.9} if name in ("top_p_min", "top_p_reset_id") else {}
    obeys_or_refuses(engine, name, sampled(**more | {name: VALUES[name]}))


@dataclass(frozen=True, kw_only=True)
class Wider(Sampling):
    """As it would be with a field that no engine has heard of."""

    imaginary: float | None = None


@pytest.mark.parametrize("engine", ENGINES)
def test_a_field_that_no_engine_knows_is_refused_by_name(engine: Callable[[Sampling], Any]) -> None:
    """Or else the test above would fail with it."""
    with pytest.raises(InvalidRequest, match=r"^imaginary: "):
        engine(sampled(Wider, imaginary=0.1))
