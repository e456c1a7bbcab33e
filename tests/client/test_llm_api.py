"""TensorRT-LLM's LLM API as an engine, against a module with its public surface."""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from doubles.scripted import Fault, Script, ScriptedEngine
from doubles.scripted_tokens import reciting, table
from tests.helpers.packages import needs
from tests.helpers.scripted_pairs import ids, read
from tests.helpers.server_settings import DEMO
from tests.helpers.waiting import eventually
from trtllm_bls.cli import main
from trtllm_bls.engines.llm_api import LlmApiEngine, open_llm
from trtllm_bls.errors import (
    EngineError,
    EngineStalled,
    EngineUnavailable,
    InvalidRequest,
    SettingsError,
    SetupError,
    Unsupported,
)
from trtllm_bls.settings.parameters import EngineParameters
from trtllm_bls.types import Adapter, EngineRequest, FinishReason, Guide, Sampling, Wants
from trtllm_bls.wire.request_fields import TYPED_INPUTS, typed_fields

EOS = 2
ANSWER = (11, 12, 13, 14, 15)
RULE = reciting(ANSWER, 2, then=EOS)
ASK = EngineRequest(request_id="r", input_ids=(5, 6), max_tokens=9, end_id=EOS)
SURFACE = Path(__file__).parents[1] / "helpers" / "llm_api"


