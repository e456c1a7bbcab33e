"""Which engine answers: one text, read in one place, by models and by ``serve``."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from doubles.scripted_tokens import reciting
from tests.helpers.fake_engine_server import ASK, Say, Triton
from tests.helpers.scripted_services import playing
from tests.unit.test_deployment import deployed, parameters
from trtllm_bls.bundled import DEMO, REPOSITORY
from trtllm_bls.engines.replicas import ReplicatedEngine
from trtllm_bls.engines.routing import RoutingEngine
from trtllm_bls.engines.triton_model import GrpcEngine
from trtllm_bls.engines.trtllm_service.service_engine import TrtllmServiceEngine
from trtllm_bls.errors import SettingsError, SetupError, Unsupported
from trtllm_bls.operate import preparation
from trtllm_bls.orchestrator.deployment import Deployment
from trtllm_bls.settings.command_options import ServeSettings
from trtllm_bls.settings.parameters import EngineKind, check, parse_engine
from trtllm_bls.types import SpeculationRequest

IMPORTED = """
import sys
import trtllm_bls.orchestrator.deployment
print(*sorted({"torch", "tensorrt_llm", "trtllm_bls.engines.embedded"} & set(sys.modules)))
"""
ELSEWHERE = "trtllm://gpu:50051"


@pytest.mark.parametrize(
    ("text", "kind", "addresses"),
    [
        ("triton:tensorrt_llm", EngineKind.TRITON, (("", "tensorrt_llm"),)),
        ("triton+grpc://a:1/m", EngineKind.TRITON_GRPC, (("a:1", "m"),)),
        ("triton+grpc://a:1/m,b:2", EngineKind.TRITON_GRPC, (("a:1", "m"), ("b:2", "m"))),
        ("triton+grpc://a:1/m, b:2/n", EngineKind.TRITON_GRPC, (("a:1", "m"), ("b:2", "n"))),
        ("trtllm://[::1]:1,b:2/", EngineKind.TRTLLM, (("[::1]:1", ""), ("b:2", ""))),
    ],
)
def test_a_choice_is_a_kind_and_addresses(text: str, kind: EngineKind, addresses: Any) -> None:
    assert (parse_engine(text).kind, parse_engine(text).addresses) == (kind, addresses)


@pytest.mark.parametrize(
    "text",
    [
        "tensorrt_llm",
        "triton:",
        "triton:a,b",
        "triton+grpc://a:1",
        "triton+grpc://a/m",
        "trtllm://a",
        "trtllm://a:port",
        "trtllm://a:65536",
        "trtllm://a:1/m",
        "trtllm://",
        "http://a:1",
    ],
)
def test_anything_else_is_refused_with_the_forms_there_are(text: str) -> None:
    with pytest.raises(SettingsError, match=r"use triton:MODEL, .* or trtllm://HOST:PORT"):
        check("tensorrt_llm_bls", "engine", text)
    with pytest.raises(SettingsError, match=r"--engine '.*': use triton:MODEL"):
        ServeSettings(engine=text, model=DEMO / "target")


def target_of(**more: Any) -> Any:
    engine = deployed(**more).engine
    while isinstance(engine, RoutingEngine):
        engine = engine.target
    return engine


def test_the_choice_becomes_an_engine() -> None:
    """The older parameters still name a model of this server."""
    assert target_of(tensorrt_llm_model_name="mine").name == "mine"
    named = target_of(engine=parse_engine("triton:other"))
    assert (type(named), named.name) == (GrpcEngine, "other")
    service = target_of(engine=parse_engine(ELSEWHERE), engine_max_sequence_tokens=500)
    assert isinstance(service, TrtllmServiceEngine)
    assert service._max_sequence_tokens == 500
    assert service._eos_id is not None
    both = target_of(engine=parse_engine("triton+grpc://a:1/m,b:2"), engine_resume=True)
    assert isinstance(both, ReplicatedEngine)
    assert both.resume


async def test_models_of_other_servers_stand_in_for_each_other() -> None:
    """Where one of them is down, the other answers."""
    async with Triton(Say((7, 8), final=True)) as one, Triton(Say((7, 8), final=True)) as two:
        choice = parse_engine(f"triton+grpc://{one.url}/tensorrt_llm,{two.url}")
        deployment = Deployment(parameters(engine=choice))
        for _ in range(2):
            await deployment.engine.capacity()
            chunks = [chunk async for chunk in deployment.engine.generate(ASK)]
            assert chunks[0].token_ids == (7, 8)
            await one.__aexit__()
        await deployment.close()


@pytest.mark.parametrize(
    "more", [{"tensorrt_llm_draft_model_name": "tensorrt_llm_draft"}, {"draft_source": "ngram"}]
)
async def test_a_service_gets_no_drafts(
    more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """It could verify none; the log says which of its own settings do the same."""
    deployment = Deployment(parameters(engine=parse_engine(ELSEWHERE), **more))
    engine: Any = deployment.engine
    assert engine._draft is None
    await deployment.close()
    assert "verifies no drafts" in caplog.text and "speculative_config" in caplog.text


@pytest.mark.parametrize("ignored", [False, True])
async def test_a_request_for_drafts_of_a_service_meets_what_the_deployment_says(
    ignored: bool,
) -> None:
    """A refusal that names the service's own settings, or plain decoding."""
    asked = replace(ASK, speculation=SpeculationRequest(num_draft_tokens=3))
    async with playing(reciting((7, 8), len(ASK.input_ids), then=2)) as (service, url):
        choice = parse_engine(f"trtllm://{url}")
        said = "ignore" if ignored else "refuse"
        deployment = Deployment(parameters(engine=choice, unverifiable_drafts=said))
        await deployment.engine.capacity()
        if ignored:
            chunks = [chunk async for chunk in deployment.engine.generate(asked)]
            assert [token for chunk in chunks for token in chunk.token_ids][:2] == [7, 8]
            assert len(service.requests) == 1
        else:
            with pytest.raises(Unsupported, match=r"num_draft_tokens: .*speculative_config"):
                deployment.engine.generate(asked)
        await deployment.close()


