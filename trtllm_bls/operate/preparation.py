"""The preparation of a run of the server: its files, its command line and its environment.

The files are in a temporary directory that consists mostly of links: a backend directory, the right
libpython, a changed model repository. For the models a ``TRTLLM_BLS_*`` variable takes precedence
over a parameter in their configuration, unless ``--set`` gave that parameter.
"""

from __future__ import annotations

import filecmp
import os
import shlex
import shutil
import sys
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trtllm_bls.bundled import DEMO, REPOSITORY
from trtllm_bls.errors import SettingsError, SetupError
from trtllm_bls.operate.checks import PACKAGE, PYTHON, Installation
from trtllm_bls.operate.guard import remove_traces
from trtllm_bls.operate.health import SHARED_MEMORY
from trtllm_bls.operate.ports import Ports
from trtllm_bls.orchestrator.status import StatusDirectory
from trtllm_bls.settings import parameters
from trtllm_bls.settings.command_options import (
    Override,
    ServeSettings,
    auto_processes,
    usable_cores,
)
from trtllm_bls.settings.cpp_backend import check_backend
from trtllm_bls.settings.model_config import read_config, values_of
from trtllm_bls.settings.model_names import (
    BLS_NAME,
    DRAFT_NAME,
    ENGINE_NAME,
    ENSEMBLE_NAME,
    ENSEMBLE_PLATFORM,
)
from trtllm_bls.text.checkpoint_dir import check_checkpoint, check_tokenizer
from trtllm_bls.text.template_trial import NO_FORK_HANDLERS

_INSTANCES = "instance group"  # stands for --bls-instances; no parameter can have this name

# Each model instance has a pool of threads inside the server, for its calls to other models and for
# sending responses. A call holds a thread until its first response. With fewer threads than
# streams, running streams would wait behind new ones. The margin is for control requests and for
# streams that are ending.
_THREAD_MARGIN = 32
# If no model calls another, only responses use the pool, and a model sends from at most this many
# threads at once. A larger pool would spread the same work over threads with cold caches.
SENDING_THREADS = 4

_MAX_TOKENIZER_THREADS = 8  # in each process that tokenises
# Checkpoints come from local directories, so Hugging Face libraries must not ask the network.
# TOKENIZERS_PARALLELISM silences a warning about forks: a fork of ours encodes no text.
_QUIET_LIBRARIES = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "true",
    "PYTHONUNBUFFERED": "1",
}


TMPDIR = "mount a volume there, or name another directory by the variable TMPDIR"


