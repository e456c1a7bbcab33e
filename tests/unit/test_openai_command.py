"""``trtllm-bls openai``: where its parameters come from, and what it refuses to start with."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from tests.helpers.packages import import_or_skip
from tests.helpers.small_tokenizers import directory
from trtllm_bls.cli import main
from trtllm_bls.errors import SettingsError
from trtllm_bls.openai.openai_command import SERVE_OPTIONS, places_of, read_parameters
from trtllm_bls.settings.command_options import ServeSettings, options_of, words_of
from trtllm_bls.settings.parameters import GRPC_URL, MODEL_DIR


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """With a configuration of ``tensorrt_llm_bls`` whose tokenizer lies beside it."""
    models = tmp_path / "repository"
    (models / "tensorrt_llm_bls").mkdir(parents=True)
    (tmp_path / "llama").symlink_to(directory("byte-level"))
    (models / "tensorrt_llm_bls" / "config.pbtxt").write_text(
        'parameters { key: "tokenizer_dir" value { string_value: "../llama" } }\n'
        'parameters { key: "engine_url" value { string_value: "there:1" } }\n'
        'parameters { key: "max_streams" value { string_value: "100" } }\n'
        'parameters { key: "engine_transport" value { string_value: "auto" } }\n'
    )
    return models


def test_options_come_before_the_environment_and_that_before_the_repository(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines are reached over gRPC, whatever the repository says of Triton's models."""
    monkeypatch.delenv(GRPC_URL, raising=False)
    monkeypatch.delenv(MODEL_DIR, raising=False)
    found = read_parameters(repository, {})
    assert (found.engine_url, found.engine_transport) == ("there:1", "grpc")
    assert found.tokenizer_dir == repository.parent / "llama"
    monkeypatch.setenv(GRPC_URL, "environment:2")
    assert read_parameters(repository, {}).engine_url == "environment:2"
    assert read_parameters(repository, {"engine_url": "option:3"}).engine_url == "option:3"


