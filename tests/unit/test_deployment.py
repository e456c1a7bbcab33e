"""From a deployment's parameters to its engines and its orchestrator."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from doubles.scripted import Fault
from doubles.scripted_tokens import hashed
from tests.helpers.fake_engine_server import Triton
from tests.helpers.fake_metrics import Registry
from tests.helpers.scripted_services import playing
from tests.helpers.scripted_text import Collected, padded_model, tokenizer
from tests.helpers.small_tokenizers import directory
from tests.helpers.waiting import eventually, run_async
from trtllm_bls import __version__
from trtllm_bls.errors import EngineUnavailable, SettingsError, SetupError
from trtllm_bls.orchestrator import deployment
from trtllm_bls.orchestrator.deployment import Deployment
from trtllm_bls.orchestrator.status import common_problem
from trtllm_bls.settings.parameters import BlsParameters, parse_engine
from trtllm_bls.speculative.options import DraftSource, SpeculationOptions
from trtllm_bls.types import TextChunk, TextRequest


def parameters(**more: Any) -> BlsParameters:
    values: dict[str, Any] = {
        "tokenizer_dir": Path(directory("byte-level")),
        "engine_transport": "grpc",
        "engine_url": "127.0.0.1:1",
        "engine_stall_seconds": 1,
        "request_timeout_seconds": 0,
        "max_timeout_seconds": None,
        "overlap_drafts": False,
        "max_streams": 4,
        "max_running_requests": 256,
    }
    return BlsParameters(**(values | more))


def deployed(**more: Any) -> Deployment:
    """A deployment that has been closed again; what it was made of can be looked at."""

    async def make() -> Deployment:
        made = Deployment(parameters(**more), Registry())
        await made.close()
        return made

    return run_async(make())


@pytest.mark.parametrize(
    ("default", "longest", "limit"),
    [(0, None, None), (0, 5, 5), (9, None, 9), (9, 5, 5), (4, 5, 4)],
)
def test_the_longest_time_bounds_a_request_that_names_none(
    default: float, longest: float | None, limit: float | None
) -> None:
    made = deployed(request_timeout_seconds=default, max_timeout_seconds=longest)
    assert made.defaults.timeout_s == limit


def test_engines_are_sent_a_bias_for_each_of_the_models_logits() -> None:
    """Which may be more than the tokenizer has tokens."""
    made: Any = deployed(tokenizer_dir=padded_model()).engine
    assert made.target.vocab_size == tokenizer().vocab_size + 64


async def test_a_service_is_asked_how_it_is_and_a_triton_model_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By whoever tells of readiness; both addresses must be ill, where there are two."""
    # An answer is believed for a second, which this test would wait for three times.
    monkeypatch.setattr("trtllm_bls.engines.trtllm_service.service_engine._HEALTH_SECONDS", 0.02)

    async def problem_of(deployment: Deployment, ill: bool) -> str | None:
        async def known() -> bool:
            return (common_problem(await deployment.engine_problems()) is not None) is ill

        await eventually(known)
        return common_problem(await deployment.engine_problems())

    async with playing(hashed(10)) as (one, first), playing(hashed(10)) as (two, second):
        choice = parse_engine(f"trtllm://{first},{second}")
        made = Deployment(parameters(engine=choice), Registry())
        await problem_of(made, ill=False)
        ill = replace(one.behaviour, health="RuntimeError: dead")
        one.behaviour = two.behaviour = ill
        told = await problem_of(made, ill=True)
        assert told and first in told and told.endswith("not healthy: RuntimeError: dead")
        one.behaviour = replace(ill, health="OK")
        await problem_of(made, ill=False)
        names = f"trtllm://{first}", f"trtllm://{second}"

        async def one_is_up() -> bool:
            problems = await made.engine_problems()
            assert tuple(problems) == names
            return not problems[names[0]] and "RuntimeError: dead" in problems[names[1]]

        await eventually(one_is_up)
        await made.close()
    made = Deployment(parameters(engine_url="127.0.0.1:1"), Registry())
    assert await made.engine_problems() == {}
    await made.close()


async def test_an_engine_elsewhere_shows_that_it_goes_on() -> None:
    """Though every answer is to be in one piece and none has ended: they are read as they grow."""
    asked = TextRequest(request_id="r", text="The quick", max_tokens=100)
    async with playing(hashed(10)) as (service, url):
        choice = parse_engine(f"trtllm://{url}")
        made = Deployment(parameters(engine=choice), Registry())
        service.engine.fault = Fault(error=None, after_tokens=5)
        sinks = [Collected() for _ in range(6)]
        running = [
            asyncio.create_task(made.orchestrator.run(replace(asked, request_id=str(n)), sink))
            for n, sink in enumerate(sinks)
        ]
        await eventually(lambda: made.load().tokens == 6 * 5)
        assert sum(message.streaming for message in service.requests) == 6
        assert not any(sink.chunks for sink in sinks)
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        assert made.load().tokens == 6 * 5
        await made.close()
    made = Deployment(parameters(), Registry())
    assert made.orchestrator._defaults.engine_shows_progress  # an engine here tells its steps
    await made.close()


async def test_the_first_line_of_the_log_is_not_left_to_the_first_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Triton's logger takes about 40 ms for its first line, which a first token would wait for."""
    caplog.set_level("INFO")
    made = Deployment(parameters(max_running_requests=3, max_queued_requests=5), Registry())
    made.start(asyncio.get_running_loop())
    await made.close()
    limits = "this process runs at most 3 requests, and 5 more wait"
    own = [record.message for record in caplog.records if record.name == deployment.__name__]
    assert own == [f"trtllm-bls {__version__}: {limits}"]


