"""The files of one run: a backend directory, the right libpython, a changed model repository.

Owns the layout of a temporary directory that consists mostly of links.
"""

from __future__ import annotations

import filecmp
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trtllm_bls.checkpoint_dir import REPOSITORY
from trtllm_bls.errors import SettingsError, SetupError
from trtllm_bls.launcher.checks import PACKAGE, PYTHON, Installation
from trtllm_bls.parameters import check, is_true
from trtllm_bls.parameters.cpp_backend import check_backend
from trtllm_bls.parameters.model_config import read_config, values_of
from trtllm_bls.settings import Override, ServeSettings, auto_processes

BLS, ENGINE, _DRAFT = "tensorrt_llm_bls", "tensorrt_llm", "tensorrt_llm_draft"
_ENGINE_MODELS = (ENGINE, _DRAFT, "ensemble")  # left out if the engine is in another process
_INSTANCES = "instance group"  # stands for --bls-instances; no parameter can have this name
_DRAFT_OVERRIDES = (
    Override(_DRAFT, "is_draft", "true"),
    Override(BLS, "tensorrt_llm_draft_model_name", _DRAFT),
)


def link_libpython(workdir: Path, library: Path) -> Path:
    """A directory with only this library, for the front of the search path.

    The library's own directory may hold others, which must not replace the server's.
    """
    return _links(workdir / "lib", [library])


def link_backends(workdir: Path, server: Installation) -> Path:
    """A directory of the server's backends; the Python one has this interpreter's stub and this
    package.

    The embedded Python ignores PYTHONPATH but has the backend's directory on its path, so models
    can import this package even if it is not installed.
    """
    python, stub = server.backends / "python", server.stub(PYTHON)
    directory = _links(workdir / "backends", set(server.backends.iterdir()) - {python})
    theirs = [file for file in python.iterdir() if file.name != stub.name]
    _links(directory / python.name, [*theirs, stub, PACKAGE])
    return directory


def _links(directory: Path, targets: Iterable[Path]) -> Path:
    """A new directory of links to files and directories, under their own names."""
    directory.mkdir()
    for target in targets:
        (directory / target.name).symlink_to(target)
    return directory


def model_names(repository: Path) -> tuple[str, ...]:
    """The models of a repository: its directories with a configuration or a version."""
    if not repository.is_dir():
        raise SetupError(f"--model-repository {repository}: no such directory")
    names = tuple(sorted(d.name for d in repository.iterdir() if d.is_dir() and _is_model(d)))
    if not names:
        raise SetupError(f"--model-repository {repository}: no model in it")
    return names


def _is_model(directory: Path) -> bool:
    if (directory / "config.pbtxt").is_file():
        return True
    return any(d.name.isdigit() for d in directory.iterdir() if d.is_dir())


def prepare_models(
    workdir: Path, repository: Path, settings: ServeSettings, with_draft: bool
) -> Path:
    """The repository itself, or a copy made of links with changed configurations.

    A copy is needed if settings change a configuration, or if Triton cannot handle the path. The
    original's siblings are linked beside the copy, so that relative paths such as ``../assets``
    still work. ``with_draft`` adds a second embedded engine for drafts, unless the repository has
    its own. Raises ``SettingsError`` for an unknown model or a broken configuration.
    """
    with_draft = with_draft and not settings.engine_is_elsewhere and _can_add_draft(repository)
    changes = _changes(repository, settings, with_draft)
    if not changes and is_plain(repository):
        return repository
    surroundings = _links(workdir / "repository", set(repository.parent.iterdir()) - {repository})
    copy = surroundings / (repository.name if is_plain(repository.name) else "models")
    shutil.copytree(repository, copy, symlinks=False, copy_function=os.symlink)
    if settings.engine_is_elsewhere:
        for name in _ENGINE_MODELS:
            shutil.rmtree(copy / name, ignore_errors=True)
    if with_draft:
        shutil.copytree(copy / ENGINE, copy / _DRAFT, symlinks=True)
    names = model_names(copy)
    for option, change in changes:
        if change.model not in names:
            raise SettingsError(
                f"{option}: no model {change.model!r} in {repository}; there are {', '.join(names)}"
            )
        _rewrite(copy / change.model / "config.pbtxt", option, change)
    return copy


def parameter(repository: Path, model: str, key: str) -> str:
    """A parameter of a model's configuration; empty if unreadable, which Triton will report."""
    try:
        return values_of(read_config(repository / model / "config.pbtxt")).get(key, "")
    except SettingsError:
        return ""


def sends_only(repository: Path) -> bool:
    """Whether no Python model calls another inside the server: all are this package's."""
    return all(
        _our_model(repository / name, "")
        for name in model_names(repository)
        if any((repository / name).glob("*/*.py"))
    )