@pytest.mark.parametrize(
    ("cores", "words", "workers", "running"),
    [
        (4, [], 1, 100),
        (16, [], 2, 100),
        (16, ["--max-streams", "1000"], 4, 500),
        (16, ["--max-streams", "1000", "--engine-affinity", "true"], 1, 1000),
        (16, ["--max-streams", "1000", "--draft-memory-tokens", "9"], 1, 1000),
        (16, ["--workers", "1"], 1, 100),
        (2, ["--workers", "4"], 4, 50),
    ],
)
def test_each_worker_has_twice_its_share_of_what_may_run_at_once(
    cores: int,
    words: list[str],
    workers: int,
    running: int,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the processes of ``tensorrt_llm_bls`` do, also where ``auto`` says how many there are."""
    import_or_skip("uvicorn")
    served = []
    monkeypatch.setattr(
        "trtllm_bls.openai.workers.serve", lambda *given, **more: served.append((*given, more))
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    words = ["--model-repository", str(repository), *words]
    result = CliRunner().invoke(main, ["openai", *words])
    assert result.exit_code == 0
    ((parameters, *_, listening),) = served
    assert (listening["workers"], parameters.max_running) == (workers, running)
    assert bool(listening["workers_note"]) == ("--workers" not in words)


def test_places_are_those_of_all_processes_of_the_model(repository: Path) -> None:
    """Where Triton starts one for each GPU, nobody here knows their number."""
    config = repository / "tensorrt_llm_bls" / "config.pbtxt"
    text = config.read_text()
    config.write_text(text + "instance_group { count: 4 kind: KIND_CPU }")
    assert places_of(repository) == (4 * 50, 4 * 200)
    for groups in ("", "instance_group { count: 4 }"):
        config.write_text(text + groups)
        assert places_of(repository) == (0, 0)


@pytest.mark.parametrize(
    ("workers", "places"), [("1", (200, 800)), ("2", (200, 800)), ("4", (100, 400))]
)
def test_each_worker_in_front_of_the_model_has_twice_its_share_of_the_places(
    workers: str, places: tuple[int, int], repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All together send Triton at most twice what it takes, where each could have sent all."""
    import_or_skip("uvicorn")
    served = []
    monkeypatch.setattr(
        "trtllm_bls.openai.workers.serve", lambda *given, **more: served.append((*given, more))
    )
    config = repository / "tensorrt_llm_bls" / "config.pbtxt"
    config.write_text(config.read_text() + "instance_group { count: 4 kind: KIND_CPU }")
    front = json.dumps({"port": 0, "grpc": "", "http": "", "metrics": ""})
    words = ["--model-repository", str(repository), "--workers", workers, "--in-front-of", front]
    assert CliRunner().invoke(main, ["openai", *words]).exit_code == 0
    ((*_, given, _),) = served
    assert given.places == places


def test_relative_paths_start_where_they_were_given(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option's at the current directory."""
    monkeypatch.chdir(repository.parent)
    found = read_parameters(None, {"tokenizer_dir": "llama"})
    assert found.tokenizer_dir == repository.parent / "llama"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "parameter tokenizer_dir = '': name a directory"),
        (["--model-repository", "/none"], "--model-repository: /none/"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0: every machine that reaches this one"),
        (["--api-keys-file", "/none"], "--api-keys-file /none: cannot be read"),
        (["--tokenizer-dir", "/none"], "no such directory"),
        (["--tokenizer-dir", ".", "--max-streams", "many"], "use a whole number of at least 1"),
    ],
)
def test_what_it_cannot_start_with_is_one_line(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That names the option or parameter."""
    import_or_skip("uvicorn")
    monkeypatch.delenv(MODEL_DIR, raising=False)
    result = CliRunner().invoke(main, ["openai", *words])
    assert result.exit_code == 1
    assert result.output.startswith("error: ")
    assert says in " ".join(result.output.split())


@pytest.mark.parametrize("port", ["-1", "65536"])
def test_a_port_that_there_cannot_be_is_refused(port: str, repository: Path) -> None:
    import_or_skip("uvicorn")
    words = ["openai", "--model-repository", str(repository), "--port", port]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert f"Invalid value for '--port': {port} is not in the range" in result.output


@pytest.mark.parametrize("words", [["--expose"], ["--api-keys-file", "keys"]])
def test_every_machine_may_use_the_api_only_where_that_is_said_or_keys_are_asked_for(
    words: list[str], repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loopback needs neither."""
    import_or_skip("uvicorn")
    monkeypatch.setattr("trtllm_bls.openai.workers.serve", lambda *given, **more: None)
    monkeypatch.chdir(tmp_path)
    Path("keys").write_text("0" * 64 + "\n")
    openly = ["openai", "--model-repository", str(repository), "--host", "0.0.0.0"]
    result = CliRunner().invoke(main, openly)
    assert result.exit_code == 1
    assert "add --api-keys-file, or --expose" in result.output
    assert CliRunner().invoke(main, [*openly, *words]).exit_code == 0


def test_a_broken_configuration_is_named(repository: Path) -> None:
    """By its file."""
    (repository / "tensorrt_llm_bls" / "config.pbtxt").write_text("parameters {")
    with pytest.raises(SettingsError, match=r"config\.pbtxt: cannot be read"):
        read_parameters(repository, {})


@pytest.mark.parametrize(
    "given", [{}, {"exit_timeout": 7, "tool_parser": "hermes", "expose": True}]
)
def test_what_serve_passes_on_is_read_as_it_was_told(given: dict[str, Any], tmp_path: Path) -> None:
    """By the program that answers HTTP for it; what was not given stays away."""
    lists = {"loras": ("a", "b=7"), "allowed_hosts": ("x.example",), "served_model_names": ("m",)}
    keys = tmp_path / "keys"
    keys.touch()
    settings = ServeSettings(**given, **(lists | {"api_keys_file": keys} if given else {}))
    read: dict[str, Any] = {}
    command = click.Command("openai", callback=read.update)
    options_of(ServeSettings, *SERVE_OPTIONS)(command)
    command.main(list(words_of(settings, SERVE_OPTIONS)), standalone_mode=False)
    assert read == {name: getattr(settings, name) for name in SERVE_OPTIONS}
