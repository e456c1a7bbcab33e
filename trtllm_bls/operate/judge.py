"""tritonserver as the judge of a model repository: it loads a scratch copy.

In the copy every configuration is the user's own file. Programs of Python models are stand-ins, and
so is each backend that is not installed or would take a GPU's memory. All else is linked. The
server listens on free ports of this machine alone, and ends when it has loaded or refused each
model.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtllm_bls.errors import SetupError
from trtllm_bls.operate import checks, preparation
from trtllm_bls.operate.logs import LogBook
from trtllm_bls.operate.ports import Ports, choose
from trtllm_bls.operate.preparation import Scratch
from trtllm_bls.operate.supervisor import describe_exit
from trtllm_bls.operate.tritonserver import POLL_S, GuardedProcess
from trtllm_bls.settings.command_options import ServeSettings
from trtllm_bls.settings.model_config import backend_of
from trtllm_bls.settings.model_names import ENSEMBLE_PLATFORM

# Processes of stand-ins that one server starts; with many more, some are judged dead while they
# wait for a core.
STUBS = 24
# Loading them takes the memory of a GPU, which a running server may have.
_HEAVY_BACKENDS = frozenset({"tensorrtllm", "vllm"})
_BACKEND_NAME = re.compile(r"\w[\w.-]*")
STAND_IN = Path(__file__).with_name("stand_in.py")
_NO_REASON = "tritonserver does not load it, and gives no reason"
_VERDICT_S = 10.0
_EXIT_S = 5


@dataclass
class ServerJudgement:
    """Triton's verdict on models: its ``reasons`` by model that it refuses.

    It gave none in time on the models that are ``unsettled``.
    """

    reasons: dict[str, str] = field(default_factory=dict)
    unsettled: list[str] = field(default_factory=list)


def judge(
    repository: Path,
    configs: Mapping[str, Any],
    server: checks.Installation,
    *,
    seconds: float,
    progress: Callable[[str], object] = lambda text: None,
) -> ServerJudgement:
    """Have ``server`` load each model of a repository, within ``seconds``.

    ``configs`` has the readable configurations by model. Some faults crash a server (24.10), so
    models that were not settled are loaded again alone. Raises ``SetupError`` where no server can
    be started.
    """
    deadline = time.monotonic() + seconds
    names = [path.name for path in sorted(repository.iterdir()) if path.is_dir()]
    verdict = ServerJudgement()
    waiting = list(groups_of(names, configs))
    while waiting:
        group = waiting.pop(0)
        if time.monotonic() >= deadline:
            verdict.unsettled += group
            continue
        progress(f"Triton judges {len(group)} of {len(names)} models")
        with _Run(repository, _with_steps(group, configs), configs, server) as run:
            crash = run.wait(deadline)
        if crash is not None and run.lost_a_port:
            waiting.insert(0, group)
            continue
        if crash is not None and not run.is_triton:
            raise SetupError(f"{server.binary} does not start: {crash}")
        loaded = run.loaded
        reasons = run.reasons
        suspects: list[str] = []  # one of them has crashed the server
        for name in group:
            if name in reasons:
                verdict.reasons[name] = reasons[name]
            elif name in loaded:
                continue
            elif crash is None:
                verdict.unsettled.append(name)
            elif len(group) == 1:
                verdict.reasons[name] = f"tritonserver crashes as it loads it: {crash}"
            else:
                suspects.append(name)
        if not suspects:
            continue
        if run.hangs and len(suspects) < len(group):
            # A model without a program hangs the server, and its log names it. Then the other
            # models need not be loaded one by one.
            waiting.append(suspects)
        else:
            waiting += [[name] for name in suspects]
    return verdict


def groups_of(names: Sequence[str], configs: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the models that one server judges, so that it does not start too many processes."""
    group: list[str] = []
    stubs = 0
    for name in names:
        count = 1
        if name in configs and configs[name].instance_group:
            count = sum(max(instances.count, 1) for instances in configs[name].instance_group)
        if group and stubs + count > STUBS:
            yield group
            group = []
            stubs = 0
        group.append(name)
        stubs += count
    if group:
        yield group


def _with_steps(group: Sequence[str], configs: Mapping[str, Any]) -> list[str]:
    """Return the models of a group, and those that its ensembles call."""
    names = list(group)
    for name in names:  # which grows meanwhile
        if name in configs:
            for step in configs[name].ensemble_scheduling.step:
                if step.model_name in configs and step.model_name not in names:
                    names.append(step.model_name)
    return names


# --- the scratch copy -------------------------------------------------------------------------


def write_copy(
    repository: Path, copy: Path, names: Sequence[str], configs: Mapping[str, Any]
) -> None:
    """Link the models ``names`` into a new directory, with stand-ins for programs."""
    for name in names:
        program = "model.py"
        is_python = True
        if name in configs:
            program = configs[name].default_model_filename or program
            is_python = backend_of(configs[name]) in ("", "python")
        model = copy / name
        model.mkdir(parents=True)
        for entry in (repository / name).iterdir():
            if not (entry.is_dir() and entry.name.isdecimal()):
                (model / entry.name).symlink_to(os.path.realpath(entry))
                continue
            (model / entry.name).mkdir()
            for file in entry.iterdir():
                target = Path(os.path.realpath(file))
                if is_python and file.name == program:
                    target = STAND_IN
                (model / entry.name / file.name).symlink_to(target)