def is_plain(path: Path | str) -> bool:
    """Whether Triton can handle a path: it passes it through a shell, unquoted, as ASCII."""
    return shlex.quote(str(path)) == str(path)


def link_checkpoint(workdir: Path, name: str, directory: str) -> Path:
    """The directory, or one of links to its files if the path is not ASCII, which models cannot
    read."""
    if directory.isascii():
        return Path(directory)
    return _links(workdir / name, Path(directory).iterdir())


def _can_add_draft(repository: Path) -> bool:
    names = model_names(repository)
    embedded = (repository / ENGINE / "1" / "model.py").is_file()
    return embedded and BLS in names and _DRAFT not in names


def _changes(
    repository: Path, settings: ServeSettings, with_draft: bool
) -> list[tuple[str, Override]]:
    """The changes to configurations, each with the option that asked for it."""
    instances, _ = instances_of(repository, settings)
    options = (
        ("--bls-instances", _INSTANCES, instances),
        ("--engine", "engine", settings.engine),
    )
    overrides = (*(_DRAFT_OVERRIDES if with_draft else ()), *settings.overrides)
    return [
        *(
            (name, Override(BLS, key, str(value)))
            for name, key, value in options
            if value is not None
        ),
        *(("--decoupled", each) for each in _policies(repository, settings, with_draft)),
        *((f"--set {each.model}.{each.parameter}", each) for each in overrides),
    ]


def _policies(repository: Path, settings: ServeSettings, with_draft: bool) -> Iterator[Override]:
    """Of ``--decoupled``. Where the orchestrator answers once to a request, so does each engine
    that is known to be able to, and both repeat the prompt: as TensorRT-LLM's models do."""
    if settings.decoupled is None:
        return
    engines = {} if settings.engine_is_elsewhere else {ENGINE: ENGINE, _DRAFT: _DRAFT}
    if with_draft:
        engines[_DRAFT] = ENGINE
    known = [
        name
        for name, source in engines.items()
        if _our_model(repository / source, "") or parameter(repository, source, "gpt_model_type")
    ]
    for name in (BLS, *known):
        yield Override(name, "decoupled", str(settings.decoupled))
        if not settings.decoupled:
            yield Override(name, "exclude_input_in_output", "false")


def instances_of(repository: Path, settings: ServeSettings) -> tuple[int | None, str]:
    """The processes of ``tensorrt_llm_bls``, and why if that was left to us. ``None``: as it is."""
    asked = settings.bls_instances
    if asked != "auto" and (asked is not None or repository != REPOSITORY):
        return asked, ""
    given = {each.parameter: each.value for each in settings.overrides if each.model == BLS}
    affinity, memory = (
        given.get(key, parameter(repository, BLS, key))
        for key in ("engine_affinity", "draft_memory_tokens")
    )
    return auto_processes(settings.max_streams, is_true(affinity) or memory not in ("", "0"))


def _rewrite(file: Path, option: str, change: Override) -> None:
    try:
        config = read_config(file)
    except SettingsError as error:
        raise SettingsError(f"{option}: {error}") from error
    config.name = change.model  # a model that was copied still has its original's
    if change.parameter == _INSTANCES:
        del config.instance_group[:]
        kind = model_config_pb2.ModelInstanceGroup.KIND_CPU
        config.instance_group.add(kind=kind, count=int(change.value))
    else:
        _check_parameter(file.parent, config, change)
        if change.parameter == "decoupled":
            config.model_transaction_policy.decoupled = is_true(change.value)
        else:
            config.parameters[change.parameter].string_value = change.value
    file.unlink()  # only the link; the original stays unchanged
    file.write_text(text_format.MessageToString(config), encoding="utf-8")


def _check_parameter(directory: Path, config: Any, override: Override) -> None:
    """Raises ``SettingsError`` for what our own models or the C++ backend would not understand."""
    try:
        cpp = config.backend == "tensorrtllm"
        if cpp and override.parameter != "decoupled":
            check_backend(override.parameter, override.value)
        elif ours := ENGINE if cpp else _our_model(directory, config.platform):
            check(ours, override.parameter, override.value)
    except SettingsError as error:
        raise SettingsError(f"--set {override}: {error}") from None


def _our_model(directory: Path, platform: str) -> str | None:
    """Which of this package's models it is, recognised by an identical ``model.py``."""
    if platform == "ensemble":
        return platform
    code = directory / "1" / "model.py"
    for file in REPOSITORY.glob("*/1/model.py"):
        if code.is_file() and filecmp.cmp(code, file, shallow=False):
            return file.parts[-3]
    return None
