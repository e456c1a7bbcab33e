"""The subject of an examination, its findings, and the list of checks that make them.

``doctor`` runs every check, ``serve`` those of ``preflight.py``. No check changes anything.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import click

from trtllm_bls.client.client import Tls
from trtllm_bls.configure import engine_dir as cpp
from trtllm_bls.configure.model_programs import model_of
from trtllm_bls.errors import SettingsError, SetupError, TrtllmBlsError
from trtllm_bls.settings import cpp_backend
from trtllm_bls.settings.command_options import GrpcAddress, ServeSettings, option, setting
from trtllm_bls.settings.model_config import read_config, values_of
from trtllm_bls.settings.model_names import ENSEMBLE_PLATFORM
from trtllm_bls.text.tokenizer import Tokenizer, load_tokenizer
from trtllm_bls.wire.contract import BLS, ENGINE, LLMAPI, MODELS, Model, by_name

CPP_BACKEND = "tensorrtllm"
loaded_tokenizer = cache(load_tokenizer)  # it takes seconds
GrpcUrl = Annotated[str, GrpcAddress()]
Directory = Annotated[Path, click.Path(exists=True, file_okay=False, path_type=Path)]


def installed(package: str) -> str | None:
    """Return the version of an installed package; ``None`` if it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def serve_ports() -> dict[str, int]:
    """Return the default ports of ``serve``, by option."""
    ports = {}
    for field_ in fields(ServeSettings):
        if not field_.name.endswith("_port"):
            continue
        port: int | None = getattr(ServeSettings, field_.name)
        if port is not None:
            ports[option(field_.name)] = port
    return ports