@pytest.mark.parametrize("key", ["tensorrt_llm_model_name", "tensorrt_llm_draft_model_name"])
def test_an_address_is_no_models_name(key: str) -> None:
    """It would be asked of this server, which has no such model."""
    with pytest.raises(SettingsError, match="an address is for `engine`"):
        check("tensorrt_llm_bls", key, ELSEWHERE)


def test_serve_runs_no_engine_where_there_is_one_elsewhere(tmp_path: Path) -> None:
    """What needs one is left out; the orchestrator is told of the other."""
    settings = ServeSettings(engine=ELSEWHERE, model=DEMO / "target")
    served = preparation.prepare_models(tmp_path, REPOSITORY, settings, with_draft=True)
    assert preparation.model_names(served) == (
        "postprocessing",
        "preprocessing",
        "tensorrt_llm_bls",
    )
    text = (served / "tensorrt_llm_bls" / "config.pbtxt").read_text()
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert config.parameters["engine"].string_value == ELSEWHERE


def test_serve_keeps_its_models_where_the_engine_is_one_of_them(tmp_path: Path) -> None:
    settings = ServeSettings(engine="triton:tensorrt_llm")
    served = preparation.prepare_models(tmp_path, REPOSITORY, settings, with_draft=False)
    assert {"ensemble", "tensorrt_llm"} <= set(preparation.model_names(served))


def test_an_engine_elsewhere_needs_a_tokenizer_and_nothing_more(tmp_path: Path) -> None:
    """The directory need not hold weights; no directory at all is refused, and so is a draft."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((DEMO / "target" / name).read_bytes())
    settings = ServeSettings(engine=ELSEWHERE, model=tmp_path)
    assert list(preparation.model_directories(settings).values()) == [str(tmp_path)]
    with pytest.raises(SetupError):
        preparation.model_directories(ServeSettings(model=tmp_path))
    with pytest.raises(SettingsError, match="needs --model, for its tokenizer"):
        ServeSettings(engine=ELSEWHERE)
    with pytest.raises(SettingsError, match="takes no --draft-model"):
        ServeSettings(engine=ELSEWHERE, model=tmp_path, draft_model=tmp_path)


def test_an_engines_runtime_is_imported_where_it_is_opened_alone() -> None:
    """A process of ``tensorrt_llm_bls`` loads neither torch nor TensorRT-LLM."""
    program = [sys.executable, "-c", IMPORTED]
    imported = subprocess.run(program, capture_output=True, text=True, timeout=120, check=True)
    assert imported.stdout.strip() == ""
