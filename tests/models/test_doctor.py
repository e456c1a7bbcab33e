"""``trtllm-bls doctor``: each fault is found, named, and comes with its mend."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.helpers.small_tokenizers import directory
from tests.models.configured import BUILD, NOT_PAGED, PLAIN, Demo, make_engine
from tests.models.doctored import change, container, findings, only, rewrite
from trtllm_bls.bundled import REPOSITORY
from trtllm_bls.cli import main
from trtllm_bls.operate import doctor
from trtllm_bls.operate.doctor import diagnose
from trtllm_bls.operate.findings import Subject, examine


def with_draft(demo: Demo, tmp_path: Path, **more: Any) -> Path:
    draft = make_engine(tmp_path / "draft", PLAIN, **more)
    demo.write("--draft-engine-dir", str(draft))
    return draft


# --- the whole ------------------------------------------------------------------------------


def test_what_configure_writes_is_sound(demo: Demo, tmp_path: Path) -> None:
    """Every check that looks at a repository passes on one with a target and a draft."""
    with_draft(demo, tmp_path)
    server = container(tmp_path / "server")
    found = list(diagnose(Subject(repository=demo.out, server=server, ports={}, is_judged=False)))
    assert {finding.level for _, finding in found} == {"ok"}, found
    names = {name for name, _ in found}
    assert names >= {"placeholders", "parameters", "speculation", "logits_types", "vocabulary"}


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["doctor", *map(str, words)])
    return result.exit_code, result.output


def test_errors_are_in_the_exit_code_and_in_the_json(demo: Demo, tmp_path: Path) -> None:
    """0 without errors, 1 with some, 2 for options that cannot be used."""
    demo.write()
    there = ("--model-repository", demo.out, "--server", container(tmp_path / "server"))
    assert run(*there)[0] == 0
    change(demo, "tensorrt_llm", decoding_mode="${decoding_mode}")
    code, output = run(*there, "--json")
    assert code == 1
    answer = json.loads(output)
    assert answer["count"]["error"] == 1, answer
    wrong = [each for each in answer["findings"] if each["level"] == "error"]
    assert [(each["check"], bool(each["mend"])) for each in wrong] == [("placeholders", True)]
    code, output = run(*there)
    assert code == 1
    line = next(line for line in output.splitlines() if line.startswith("error"))
    assert line.startswith("error placeholders: tensorrt_llm: placeholders in decoding_mode; fill")
    for wrong_option in (("--version", "0.8"), ("--model-repository", "/elsewhere"), ("--port",)):
        assert run(*wrong_option)[0] == 2


# --- parameters and engines -----------------------------------------------------------------


def test_a_configuration_that_cannot_be_read_is_an_error(demo: Demo, tmp_path: Path) -> None:
    """So is a directory without models, and an engine's without an engine."""
    demo.write()
    config = demo.out / "ensemble" / "config.pbtxt"
    config.write_text("max_batch_size: ${size}")
    assert str(config) in only(findings("readable", repository=demo.out)).summary
    (tmp_path / "empty").mkdir()
    assert "no model" in only(findings("readable", repository=tmp_path / "empty")).summary
    assert "config.json" in only(findings("readable", engine_dir=tmp_path / "empty")).summary
    old = make_engine(tmp_path / "old", BUILD, version="0.8.0")
    assert "version 0.8.0" in only(findings("readable", engine_dir=old, version="0.19")).summary
    assert findings("versions", engine_dir=old, version="0.19") == []


@pytest.mark.parametrize(
    ("version", "model", "key", "value", "reason"),
    [
        (
            "0.13",
            "tensorrt_llm",
            "multi_block_mode",
            "true",
            "of 0.13 has no parameter multi_block_mode",
        ),
        ("0.19", "tensorrt_llm", "max_beam_with", "1", "has no parameter max_beam_with"),
        ("0.19", "tensorrt_llm", "enable_kv_cache_reuse", "yes", "'yes' is not allowed"),
        (
            "last",
            "tensorrt_llm_bls",
            "draft_source",
            "oracle",
            "draft_source = 'oracle': use one of",
        ),
    ],
)
def test_a_parameter_that_is_not_read(
    demo: Demo, version: str, model: str, key: str, value: str, reason: str
) -> None:
    """By the release it would be ignored, or taken for "not set"; by us, refused at load."""
    demo.write("--version", version)
    change(demo, model, **{key: value})
    found = findings("parameters", repository=demo.out, version=version)
    assert only(found).summary.startswith(f"{model}.{key}: ")
    assert only(found).summary.endswith(reason)