def link_backends(workdir: Path, server: checks.Installation, configs: Mapping[str, Any]) -> Path:
    """Link the server's backends as ``serve`` does, and stand-ins for others that models name."""
    directory = preparation.link_backends(workdir, server)
    names = {backend_of(config) for config in configs.values()} - {"", "python", ENSEMBLE_PLATFORM}
    for name in filter(_BACKEND_NAME.fullmatch, names):
        place = directory / name
        if name in _HEAVY_BACKENDS and place.is_symlink():
            place.unlink()
        if not place.exists():
            place.mkdir()
            (place / "model.py").symlink_to(STAND_IN)
    # A backend in Python is run by this library, which Triton does not follow out of its directory.
    library = directory / "python" / "libtriton_python.so"
    if library.is_symlink():
        target = library.resolve()
        library.unlink()
        shutil.copyfile(target, library)
    return directory


# --- one server -------------------------------------------------------------------------------


class _Run:
    """A tritonserver that loads models, and its verdict on each."""

    def __init__(
        self,
        repository: Path,
        names: Sequence[str],
        configs: Mapping[str, Any],
        server: checks.Installation,
    ) -> None:
        settings = ServeSettings(
            http_port=0,
            grpc_port=0,
            metrics_port=0,
            model_repository=repository,
            max_streams=1,
            exit_timeout=_EXIT_S,
            open_control_apis=True,  # the index is one of them
        )
        self._ports: Ports = choose(settings)
        self._book = LogBook()
        self._index: dict[str, dict[str, str]] | None = None
        self._repository = repository
        scratch = Scratch()
        self._id = scratch.workdir.name  # no other Triton has it
        self._process = GuardedProcess(scratch, 0.0, self._log)
        try:
            scratch.make()
            libraries = preparation.links(scratch.workdir / "lib", [checks.libpython()])
            environment = preparation.server_environment(
                settings, self._ports, libraries, os.environ
            )
            self._copy = scratch.workdir / "models"
            write_copy(repository, self._copy, names, configs)
            backends = link_backends(scratch.workdir, server, configs)
            command = preparation.server_command(
                server, settings, self._ports, self._copy, backends, scratch.region_prefix, True
            )
            command += ["--model-control-mode=explicit", "--load-model=*"]
            command += ["--exit-on-error=false", "--strict-readiness=false", f"--id={self._id}"]
            self._process.run(command, environment)
        except BaseException as error:
            self._end()
            if isinstance(error, OSError):
                raise SetupError(f"{scratch.workdir.parent}: {error.strerror}") from error
            raise

    def _log(self, raw: str) -> None:
        self._book.add(raw)

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *raised: object) -> None:
        self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.close()

    def wait(self, deadline: float) -> str | None:
        """Wait until all models have loaded or failed; return how the server ended before that."""
        while time.monotonic() < deadline:
            self._index = self._ask_index()
            if self._index is not None:
                return None
            if self._book.hangs:
                return "it waits for a model without a program"
            if not self._process.running:
                return describe_exit(self._process.wait())
            time.sleep(POLL_S)
        return None

    def _ask_index(self) -> dict[str, dict[str, str]] | None:
        """Ask for the index's row of each model; ``None`` before the server answers.

        It answers when all models have loaded or failed. Another program, which took the port
        before Triton did, has another name or none.
        """
        url = f"{self._ports.http_url}/v2"
        index = urllib.request.Request(f"{url}/repository/index", data=b"{}", method="POST")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(url, timeout=_VERDICT_S) as answer:
                if json.load(answer)["name"] != self._id:
                    return None
            with opener.open(index, timeout=_VERDICT_S) as answer:
                return {row["name"]: row for row in json.load(answer)}
        except (OSError, http.client.HTTPException, ValueError, TypeError, KeyError):
            return None

    @property
    def lost_a_port(self) -> bool:
        """True where another program took one of the free ports before Triton did."""
        return self._book.port_taken is not None

    @property
    def hangs(self) -> bool:
        """True where the server would never have answered."""
        return self._book.hangs

    @property
    def is_triton(self) -> bool:
        """True where the program has written a line as Triton writes it."""
        return self._book.is_triton

    @property
    def loaded(self) -> set[str]:
        """The models that serve requests, or would if the server had not crashed."""
        if self._index is None:
            return set(self._book.loaded)
        return {name for name, row in self._index.items() if row.get("state") == "READY"}

    @property
    def reasons(self) -> dict[str, str]:
        """Triton's reason for each model that it has refused, with the user's own paths."""
        reasons = self._book.reasons()
        for name, row in (self._index or {}).items():
            if name not in self.loaded:
                reasons.setdefault(name, row.get("reason") or _NO_REASON)
        for name, reason in reasons.items():
            reasons[name] = reason.replace(f"{self._copy}/", f"{self._repository}/")
        return reasons
