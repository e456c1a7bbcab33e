"""The server's command line and environment, computed from the settings.

Owns which option and which variable sets what. For the models a ``TRTLLM_BLS_*`` variable takes
precedence over a parameter in their configuration, unless ``--set`` gave that parameter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from trtllm_bls.checkpoint_dir import DEMO, REPOSITORY, check_checkpoint, check_tokenizer
from trtllm_bls.errors import SetupError
from trtllm_bls.launcher.checks import Installation
from trtllm_bls.launcher.ports import Ports
from trtllm_bls.parameters import (
    DRAFT_MODEL_DIR,
    ENGINE_TLS_PIN,
    GIVEN,
    GRPC_URL,
    MAX_STREAMS,
    MODEL_DIR,
    STATUS_DIR,
    THREADS,
)
from trtllm_bls.settings import ServeSettings

# Each model instance has a pool of threads inside the server, for its calls to other models and for
# sending responses. A call holds a thread until its first response. With fewer threads than
# streams, running streams would wait behind new ones. The margin is for control requests and for
# streams that are ending.
THREAD_MARGIN = 32
# If no model calls another, only responses use the pool, and a model sends from at most this many
# threads at once. A larger pool would spread the same work over threads with cold caches.
SENDING_THREADS = 4

# Any client could otherwise read other requests' inputs in shared memory, load and unload models,
# or switch the log off. Inference, health, metadata, configuration and statistics stay open.
CONTROL_APIS = ("shared-memory", "model-repository", "logging", "trace")

# Checkpoints come from local directories, so Hugging Face libraries must not ask the network.
# TOKENIZERS_PARALLELISM silences a warning about forks: our processes fork only to exec.
TOKENIZER_THREADS = 8  # at most, in each process that tokenises
_QUIET_LIBRARIES = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "true",
    "PYTHONUNBUFFERED": "1",
}


def server_command(
    server: Installation,
    settings: ServeSettings,
    ports: Ports,
    repository: Path,
    backends: Path,
    region_prefix: str,
    sends_only: bool = False,
) -> list[str]:
    """The command line. ``region_prefix`` begins the names of all shared-memory regions;
    ``sends_only``: no Python model calls another one inside the server.

    Auto-completion of configurations is off, because it would start every model's Python twice.
    """
    threads = SENDING_THREADS if sends_only else settings.max_streams + THREAD_MARGIN
    threads = settings.thread_pool_size or threads
    options = {
        "model-repository": repository,
        "backend-directory": backends,
        "http-address": ports.http_host,
        "http-port": ports.http,
        "grpc-address": ports.host,
        "grpc-port": ports.grpc,
        "metrics-address": ports.plain_host,
        "metrics-port": ports.metrics,
        "exit-timeout-secs": settings.exit_timeout,
        **_tls_options(settings),
    }
    return [
        str(server.binary),
        *(f"--{name}={value}" for name, value in options.items()),
        *([] if settings.open_control_apis else _restrictions()),
        f"--backend-config=python,thread-pool-size={threads}",
        f"--backend-config=python,shm-region-prefix-name={region_prefix}",
        "--disable-auto-complete-config",
        # These headers reach models as request parameters: ``traceparent`` goes to the engine and
        # into the log; ``triton_grpc_error`` delays errors (``python_backend``).
        "--grpc-header-forward-pattern=traceparent|triton_grpc_error",
        "--http-header-forward-pattern=traceparent",
    ]


def server_environment(
    settings: ServeSettings, ports: Ports, libraries: Path, inherited: Mapping[str, str]
) -> dict[str, str]:
    """The server's environment; ``libraries`` holds the libpython to use.

    This interpreter's directory leads PATH: the embedded Python finds its home and its packages by
    the first ``python3`` there, and by nothing else.
    """
    environment = dict(inherited) | _QUIET_LIBRARIES | model_directories(settings)
    threads = min(TOKENIZER_THREADS, len(os.sched_getaffinity(0)))
    environment.setdefault("RAYON_NUM_THREADS", str(threads))
    executables = os.path.dirname(sys.executable)
    for variable, first in (("PATH", executables), ("LD_LIBRARY_PATH", str(libraries))):
        environment[variable] = os.pathsep.join(filter(None, (first, inherited.get(variable))))
    environment[GRPC_URL] = ports.grpc_url
    environment[MAX_STREAMS] = str(settings.max_streams)
    given = {f"{each.model}.{each.parameter}": each.value for each in settings.overrides}
    if (directory := given.pop("tensorrt_llm_bls.status_dir", None)) is not None:
        environment[STATUS_DIR] = directory  # which the launcher makes, and reads itself
    environment[GIVEN] = ",".join(given)
    elsewhere = settings.engine_is_elsewhere or "tensorrt_llm_bls.engine_url" in given
    if settings.tls_cert is not None and not elsewhere:
        # The models reach the server at an address, which its certificate need not name.
        environment[ENGINE_TLS_PIN] = os.path.abspath(settings.tls_cert)
    if settings.threads is not None:
        environment[THREADS] = str(settings.threads)
    return environment


def model_directories(settings: ServeSettings) -> dict[str, str]:
    """The checkpoints that the models load, by variable; empty if their configuration decides.

    The demo's draft is only assumed together with the demo's model, because a draft with another
    vocabulary cannot be used. Raises ``SetupError`` for a missing directory and, with the bundled
    repository, for a directory that is not a complete checkpoint.
    """
    target, draft = settings.model, settings.draft_model
    if target is None and draft is None and settings.model_repository is None:
        target, draft = DEMO / "target", DEMO / "draft"
    directories = {}
    for option, variable, directory in (
        ("--model", MODEL_DIR, target),
        ("--draft-model", DRAFT_MODEL_DIR, draft),
    ):
        if directory is None:
            continue
        directory = directory.expanduser().resolve()
        if not directory.is_dir():
            raise SetupError(f"{option} {directory}: no such directory")
        if settings.model_repository is None:  # else its models say what the directory is for
            if not settings.engine_is_elsewhere:
                check_checkpoint(directory)
            check_tokenizer(directory)
        directories[variable] = str(directory)
    return directories


def model_repository(settings: ServeSettings) -> Path:
    """The model repository to serve, absolute: our own where none was named."""
    return (settings.model_repository or REPOSITORY).expanduser().resolve()


def _tls_options(settings: ServeSettings) -> dict[str, object]:
    """Triton's TLS options, which exist for gRPC only."""
    if settings.tls_cert is None:
        return {}
    files = {"grpc-server-cert": settings.tls_cert, "grpc-server-key": settings.tls_key}
    if settings.tls_client_ca is None:
        return {"grpc-use-ssl": "true", **files}
    return {"grpc-use-ssl-mutual": "true", **files, "grpc-root-cert": settings.tls_client_ca}


def _restrictions() -> list[str]:
    """Triton asks for a header before it answers a control API. Every user of the machine can read
    a command line, so the header is no secret: it is one that nobody can send. gRPC resets a call
    whose header has blanks in its name, and no HTTP header has a line feed in its value."""
    rule = f"{','.join(CONTROL_APIS)}:closed by serve=closed\nby serve"
    return [f"--http-restricted-api={rule}", f"--grpc-restricted-protocol={rule}"]
