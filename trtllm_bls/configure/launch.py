"""How the engines of a repository are started where one process of the server is not enough.

An engine of several ranks needs one server process per rank, all but the first loading the engines
alone ("leader mode"). Engines of unequal ranks, or on GPUs of their own, need TensorRT-LLM's
"orchestrator mode", in which one server starts worker processes for each. Both are started by
TensorRT-LLM's ``launch_triton_server.py``, or by the Slurm script made here.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trtllm_bls.configure.engine_dir import EngineDir
from trtllm_bls.configure.options import ConfigureOptions
from trtllm_bls.errors import SettingsError
from trtllm_bls.parameters import rows_of
from trtllm_bls.parameters.cpp_backend import Version

_NO_SPAWN_SINCE: Version = (0, 13)
# A stream may hold one of the Python backend's threads until its first token; some are just ending.
_THREADS = int(rows_of("tensorrt_llm_bls")["max_streams"].default) + 32


@dataclass(frozen=True)
class Launch:
    """How to start: the engines' model names, and MPI's processes, each a tritonserver.

    ``spawn`` tells whether an orchestrator starts its workers itself (over MPI), in place of
    ``participants``: the ranks of each model, where rank 0 is the orchestrator's.
    """

    models: tuple[str, ...]
    world_size: int = 1
    orchestrator: bool = False
    spawn: bool = True

    @property
    def by_serve(self) -> bool:
        """Whether one server process is all there is, as ``trtllm-bls serve`` starts it."""
        return self.world_size == 1 and not self.orchestrator


def plan_launch(
    options: ConfigureOptions, engines: Mapping[str, EngineDir], version: Version
) -> Launch:
    """What the engines need; raises ``SettingsError`` for what the release cannot do."""
    ranks = [engine.ranks for engine in engines.values()]
    orchestrator = options.separate_gpus or len(set(ranks)) > 1
    if not options.disable_spawn_processes:
        return Launch(tuple(engines), 1 if orchestrator else ranks[0], orchestrator)
    if version < _NO_SPAWN_SINCE:
        raise SettingsError("--disable-spawn-processes: TensorRT-LLM has it since 0.13")
    return Launch(tuple(engines), 1 + sum(ranks), orchestrator=True, spawn=False)


def participants(launch: Launch, engines: Mapping[str, EngineDir]) -> dict[str, str]:
    """The parameter ``participant_ids`` of each engine, where its ranks are not spawned."""
    if launch.spawn:
        return {}
    ids, first = {}, 1
    for name, engine in engines.items():
        ids[name] = ",".join(map(str, range(first, first + engine.ranks)))
        first += engine.ranks
    return ids


def launcher_command(launch: Launch, repository: Path) -> str:
    """The line for TensorRT-LLM's own launcher."""
    words = ["python3", "launch_triton_server.py", "--world_size", str(launch.world_size)]
    words += ["--model_repo", str(repository.absolute())]
    words += ["--tensorrt_llm_model_name", ",".join(launch.models)]
    if launch.orchestrator:
        words.append("--multi-model")
    if not launch.spawn:
        words.append("--disable-spawn-processes")
    return shlex.join(words)


def slurm_script(launch: Launch, repository: Path) -> str:
    """A job script that starts one server process per rank, without the launcher.

    Raises ``SettingsError`` where the orchestrator would have to spawn: Slurm starts all processes.
    """
    if launch.orchestrator and launch.spawn:
        raise SettingsError("--slurm: engines of unequal ranks need --disable-spawn-processes too")
    loads = " ".join(f"--load-model={name}" for name in launch.models)
    environment = (
        ["export TRTLLM_ORCHESTRATOR=1", "export TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES=0"]
        if launch.orchestrator
        else []
    )
    lines = [
        "#!/bin/bash",
        "#SBATCH --job-name=trtllm-bls",
        f"#SBATCH --ntasks={launch.world_size}",
        f"#SBATCH --gpus={launch.world_size - 1 if launch.orchestrator else launch.world_size}",
        "set -euo pipefail",
        'export SERVER="${SERVER:-/opt/tritonserver/bin/tritonserver}"',
        f"export REPOSITORY={shlex.quote(str(repository.absolute()))}",
        *environment,
        "# Rank 0 serves; the others load the engines alone and end with it.",
        "srun --mpi=pmix --kill-on-bad-exit=1 bash -c '",
        '  role=""',
        f'  [ "$SLURM_PROCID" = 0 ] || role="--model-control-mode=explicit {loads}"',
        "  # Whoever reaches a port could otherwise read other requests or switch the log off.",
        '  key="$(cat /proc/sys/kernel/random/uuid)"',
        '  rule="shared-memory,model-repository,logging,trace:trtllm-bls-control=$key"',
        '  exec "$SERVER" --model-repository="$REPOSITORY" --disable-auto-complete-config \\',
        '    --http-restricted-api="$rule" --grpc-restricted-protocol="$rule" \\',
        '    --grpc-header-forward-pattern="traceparent|triton_grpc_error" \\',
        f"    --backend-config=python,thread-pool-size={_THREADS} \\",
        '    --backend-config=python,shm-region-prefix-name="prefix${SLURM_PROCID}_" $role',
        "'",
    ]
    return "\n".join(lines) + "\n"
