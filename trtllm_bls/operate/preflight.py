"""The checks that ``serve`` waits for: what a server, once started, would not say so early or so
clearly. What Triton refuses is not among them, for Triton says that itself.

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

PREPARING, LOADING = "preparing", "loading"


def preflight(
    before: str, subject: Subject, warn: Callable[[str], object], *, refuses: bool
) -> None:
    """Run the checks that ``serve`` waits for; ``warn`` gets each finding that does not stop it.

    Raises ``SetupError`` with the first error, unless ``refuses`` is false (``--no-checks``).
    """
    checks = [check for check in CHECKS if check.before == before]
    problems = [finding for _, finding in examine(subject, checks) if finding.level != "ok"]
    errors = [finding for finding in problems if finding.level == "error"] if refuses else []
    for finding in problems:
        if finding not in errors[:1]:
            warn(str(finding))
    if errors:
        raise SetupError(str(errors[0]))


@check("this machine can run the server's models", before=PREPARING)
def platform_and_place(subject: Subject) -> None:
    checks.check_platform()
    checks.check_environment(sys.prefix, checks.PACKAGE)


def has_server(subject: Subject) -> bool:
    """True where a server is named, or is found here."""
    with suppress(SetupError):
        return bool(subject.server or checks.find_server(None))
    return False


def _serves_here(subject: Subject) -> bool:
    """True where a server is to be started on this machine: none runs, and the release that is
    named belongs to another machine only where no server is here."""
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
        what = "/tmp cannot be written, where Triton's Python backend makes a directory"
        raise SetupError(f"{what}; mount a volume there")


@check("shared memory has room for the models' tensors", before=PREPARING)
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
    installation, library = checks.find_server(subject.server), checks.libpython()
    paths = filter(None, (str(library.parent), subject.environment.get("LD_LIBRARY_PATH")))
    searched = {**subject.environment, "LD_LIBRARY_PATH": os.pathsep.join(paths)}
    checks.check_server(installation, searched)
    checks.check_numpy(installation, checks.embedded_numpy())


@check("every model's program is of this version", lambda s: s.configs, LOADING)
def program_versions(subject: Subject) -> Findings:
    """A program that an earlier version wrote does not load where it imports what has gone. Its
    user may have changed one, so that it does."""
    assert subject.repository is not None
    mend = f"run trtllm-bls upgrade {shlex.quote(str(subject.source or subject.repository))}"
    for model in subject.configs:
        for code in sorted((subject.repository / model).glob("[0-9]*/model.py")):
            level: Level = "error" if model_of(code) else "warn"
            for name in names_gone(code):
                what = f"{model}: its model.py imports {name}, which this version does not have"
                yield Finding(level, what, mend)


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
    place = directory if directory.is_dir() else directory.parent
    if not place.is_dir():
        raise SettingsError(f"{problem}: there is no {place}; make it")
    if not os.access(place, os.W_OK | os.X_OK):
        raise SettingsError(f"{problem}: {place} cannot be written; name another directory")


@check("every parameter is known and has a value that can be read", lambda s: s.configs, LOADING)
def parameters(subject: Subject) -> Findings:
    """A model of this package does not load with a value that it cannot read. Another parameter
    has no effect, or another one than its name says."""
    own = subject.models_of_this_package
    for model, known in subject.known_models.items():
        declared = parameters_of(own.get(model, ""))
        for key, value in subject.values(model).items():
            if "${" in value or not value:
                continue
            try:
                if model in subject.cpp_models:
                    cpp_backend.check_backend(key, value, subject.release)
                else:
                    check_ours(known.name, key, value)
            except SettingsError as error:
                is_read = key in declared and not subject.environment.get(declared[key].env)
                level: Level = "error" if is_read else "warn"
                yield Finding.of(SettingsError(f"{model}.{key}: {error}"), level)