def test_a_key_without_which_the_backend_does_not_load(demo: Demo) -> None:
    """From 0.19 on also those of guided decoding."""
    demo.write("--version", "0.18")
    assert findings("demanded_parameters", repository=demo.out, version="0.18") == []
    found = only(findings("demanded_parameters", repository=demo.out, version="0.19"))
    assert "tokenizer_dir" in found.summary


@pytest.mark.parametrize(
    ("built", "backend", "level"),
    [
        ("0.17.0.post1", "0.17.0", None),
        ("0.18.0", "0.18.2", "warn"),
        ("0.18.0", "0.18", None),
        ("0.18.2", "0.18", None),
        ("0.17.0", "0.19", "error"),
    ],
)
def test_an_engine_of_another_release(
    tmp_path: Path, built: str, backend: str, level: str | None
) -> None:
    """Another patch may do, and is not told where none is named; another release does not load."""
    engine = make_engine(tmp_path / "engine", BUILD, version=built)
    found = findings("versions", engine_dir=engine, version=backend)
    assert [finding.level for finding in found] == ([level] if level else [])


def test_an_engine_that_ends_after_one_step(demo: Demo, tmp_path: Path) -> None:
    """The target is told to the orchestrator; a draft is of no use."""
    old = {"repository": demo.out, "version": "0.18"}
    demo.write("--version", "0.18")
    assert findings("one_step_drafts", **old) == []
    change(demo, "tensorrt_llm", one_step_requests=None)
    assert "one_step_requests=true" in only(findings("one_step_drafts", **old)).remedy
    draft = make_engine(tmp_path / "draft", BUILD)
    change(demo, "tensorrt_llm", one_step_requests="true")
    found = findings("one_step_drafts", draft_engine_dir=draft, **old)
    assert "drafts one token" in only(found).summary


def test_what_a_target_of_drafts_needs(demo: Demo, tmp_path: Path) -> None:
    """The build's mode, paged context attention, and reuse of the KV cache."""
    with_draft(demo, tmp_path)
    change(demo, "tensorrt_llm", enable_kv_cache_reuse="false")
    assert "enable_kv_cache_reuse" in only(findings("speculation", repository=demo.out)).remedy
    change(demo, "tensorrt_llm", enable_kv_cache_reuse="true")
    engine = make_engine(tmp_path / "not_paged", BUILD | NOT_PAGED)
    found = only(findings("speculation", repository=demo.out, engine_dir=engine))
    assert "paged context" in found.summary
    assert "--use_paged_context_fmha" in found.remedy
    found = only(findings("built_for", repository=demo.out, engine_dir=engine))
    assert "paged context" in found.summary


def test_logits_of_another_type(demo: Demo, tmp_path: Path) -> None:
    """Declared as the engine was built; the draft's have to be the target's."""
    demo.write()
    half = {"pretrained_config": {"logits_dtype": "float16"}}
    engine = make_engine(tmp_path / "half", BUILD, **half)
    found = findings("tensors", repository=demo.out, engine_dir=engine, version="1.0")
    assert {finding.summary.split()[0] for finding in found} == {
        "tensorrt_llm.context_logits",
        "tensorrt_llm.generation_logits",
        "tensorrt_llm.draft_logits",
        "ensemble.context_logits",
        "ensemble.generation_logits",
    }
    with_draft(Demo(tmp_path / "both", demo.engine, demo.tokenizer), tmp_path, **half)
    found = findings("logits_types", repository=tmp_path / "both")
    assert "the target takes FP32" in only(found).summary