@pytest.mark.parametrize("source", ["off", "model", "ngram", "mixed"])
def test_the_source_of_drafts_is_a_default_unless_it_is_off(source: str) -> None:
    """And every other parameter of speculation arrives where it counts."""
    made: Any = deployed(draft_source=source, num_draft_tokens=4, overlap_drafts=None).engine
    assert made._by_default == (source != "off")
    assert made._options == SpeculationOptions(
        draft_source=DraftSource("model" if source == "off" else source),
        num_draft_tokens=4,
        max_draft_tokens=32,
        draft_deadline_s=0.5,
        overlap=None,
    )


def test_what_is_silent_about_speculation_is_as_the_table_says() -> None:
    """A process without a configuration has the defaults of the parameters."""
    options = SpeculationOptions()
    assert options.max_draft_tokens == BlsParameters.max_draft_len
    assert options.draft_deadline_s == BlsParameters.draft_deadline_seconds


class Certificates:
    """Of a server at 127.0.0.1 and of a client, by one authority; files as parameters name them."""

    def __init__(self, directory: Path) -> None:
        authority = trustme.CA()
        self.ca = directory / "ca.pem"
        authority.cert_pem.write_to_path(str(self.ca))
        client = authority.issue_cert("client")
        self.cert, self.key = directory / "client.pem", directory / "client.key"
        client.cert_chain_pems[0].write_to_path(str(self.cert))
        client.private_key_pem.write_to_path(str(self.key))
        server = authority.issue_cert("127.0.0.1")
        self.server = grpc.ssl_server_credentials(
            [(server.private_key_pem.bytes(), server.cert_chain_pems[0].bytes())],
            root_certificates=authority.cert_pem.bytes(),
            require_client_auth=True,
        )


def tls_files(**files: Path) -> dict[str, Path]:
    """As parameters: ``ca`` is ``engine_tls_ca``."""
    return {f"engine_tls_{name}": path for name, path in files.items()}


async def test_an_engine_behind_tls_is_reached_by_who_shows_its_certificate(tmp_path: Path) -> None:
    """And the server's has to be of the authority that the parameter names."""
    known = Certificates(tmp_path)
    (tmp_path / "others").mkdir()
    other = Certificates(tmp_path / "others")

    async def ask(url: str, **files: Path) -> int | None:
        made = Deployment(parameters(engine_url=url, **files), Registry())
        try:
            return (await made.engine.capacity()).max_sequence_tokens
        finally:
            await made.close()

    triton = Triton()
    triton.credentials = known.server
    async with triton:
        mine = tls_files(ca=known.ca, cert=known.cert, key=known.key)
        assert await ask(triton.url, **mine) == 64
        for wrong in (
            {},
            tls_files(ca=known.ca),
            mine | tls_files(ca=other.ca),
            mine | tls_files(cert=other.cert, key=other.key),
        ):
            with pytest.raises(EngineUnavailable):
                await ask(triton.url, **wrong)


def test_tls_that_is_half_configured_is_refused_at_load(tmp_path: Path) -> None:
    """Each time with the parameter's name; nothing is sent in the clear instead."""
    files = Certificates(tmp_path)
    for named, said in (
        ({"cert": files.cert, "key": files.key}, "engine_tls_ca is empty"),
        ({"ca": files.ca, "cert": files.cert}, "engine_tls_key: set both"),
        ({"ca": files.key}, "engine_tls_.*client.key"),
        ({"ca": files.ca, "cert": files.ca, "key": files.key}, "not usable"),
    ):
        with pytest.raises(SettingsError, match=said):
            Deployment(parameters(**tls_files(**named)), Registry())


def test_a_draft_with_another_vocabulary_is_never_asked(caplog: pytest.LogCaptureFixture) -> None:
    """Token tables are compared at load; equal sizes would not be enough."""
    other = Path(directory("sentencepiece"))
    given = {"draft_tokenizer_dir": other, "draft_source": "model"}
    made: Any = deployed(tensorrt_llm_draft_model_name="draft", **given).engine
    assert made._draft is None
    assert "draft model draft is not used" in caplog.text
    assert "another token table" in caplog.text and str(other) in caplog.text


@pytest.mark.parametrize("told", [True, False])
def test_a_draft_with_the_targets_vocabulary_is_used(told: bool) -> None:
    """Where its tokenizer is not named, nothing is compared."""
    same = Path(directory("byte-level")) if told else None
    made: Any = deployed(tensorrt_llm_draft_model_name="draft", draft_tokenizer_dir=same).engine
    assert made._draft.name == "draft"
    assert deployed().engine.name == "tensorrt_llm"


def test_a_tokenizer_that_is_not_there_is_told_at_load(tmp_path: Path) -> None:
    """Not at the first request."""
    with pytest.raises(SetupError, match=str(tmp_path)):
        Deployment(parameters(tokenizer_dir=tmp_path), Registry())


async def test_an_engine_that_is_not_there_is_told_at_the_request() -> None:
    """While models load, the server's own port is not open yet, so loading cannot wait for it."""

    class Nowhere:
        async def ready(self) -> None:
            pass

        def send(self, chunk: TextChunk) -> None:
            raise AssertionError(chunk)

    made = Deployment(parameters(), Registry())
    request = TextRequest(request_id="r", text="hi", max_tokens=5)
    with pytest.raises(EngineUnavailable, match="tensorrt_llm"):
        await made.orchestrator.run(request, Nowhere())
    await made.close()
