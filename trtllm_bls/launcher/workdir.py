"""What one server run needs on disk: a backend directory, the right libpython, changed models.

Owns the layout of a temporary directory, mostly links; the guard removes it after the server.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trtllm_bls.errors import SettingsError, SetupError
from trtllm_bls.launcher.find import Installation
from trtllm_bls.launcher.interpreter import PYTHON
from trtllm_bls.settings import Override


def link_libpython(workdir: Path, library: Path) -> Path:
    """A directory holding that one library, to be first on the search path.

    The library's own directory may hold other libraries, which must not replace the server's.
    """
    directory = workdir / "lib"
    directory.mkdir()
    (directory / library.name).symlink_to(library)
    return directory


def link_backends(workdir: Path, server: Installation) -> Path:
    """The server's backends, the Python one with the stub of this interpreter."""
    directory = workdir / "backends"
    python = directory / "python"
    python.mkdir(parents=True)
    for backend in server.backends.iterdir():
        if backend.name != python.name:
            (directory / backend.name).symlink_to(backend)
    for file in (server.backends / python.name).iterdir():
        (python / file.name).symlink_to(file)
    stub = server.stub(PYTHON)
    link = python / stub.name
    link.unlink(missing_ok=True)
    link.symlink_to(stub)
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


def apply_overrides(workdir: Path, repository: Path, overrides: tuple[Override, ...]) -> Path:
    """The repository itself, or with overrides a copy whose configurations are changed.

    The copy's neighbours are linked beside it, so that relative paths such as ``../assets`` keep
    their meaning. Raises ``SettingsError`` for an unknown model or an unreadable configuration.
    """
    if not overrides:
        return repository
    _check_models(repository, overrides)
    surroundings = workdir / "repository"
    surroundings.mkdir()
    for neighbour in repository.parent.iterdir():
        if neighbour != repository:
            (surroundings / neighbour.name).symlink_to(neighbour)
    copy = surroundings / repository.name
    shutil.copytree(repository, copy, symlinks=False, copy_function=os.symlink)
    for override in overrides:
        _rewrite(copy / override.model / "config.pbtxt", override)
    return copy


def _check_models(repository: Path, overrides: tuple[Override, ...]) -> None:
    names = model_names(repository)
    for override in overrides:
        if override.model not in names:
            raise SettingsError(
                f"--set {override.model}.{override.parameter}: no model {override.model!r} in "
                f"{repository}; there are {', '.join(names)}"
            )


def _rewrite(file: Path, override: Override) -> None:
    try:
        config = text_format.Parse(file.read_text(), model_config_pb2.ModelConfig())
    except (OSError, text_format.ParseError) as error:
        problem = str(error).splitlines()[0]
        raise SettingsError(
            f"--set {override.model}.{override.parameter}: its config.pbtxt cannot be read: "
            f"{problem}"
        ) from error
    config.parameters[override.parameter].string_value = override.value
    file.unlink()  # a link to the original, which stays as it is
    file.write_text(text_format.MessageToString(config))
