"""One run of the server: its command, its environment, its files."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest

from trtllm_bls.bundled import DEMO, REPOSITORY
from trtllm_bls.errors import SetupError
from trtllm_bls.operate import preparation
from trtllm_bls.operate.checks import Installation
from trtllm_bls.operate.ports import Ports
from trtllm_bls.settings.command_options import Override, ServeSettings
from trtllm_bls.settings.model_names import BLS_NAME
from trtllm_bls.settings.parameters import TEXT, Parameters, parameters_of
from trtllm_bls.triton.request_server import SENDERS

PORTS = Ports("127.0.0.1", "127.0.0.1", "127.0.0.1", 8000, 8001, 8002)


# --- command and environment ----------------------------------------------------------------


def options(settings: ServeSettings, **more: Any) -> list[str]:
    server = Installation(Path("/triton"))
    places = (Path("/models"), Path("/be"), "mine_")
    return preparation.server_command(server, settings, PORTS, *places, **more)


def environment(settings: ServeSettings, **inherited: str) -> dict[str, str]:
    return preparation.server_environment(settings, PORTS, Path("/run/lib"), inherited)


def test_no_handler_of_grpc_runs_when_a_model_forks() -> None:
    """Unless the operator's own models need it."""
    assert environment(ServeSettings())["GRPC_ENABLE_FORK_SUPPORT"] == "0"
    own = environment(ServeSettings(), GRPC_ENABLE_FORK_SUPPORT="1")
    assert own["GRPC_ENABLE_FORK_SUPPORT"] == "1"


def test_every_address_is_bound_to_the_host() -> None:
    """Nothing listens beyond the address that was asked for."""
    given = options(ServeSettings())
    for service, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        assert f"--{service}-address=127.0.0.1" in given
        assert f"--{service}-port={port}" in given


def pool(settings: ServeSettings, **more: Any) -> int:
    found = [o for o in options(settings, **more) if "thread-pool-size" in o]
    assert len(found) == 1
    name, _, size = found[0].rpartition("=")
    assert name == "--backend-config=python,thread-pool-size"
    return int(size)


def test_the_thread_pool_is_larger_than_the_number_of_streams_that_may_hold_one() -> None:
    """Otherwise streams that wait for their first token would hold up running ones."""
    assert pool(ServeSettings(max_streams=500)) > 500
    assert pool(ServeSettings(max_streams=500), sends_only=True) == SENDERS
    assert pool(ServeSettings(thread_pool_size=7)) == 7


@pytest.mark.parametrize(
    ("model", "code", "config", "expected"),
    [
        ("tensorrt_llm", None, 'backend: "tensorrtllm"', True),
        ("custom", b"import triton_python_backend_utils", 'backend: "python"', False),
        (BLS_NAME, "shipped", "", True),
        ("another_name", "shipped", "", True),
    ],
)
def test_which_python_models_only_send(
    model: str,
    code: bytes | str | None,
    config: str,
    expected: bool,
    tmp_path: Path,
) -> None:
    """All others may call models inside the server, where each call holds a thread."""
    version = tmp_path / model / "1"
    version.mkdir(parents=True)
    if code is not None:
        shipped = (REPOSITORY / BLS_NAME / "1" / "model.py").read_bytes()
        (version / "model.py").write_bytes(shipped if isinstance(code, str) else code)
    (version.parent / "config.pbtxt").write_text(config)
    assert preparation.sends_only(tmp_path) is expected


def test_our_own_repository_only_sends() -> None:
    assert preparation.sends_only(REPOSITORY)


def test_shared_memory_carries_the_servers_own_prefix() -> None:
    """What is left in /dev/shm can be told from other servers' regions."""
    assert "--backend-config=python,shm-region-prefix-name=mine_" in options(ServeSettings())


def test_our_python_comes_first() -> None:
    """The embedded Python must find this interpreter's library and home before any other."""
    made = environment(ServeSettings(), PATH="/bin", LD_LIBRARY_PATH="/cuda")
    assert made["PATH"] == f"{os.path.dirname(sys.executable)}:/bin"
    assert made["LD_LIBRARY_PATH"] == "/run/lib:/cuda"
    assert environment(ServeSettings())["LD_LIBRARY_PATH"] == "/run/lib"


def test_models_are_told_what_serve_was_told() -> None:
    """Addresses and sizes reach the models through their environment; threads only if given."""
    made = environment(ServeSettings(max_streams=7, threads=2))
    assert made["TRTLLM_BLS_GRPC_URL"] == "127.0.0.1:8001"
    assert made["TRTLLM_BLS_MAX_STREAMS"] == "7"
    assert made["TRTLLM_BLS_ENGINE_THREADS"] == "2"
    assert made["HF_HUB_OFFLINE"] == "1"
    assert "TRTLLM_BLS_ENGINE_THREADS" not in environment(ServeSettings())


