"""The checks that ``serve`` waits for: of faults that a server, once started, would not report so
early or so clearly. Models that Triton refuses are not among them, for Triton says that itself.

``doctor`` runs these, too.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress

from trtllm_bls.configure.model_programs import model_of, names_gone
from trtllm_bls.errors import SettingsError, SetupError
from trtllm_bls.operate import checks
from trtllm_bls.operate.findings import (
    CHECKS,
    Finding,
    Findings,
    Level,
    Subject,
    check,
    examine,
    fault,
)
from trtllm_bls.operate.preparation import Scratch
from trtllm_bls.settings import cpp_backend
from trtllm_bls.settings.parameters import check as check_ours
from trtllm_bls.settings.parameters import parameters_of

PREPARING = "preparing"
LOADING = "loading"


def preflight(
    stage: str, subject: Subject, warn: Callable[[str], object], *, refuses: bool
) -> None:
    """Run the checks that ``serve`` waits for; ``warn`` gets each finding that does not stop it.

    Raises ``SetupError`` with the first error, unless ``refuses`` is false (``--no-checks``).
    """
    checks = [check for check in CHECKS if check.stage == stage]
    error: Finding | None = None
    for _, finding in examine(subject, checks):
        if finding.level == "ok":
            continue
        if finding.level == "error" and refuses and error is None:
            error = finding
        elif finding != error:
            warn(str(finding))
    if error is not None:
        raise SetupError(str(error))


@check("this machine can run the server's models", stage=PREPARING)
def platform_and_place(subject: Subject) -> None:
    checks.check_platform()
    checks.check_environment(sys.prefix, checks.PACKAGE)


def has_server(subject: Subject) -> bool:
    """Return True if a server is named, or is found here."""
    with suppress(SetupError):
        return bool(subject.server or checks.find_server(None))
    return False


def _serves_here(subject: Subject) -> bool:
    """Return True if a server is to be started on this machine.

    Then none runs yet. A release that is named belongs to another machine where no server is here.
    """
    return not subject.url and (not subject.version or has_server(subject))


@check("as many files can be open as streams need", _serves_here, PREPARING)
def open_files(subject: Subject) -> None:
    checks.check_open_files(subject.max_streams)


@check("files of a run can be made", _serves_here, PREPARING)
def temporary_directory(subject: Subject) -> None:
    scratch = Scratch()
    try:
        scratch.make()
    finally:
        scratch.remove()
    if not os.access("/tmp", os.W_OK):
        raise SetupError(
            "/tmp cannot be written, where Triton's Python backend makes a directory; "
            "mount a volume there"
        )


@check("shared memory has room for the models' tensors", stage=PREPARING)
def shared_memory(subject: Subject) -> Findings:
    """Docker's default of 64 MB is filled by a few large answers."""
    if subject.shared_memory.exists() and not os.access(subject.shared_memory, os.W_OK):
        yield fault(f"{subject.shared_memory} cannot be written", "mount a memory volume there")
    if warning := checks.check_shared_memory(subject.shared_memory):
        yield Finding.of(SetupError(warning), "warn")


@check(
    "there is a server, and it runs models on this Python and its numpy",
    lambda s: _serves_here(s) or has_server(s),
    PREPARING,
)
def server_python(subject: Subject) -> None:
    installation = checks.find_server(subject.server)
    paths = [str(checks.libpython().parent)]
    if library_path := subject.environment.get("LD_LIBRARY_PATH"):
        paths.append(library_path)
    environment = {**subject.environment, "LD_LIBRARY_PATH": os.pathsep.join(paths)}
    checks.check_server(installation, environment)
    checks.check_numpy(installation, checks.embedded_numpy())


@check("every model's program is of this version", lambda s: s.configs, LOADING)
def program_versions(subject: Subject) -> Findings:
    """A program of an earlier version does not load if it imports a name that is gone.

    A program that its user has changed may load.
    """
    assert subject.repository is not None
    repository = subject.source or subject.repository
    remedy = f"run trtllm-bls upgrade {shlex.quote(str(repository))}"
    for model in subject.configs:
        for code in sorted((subject.repository / model).glob("[0-9]*/model.py")):
            level: Level = "warn"
            if model_of(code):
                level = "error"
            for name in names_gone(code):
                yield Finding(
                    level,
                    f"{model}: its model.py imports {name}, which this version does not have",
                    remedy,
                )


def _is_store_named(subject: Subject) -> bool:
    return subject.store_dir is not None


@check("responses can be stored", _is_store_named, PREPARING)
def store_directory(subject: Subject) -> None:
    """Each worker of the OpenAI API opens it, once all models have loaded."""
    assert subject.store_dir is not None
    directory = subject.store_dir.absolute()
    problem = f"--store-dir {subject.store_dir}"
    if directory.exists() and not directory.is_dir():
        raise SettingsError(f"{problem}: is a file; name a directory")
    if directory.is_symlink() and not directory.is_dir():
        raise SettingsError(f"{problem}: is a link that leads nowhere; name a directory")
    if not directory.is_dir():
        directory = directory.parent  # the store makes its own directory there
    if not directory.is_dir():
        raise SettingsError(f"{problem}: there is no {directory}; make it")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise SettingsError(f"{problem}: {directory} cannot be written; name another directory")


@check("every parameter is known and has a value that can be read", lambda s: s.configs, LOADING)
def parameters(subject: Subject) -> Findings:
    """A model of this package does not load with a value that it cannot read. Another parameter
    has no effect, or another one than its name says."""
    our_models = subject.models_of_this_package
    for model, contract in subject.known_models.items():
        parameters = parameters_of(our_models.get(model, ""))
        for key, value in subject.values(model).items():
            if "${" in value or not value:
                continue
            try:
                if model in subject.cpp_models:
                    cpp_backend.check_backend(key, value, subject.release)
                else:
                    check_ours(contract.name, key, value)
            except SettingsError as error:
                level: Level = "warn"
                if key in parameters and not subject.environment.get(parameters[key].env):
                    level = "error"
                yield Finding.of(SettingsError(f"{model}.{key}: {error}"), level)
