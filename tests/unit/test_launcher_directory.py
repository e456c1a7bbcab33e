"""The directory in which a server runs: its repository with overrides, drafts and links."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trtllm_bls.bundled import REPOSITORY
from trtllm_bls.errors import SettingsError, SetupError
from trtllm_bls.operate import preparation
from trtllm_bls.operate.checks import PYTHON, Installation
from trtllm_bls.settings.command_options import Override, ServeSettings, auto_processes

# --- the working directory ------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    made = tmp_path / "checkout" / "models"
    for model in ("bls", "ensemble"):
        (made / model / "1").mkdir(parents=True)
        (made / model / "config.pbtxt").write_text(
            'backend: "python"\nparameters { key: "old" value { string_value: "1" } }\n'
        )
        (made / model / "1" / "model.py").write_text("# code\n")
    (made.parent / "assets").mkdir()
    (made / "README.md").touch()
    (made / "__pycache__").mkdir()
    return made


def parameters(repository: Path, model: str) -> dict[str, str]:
    text = (repository / model / "config.pbtxt").read_text()
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    return {key: value.string_value for key, value in config.parameters.items()}


def override(directory: Path, repository: Path, *overrides: Override) -> Path:
    directory.mkdir(exist_ok=True)
    settings = ServeSettings(overrides=overrides)
    return preparation.prepare_models(directory, repository, settings, with_draft=False)


def test_models_are_read_from_the_repository(repository: Path) -> None:
    """Directories with a configuration or a version; other files are none of our business."""
    assert preparation.model_names(repository) == ("bls", "ensemble")


def test_an_empty_repository_is_an_error(tmp_path: Path) -> None:
    """A server without models would come up ready and answer nothing."""
    with pytest.raises(SetupError, match=r"no model in it"):
        preparation.model_names(tmp_path)
    with pytest.raises(SetupError, match="gone: no such directory"):
        preparation.model_names(tmp_path / "gone")


def test_without_overrides_the_repository_is_served_as_it_is(
    repository: Path, tmp_path: Path
) -> None:
    """No copy, so that edits and error messages speak of the user's own files."""
    assert (
        preparation.prepare_models(tmp_path, repository, ServeSettings(), with_draft=False)
        == repository
    )


def test_overrides_change_a_copy(repository: Path, tmp_path: Path) -> None:
    """Parameters are replaced and added; the original, code and other models stay as they are."""
    before = parameters(repository, "bls")
    served = override(
        tmp_path,
        repository,
        Override("bls", "old", 'with "quotes"'),
        Override("bls", "new", ""),
    )
    assert parameters(served, "bls") == {"old": 'with "quotes"', "new": ""}
    assert parameters(served, "ensemble") == before == parameters(repository, "bls")
    assert (served / "bls" / "1" / "model.py").read_text() == "# code\n"


@pytest.mark.parametrize("target", [".", "..", "../.."])
def test_a_link_to_a_directory_around_it_is_refused(
    repository: Path, tmp_path: Path, target: str
) -> None:
    """A copy would follow it without an end."""
    (repository / "bls" / "again").symlink_to(target)
    with pytest.raises(SettingsError, match=r"bls/again: a link to a directory that it is in"):
        override(tmp_path, repository, Override("bls", "a", "b"))


def test_relative_paths_keep_their_meaning_in_a_copy(repository: Path, tmp_path: Path) -> None:
    """What is beside the repository is beside its copy."""
    served = override(tmp_path, repository, Override("bls", "a", "b"))
    assert (served / ".." / "assets").resolve() == repository.parent / "assets"


def test_a_draft_model_is_a_second_engine(repository: Path, tmp_path: Path) -> None:
    """It is the engine's model under another name, which the orchestrator's parameters have."""
    for name in ("tensorrt_llm", "tensorrt_llm_bls"):
        shutil.copytree(repository / "bls", repository / name)
    served = preparation.prepare_models(tmp_path, repository, ServeSettings(), with_draft=True)
    assert parameters(served, "tensorrt_llm_draft")["is_draft"] == "true"
    assert (
        'name: "tensorrt_llm_draft"' in (served / "tensorrt_llm_draft" / "config.pbtxt").read_text()
    )
    assert (served / "tensorrt_llm_draft" / "1" / "model.py").is_file()
    told = parameters(served, "tensorrt_llm_bls")["tensorrt_llm_draft_model_name"]
    assert told == "tensorrt_llm_draft"
    assert "is_draft" not in parameters(served, "tensorrt_llm")