@pytest.fixture(params=["1.0.0", "1.2.1", "1.4.0rc1"])
def api(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that plays ``tensorrt_llm``, in each release."""
    monkeypatch.syspath_prepend(SURFACE)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    module = importlib.import_module("tensorrt_llm")
    module.use(request.param)
    return module


def parameters(**more: Any) -> EngineParameters:
    return EngineParameters(model_dir=Path("model"), engine="llm_api", **more)


@asynccontextmanager
async def opened(
    api: Any,
    monkeypatch: pytest.MonkeyPatch,
    rule: Any = RULE,
    script: Script | None = None,
    more: dict[str, Any] | None = None,
) -> AsyncIterator[tuple[LlmApiEngine, Any]]:
    """The engine, and the LLM that it was given."""
    monkeypatch.setattr(api, "ENGINE", ScriptedEngine(rule, script))
    engine = open_llm("llm", parameters(max_sequence_tokens=64, **more or {}), lambda: 1000)
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


async def test_a_sequence_of_whose_end_nothing_is_told_ends_with_the_last_one(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine cuts both at its own longest sequence, and says so of the last one alone."""
    asked = replace(ASK, num_return_sequences=2, sampling=Sampling(top_p=0.5, seed=1))
    async with opened(api, monkeypatch, script=Script(max_sequence_tokens=5)) as (engine, _):
        chunks = await read(engine, asked)
    for index, reason in enumerate((None, FinishReason.LENGTH)):
        mine = [chunk for chunk in chunks if chunk.sequence_index == index]
        assert (tuple(ids(mine)), mine[-1].final) == (ANSWER[:3], True)
        assert mine[-1].finish_reason is reason


@pytest.mark.parametrize("streaming", [True, False])
async def test_the_first_chunk_tells_what_was_cached(
    api: Any, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    script = Script(cached_tokens=1)
    async with opened(api, monkeypatch, script=script) as (engine, _):
        asked = replace(ASK, streaming=streaming, num_return_sequences=2)
        for index in range(2):
            chunks = await read(engine, asked)
            told = [each.cached_tokens for each in chunks if each.sequence_index == index]
            assert told == [1] + [None] * (len(told) - 1)


async def test_log_probs_are_those_of_the_tokens(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[0.1, 0.2, 0.3, 0.4]] * 4
    async with opened(api, monkeypatch, table(rows)) as (engine, _):
        wants = Wants(log_probs=True)
        asked = replace(ASK, input_ids=(0, 1), end_id=-1, max_tokens=3, wants=wants)
        chunks = await read(engine, asked)
        values = [value for chunk in chunks for value in chunk.log_probs or ()]
        assert values == pytest.approx([np.log(0.4)] * 3)
        assert chunks[-1].cum_log_prob == pytest.approx(3 * np.log(0.4))


async def test_the_likeliest_ids_come_with_each_token(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as asked for, also where the chosen one is none of them. 1.0 knows the chosen one."""
    async with opened(api, monkeypatch, table([[0.1, 0.2, 0.3, 0.4]] * 4)) as (engine, _):
        asked = replace(ASK, input_ids=(0, 1), end_id=-1, max_tokens=8)
        asked = replace(asked, sampling=Sampling(top_p=1.0, seed=5))
        asked = replace(asked, wants=Wants(log_probs=True, top_log_probs=2))
        if api.__version__ == "1.0.0":
            with pytest.raises(Unsupported, match=r"^return_top_log_probs: 2; this TensorRT-LLM"):
                await read(engine, asked)
            return
        chunks = await read(engine, asked)
        best = [each for chunk in chunks for each in chunk.top_log_probs or ()]
        assert [[token for token, _ in each] for each in best] == [[3, 2]] * len(ids(chunks))
        assert [value for _, value in best[0]] == pytest.approx([np.log(0.4), np.log(0.3)])
        assert not set(ids(chunks)) <= {2, 3}


async def test_what_is_sent_is_said_aloud(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, guides, bad words and ends, in the API's own words."""
    async with opened(api, monkeypatch) as (engine, llm):
        guide = Guide("json_schema", '{"type": "object"}')
        asked = replace(ASK, bad_sequences=((7,),), guide=guide, stop_sequences=((99,),))
        await read(engine, asked)
        params = llm.requests[0]._params
        assert (params.top_k, params.end_id, params.bad_token_ids) == (1, EOS, [7])
        assert params.guided_decoding.json == '{"type": "object"}'
        assert (params.stop_token_ids, params.include_stop_str_in_output) == ([99], True)
        with pytest.raises(Unsupported, match=r"^lora_weights: "):
            engine.generate(replace(ASK, adapter=Adapter(weights=np.zeros(1))))


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
        await eventually(lambda: all(request.aborted for request in llm.requests))
        assert len(llm.requests) == 2 and len(llm.threads) == 1
        await eventually(lambda: not llm.engine.live)


async def test_a_request_that_fails_while_the_engine_closes_keeps_its_own_error(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be aborted then, and nothing has to be."""
    begun, goes_on = threading.Event(), threading.Event()

    def fails(*_: object, **__: object) -> Any:
        begun.set()
        assert goes_on.wait(30)
        raise ValueError("too odd")

    async with opened(api, monkeypatch) as (engine, llm):
        monkeypatch.setattr(llm, "generate_async", fails)
        asked = asyncio.create_task(engine.generate(ASK).wait())
        assert await asyncio.to_thread(begun.wait, 30)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        goes_on.set()
        with pytest.raises(InvalidRequest, match="too odd"):
            await asked
        await closing


async def test_what_a_request_brings_is_passed_on_or_refused_by_name(
    api: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Adapters, salts, priorities, retention and trace contexts, as far as the release has them."""
    (tmp_path / "sql").mkdir()
    file = tmp_path / "model.yaml"
    file.write_text(f"triton_config: {{lora_adapters: {{sql: {tmp_path}/sql}}}}\n")
    async with opened(api, monkeypatch, more={"model_yaml": file}) as (engine, llm):

        async def told(trace: str | None = None, **extras: Any) -> dict[str, Any]:
            arrays = {name: np.array([value]) for name, value in extras.items()}
            typed = typed_fields(arrays)
            others = {name: arrays[name] for name in arrays.keys() - TYPED_INPUTS}
            await read(engine, replace(ASK, **typed, extras=others, traceparent=trace))
            return dict(llm.options[-1])

        by_name = (await told(lora_name=b"sql"))["lora_request"]
        assert (by_name.lora_int_id, by_name.lora_path) == (1, f"{tmp_path}/sql")
        upstreams = {"lora_name": b"x", "lora_path": str(tmp_path).encode(), "lora_task_id": 7}
        assert (await told(**upstreams))["lora_request"].lora_int_id == 7
        kept = {f"retention_token_range_{n}": v for n, v in [("starts", 0), ("ends", 4)]}
        kept |= {"retention_token_range_priorities": 80, "retention_decode_priority": 20}
        retention = (await told(**kept))["retention"]
        assert (retention.ranges[0].token_end, retention.ranges[0].priority) == (4, 80)
        assert retention.decode == (20, None)
        retention = (await told(retention_decode_duration_ms=50))["retention"]
        assert retention.decode == (35, timedelta(milliseconds=50))
        for wrong, field in [
            ({"lora_name": b"other"}, "lora_name"),
            ({"lora_path": b"/"}, "lora_name"),
            ({"retention_token_range_starts": 0}, "retention_token_range_ends"),
            ({"logits_post_processor_name": b"x"}, "logits_post_processor_name"),
        ]:
            with pytest.raises(InvalidRequest, match=rf"^{field}: "):
                await told(**wrong)
        with pytest.raises(InvalidRequest, match=r"^request: lora_path .* does not exist"):
            await told(**upstreams | {"lora_path": b"/none/such"})
        release = api.__version__
        if release == "1.0.0":
            with pytest.raises(Unsupported, match=r"^cache_salt: "):
                await told(cache_salt=b"a")
            assert "cache_salt" not in await told(cache_salt=b"key:1")
            assert "trace_headers" not in await told("00-1-2-01")
        else:
            assert (await told(cache_salt=b"a"))["cache_salt"] == "a"
            assert (await told("00-1-2-01"))["trace_headers"] == {"traceparent": "00-1-2-01"}
        if release == "1.4.0rc1":
            assert (await told(priority=np.float32(0.75)))["priority"] == 0.75
        else:
            with pytest.raises(Unsupported, match=r"^priority: "):
                await told(priority=np.float32(0.75))


@needs("torch")
async def test_bias_reaches_the_engine(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[0.1, 0.2, 0.3, 0.4]] * 4
    async with opened(api, monkeypatch, table(rows)) as (engine, _):
        asked = replace(ASK, input_ids=(0, 1), end_id=-1, max_tokens=2, embedding_bias=((1, 9.0),))
        assert ids(await read(engine, asked)) == [1, 1]


async def test_figures_of_the_engines_own_speculation(
    api: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last chunk tells what was drafted and accepted, and all figures where they are wanted."""
    file = tmp_path / "model.yaml"
    file.write_text("speculative_config: {decoding_type: NGram, max_draft_len: 4}\n")
    async with opened(api, monkeypatch, more={"model_yaml": file}) as (engine, llm):
        assert "speculative_config" in (await engine.capacity()).speculates
        last = (await read(engine, ASK))[-1]
        assert last.speculation is not None and last.metrics is None
        assert (last.speculation.drafted, last.speculation.accepted) == (6, 3)
        last = (await read(engine, replace(ASK, wants=Wants(perf_metrics=True))))[-1]
        assert last.metrics is not None and last.metrics.kv_cache_reused_blocks == 1
        assert last.metrics.total_draft_tokens == 6 and (last.metrics.arrival_time_ns or 0) > 0
        name = np.array([b"all"], np.object_)
        with pytest.raises(Unsupported, match=r"^logits_post_processor_name: .* other requests"):
            engine.generate(replace(ASK, extras={"logits_post_processor_name": name}))
    async with opened(api, monkeypatch) as (engine, llm):
        last = (await read(engine, ASK))[-1]
        assert last.speculation is None and not llm.requests[0]._params.return_perf_metrics


async def test_a_file_with_a_backend_for_guides_is_judged_by_the_llm_api(
    api: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It refuses one beside speculation of one model; without one, such a file loads."""
    file = tmp_path / "model.yaml"
    file.write_text("speculative_config: {decoding_type: MTP}\n")
    async with opened(api, monkeypatch, more={"model_yaml": file}) as (engine, _):
        assert (await engine.capacity()).speculates
    file.write_text("speculative_config: {decoding_type: MTP}\nguided_decoding_backend: xgrammar\n")
    with pytest.raises(SetupError, match="not supported for speculative mode MTP"):
        async with opened(api, monkeypatch, more={"model_yaml": file}):
            pass


@pytest.mark.parametrize("sampler", ["", "auto", "TRTLLMSampler"])
async def test_a_release_whose_sampler_ignores_fields_is_warned_about(
    api: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    sampler: str,
) -> None:
    """At load, with the argument that chooses the other sampler; not where that is chosen."""
    file = tmp_path / "model.yaml"
    key = "sampler_type"
    value = sampler
    if api.__version__ == "1.0.0":
        key = "enable_trtllm_sampler"
        value = str(sampler == "TRTLLMSampler")
    file.write_text(f"{key}: {value}\n" if sampler else "")
    async with opened(api, monkeypatch, more={"model_yaml": file}):
        pass
    is_old = api.__version__ in ("1.0.0", "1.2.1")
    is_warned = f"TensorRT-LLM {api.__version__} may ignore penalties" in caplog.text
    assert is_warned is (is_old and sampler != "TRTLLMSampler")
    assert ("sampler_type: TRTLLMSampler" in caplog.text) is is_warned


async def test_model_yaml_is_read_as_upstreams(
    api: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The file comes before our parameters; what the release does not know is refused by name."""
    file = tmp_path / "model.yaml"
    text = (
        "model: /models/llama\ntensor_parallel_size: 2\nkv_cache_config: {dtype: fp8}\n"
        "logits_post_processors: {all: 'builtins:print'}\n"
        "triton_config: {max_batch_size: 0, decoupled: true}\n"
    )
    file.write_text(text)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("PMIX_MCA_gds", "hash")
    several = {"gpu_device_ids": "0,1;2,3", "instance": 1, "instances": 2}
    async with opened(api, monkeypatch, more={"model_yaml": file, **several}) as (engine, llm):
        assert llm.args == {
            "model": "/models/llama",
            "tensor_parallel_size": 2,
            "kv_cache_config": {"dtype": "fp8"},
            "max_batch_size": 32,
            "max_seq_len": 64,
            "gpus_per_node": 2,
        }
        assert os.environ["CUDA_VISIBLE_DEVICES"] == os.environ["TRTLLM_VISIBLE_DEVICES"] == "2,3"
        assert "OMPI_COMM_WORLD_RANK" not in os.environ and "PMIX_MCA_gds" in os.environ
        assert os.environ["TRTLLM_NO_USAGE_STATS"] == "1"
        name = np.array([b"all"], np.object_)
        await read(engine, replace(ASK, extras={"logits_post_processor_name": name}))
        assert llm.requests[-1]._params.logits_processor is print
        with pytest.raises(
            Unsupported, match=r"^guided_decoding_guide_type: .*model\.yaml sets no guided"
        ):
            await read(engine, replace(ASK, guide=Guide("json")))
    for wrong, words in [
        ("tensor_parallel: 2", r"TorchLlmArgs.*tensor_parallel.*Extra inputs"),
        ("[1]", "the file is .*; write a mapping"),
        ("a: {", "cannot be read"),
        ("logits_post_processors: {a: none}", "write module.path:attribute"),
        ("logits_post_processors: {a: 'none.such:x'}", "cannot be loaded: No module"),
        ("logits_post_processors: {a: 'os:sep'}", "is not callable"),
    ]:
        file.write_text(wrong)
        with pytest.raises(SetupError, match=words):
            open_llm("llm", parameters(model_yaml=file), lambda: 1000)
    with pytest.raises(SettingsError, match="'0': 2 instances need a list each, such as 0;1"):
        open_llm("llm", parameters(gpu_device_ids="0", instances=2), lambda: 1000)


@needs("torch")
@pytest.mark.parametrize("dies", [False, True])
def test_a_report_of_what_the_engine_does(
    api: Any, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """By the command, over each release; a worker that dies is told and is the exit code."""
    if dies:
        dead = ScriptedEngine(reciting(range(99), 13), Script(vocab_size=4096))
        dead.fault = Fault(error=EngineStalled("the worker died"), after_requests=4)
        monkeypatch.setattr(api, "ENGINE", dead)
    words = ["conformance", "--engine", "llm_api", "--model", str(DEMO / "target")]
    result = CliRunner().invoke(main, words)
    lines = [line.split(" | ", 1) for line in result.output.splitlines() if line.startswith("| ")]
    told = {name.removeprefix("| "): text.removesuffix(" |") for name, text in lines[2:]}
    assert result.exit_code == int(dies), result.output
    if dies:
        assert told["a stream"] == told["in one piece"] == "ok"
        assert told["end_id"] == "FAILED: EngineUnavailable: llm_api: the worker died"
        return
    assert len(told) == 18 and told.pop("figures").startswith(
        "12 of 13 prompt tokens cached, 0 of 0"
    )
    refused = {name for name, text in told.items() if text.startswith("refused: ")}
    assert refused == ({"alternatives", "cache_salt"} if api.__version__ == "1.0.0" else set())
    assert {told[name] for name in told.keys() - refused} == {"ok"}


def _not_implemented() -> None:
    raise NotImplementedError("beam search with drafts")


async def test_errors_become_statuses(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the API refuses is the caller's; a worker that is dead makes the engine unavailable."""
    async with opened(api, monkeypatch) as (engine, llm):
        llm.args["max_num_tokens"] = 1
        with pytest.raises(InvalidRequest, match=r"^request: The prompt length \(2\)"):
            await read(engine, ASK)
        del llm.args["max_num_tokens"]
        llm.engine.fault = Fault(error=EngineStalled("the worker died"), after_tokens=1)
        with pytest.raises(EngineUnavailable, match="llm: the worker died"):
            await read(engine, ASK)
        llm.engine.fault = None
        with monkeypatch.context() as patched:
            patched.setattr(llm, "_check_thread", _not_implemented)
            with pytest.raises(InvalidRequest, match=r"^request: beam search with drafts"):
                await read(engine, ASK)
        llm.is_shut_down = True
        with pytest.raises(EngineUnavailable, match="llm: LLM is shutting down"):
            await read(engine, ASK)


async def test_errors_and_absence(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The API's own errors are the engine's; without TensorRT-LLM nothing loads."""
    async with opened(api, monkeypatch) as (engine, llm):
        llm.engine.fault = Fault(error=EngineError("out of memory"), after_tokens=1)
        with pytest.raises(EngineError, match=r"^out of memory"):
            await read(engine, ASK)
    with pytest.raises(EngineUnavailable):
        await engine.capacity()
    monkeypatch.setitem(__import__("sys").modules, "tensorrt_llm", None)
    with pytest.raises(SetupError, match="engine llm_api needs TensorRT-LLM"):
        open_llm("llm", parameters(), lambda: 1000)
