"""Model parameters: read once, at load, and a wrong one is named with its model and its mend."""

from __future__ import annotations

import ast
import itertools
import json
import os
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.syntax_trees import tree
from trtllm_bls.configure.pbtxt import PARAMETERS
from trtllm_bls.errors import SettingsError
from trtllm_bls.settings.parameters import (
    DIRECTORY,
    DRAFT_MODEL_DIR,
    FILE,
    FLAG,
    GRPC_URL,
    MAX_STREAMS,
    MODEL_DIR,
    NUMBER,
    TEXT,
    THREADS,
    BlsParameters,
    EngineParameters,
    Kind,
    Parameters,
    auto_or,
    check,
    choice,
    count,
    is_true,
    none_if_zero,
    parameters_of,
)
from trtllm_bls.settings.request_limits import RequestLimits
from trtllm_bls.wire.contract import MODELS

ROOT = Path(__file__).parents[2]


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


def read(
    kind: Kind, text: str | None, default: str | None = "", repository: Path = Path("/models")
) -> Any:
    """The value of a parameter ``key`` of that kind."""
    field = kind.parameter("What it does.", default)
    declared: Any = make_dataclass("Declared", [("key", Any, field)])
    values = {} if text is None else {"key": text}
    return parameters(repository, **values).read(declared).key


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("True", True), (" 1 ", True), ("no", False), ("F", False), ("", None)],
)
def test_truth_has_many_spellings(text: str, value: bool | None) -> None:
    """Empty counts as not set, so the default holds."""
    for default in (True, False):
        expected = default if value is None else value
        assert read(FLAG, text, str(default)) is expected
    assert read(FLAG, None, "true") is True
    assert is_true(text) is bool(value)