def test_a_stalled_engine_is_noticed_before_the_request_times_out(demo: Demo) -> None:
    """Otherwise only the timeout is seen; what is no number is another check's business."""
    demo.write()
    change(demo, "tensorrt_llm_bls", engine_stall_seconds="700")
    assert "is longer than" in only(findings("time_limits", repository=demo.out)).summary
    change(demo, "tensorrt_llm_bls", engine_stall_seconds="soon")
    assert findings("time_limits", repository=demo.out) == []


def test_a_release_is_named_where_the_server_is(tmp_path: Path) -> None:
    """This machine's limits count then, too; not where a server runs already."""
    here: dict[str, Any] = {"server": container(tmp_path), "max_streams": 10**9}
    assert "--max-streams" in only(findings("open_files", version="0.19", **here)).remedy
    assert findings("open_files", url="127.0.0.1:1", **here) == []


def test_an_engine_that_names_no_release(tmp_path: Path) -> None:
    """Whether the backend can run it cannot be told."""
    engine = make_engine(tmp_path / "unnamed", BUILD, version="")
    found = only(findings("versions", engine_dir=engine, version="0.19"))
    assert found.level == "warn" and "names no release" in found.summary


def test_a_model_that_does_not_stream(demo: Demo) -> None:
    """The orchestrator would refuse it at the first request."""
    demo.write()
    config = demo.config("tensorrt_llm")
    config.model_transaction_policy.decoupled = False
    rewrite(demo, "tensorrt_llm", config)
    assert "decoupled: true" in only(findings("decoupled", repository=demo.out)).remedy


def test_two_engines_that_want_all_memory(demo: Demo, tmp_path: Path) -> None:
    """Unless they are on GPUs of their own."""
    with_draft(demo, tmp_path)
    for model in ("tensorrt_llm", "tensorrt_llm_draft"):
        change(demo, model, kv_cache_free_gpu_mem_fraction="0.9")
    assert "0.45" in only(findings("memory_shares", repository=demo.out)).remedy
    change(demo, "tensorrt_llm_draft", gpu_device_ids="1")
    assert findings("memory_shares", repository=demo.out) == []
    change(demo, "tensorrt_llm_draft", gpu_device_ids="", kv_cache_free_gpu_mem_fraction="much")
    assert findings("memory_shares", repository=demo.out) == []


# --- tokenizers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "level"), [(100, "error"), (64_000, "warn"), (1_024, None), (None, None)]
)
def test_a_tokenizer_of_another_model(
    demo: Demo, tmp_path: Path, size: int | None, level: str | None
) -> None:
    """Ids beyond the embeddings, or many more embeddings than padding explains."""
    engine = make_engine(tmp_path / "sized", BUILD, pretrained_config={"vocab_size": size})
    found = findings("vocabulary", engine_dir=engine, tokenizer_dir=demo.tokenizer)
    assert [finding.level for finding in found] == ([level] if level else [])


def test_no_vocabulary_is_compared_without_a_tokenizer(tmp_path: Path) -> None:
    """The check of the tokenizer names what is wrong with it."""
    engine = make_engine(tmp_path / "sized", BUILD, pretrained_config={"vocab_size": 100})
    assert findings("vocabulary", engine_dir=engine, tokenizer_dir=tmp_path) == []


def test_a_draft_with_another_vocabulary(tmp_path: Path) -> None:
    """A draft's ids have to mean the same."""
    target = make_engine(tmp_path / "target", BUILD, pretrained_config={"vocab_size": 32000})
    draft = make_engine(tmp_path / "draft", PLAIN, pretrained_config={"vocab_size": 50257})
    found = findings("draft_vocabulary", engine_dir=target, draft_engine_dir=draft)
    assert "50257" in only(found).summary


def test_a_draft_with_another_token_table(demo: Demo, tmp_path: Path) -> None:
    """Of the same size, perhaps; its ids mean other texts."""
    with_draft(demo, tmp_path)
    change(demo, "tensorrt_llm_bls", draft_tokenizer_dir=str(directory("unigram")))
    found = only(findings("draft_vocabulary", repository=demo.out))
    assert found.level == "error" and "another token table" in found.summary


