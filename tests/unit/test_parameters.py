"""Model parameters: read once, at load, and a wrong one is named with its model and its mend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trtllm_bls.contract.pbtxt import PARAMETERS
from trtllm_bls.errors import SettingsError
from trtllm_bls.parameters import (
    DRAFT_MODEL_DIR,
    GRPC_URL,
    MAX_STREAMS,
    MODEL_DIR,
    THREADS,
    BlsParameters,
    EngineParameters,
    Parameters,
)


@pytest.fixture(autouse=True)
def _nothing_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (MODEL_DIR, DRAFT_MODEL_DIR, GRPC_URL, MAX_STREAMS, THREADS):
        monkeypatch.delenv(name, raising=False)


def parameters(repository: Path = Path("/models"), **values: str) -> Parameters:
    """As Triton hands them to ``initialize``."""
    config = {
        "name": "bls",
        "parameters": {key: {"string_value": value} for key, value in values.items()},
    }
    return Parameters(
        {
            "model_config": json.dumps(config),
            "model_name": "bls",
            "model_repository": str(repository / "bls"),
        }
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("True", True), (" 1 ", True), ("no", False), ("F", False), ("", None)],
)
def test_truth_has_many_spellings(text: str, value: bool | None) -> None:
    """Empty counts as not set, so the default holds."""
    for default in (True, False):
        expected = default if value is None else value
        assert parameters(key=text).flag("key", default) is expected
    assert parameters().flag("key", True) is True


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (lambda p: p.flag("key", True), "maybe"),
        (lambda p: p.number("key", 1), "-1"),
        (lambda p: p.number("key", 1), "nan"),
        (lambda p: p.number("key", 1), "inf"),
        (lambda p: p.number("key", 1), "ten"),
        (lambda p: p.count("key", 1), "2.5"),
        (lambda p: p.count("key", 1, least=1), "0"),
        (lambda p: p.choice("key", ("auto", "grpc")), "http"),
        (lambda p: p.directory("key"), ""),
        (lambda p: p.directory("key"), "no/such/directory"),
        (lambda p: p.optional_directory("key"), "no/such/directory"),
        (lambda p: p.text("key"), "${engine_url}"),
        (lambda p: p.flag("key", True), "${flag}"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(read: Any, value: str) -> None:
    """Model, key and value in one line, at load and not at the first request."""
    with pytest.raises(SettingsError, match=r"^model bls: parameter key = '.*': \w+") as caught:
        read(parameters(key=value))
    assert "\n" not in str(caught.value)


def test_directories_begin_at_the_repository(tmp_path: Path) -> None:
    """Relative to where the models lie, wherever the server was started."""
    (tmp_path / "assets").mkdir()
    (tmp_path / "models").mkdir()
    found = parameters(tmp_path / "models", key="../assets").directory("key")
    assert found == tmp_path / "assets"
    assert parameters(key=str(tmp_path)).directory("key") == tmp_path
    assert parameters().optional_directory("key") is None


def test_serve_overrides_by_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Even a template that was never filled in; an empty variable overrides nothing."""
    monkeypatch.setenv(MODEL_DIR, str(tmp_path))
    monkeypatch.setenv(GRPC_URL, "localhost:9")
    monkeypatch.setenv(MAX_STREAMS, "7")
    monkeypatch.setenv(DRAFT_MODEL_DIR, "")
    read = BlsParameters.read(parameters(tokenizer_dir="${x}", engine_url="a:1", max_streams="3"))
    assert (read.tokenizer_dir, read.engine_url, read.max_streams) == (tmp_path, "localhost:9", 7)
    assert read.draft_tokenizer_dir is None


def test_defaults_are_those_of_the_checked_in_configuration(tmp_path: Path) -> None:
    """What is written there and what is meant when it is left out are the same."""
    told = {**PARAMETERS["tensorrt_llm_bls"], "tokenizer_dir": str(tmp_path)}
    assert BlsParameters.read(parameters(**told)) == BlsParameters.read(
        parameters(tokenizer_dir=str(tmp_path))
    )


def test_engine_sizes_are_told_only_where_they_are_set(tmp_path: Path) -> None:
    """0 leaves the choice to the engine."""
    read = EngineParameters.read(
        parameters(model_dir=str(tmp_path), max_batch="4", threads="0", max_draft_len="3")
    )
    assert dict(read.sizes) == {"max_batch": 4, "max_draft_len": 3}
    assert read.exclude_input is False


def test_a_draft_engine_follows_the_draft_models_override(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two engines in one repository must not both load the target."""
    (tmp_path / "draft").mkdir()
    monkeypatch.setenv(MODEL_DIR, str(tmp_path))
    monkeypatch.setenv(DRAFT_MODEL_DIR, str(tmp_path / "draft"))
    assert EngineParameters.read(parameters(is_draft="true")).model_dir == tmp_path / "draft"
    assert EngineParameters.read(parameters(is_draft="false")).model_dir == tmp_path