class Scratch:
    """The files of one run, removed after it: a directory, and regions by their prefix."""

    def __init__(self) -> None:
        try:
            parent = gettempdir()
        except FileNotFoundError as error:
            raise SetupError(f"{error.strerror}; {TMPDIR}") from error
        if not is_plain(parent):
            parent = "/tmp"
        name = uuid.uuid4().hex
        self.workdir = Path(parent, f"trtllm-bls-{name}")
        self.region_prefix = f"trtllm_bls_{name[:12]}_"
        self.regions = str(SHARED_MEMORY / self.region_prefix)
        self.canary_id = f"health-{uuid.uuid4().hex}"
        self.status = self.workdir / "status"  # see ``trtllm_bls.orchestrator.status``

    def make(self) -> None:
        """Make the directory, for this user alone. Raises ``SetupError``."""
        try:
            self.workdir.mkdir(mode=0o700)
        except OSError as error:
            raise SetupError(f"{self.workdir.parent}: {error.strerror}; {TMPDIR}") from error

    def keep_status(self, directory: str) -> None:
        """Make the status directory, which may be the user's, and clear it of old files.

        Raises ``SettingsError``.
        """
        if directory:
            self.status = Path(directory).absolute()
        try:
            self.status.mkdir(parents=True, exist_ok=True)
            StatusDirectory(self.status).clear()
        except OSError as error:
            raise SettingsError(f"status_dir {self.status}: {error.strerror}") from error

    def hide_regions(self) -> None:
        """Take the regions from other users.

        Triton's Python backend (boost) makes them 0644, whatever the umask is.
        """
        for region in SHARED_MEMORY.glob(f"{self.region_prefix}*"):
            with suppress(OSError):  # it has gone, or another user has put a link there
                descriptor = os.open(region, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    os.fchmod(descriptor, 0o600)
                finally:
                    os.close(descriptor)

    def remove(self) -> None:
        """Remove all files of the run."""
        remove_traces(self.workdir, self.regions)


def real_path(path: Path) -> Path:
    """Return the path without links and ``~``.

    A link that leads to itself stays, where ``Path.resolve`` raises ``RuntimeError`` before
    Python 3.13.
    """
    return Path(os.path.realpath(path.expanduser()))


def is_plain(path: Path | str) -> bool:
    """Return True if Triton can handle a path: it passes it through a shell, unquoted, as ASCII."""
    return shlex.quote(str(path)) == str(path)


# --- command line and environment -----------------------------------------------------------


def server_command(
    server: Installation,
    settings: ServeSettings,
    ports: Ports,
    repository: Path,
    backends: Path,
    region_prefix: str,
    sends_only: bool = False,
) -> list[str]:
    """Return the command line.

    ``region_prefix`` begins the names of all shared-memory regions. With ``sends_only`` no Python
    model calls another one inside the server. Auto-completion of configurations is off, because it
    would start every model's Python twice.
    """
    threads = settings.max_streams + _THREAD_MARGIN
    if sends_only:
        threads = SENDING_THREADS
    threads = settings.thread_pool_size or threads
    options: dict[str, object] = {
        "model-repository": repository,
        "backend-directory": backends,
        "http-address": ports.http_host,
        "http-port": ports.http,
        "grpc-address": ports.host,
        "grpc-port": ports.grpc,
        "metrics-address": ports.plain_host,
        "metrics-port": ports.metrics,
        "exit-timeout-secs": settings.exit_timeout,
        # These headers reach models as request parameters: ``traceparent`` goes to the engine and
        # into the log; ``triton_grpc_error`` delays errors (``python_backend``).
        "grpc-header-forward-pattern": "traceparent|triton_grpc_error",
        "http-header-forward-pattern": "traceparent",
    }
    if settings.tls_cert is not None:  # Triton has TLS for gRPC only
        options |= {"grpc-server-cert": settings.tls_cert, "grpc-server-key": settings.tls_key}
        if settings.tls_client_ca is None:
            options["grpc-use-ssl"] = "true"
        else:
            options |= {"grpc-use-ssl-mutual": "true", "grpc-root-cert": settings.tls_client_ca}
    if not settings.open_control_apis:
        # Any client could otherwise read other requests' inputs in shared memory, load and unload
        # models, or switch the log off. Triton asks for a header before it answers one of these
        # APIs. Every user of the machine can read a command line, so the header is no secret: it is
        # one that nobody can send. gRPC resets a call whose header has blanks in its name, and no
        # HTTP header has a line feed in its value. Inference, health, metadata, configuration and
        # statistics stay open.
        header = "shared-memory,model-repository,logging,trace:closed by serve=closed\nby serve"
        options |= {"http-restricted-api": header, "grpc-restricted-protocol": header}
    return [
        str(server.binary),
        *(f"--{name}={value}" for name, value in options.items()),
        f"--backend-config=python,thread-pool-size={threads}",
        f"--backend-config=python,shm-region-prefix-name={region_prefix}",
        "--disable-auto-complete-config",
    ]


def server_environment(
    settings: ServeSettings, ports: Ports, libraries: Path, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the server's environment; ``libraries`` holds the libpython to use.

    This interpreter's directory leads PATH: the embedded Python finds its home and its packages by
    the first ``python3`` there, and by nothing else.
    """
    environment = NO_FORK_HANDLERS | dict(inherited) | _QUIET_LIBRARIES
    environment.update(model_directories(settings))
    threads = min(_MAX_TOKENIZER_THREADS, usable_cores())
    environment.setdefault("RAYON_NUM_THREADS", str(threads))
    executables = os.path.dirname(sys.executable)
    for variable, directory in (("PATH", executables), ("LD_LIBRARY_PATH", str(libraries))):
        directories = filter(None, (directory, inherited.get(variable)))
        environment[variable] = os.pathsep.join(directories)
    environment[parameters.GRPC_URL] = ports.grpc_url
    environment[parameters.MAX_STREAMS] = str(settings.max_streams)
    for variable, parser in (
        (parameters.TOOL_PARSER, settings.tool_parser),
        (parameters.REASONING_PARSER, settings.reasoning_parser),
    ):
        if parser != "auto":  # for pipelines; the HTTP program reads the model's own chats
            environment[variable] = parser
    overrides = {f"{row.model}.{row.parameter}": row.value for row in settings.overrides}
    status_dir = overrides.pop(f"{BLS_NAME}.status_dir", None)
    if status_dir is not None:
        environment[parameters.STATUS_DIR] = status_dir  # the launcher makes it, and reads it too
    environment[parameters.GIVEN] = ",".join(overrides)
    elsewhere = settings.engine_is_elsewhere or f"{BLS_NAME}.engine_url" in overrides
    if settings.tls_cert is not None and not elsewhere:
        # The models reach the server at an address, which its certificate need not name.
        environment[parameters.ENGINE_TLS_PIN] = os.path.abspath(settings.tls_cert)
    if settings.threads is not None:
        environment[parameters.THREADS] = str(settings.threads)
    return environment


def model_directories(settings: ServeSettings) -> dict[str, str]:
    """Return the checkpoints that the models load, by variable.

    They are none if the models' configuration decides.

    The demo's draft is only assumed together with the demo's model, because a draft with another
    vocabulary cannot be used. Raises ``SetupError`` for a missing directory and, with the bundled
    repository, for a directory that is not a complete checkpoint.
    """
    target = settings.model
    draft = settings.draft_model
    if target is None and draft is None and settings.model_repository is None:
        target = DEMO / "target"
        draft = DEMO / "draft"
    directories = {}
    for option, variable, path in (
        ("--model", parameters.MODEL_DIR, target),
        ("--draft-model", parameters.DRAFT_MODEL_DIR, draft),
    ):
        if path is None:
            continue
        directory = real_path(path)
        if not directory.is_dir():
            raise SetupError(f"{option} {directory}: no such directory{_download_hint(path)}")
        if settings.model_repository is None:  # else its models say what the directory is for
            if not settings.engine_is_elsewhere:
                check_checkpoint(directory)
            check_tokenizer(directory)
        directories[variable] = str(directory)
    return directories


def _download_hint(directory: Path) -> str:
    """Return how to download a checkpoint where the path looks like a name on Hugging Face."""
    owner, _, name = str(directory).partition("/")
    looks_like_a_name = name and "/" not in name and owner not in ("", ".", "..", "~")
    if not looks_like_a_name or Path(owner).is_dir():
        return ""
    command = f"hf download {directory} --local-dir ./{name}"
    return f"; for Hugging Face's {directory}: `{command}`, then --model ./{name}"


# --- links ----------------------------------------------------------------------------------


def links(directory: Path, targets: Iterable[Path]) -> Path:
    """Make a directory of links to files and directories, under their own names."""
    directory.mkdir()
    for target in targets:
        (directory / target.name).symlink_to(target)
    return directory


def link_backends(workdir: Path, server: Installation) -> Path:
    """Make a directory of the server's backends.

    The Python one has this interpreter's stub and this package. The embedded Python ignores
    PYTHONPATH but has the backend's directory on its path, so models can import this package even
    if it is not installed.
    """
    python = server.backends / "python"
    stub = server.stub(PYTHON)
    directory = links(workdir / "backends", set(server.backends.iterdir()) - {python})
    backend_files = [file for file in python.iterdir() if file.name != stub.name]
    links(directory / python.name, [*backend_files, stub, PACKAGE])
    return directory


def link_checkpoint(workdir: Path, name: str, directory: str) -> Path:
    """Return the directory, or one of links to its files if the path is not ASCII.

    Models cannot read a path that is not ASCII.
    """
    if directory.isascii():
        return Path(directory)
    return links(workdir / name, Path(directory).iterdir())


# --- model repository -----------------------------------------------------------------------


def model_repository(settings: ServeSettings) -> Path:
    """Return the model repository to serve, absolute: our own where none was named."""
    return real_path(settings.model_repository or REPOSITORY)


def model_names(repository: Path) -> tuple[str, ...]:
    """Return the models of a repository: its directories with a configuration or a version."""
    if not repository.is_dir():
        raise SetupError(f"--model-repository {repository}: no such directory")
    names = []
    for directory in filter(Path.is_dir, repository.iterdir()):
        if (directory / "config.pbtxt").is_file() or any(map(_is_version, directory.iterdir())):
            names.append(directory.name)
    if not names:
        raise SetupError(f"--model-repository {repository}: no model in it")
    return tuple(sorted(names))


def _is_version(path: Path) -> bool:
    return path.name.isdecimal() and path.is_dir()


def _no_circles(directory: str, names: list[str]) -> tuple[str, ...]:
    """Raise ``SettingsError`` for a link into which a copy would follow without an end."""
    parent = real_path(Path(directory))
    for name in names:
        link = Path(directory, name)
        if link.is_symlink() and real_path(link) in (parent, *parent.parents):
            raise SettingsError(f"{link}: a link to a directory that it is in; remove it")
    return ()


def prepare_models(
    workdir: Path, repository: Path, settings: ServeSettings, with_draft: bool
) -> Path:
    """Return the repository itself, or a copy made of links with changed configurations.

    A copy is needed if settings change a configuration, or if Triton cannot handle the path. The
    original's siblings are linked beside the copy, so that relative paths such as ``../assets``
    still work. ``with_draft`` adds a second embedded engine for drafts, unless the repository has
    its own. Raises ``SettingsError`` for an unknown model or a broken configuration.
    """
    names = model_names(repository)
    engine_code = repository / ENGINE_NAME / "1/model.py"
    is_embedded = not settings.engine_is_elsewhere and engine_code.is_file()
    with_draft = with_draft and is_embedded and BLS_NAME in names and DRAFT_NAME not in names
    changes = _changes(repository, settings, with_draft)
    if not changes and is_plain(repository):
        return repository
    copy = links(workdir / "repository", set(repository.parent.iterdir()) - {repository}) / "models"
    if is_plain(repository.name):
        copy = copy.with_name(repository.name)
    shutil.copytree(repository, copy, ignore=_no_circles, copy_function=os.symlink)
    if settings.engine_is_elsewhere:
        for name in (ENGINE_NAME, DRAFT_NAME, ENSEMBLE_NAME):
            shutil.rmtree(copy / name, ignore_errors=True)
    if with_draft:
        shutil.copytree(copy / ENGINE_NAME, copy / DRAFT_NAME, symlinks=True)
    names = model_names(copy)
    for option, change in changes:
        if change.model not in names:
            raise SettingsError(
                f"{option}: no model {change.model!r} in {repository}; there are {', '.join(names)}"
            )
        _rewrite(copy / change.model / "config.pbtxt", option, change)
    return copy


def _changes(
    repository: Path, settings: ServeSettings, with_draft: bool
) -> list[tuple[str, Override]]:
    """Return the changes to configurations, each with the option that asked for it."""
    changes: list[tuple[str, Override]] = []
    instances, _ = instances_of(repository, settings)
    if instances is not None:
        changes.append(("--bls-instances", Override(BLS_NAME, _INSTANCES, str(instances))))
    if settings.engine is not None:
        changes.append(("--engine", Override(BLS_NAME, "engine", settings.engine)))
    if settings.decoupled is not None:
        for name in _decoupled_models(repository, settings, with_draft):
            policy = Override(name, "decoupled", str(settings.decoupled))
            changes.append(("--decoupled", policy))
            if not settings.decoupled:
                # An answer in one piece repeats the prompt, as TensorRT-LLM's models do.
                repetition = Override(name, "exclude_input_in_output", "false")
                changes.append(("--decoupled", repetition))
    overrides = settings.overrides
    if with_draft:
        draft_name = Override(BLS_NAME, "tensorrt_llm_draft_model_name", DRAFT_NAME)
        overrides = (Override(DRAFT_NAME, "is_draft", "true"), draft_name, *overrides)
    for override in overrides:
        changes.append((f"--set {override.model}.{override.parameter}", override))
    return changes


def _decoupled_models(repository: Path, settings: ServeSettings, with_draft: bool) -> list[str]:
    """Return the models that ``--decoupled`` changes.

    They are the orchestrator, and each engine that is known to be able to answer once.
    """
    names = [BLS_NAME]
    if settings.engine_is_elsewhere:
        return names
    for name in (ENGINE_NAME, DRAFT_NAME):
        original = name
        if with_draft:
            original = ENGINE_NAME  # the draft's model is going to be a copy of it
        is_ours = _our_model(repository / original, "") is not None
        if is_ours or parameter(repository, original, "gpt_model_type"):
            names.append(name)
    return names


def instances_of(repository: Path, settings: ServeSettings) -> tuple[int | None, str]:
    """Return the number of ``tensorrt_llm_bls``'s processes, and the reason if we choose it.

    ``None`` leaves the configuration as it is.
    """
    count = settings.bls_instances
    if count != "auto" and (count is not None or repository != REPOSITORY):
        return count, ""
    overrides = _bls_overrides(settings)

    def value(key: str) -> str:
        return overrides.get(key, parameter(repository, BLS_NAME, key))

    has_affinity = parameters.is_true(value("engine_affinity"))
    has_memory = value("draft_memory_tokens") not in ("", "0")
    return auto_processes(settings.max_streams, has_affinity or has_memory)


def _bls_overrides(settings: ServeSettings) -> dict[str, str]:
    """Return the parameters of ``tensorrt_llm_bls`` that ``--set`` gave."""
    return {row.parameter: row.value for row in settings.overrides if row.model == BLS_NAME}


def log_format(settings: ServeSettings) -> str:
    """Return the form of log lines, as ``tensorrt_llm_bls`` will read it; empty for its default."""
    key = "log_format"
    variable = parameters.parameters_of(BLS_NAME)[key].env
    value = _bls_overrides(settings).get(key) or os.environ.get(variable)
    return value or parameter(model_repository(settings), BLS_NAME, key)


def parameter(repository: Path, model: str, key: str) -> str:
    """Read a parameter of a configuration; empty if unreadable, which Triton will report."""
    try:
        return values_of(read_config(repository / model / "config.pbtxt")).get(key, "")
    except SettingsError:
        return ""


def _rewrite(file: Path, option: str, change: Override) -> None:
    """Change the configuration.

    Raises ``SettingsError`` where it cannot be read, and for a parameter that our own models or the
    C++ backend would not understand.
    """
    key = change.parameter
    value = change.value
    try:
        config = read_config(file)
    except SettingsError as error:
        raise SettingsError(f"{option}: {error}") from error
    config.name = change.model  # a model that was copied still has its original's
    if key == _INSTANCES:
        del config.instance_group[:]
        kind = model_config_pb2.ModelInstanceGroup.KIND_CPU
        config.instance_group.add(kind=kind, count=int(value))
    else:
        is_cpp = config.backend == "tensorrtllm"
        try:
            if is_cpp and key == "decoupled":
                parameters.check(ENGINE_NAME, key, value)
            elif is_cpp:
                check_backend(key, value)
            elif model := _our_model(file.parent, config.platform):
                parameters.check(model, key, value)
        except SettingsError as error:
            raise SettingsError(f"--set {change}: {error}") from None
        if key == "decoupled":
            config.model_transaction_policy.decoupled = parameters.is_true(value)
        else:
            config.parameters[key].string_value = value
    file.unlink()  # only the link; the original stays unchanged
    file.write_text(text_format.MessageToString(config), encoding="utf-8")


def sends_only(repository: Path) -> bool:
    """Return True if no Python model calls another inside the server: all are this package's."""
    for name in model_names(repository):
        directory = repository / name
        if any(directory.glob("*/*.py")) and not _our_model(directory, ""):
            return False
    return True


def _our_model(directory: Path, platform: str) -> str | None:
    """Return the model of this package that has an identical ``model.py``, if any."""
    if platform == ENSEMBLE_PLATFORM:
        return ENSEMBLE_NAME
    code = directory / "1" / "model.py"
    for file in REPOSITORY.glob("*/1/model.py"):
        if code.is_file() and filecmp.cmp(code, file, shallow=False):
            return file.parts[-3]
    return None