@pytest.mark.parametrize(
    "key", ["engine_url", "tokenizer_dir", "draft_tokenizer_dir", "max_streams", "engine_tls_pin"]
)
def test_no_variable_overrules_what_was_set(key: str, tmp_path: Path) -> None:
    """Neither one of ``serve``'s own nor one of the shell, and for that model alone."""
    variable = parameters_of("tensorrt_llm_bls")[key].env
    declared: Any = make_dataclass("Declared", [(key, str, TEXT.parameter("", env=variable))])
    ours = Override("tensorrt_llm_bls", key, "set")
    made = environment(ServeSettings(overrides=(ours,)), **{variable: "from the shell"})

    def read(model: str) -> Any:
        config = {"name": model, "parameters": {key: {"string_value": "set"}}}
        arguments = {"model_config": json.dumps(config), "model_repository": "/models/m"}
        return getattr(Parameters(arguments, made).read(declared), key)

    assert read("tensorrt_llm_bls") == "set"
    assert read("preprocessing") != "set"


def test_a_status_directory_that_was_set_is_the_servers_too() -> None:
    """The launcher reads it as well, and makes it."""
    there = Override("tensorrt_llm_bls", "status_dir", "/run/one")
    made = environment(ServeSettings(overrides=(there,)), TRTLLM_BLS_STATUS_DIR="/run/other")
    assert made["TRTLLM_BLS_STATUS_DIR"] == "/run/one"


def test_an_engine_elsewhere_does_not_show_the_servers_own_certificate(tmp_path: Path) -> None:
    """It has one of its own."""
    for name in ("cert", "key"):
        (tmp_path / name).touch()
    files = {f"tls_{name}": tmp_path / name for name in ("cert", "key")}
    assert "TRTLLM_BLS_ENGINE_TLS_PIN" in environment(ServeSettings(**files))
    elsewhere = Override("tensorrt_llm_bls", "engine_url", "gpu-7:8001")
    made = environment(ServeSettings(**files, overrides=(elsewhere,)))
    assert "TRTLLM_BLS_ENGINE_TLS_PIN" not in made


def test_the_demo_is_the_default_only_where_nothing_was_named(tmp_path: Path) -> None:
    """A named model is never joined by the demo's draft, nor a named repository by its model."""
    assert preparation.model_directories(ServeSettings()) == {
        "TRTLLM_BLS_MODEL_DIR": str(DEMO / "target"),
        "TRTLLM_BLS_DRAFT_MODEL_DIR": str(DEMO / "draft"),
    }
    named = ServeSettings(model=DEMO / "draft")
    assert preparation.model_directories(named) == {"TRTLLM_BLS_MODEL_DIR": str(DEMO / "draft")}
    assert preparation.model_directories(ServeSettings(model_repository=tmp_path)) == {}


def test_our_own_repository_and_demo_come_with_the_package() -> None:
    """In a checkout they are the checkout's own; a relative tokenizer_dir leads to the demo."""
    assert preparation.model_repository(ServeSettings()) == REPOSITORY
    assert "tensorrt_llm_bls" in preparation.model_names(REPOSITORY)
    assert (REPOSITORY / "../assets/demo/target").resolve() == DEMO / "target"


@pytest.mark.parametrize("option", ["--http-restricted-api=", "--grpc-restricted-protocol="])
def test_control_apis_are_closed_unless_asked_for(option: str) -> None:
    """A command line is no secret, so the header that would open them is one nobody can send."""
    closed = [given for given in options(ServeSettings()) if option in given]
    assert len(closed) == 1
    name, value = closed[0].removeprefix(option).partition(":")[2].split("=")
    assert " " in name and "\n" in value
    for api in ("shared-memory", "model-repository", "logging", "trace"):
        assert all(api in given for given in closed)
    assert not [o for o in options(ServeSettings(open_control_apis=True)) if option in o]


def test_a_missing_checkpoint_names_its_option(tmp_path: Path) -> None:
    """Before anything starts."""
    with pytest.raises(SetupError, match=r"--draft-model .*gone: no such directory"):
        preparation.model_directories(ServeSettings(draft_model=tmp_path / "gone"))


def test_a_directory_that_is_no_checkpoint_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    """Unless the repository is the user's, whose models may read what they like."""
    with pytest.raises(SetupError, match=r"has no config\.json"):
        preparation.model_directories(ServeSettings(model=tmp_path))
    theirs = ServeSettings(model=tmp_path, model_repository=tmp_path)
    assert preparation.model_directories(theirs) == {"TRTLLM_BLS_MODEL_DIR": str(tmp_path)}