def test_a_repository_with_its_own_draft_model_is_left_alone(
    repository: Path, tmp_path: Path
) -> None:
    """Nothing is added where there is a draft model, or no embedded engine to copy."""
    assert (
        preparation.prepare_models(tmp_path, repository, ServeSettings(), with_draft=True)
        == repository
    )
    for name in ("tensorrt_llm", "tensorrt_llm_bls", "tensorrt_llm_draft"):
        shutil.copytree(repository / "bls", repository / name)
    assert (
        preparation.prepare_models(tmp_path, repository, ServeSettings(), with_draft=True)
        == repository
    )


def test_an_override_of_an_unknown_model_lists_the_models(repository: Path, tmp_path: Path) -> None:
    """A misspelt model is not silently ignored."""
    with pytest.raises(SettingsError, match=r"no model 'blz' in .*; there are bls, ensemble"):
        override(tmp_path, repository, Override("blz", "a", "b"))


@pytest.mark.parametrize(
    ("override", "mend"),
    [
        (
            Override("tensorrt_llm", "nosuch", "1"),
            "there are: decoupled, engine, exclude_input",
        ),
        (Override("tensorrt_llm", "max_bach", "1"), "did you mean max_batch?"),
        (Override("tensorrt_llm", "max_batch", "many"), "use a whole number of at least 0"),
        (Override("tensorrt_llm_bls", "decoupled", "maybe"), "use true or false"),
    ],
)
def test_a_parameter_that_our_model_does_not_have_is_refused(
    tmp_path: Path, override: Override, mend: str
) -> None:
    """In one line that says what would do, before anything starts."""
    with pytest.raises(SettingsError) as caught:
        preparation.prepare_models(
            tmp_path, REPOSITORY, ServeSettings(overrides=(override,)), with_draft=False
        )
    assert str(caught.value).startswith(f"--set {override}: ")
    assert mend in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_cpp_backend_takes_what_it_reads(repository: Path, tmp_path: Path) -> None:
    """Whichever release is behind it; a key that no release reads is refused."""
    config = repository / "bls" / "config.pbtxt"
    config.write_text('backend: "tensorrtllm"\n')
    for key in ("multiBlockMode", "multi_block_mode", "one_step_requests"):
        served = override(tmp_path / key, repository, Override("bls", key, "true"))
        assert parameters(served, "bls")[key] == "true"
    with pytest.raises(SettingsError, match=r"has no parameter nosuch; "):
        override(tmp_path / "refused", repository, Override("bls", "nosuch", "1"))


@pytest.mark.parametrize("kind", ['platform: "onnxruntime_onnx"', 'backend: "python"'])
def test_a_model_that_is_not_ours_takes_any_parameter(
    repository: Path, tmp_path: Path, kind: str
) -> None:
    """Only its own code knows what it reads."""
    (repository / "bls" / "config.pbtxt").write_text(kind)
    served = override(tmp_path / "served", repository, Override("bls", "anything", "1"))
    assert parameters(served, "bls") == {"anything": "1"}


def test_an_ensemble_has_no_parameters(repository: Path, tmp_path: Path) -> None:
    """Nothing would read them."""
    (repository / "bls" / "config.pbtxt").write_text('platform: "ensemble"')
    with pytest.raises(SettingsError, match="ensemble has no parameter x; there are: none"):
        override(tmp_path / "served", repository, Override("bls", "x", "1"))


def test_whether_the_model_streams_can_be_set(tmp_path: Path) -> None:
    """It becomes Triton's transaction policy."""
    no_streams = Override("tensorrt_llm_bls", "decoupled", "false")
    served = override(tmp_path, REPOSITORY, no_streams)
    text = (served / "tensorrt_llm_bls" / "config.pbtxt").read_text()
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert not config.model_transaction_policy.decoupled
    assert "decoupled" not in config.parameters


def test_a_draft_model_gets_an_engine_of_its_own(tmp_path: Path) -> None:
    """Only where the engine is the embedded one and the repository brings none for drafts."""
    models = tmp_path / "checkout" / "models"
    for model in ("tensorrt_llm", "tensorrt_llm_bls"):
        (models / model / "1").mkdir(parents=True)
        (models / model / "config.pbtxt").write_text(f'name: "{model}"\n')
    assert preparation.prepare_models(tmp_path, models, ServeSettings(), with_draft=True) == models
    (models / "tensorrt_llm" / "1" / "model.py").write_text("# embedded\n")
    assert preparation.prepare_models(tmp_path, models, ServeSettings(), with_draft=False) == models
    served = preparation.prepare_models(tmp_path, models, ServeSettings(), with_draft=True)
    assert preparation.model_names(served) == (
        "tensorrt_llm",
        "tensorrt_llm_bls",
        "tensorrt_llm_draft",
    )
    assert parameters(served, "tensorrt_llm_draft") == {"is_draft": "true"}
    named = parameters(served, "tensorrt_llm_bls")["tensorrt_llm_draft_model_name"]
    assert named == "tensorrt_llm_draft"
    assert 'name: "tensorrt_llm_draft"' in (served / named / "config.pbtxt").read_text()


