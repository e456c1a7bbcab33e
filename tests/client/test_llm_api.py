"""TensorRT-LLM's LLM API as an engine, against a module with its public surface."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from doubles.scripted import Fault, Script, ScriptedEngine
from doubles.scripted_tokens import reciting, table
from tests.helpers.scripted_pairs import ids, read
from tests.helpers.waiting import eventually
from trtllm_bls.engines.llm_api import LlmApiEngine, open_llm
from trtllm_bls.errors import EngineError, EngineUnavailable, SetupError, Unsupported
from trtllm_bls.types import EngineRequest, FinishReason, Sampling, Wants

EOS = 2
ANSWER = (11, 12, 13, 14, 15)
RULE = reciting(ANSWER, 2, then=EOS)
ASK = EngineRequest(request_id="r", input_ids=(5, 6), max_tokens=9, end_id=EOS)
SURFACE = Path(__file__).parents[1] / "helpers" / "llm_api"


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that plays ``tensorrt_llm``."""
    monkeypatch.syspath_prepend(SURFACE)
    return importlib.import_module("tensorrt_llm")


@asynccontextmanager
async def opened(
    api: Any, monkeypatch: pytest.MonkeyPatch, rule: Any = RULE, script: Script | None = None
) -> AsyncIterator[tuple[LlmApiEngine, Any]]:
    """The engine, and the LLM that it was given."""
    monkeypatch.setattr(api, "ENGINE", ScriptedEngine(rule, script))
    engine = open_llm("llm", Path("model"), {"max_sequence_tokens": 64, "threads": 3}, lambda: 1000)
    await engine.capacity()
    yield engine, engine._llm
    await engine.close()


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(
    ("more", "tokens", "reason"),
    [
        ({}, ANSWER, FinishReason.END_ID),
        ({"max_tokens": 3}, ANSWER[:3], FinishReason.LENGTH),
        ({"end_id": 13}, ANSWER[:2], FinishReason.END_ID),
        ({"stop_sequences": ((13,),)}, ANSWER[:3], FinishReason.STOP),
        ({"stop_sequences": ((12, 13),)}, ANSWER[:3], FinishReason.STOP),
        ({"end_id": -1, "max_tokens": 6}, (*ANSWER, EOS), FinishReason.LENGTH),
        ({"num_return_sequences": 2}, ANSWER, FinishReason.END_ID),
        (
            {"num_return_sequences": 2, "sampling": Sampling(top_p=0.5, seed=1)},
            ANSWER,
            FinishReason.END_ID,
        ),
    ],
)
async def test_each_sequence_is_told_once(
    api: Any,
    monkeypatch: pytest.MonkeyPatch,
    more: dict[str, Any],
    tokens: tuple[int, ...],
    reason: FinishReason,
    streaming: bool,
) -> None:
    """In pieces or whole, without its end id, with its stop, and with why it ended."""
    async with opened(api, monkeypatch) as (engine, _):
        chunks = await read(engine, replace(ASK, streaming=streaming, **more))
        for index in range(more.get("num_return_sequences", 1)):
            mine = [chunk for chunk in chunks if chunk.sequence_index == index]
            assert tuple(ids(mine)) == tokens
            assert [chunk.final for chunk in mine] == [False] * (len(mine) - 1) + [True]
            assert mine[-1].finish_reason is reason
            assert streaming or len(mine) == 1


async def test_log_probs_are_those_of_the_tokens(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[0.1, 0.2, 0.3, 0.4]] * 4
    async with opened(api, monkeypatch, table(rows)) as (engine, _):
        wants = Wants(log_probs=True)
        asked = replace(ASK, input_ids=(0, 1), end_id=-1, max_tokens=3, wants=wants)
        chunks = await read(engine, asked)
        values = [value for chunk in chunks for value in chunk.log_probs or ()]
        assert values == pytest.approx([np.log(0.4)] * 3)
        assert chunks[-1].cum_log_prob == pytest.approx(3 * np.log(0.4))


async def test_what_is_sent_is_said_aloud(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, guides, bad words and ends, in the API's own words."""
    async with opened(api, monkeypatch) as (engine, llm):
        guide = {
            "guided_decoding_guide_type": np.array([b"json_schema"], np.object_),
            "guided_decoding_guide": np.array([b'{"type": "object"}'], np.object_),
        }
        asked = replace(ASK, bad_sequences=((7,),), extras=guide, stop_sequences=((99,),))
        await read(engine, asked)
        params = llm.requests[0]._params
        assert (params.top_k, params.end_id, params.bad_token_ids) == (1, EOS, [7])
        assert params.guided_decoding.json == '{"type": "object"}'
        assert (params.stop_token_ids, params.include_stop_str_in_output) == ([99], True)
        with pytest.raises(Unsupported, match=r"^lora_weights: "):
            engine.generate(replace(ASK, extras={"lora_weights": np.zeros(1)}))


async def test_a_parameter_that_this_release_lacks_is_refused_by_name(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters came one by one."""
    known = {name: None for name in api.SamplingParams.__dataclass_fields__ if name != "min_p"}
    older = type("SamplingParams", (), {"__dataclass_fields__": known})
    async with opened(api, monkeypatch) as (engine, _):
        monkeypatch.setattr(api, "SamplingParams", older)
        with pytest.raises(Unsupported, match=r"^min_p: the LLM API of this TensorRT-LLM"):
            engine.generate(replace(ASK, sampling=Sampling(top_p=0.9, min_p=0.1)))


async def test_leaving_aborts(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever leaves, and a stop that the engine does not know of."""
    script = Script(step_seconds=0.002)
    async with opened(api, monkeypatch, reciting(range(9, 999), 2), script) as (engine, llm):
        stream = engine.generate(replace(ASK, max_tokens=50))
        await stream.wait()
        await stream.aclose()
        await read(engine, replace(ASK, max_tokens=50, stop_sequences=((11, 12),)))
        assert [request.aborted for request in llm.requests] == [True, True]
        await eventually(lambda: not llm.engine.live)


async def test_errors_and_absence(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The API's own errors are the engine's; without TensorRT-LLM nothing loads."""
    async with opened(api, monkeypatch) as (engine, llm):
        llm.engine.fault = Fault(error=EngineError("out of memory"), after_tokens=1)
        with pytest.raises(EngineError, match="llm: out of memory"):
            await read(engine, ASK)
    with pytest.raises(EngineUnavailable):
        await engine.capacity()
    monkeypatch.setitem(__import__("sys").modules, "tensorrt_llm", None)
    with pytest.raises(SetupError, match="engine llm_api needs TensorRT-LLM"):
        open_llm("llm", Path("model"), {}, lambda: 1000)