def test_a_tokenizer_that_cannot_be_loaded(tmp_path: Path) -> None:
    """Named before the server is started."""
    found = only(findings("tokenizer", tokenizer_dir=tmp_path))
    assert str(tmp_path) in found.summary


@pytest.mark.parametrize("key", ["tokenizer_dir", "draft_tokenizer_dir"])
def test_a_placeholder_is_no_tokenizer(demo: Demo, key: str) -> None:
    """The check of placeholders names it."""
    demo.write()
    change(demo, "tensorrt_llm_bls", **{key: "${directory}"})
    assert findings("tokenizer", repository=demo.out) == []
    assert key in only(findings("placeholders", repository=demo.out)).summary


# --- the machine ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "mend"),
    [
        ({"http_proxy": "http://proxy:3128"}, "set no_proxy=localhost,127.0.0.1"),
        ({"HTTPS_PROXY": "x", "no_proxy": "localhost,.example"}, "no_proxy=localhost,.example,127"),
        ({"http_proxy": "x", "no_proxy": "*"}, None),
        ({"http_proxy": "x", "NO_PROXY": "localhost, 127.0.0.1"}, None),
        ({"http_proxy": ""}, None),
    ],
)
def test_a_proxy_for_connections_to_this_machine(
    environment: dict[str, str], mend: str | None
) -> None:
    """gRPC would send the engine's requests to it."""
    found = findings("proxies", environment=environment)
    if mend is None:
        assert found == []
    else:
        assert mend in only(found).remedy


def test_packages_that_are_too_old_or_absent() -> None:
    """A container of TensorRT-LLM 0.14 has transformers 4.36."""
    old = {"transformers": "4.36.1", "tritonclient": "2.45.0"}
    found = findings(
        "packages", packages=lambda name: old.get(name, "999" if name != "hpack" else None)
    )
    assert {"transformers 4.36.1", "no hpack"} <= {
        finding.summary.split(",")[0] for finding in found
    }
    assert all(finding.remedy for finding in found)


def test_httpcore_beside_another_h11_than_it_runs_with() -> None:
    """The Containerfile adds httpcore to images whose h11 it must leave."""
    assert findings("packages") == []
    h11 = {"h11": "0.12.0"}
    found = only(
        findings("packages", packages=lambda name: h11.get(name) or doctor.installed(name))
    )
    assert found.summary.startswith("h11 0.12.0, httpcore needs ")
    assert "HTTPCORE=" in found.remedy


@pytest.mark.parametrize(
    ("release", "transformers", "sound"),
    [
        ("0.19.0", "4.51.3", True),
        ("0.19.0", "4.57.1", False),
        ("0.16.0", "4.45.2", True),
        ("0.18.2", "4.57.1", True),  # its notes and its requirements name different ones
        ("1.3.0rc1", "4.57.1", True),  # nothing is known of it
    ],
)
def test_transformers_beside_tensorrt_llms_own_package(
    release: str, transformers: str, sound: bool
) -> None:
    """Each release of it was made with one."""
    installed = {"tensorrt-llm": release, "transformers": transformers}
    assert (findings("pins", packages=installed.get) == []) is sound


@pytest.mark.parametrize(
    ("release", "stubs", "words"),
    [
        ("1.2.1", None, None),  # which has no such service
        ("1.3.0rc22", "0.4.28", "trtllm-serve --grpc of TensorRT-LLM 1.3.0rc22 does not start"),
        ("1.3.0rc24", None, None),  # pip installs the stubs with it
        ("1.3.0rc25", None, "no smg-grpc-proto"),
        ("1.3.0rc25", "0.4.28", None),
        ("1.4.0", None, "no smg-grpc-proto"),
    ],
)
def test_a_release_whose_grpc_service_does_not_start_is_a_warning(
    release: str, stubs: str | None, words: str | None
) -> None:
    """One has a defect, later ones need a package that they do not bring."""
    present = {"tensorrt-llm": release, "smg-grpc-proto": stubs}
    told = findings("service", packages=present.get)
    assert bool(told) == bool(words)
    if words:
        assert only(told).level == "warn" and words in only(told).summary