def config_of(repository: Path, model: str) -> Any:
    text = (repository / model / "config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


@pytest.fixture
def bls(repository: Path) -> Path:
    (repository / "bls").rename(repository / "tensorrt_llm_bls")
    return repository


def test_instances_and_streaming_are_settings(bls: Path, tmp_path: Path) -> None:
    """They change the orchestrator's configuration and no other model's."""
    before = config_of(bls, "ensemble")
    settings = ServeSettings(bls_instances=3, decoupled=True)
    served = preparation.prepare_models(tmp_path, bls, settings, with_draft=False)
    config = config_of(served, "tensorrt_llm_bls")
    assert [group.count for group in config.instance_group] == [3]
    assert config.model_transaction_policy.decoupled
    assert config_of(served, "ensemble") == before


def test_unary_requests_instead_of_streams(bls: Path, tmp_path: Path) -> None:
    """``decoupled`` false is not the same as not given."""
    file = bls / "tensorrt_llm_bls" / "config.pbtxt"
    file.write_text(file.read_text() + "model_transaction_policy { decoupled: true }\n")
    settings = ServeSettings(decoupled=False)
    served = preparation.prepare_models(tmp_path, bls, settings, with_draft=False)
    assert not config_of(served, "tensorrt_llm_bls").model_transaction_policy.decoupled


def test_engines_answer_unary_requests_too(tmp_path: Path) -> None:
    """Ours and the C++ backend; an engine that nobody knows is left as it is."""
    cpp, other = tmp_path / "cpp" / "models", tmp_path / "other" / "models"
    for models in (cpp, other):
        shutil.copytree(REPOSITORY, models)
    file = cpp / "tensorrt_llm" / "config.pbtxt"
    file.write_text(
        'name: "tensorrt_llm" backend: "tensorrtllm" model_transaction_policy { decoupled: true }'
        'parameters { key: "gpt_model_type" value { string_value: "inflight_batching" } }'
    )
    (other / "tensorrt_llm" / "1" / "model.py").write_text("# somebody's")
    for models, unary in ((cpp, True), (REPOSITORY, True), (other, False)):
        workdir_of = tmp_path / models.parent.name / "work"
        workdir_of.mkdir(parents=True)
        served = preparation.prepare_models(
            workdir_of, models, ServeSettings(decoupled=False), False
        )
        config = config_of(served, "tensorrt_llm")
        assert config.model_transaction_policy.decoupled != unary
        excluded = config.parameters["exclude_input_in_output"].string_value
        assert excluded == ("false" if unary else "true")


@pytest.mark.parametrize(
    ("cores", "streams", "count"),
    [
        *((1, 256, 1), (4, 256, 1), (7, 256, 1), (8, 256, 2), (16, 256, 4), (128, 1024, 4)),
        *((128, 1, 1), (128, 64, 1), (128, 65, 2), (128, 192, 3)),
        *((4, 2048, 1), (5, 2048, 2), (8, 2048, 4), (16, 2048, 8), (128, 4096, 8)),
    ],
)
def test_automatic_processes_follow_cores_and_streams(
    cores: int, streams: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each 64 streams, at most four and a quarter of the cores (above 1,024 streams eight
    and half of them), at least one; the line of the start says why. What is remembered for later
    requests is remembered in one process."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    found, why = auto_processes(streams, remembers=False)
    assert found == count
    assert f"processes: {count} (auto: {cores} cores, max_streams {streams})" == why
    assert auto_processes(streams, remembers=True)[0] == 1


@pytest.mark.parametrize(
    ("override", "count"),
    [
        ("max_draft_len=8", 4),
        ("draft_memory_tokens=0", 4),
        ("draft_memory_tokens=1000", 1),
        ("engine_affinity=true", 1),
    ],
)
def test_our_own_repository_has_automatic_processes(
    override: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a number was asked for."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    overrides = (Override.parse(f"tensorrt_llm_bls.{override}"),)
    for asked, expected in ((None, count), ("auto", count), (3, 3)):
        settings = ServeSettings(bls_instances=asked, overrides=overrides)
        (directory := tmp_path / str(asked)).mkdir()
        served = preparation.prepare_models(directory, REPOSITORY, settings, with_draft=False)
        groups = config_of(served, "tensorrt_llm_bls").instance_group
        assert [group.count for group in groups] == [expected]


def test_a_repository_of_others_keeps_its_processes(bls: Path, tmp_path: Path) -> None:
    """``auto`` changes them only where it was asked for, and reads there what is remembered."""
    file = bls / "tensorrt_llm_bls" / "config.pbtxt"
    file.write_text(
        file.read_text() + "instance_group { count: 7 kind: KIND_CPU }\n"
        'parameters { key: "engine_affinity" value { string_value: "true" } }\n'
    )
    assert preparation.prepare_models(tmp_path, bls, ServeSettings(), with_draft=False) == bls
    assert preparation.instances_of(bls, ServeSettings()) == (None, "")
    asked = ServeSettings(bls_instances="auto", max_streams=4096)
    assert preparation.instances_of(bls, asked)[0] == 1


def test_a_repository_without_the_orchestrator_has_no_instances_of_it(
    repository: Path, tmp_path: Path
) -> None:
    """The line names the option that was given."""
    settings = ServeSettings(bls_instances="auto")
    with pytest.raises(SettingsError, match=r"^--bls-instances: no model 'tensorrt_llm_bls' in"):
        preparation.prepare_models(tmp_path, repository, settings, with_draft=False)


@pytest.mark.parametrize("name", ["with blank", "größe", "a;b", "$HOME"])
def test_a_path_that_triton_cannot_pass_on_is_linked(
    repository: Path, tmp_path: Path, name: str
) -> None:
    """It starts models through a shell, without quotes."""
    odd = repository.parent.rename(tmp_path / name) / repository.name
    (tmp_path / "work").mkdir()
    served = preparation.prepare_models(tmp_path / "work", odd, ServeSettings(), with_draft=False)
    assert preparation.is_plain(served)
    assert preparation.model_names(served) == preparation.model_names(odd)


def test_a_checkpoint_beyond_ascii_is_linked(tmp_path: Path) -> None:
    """The models' Python reads paths as ASCII; a path that it can read stays as it is."""
    odd = tmp_path / "größe"
    odd.mkdir()
    (odd / "config.json").write_text("{}")
    linked = preparation.link_checkpoint(tmp_path, "model", str(odd))
    assert str(linked.resolve()).isascii()
    assert (linked / "config.json").read_text() == "{}"
    assert preparation.link_checkpoint(tmp_path, "other", str(tmp_path)) == tmp_path


def test_an_unreadable_configuration_is_named(repository: Path, tmp_path: Path) -> None:
    """An override needs the whole configuration; the line says which one cannot be read."""
    (repository / "bls" / "config.pbtxt").write_text("nonsense {")
    with pytest.raises(SettingsError, match=r"--set bls\.a: .*config\.pbtxt: cannot be read"):
        override(tmp_path, repository, Override("bls", "a", "b"))


def test_the_python_backend_gets_our_stub_and_our_package(tmp_path: Path) -> None:
    """Other backends are linked whole, the Python backend file by file."""
    server = Installation(tmp_path / "triton")
    python = server.backends / "python"
    stubs = server.root / "python_backend_stubs" / PYTHON
    for directory in (python, server.backends / "tensorrtllm", stubs):
        directory.mkdir(parents=True)
    for file in (python / "libtriton_python.so", python / "triton_python_backend_stub"):
        file.write_text("theirs")
    (stubs / "triton_python_backend_stub").write_text("ours")
    linked = preparation.link_backends(tmp_path, server)
    assert (linked / "python" / "libtriton_python.so").read_text() == "theirs"
    assert (linked / "python" / "triton_python_backend_stub").read_text() == "ours"
    assert (linked / "python" / "trtllm_bls" / "errors.py").is_file()
    assert (linked / "tensorrtllm").is_dir()


def test_only_libpython_is_put_before_the_servers_libraries(tmp_path: Path) -> None:
    """Its own directory may hold other builds of what the server brings."""
    (tmp_path / "libssl.so").touch()
    (tmp_path / "libpython.so").write_text("python")
    linked = preparation.links(tmp_path / "lib", [tmp_path / "libpython.so"])
    assert [file.name for file in linked.iterdir()] == ["libpython.so"]
    assert (linked / "libpython.so").read_text() == "python"