@pytest.mark.parametrize(
    ("kind", "value", "named"),
    [
        (FLAG, False, "true"),
        (choice("auto", "grpc"), "auto", "grpc"),
        (choice(auto=None, on=True), None, "on"),
        (none_if_zero(count(0)), None, "3"),
        (auto_or(count(1)), None, "3"),
        (TEXT, "", "three"),
        (count(0), None, "3"),
    ],
)
def test_a_kind_may_have_a_default_of_its_own(kind: Kind, value: Any, named: str) -> None:
    """It holds where neither the configuration nor the parameter says another one."""
    assert read(kind, None) == value == read(kind, "")
    assert read(kind, None, named) == read(kind, named) != value


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (FLAG, "maybe"),
        (NUMBER, "-1"),
        (NUMBER, "nan"),
        (NUMBER, "inf"),
        (NUMBER, "ten"),
        (count(0), "2.5"),
        (count(1), "0"),
        (choice("auto", "grpc"), "http"),
        (DIRECTORY, ""),
        (DIRECTORY, "no/such/directory"),
        (DIRECTORY, __file__),
        (FILE, ""),
        (FILE, "no/such/file"),
        (FILE, "/"),
        (TEXT, "${engine_url}"),
        (FLAG, "${flag}"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(kind: Kind, value: str) -> None:
    """Model, key and value in one line, at load and not at the first request."""
    with pytest.raises(SettingsError, match=r"^model bls: parameter key = '.*': \w+") as caught:
        read(kind, value, None)
    assert "\n" not in str(caught.value)


def test_directories_begin_at_the_repository(tmp_path: Path) -> None:
    """Relative to where the models lie, wherever the server was started."""
    (tmp_path / "assets").mkdir()
    (tmp_path / "models").mkdir()
    assert read(DIRECTORY, "../assets", None, tmp_path / "models") == tmp_path / "assets"
    assert read(DIRECTORY, str(tmp_path), None) == tmp_path
    assert read(DIRECTORY, None) is None
    with pytest.raises(SettingsError, match="no such directory"):
        read(DIRECTORY, "no/such/directory")


def test_what_lies_beside_a_repository_of_links_is_beside_the_links(tmp_path: Path) -> None:
    """The path that the links lead to may hold letters that a model cannot read."""
    for directory in ("real/models", "real/assets", "links/assets"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "links" / "models").symlink_to(tmp_path / "real" / "models")
    found = read(DIRECTORY, "../assets", None, tmp_path / "links" / "models")
    assert found == tmp_path / "links" / "assets"


def test_serve_overrides_by_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Even a template that was never filled in; an empty variable overrides nothing."""
    monkeypatch.setenv(MODEL_DIR, str(tmp_path))
    monkeypatch.setenv(GRPC_URL, "127.0.0.1:9")
    monkeypatch.setenv(MAX_STREAMS, "7")
    monkeypatch.setenv(DRAFT_MODEL_DIR, "")
    given = parameters(tokenizer_dir="${x}", engine_url="a:1", max_streams="3")
    bls = given.read(BlsParameters)
    assert (bls.tokenizer_dir, bls.engine_url, bls.max_streams) == (tmp_path, "127.0.0.1:9", 7)
    assert bls.draft_tokenizer_dir is None


def test_defaults_are_those_of_the_checked_in_configuration(tmp_path: Path) -> None:
    """What is written there and what is meant when it is left out are the same."""
    told = {**PARAMETERS["tensorrt_llm_bls"], "tokenizer_dir": str(tmp_path)}
    given = parameters(tokenizer_dir=str(tmp_path))
    assert parameters(**told).read(BlsParameters) == given.read(BlsParameters)


def test_a_draft_engine_follows_the_draft_models_override(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two engines in one repository must not both load the target."""
    (tmp_path / "draft").mkdir()
    monkeypatch.setenv(MODEL_DIR, str(tmp_path))
    monkeypatch.setenv(DRAFT_MODEL_DIR, str(tmp_path / "draft"))
    for is_draft, path in (("true", tmp_path / "draft"), ("false", tmp_path)):
        assert parameters(is_draft=is_draft).read(EngineParameters).model_dir == path


def test_whether_the_model_streams_is_read_from_its_transaction_policy(tmp_path: Path) -> None:
    """Triton's own switch, which without a policy is off."""
    for policy, decoupled in (({}, False), ({"decoupled": True}, True)):
        config = {
            "name": "bls",
            "model_transaction_policy": policy,
            "parameters": {"tokenizer_dir": {"string_value": str(tmp_path)}},
        }
        args = {"model_config": json.dumps(config), "model_repository": "/models/bls"}
        assert Parameters(args).read(BlsParameters).decoupled is decoupled


# --- the declarations -----------------------------------------------------------------------

# Read by Triton itself, or by the dataclass for another parameter.
READ_ELSEWHERE = {"is_draft"}


def attributes_read() -> set[str]:
    """Every name that code of the package reads as an attribute, but for the declarations'."""
    files = {*ROOT.glob("trtllm_bls/**/*.py"), *ROOT.glob("models/*/1/model.py")}
    nodes = itertools.chain.from_iterable(ast.walk(tree(file)) for file in files)
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def test_no_parameter_is_without_effect() -> None:
    """Whatever can be set is read: as an attribute, as a limit or as one of the engine's sizes."""
    read = attributes_read() | READ_ELSEWHERE
    read |= {field.name for field in fields(RequestLimits)}
    for model in MODELS:
        assert parameters_of(model.name).keys() <= read, model.name


@pytest.mark.parametrize(
    ("value", "instances", "cores", "expected"),
    [
        ("", 1, 7, False),
        ("", 1, 8, True),
        ("auto", 4, 15, False),
        ("auto", 4, 16, True),
        ("on", 4, 2, True),
        ("off", 1, 16, False),
    ],
)
def test_one_core_is_for_each_process_if_there_are_enough_unless_told(
    value: str,
    instances: int,
    cores: int,
    expected: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine and the server need cores, too."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    read = parameters(tokenizer_dir=str(tmp_path), one_core=value)
    read.instances = instances
    assert read.read(BlsParameters).keeps_one_core is expected


@pytest.mark.parametrize(
    ("name", "number"), [("tensorrt_llm_bls_0_3", 3), ("bls_2_1_12", 12), ("", 0), ("bls", 0)]
)
def test_a_process_has_the_number_in_its_name(name: str, number: int) -> None:
    """Triton's name for it: the model, the group of instances, and its number in the group."""
    args = {"model_config": '{"name": "bls"}', "model_repository": "/m/bls"}
    assert Parameters(args | {"model_instance_name": name}).instance == number


@pytest.mark.parametrize(
    ("instances", "values", "running", "queued"),
    [
        (1, {}, 16, 64),
        (2, {}, 16, 64),
        (3, {}, 10, 40),
        (64, {}, 1, 4),
        (4, {"max_running_requests": "7", "max_queued_requests": "0"}, 7, 0),
    ],
)
def test_processes_share_the_streams_of_a_server(
    instances: int, values: dict[str, str], running: int, queued: int, tmp_path: Path
) -> None:
    """Each may run twice its share: Triton gives one more requests than another."""
    given = parameters(tokenizer_dir=str(tmp_path), max_streams="16", **values)
    given.instances = instances
    read = given.read(BlsParameters)
    assert (read.max_running, read.max_queued) == (running, queued)


@pytest.mark.parametrize("model", [model.name for model in MODELS])
def test_what_a_declaration_gives_is_what_it_allows(model: str) -> None:
    """Its default and its shipped value are values of its kind."""
    for key, declared in parameters_of(model).items():
        check(model, key, declared.default or "")
        check(model, key, declared.in_file)


@pytest.mark.parametrize(
    ("key", "value", "mend"),
    [
        ("max_stream", "4", "did you mean max_streams?"),
        ("accumulate", "true", "did you mean accumulate_tokens?"),
        ("x", "1", "there are: accumulate_tokens, add_special_tokens, "),
        ("max_streams", "0", "use a whole number of at least 1"),
        ("draft_source", "oracle", "use one of: off, model, ngram, mixed"),
    ],
)
def test_a_slip_is_answered_with_what_would_do(key: str, value: str, mend: str) -> None:
    """The key that looks like it, all keys, or what its values are."""
    with pytest.raises(SettingsError, match=key) as caught:
        check("tensorrt_llm_bls", key, value)
    assert mend in str(caught.value)
    assert "\n" not in str(caught.value)