def _release(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
    if not value:
        return ""
    try:
        cpp_backend.parse_version(value)
    except SettingsError as error:
        raise click.UsageError(str(error), ctx) from error
    return value


@dataclass
class Subject:
    """The options of ``doctor``, and the configurations and engines behind them.

    ``version`` names TensorRT-LLM's release where neither an installed package nor an engine tells.
    """

    repository: Directory | None = setting("What is to be served.", flag="--model-repository")
    url: GrpcUrl | None = setting("gRPC port of a running server.", metavar="HOST:PORT")
    engine_dir: Directory | None = setting("Engine of the target model.")
    draft_engine_dir: Directory | None = setting("Engine of the draft model.")
    tokenizer_dir: Directory | None = setting("Tokenizer of the target model.")
    server: Path | None = setting("As of `serve`.")
    version: str = setting(
        "TensorRT-LLM release of the container.  [default: as installed, or the engine's]",
        "",
        callback=_release,
    )
    tls: Tls | None = None  # to ``url``
    max_streams: int = ServeSettings.max_streams
    store_dir: Path | None = None
    source: Path | None = None  # the repository of the user, where ``repository`` is made of it
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    packages: Callable[[str], str | None] = installed
    shared_memory: Path = Path("/dev/shm")
    ports: Mapping[str, int] = field(default_factory=serve_ports)
    is_judged: bool = True  # by tritonserver, which is started for that
    progress: Callable[[str], object] = lambda text: None

    def __post_init__(self) -> None:
        self.unreadable: list[SettingsError] = []  # configurations and engines
        self.unreadable_models: set[str] = set()
        self.configs: dict[str, Any] = {}  # Triton's ``ModelConfig`` of each model
        paths: list[Path] = []
        if self.repository:
            paths = sorted(self.repository.glob("*/config.pbtxt"))
        for path in paths:
            try:
                self.configs[path.parent.name] = read_config(path)
            except SettingsError as error:
                self.unreadable.append(error)
                self.unreadable_models.add(path.parent.name)
        self.cpp_models: list[str] = []
        for name, config in self.configs.items():
            if config.backend == CPP_BACKEND:
                self.cpp_models.append(name)
        values = self.values(BLS.name)
        self.target = values.get("tensorrt_llm_model_name") or ENGINE.name
        self.draft = values.get("tensorrt_llm_draft_model_name", "")  # empty where there is none
        self.tokenizer = self.tokenizer_dir or self.directory(BLS.name, "tokenizer_dir")
        directories = {}
        for name in self.cpp_models:
            model_path = self.values(name).get("gpt_model_path")
            if model_path and "${" not in model_path:
                directories[name] = Path(model_path)
        if self.engine_dir:
            directories[self.target] = self.engine_dir
        if self.draft_engine_dir:
            directories[self.draft or "the draft"] = self.draft_engine_dir
        self.engines: dict[str, cpp.EngineDir] = {}  # by model, of the options or of the repository
        for name, directory in directories.items():
            try:
                engine = cpp.read_engine(f"{name}: engine", directory, check=True)
                engine.release()  # raises where there is no such release
                self.engines[name] = engine
            except SettingsError as error:
                self.unreadable.append(error)

    def values(self, model: str) -> dict[str, str]:
        """Return a model's parameters; none where there is no such model."""
        if model not in self.configs:
            return {}
        return values_of(self.configs[model])

    def directory(self, model: str, key: str) -> Path | None:
        """Return the directory that a model's parameter names; ``None`` where it names none."""
        path = self.values(model).get(key, "")
        if not path or "${" in path:
            return None
        return Path(os.path.abspath((self.repository or Path()) / path))

    @property
    def models_of_this_package(self) -> dict[str, str]:
        """The models that are this package's by their ``model.py``, and which one each is."""
        models = {}
        for name in self.configs:
            for code in Path(self.repository or "", name).glob("[0-9]*/model.py"):
                if model := model_of(code):
                    models[name] = model
        return models

    @property
    def llm_api_models(self) -> list[str]:
        """The models in which TensorRT-LLM's LLM API runs."""
        return [name for name in self.configs if self.values(name).get("engine") == "llm_api"]

    @property
    def pipelines(self) -> dict[str, dict[str, Any]]:
        """The parameters that pipelines declare in so many words, by model."""
        pipelines: dict[str, dict[str, Any]] = {}
        for name in self.configs:
            assert self.repository is not None
            for file in sorted((self.repository / name).glob("*/model.py")):
                with suppress(OSError, ValueError, SyntaxError):  # other checks report it
                    parameters = _declared_parameters(file.read_text(encoding="utf-8"))
                    if parameters is not None:
                        pipelines[name] = parameters
        return pipelines

    @property
    def known_models(self) -> dict[str, Model]:
        """Our models and those of the C++ backend, with the tensors that each should have."""

        def of_release(engine: str) -> dict[str, Model]:
            logits = "FP32"
            if engine in self.engines:
                logits = self.engines[engine].logits
            return cpp.models_for(self.release or cpp_backend.LAST, logits)

        # The ensemble hands on the tensors of the target's release.
        ours = by_name(MODELS)
        if self.cpp_models:
            ours = of_release(self.target)
        models = {}
        for name, config in self.configs.items():
            is_ensemble = config.platform == ENSEMBLE_PLATFORM
            if config.backend == CPP_BACKEND:
                models[name] = of_release(name)[ENGINE.name]
            elif self.values(name).get("tensors") == "llmapi":
                models[name] = replace(LLMAPI, name=BLS.name)  # whose parameters it has
            elif name in self.llm_api_models:
                models[name] = ENGINE
            elif name in ours and (config.backend == "python" or is_ensemble):
                models[name] = ours[name]
        return models

    @property
    def tokens(self) -> Tokenizer | None:
        """The target's tokenizer; ``None`` where none can be loaded, which a check reports."""
        if self.tokenizer:
            with suppress(SetupError):
                return loaded_tokenizer(self.tokenizer)
        return None

    @property
    def backend_version(self) -> str:
        """The TensorRT-LLM that runs here, by option or package; empty where unknown."""
        return self.version or self.packages("tensorrt-llm") or ""

    @property
    def release(self) -> cpp_backend.Version | None:
        """The release of the backend, or else of the target's engine."""
        if self.backend_version:
            return cpp_backend.parse_version(self.backend_version)
        if self.target not in self.engines:
            return None
        return self.engines[self.target].release()


def _declared_parameters(program: str) -> dict[str, Any] | None:
    """Read the ``parameters`` of the class in a ``model.py``, without running the program.

    ``None`` if they cannot be read so.
    """
    if "trtllm_bls.pipeline" not in program:
        return None
    bases: list[str] = []
    for definition in ast.parse(program).body:
        if not isinstance(definition, ast.ClassDef):
            continue
        bases += map(ast.unparse, definition.bases)
        if definition.name != "TritonPythonModel":
            continue
        for line in definition.body:
            if not isinstance(line, (ast.Assign, ast.AnnAssign)) or line.value is None:
                continue
            targets = [line.target] if isinstance(line, ast.AnnAssign) else line.targets
            if "parameters" in map(ast.unparse, targets):
                value = ast.literal_eval(line.value)
                if not isinstance(value, dict):
                    return None
                return value
    if bases != ["StreamingModel"]:  # another base class may declare some
        return None
    return {}


# --- findings ---------------------------------------------------------------------------------


Level = Literal["ok", "warn", "error"]


@dataclass(frozen=True)
class Finding:
    """A line about something that holds or does not; ``remedy`` is empty where none is needed."""

    level: Level
    summary: str
    remedy: str = ""

    def __str__(self) -> str:
        if not self.remedy:
            return self.summary
        return f"{self.summary}; {self.remedy}"

    def row(self, check: str) -> dict[str, str]:
        """Return the finding of a check as ``doctor --json`` prints it."""
        return {
            "check": check,
            "level": self.level,
            "what": self.summary,
            "mend": self.remedy,
        }

    @classmethod
    def of(cls, error: TrtllmBlsError, level: Level = "error") -> Finding:
        """Split the error's text: this package's errors end with a remedy, after "; " or ": "."""
        text = str(error)
        for mark in ("; ", ": "):
            summary, _, remedy = text.rpartition(mark)
            if " " in summary:  # a name in front of a colon is no sentence yet
                return cls(level, summary, remedy)
        return cls(level, text)


Findings = Iterator[Finding]
fault = partial(Finding, "error")
warn = partial(Finding, "warn")


@dataclass(frozen=True)
class Check:
    """An examination of a subject; ``title`` is the rule that it tests.

    ``run`` yields or raises a finding for each fault. ``applies`` tells whether there is something
    to look at. ``serve`` enters the ``stage`` only if this finds no error: ``preparing`` a server,
    or ``loading`` its models. An error certainly keeps a server from starting or answering; a
    warning is for a fault that is likely to do so.
    """

    name: str
    title: str
    applies: Callable[[Subject], Any]
    run: Callable[[Subject], Findings | None]
    stage: str = ""


CHECKS: list[Check] = []


def check(
    title: str, applies: Callable[[Subject], Any] = lambda subject: True, stage: str = ""
) -> Callable[[Callable[[Subject], Findings | None]], None]:
    """Put a function into the list of checks, under its own name."""
    return lambda run: CHECKS.append(Check(run.__name__, title, applies, run, stage))


def examine(subject: Subject, checks: Sequence[Check]) -> Iterator[tuple[str, Finding]]:
    """Yield every finding with its check's name. An error that a check raises is its last one."""
    for check in checks:
        if not check.applies(subject):
            continue
        findings: list[Finding] = []
        try:
            findings.extend(check.run(subject) or ())
        except TrtllmBlsError as error:
            findings.append(Finding.of(error))
        for finding in findings or [Finding("ok", check.title)]:
            yield check.name, finding