def test_a_server_without_a_backend_for_this_python(tmp_path: Path) -> None:
    """Its stub would not start; named before the models do not load."""
    for name in ("bin", "backends", "python_backend_stubs/3.1"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "bin" / "tritonserver").touch()
    found = only(findings("server_python", server=tmp_path))
    assert "no Python backend for Python" in found.summary and "container" in found.remedy
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    for nowhere in (tmp_path / "none", circle):
        found = only(findings("server_python", server=nowhere))
        assert "no tritonserver there" in found.summary


def test_an_environment_that_the_server_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its embedded Python knows ASCII paths alone."""
    monkeypatch.setattr(sys, "prefix", "/home/jürgen/venv")
    assert "plain ASCII" in only(findings("platform_and_place")).remedy


def test_little_shared_memory(tmp_path: Path) -> None:
    """A directory that is not there has none."""
    assert "--shm-size" in only(findings("shared_memory", shared_memory=tmp_path / "none")).remedy


def test_what_new_writes_and_what_is_bundled_is_clean(tmp_path: Path) -> None:
    """As doctor and ``serve`` look at it; a copy of a file that is spoilt is not."""
    model = tmp_path / "models" / "mine"
    told = CliRunner().invoke(main, ["new", str(model)])
    assert told.exit_code == 0, told.output
    for repository in (model.parent, REPOSITORY):
        for name in (
            "readable",
            "programs",
            "fitness",
            "placeholders",
            "wiring",
            "tensors",
        ):
            assert findings(name, repository=repository) == []


def test_a_pipelines_own_parameters_are_listed_and_read(tmp_path: Path) -> None:
    """From its program, which is not run."""
    model = tmp_path / "models" / "mine"
    assert CliRunner().invoke(main, ["new", str(model)]).exit_code == 0
    file = model / "1" / "model.py"
    (check,) = [each for each in doctor.CHECKS if each.name == "pipeline_parameters"]
    assert findings("pipeline_parameters", repository=model.parent) == []  # it declares none
    body = "class TritonPythonModel(StreamingModel):"
    declared = 'parameters = {"nearest": 2, "voice": "anna"}'
    program = file.read_text().replace(body, f"{body}\n    {declared}")
    assert declared in program
    config = model / "config.pbtxt"
    text = config.read_text()

    def parameter(key: str, value: str) -> None:
        more = f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        config.write_text(f"{text}\n{more}\n")

    parameter("decuopled", "true")
    (unknown,) = findings("pipeline_parameters", repository=model.parent)
    assert (unknown.level, unknown.remedy) == ("warn", "did you mean decoupled?")
    file.write_text(f"{program}\nraise SystemExit\n")
    parameter("voice", "otto")
    (listed,) = [each for _, each in examine(Subject(repository=model.parent), [check])]
    assert (listed.level, listed.summary) == ("ok", "mine: nearest = 2, voice = 'otto'")
    parameter("nearest", "two")
    wrong = only(findings("pipeline_parameters", repository=model.parent))
    assert wrong.level == "error" and "parameter nearest = 'two'" in wrong.summary
    parameter("neerest", "3")
    (unknown,) = findings("pipeline_parameters", repository=model.parent)
    assert (unknown.level, unknown.remedy) == ("warn", "did you mean nearest?")


@pytest.mark.parametrize("declared", ['{"a": [1]}', '{"a": None}', "{1: 2}", '{b"a": 2}'])
def test_a_default_that_gives_no_type_is_told(tmp_path: Path, declared: str) -> None:
    model = tmp_path / "models" / "mine"
    assert CliRunner().invoke(main, ["new", str(model)]).exit_code == 0
    file, body = model / "1" / "model.py", "class TritonPythonModel(StreamingModel):"
    program = file.read_text()
    file.write_text(program.replace(body, f"{body}\n    parameters = {declared}"))
    found = only(findings("pipeline_parameters", repository=model.parent))
    assert found.level == "error" and "model mine: parameters = {" in found.summary
    file.write_text(program.replace(body, f"{body}\n    parameters = 5"))  # mypy tells
    assert findings("pipeline_parameters", repository=model.parent) == []
