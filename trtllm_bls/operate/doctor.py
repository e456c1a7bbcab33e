"""``trtllm-bls doctor``: finds what is wrong with a deployment before the first request.

No check changes anything. Where a rule exists elsewhere in the package, the check asks there. The
last command, ``conformance``, asks an engine itself.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.metadata
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import click
import grpc
import psutil
from packaging.requirements import Requirement
from rich.console import Console
from rich.text import Text
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from trtllm_bls.client.client import Tls
from trtllm_bls.configure import engine_dir as cpp
from trtllm_bls.configure.upgrade import names_gone
from trtllm_bls.engines.own_port import listening_processes
from trtllm_bls.engines.trtllm_service import service_messages as messages
from trtllm_bls.errors import SettingsError, SetupError, TrtllmBlsError
from trtllm_bls.operate import checks
from trtllm_bls.operate.preparation import Scratch
from trtllm_bls.pipeline.streaming_model import own_parameters, undeclared
from trtllm_bls.settings import cpp_backend
from trtllm_bls.settings.command_options import (
    GrpcAddress,
    ServeSettings,
    TlsConnection,
    option,
    options_of,
    setting,
)
from trtllm_bls.settings.model_config import (
    backend_of,
    dtype_of,
    ensemble_refusals,
    instances_of,
    read_config,
    refusals,
    served_versions,
    unknown_field,
    values_of,
)
from trtllm_bls.settings.model_yaml import ModelYaml, gpus_of
from trtllm_bls.settings.parameters import (
    EngineKind,
    EngineParameters,
    is_true,
    parameters_of,
    parse_engine,
    suggestion,
)
from trtllm_bls.settings.parameters import check as check_ours
from trtllm_bls.text.tokenizer import Tokenizer, load_tokenizer
from trtllm_bls.wire.contract import (
    BLS,
    ENGINE,
    LLMAPI,
    MODELS,
    POSTPROCESSING,
    PREPROCESSING,
    Model,
)

CPP_BACKEND = "tensorrtllm"
GrpcUrl = Annotated[str, GrpcAddress()]
Directory = Annotated[Path, click.Path(exists=True, file_okay=False, path_type=Path)]
_PATH = click.Path(path_type=Path)


def installed(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def serve_ports() -> dict[str, int]:
    """The default ports of ``serve``, by option."""
    names = [field.name for field in fields(ServeSettings) if field.name.endswith("_port")]
    ports = {option(name): getattr(ServeSettings, name) for name in names}
    return {flag: port for flag, port in ports.items() if port is not None}


def _release(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
    try:
        return value if value and cpp_backend.parse_version(value) else ""
    except SettingsError as error:
        raise click.UsageError(str(error), ctx) from error


@dataclass
class Subject:
    """The options of ``doctor``, and what can be read behind them.

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
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    packages: Callable[[str], str | None] = installed
    shared_memory: Path = Path("/dev/shm")
    ports: Mapping[str, int] = field(default_factory=serve_ports)

    def __post_init__(self) -> None:
        self.unreadable: list[SettingsError] = []  # configurations and engines
        self.configs: dict[str, Any] = {}  # Triton's ``ModelConfig`` of each model
        for path in sorted(self.repository.glob("*/config.pbtxt")) if self.repository else ():
            try:
                self.configs[path.parent.name] = read_config(path)
            except SettingsError as error:
                self.unreadable.append(error)
        self.cpp_models = [n for n, c in self.configs.items() if c.backend == CPP_BACKEND]
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
        """A model's parameters; none where there is no such model."""
        return values_of(self.configs[model]) if model in self.configs else {}

    def directory(self, model: str, key: str) -> Path | None:
        """A directory that a model's parameter names; ``None`` where it names none."""
        path = self.values(model).get(key, "")
        if not path or "${" in path:
            return None
        return Path(os.path.abspath((self.repository or Path()) / path))

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
                with suppress(OSError, ValueError, SyntaxError):  # the file's own checks tell
                    declared = _declared_parameters(file.read_text(encoding="utf-8"))
                    if declared is not None:
                        pipelines[name] = declared
        return pipelines

    @property
    def known_models(self) -> dict[str, Model]:
        """Our models and those of the C++ backend, with the tensors that each should have."""

        def of_release(engine: str) -> dict[str, Model]:
            logits = self.engines[engine].logits if engine in self.engines else "FP32"
            return cpp.models_for(self.release or cpp_backend.LAST, logits)

        # The ensemble hands on the tensors of the target's release.
        ours = {model.name: model for model in MODELS}
        if self.cpp_models:
            ours = of_release(self.target)
        known = {}
        for name, config in self.configs.items():
            if config.backend == CPP_BACKEND:
                known[name] = of_release(name)[ENGINE.name]
            elif self.values(name).get("tensors") == "llmapi":
                known[name] = replace(LLMAPI, name=BLS.name)  # whose parameters it has
            elif name in self.llm_api_models:
                known[name] = ENGINE
            elif name in ours and (config.backend == "python" or config.platform == "ensemble"):
                known[name] = ours[name]
        return known

    @property
    def tokens(self) -> Tokenizer | None:
        """The target's tokenizer; ``None`` where none can be loaded, which a check tells."""
        with suppress(SetupError):
            return _loaded(self.tokenizer) if self.tokenizer else None
        return None

    @property
    def backend_version(self) -> str:
        """The TensorRT-LLM that runs here: as named, or as installed; empty where unknown."""
        return self.version or self.packages("tensorrt-llm") or ""

    @property
    def release(self) -> cpp_backend.Version | None:
        """The release of the backend, or else of the target's engine."""
        if self.backend_version:
            return cpp_backend.parse_version(self.backend_version)
        engine = self.engines.get(self.target)
        return engine.release() if engine else None


def _declared_parameters(program: str) -> dict[str, Any] | None:
    """What the class of a ``model.py`` has as ``parameters``, or ``None`` if that cannot be told;
    the program is read and not run."""
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
            targets = line.targets if isinstance(line, ast.Assign) else [line.target]
            if "parameters" in map(ast.unparse, targets):
                value = ast.literal_eval(line.value)
                return value if isinstance(value, dict) else None
    return {} if bases == ["StreamingModel"] else None  # others may declare some


# --- findings ---------------------------------------------------------------------------------


Level = Literal["ok", "warn", "error"]


@dataclass(frozen=True)
class Finding:
    """One line: what holds or does not, and what to do about it (empty where nothing is)."""

    level: Level
    what: str
    mend: str = ""

    def __str__(self) -> str:
        return f"{self.what}; {self.mend}" if self.mend else self.what

    @classmethod
    def of(cls, error: TrtllmBlsError, level: Level = "error") -> Finding:
        """Split the error's text: this package's errors end with what to do, after "; " or ": "."""
        text = str(error)
        for mark in ("; ", ": "):
            what, _, mend = text.rpartition(mark)
            if " " in what:  # a name in front of a colon is no sentence yet
                return cls(level, what, mend)
        return cls(level, text)


Findings = Iterator[Finding]
fault, warn = partial(Finding, "error"), partial(Finding, "warn")


@dataclass(frozen=True)
class Check:
    """``run`` yields or raises what is wrong; ``title`` says what holds where there is nothing.

    ``applies`` tells whether there is something to look at. ``before``: what ``serve`` does only if
    this finds no error: ``preparing`` a server, or ``loading`` its models.
    """

    name: str
    title: str
    applies: Callable[[Subject], Any]
    run: Callable[[Subject], Findings | None]
    before: str = ""


CHECKS: list[Check] = []


def check(
    title: str, applies: Callable[[Subject], Any] = lambda subject: True, before: str = ""
) -> Callable[[Callable[[Subject], Findings | None]], None]:
    """Put a function into the list of checks, under its own name."""
    return lambda run: CHECKS.append(Check(run.__name__, title, applies, run, before))


def examine(
    subject: Subject, checks: Sequence[Check] | None = None
) -> Iterator[tuple[str, Finding]]:
    """Every finding with its check's name. What a check raises is its last finding."""
    for check in CHECKS if checks is None else checks:
        if not check.applies(subject):
            continue
        findings: list[Finding] = []
        try:
            findings.extend(check.run(subject) or ())
        except TrtllmBlsError as error:
            findings.append(Finding.of(error))
        for finding in findings or [Finding("ok", check.title)]:
            yield check.name, finding


def preflight(before: str, subject: Subject, warn: Callable[[str], object]) -> None:
    """The checks that ``serve`` waits for; ``warn`` is told what does not stop it.

    Raises ``SetupError`` with the first error.
    """
    checks = [check for check in CHECKS if check.before == before]
    problems = [finding for _, finding in examine(subject, checks) if finding.level != "ok"]
    errors = [finding for finding in problems if finding.level == "error"]
    for finding in problems:
        if finding not in errors[:1]:
            warn(str(finding))
    if errors:
        raise SetupError(str(errors[0]))


# --- this machine: shared memory, proxies, Python and packages --------------------------------


DISTRIBUTION = "trtllm-bls"
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
_LOOPBACK = ("localhost", "127.0.0.1")


PREPARING, LOADING = "preparing", "loading"


@check("this machine can run the server's models", before=PREPARING)
def platform_and_place(subject: Subject) -> None:
    checks.check_platform()
    checks.check_environment(sys.prefix, checks.PACKAGE)


def _serves_here(subject: Subject) -> bool:
    """Whether a server is to be started on this machine: none is asked, and a release that is named
    need not be of another machine where a server is here."""
    return not subject.url and bool(not subject.version or _server(subject))


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


@check("connections to this machine go past any proxy")
def proxies(subject: Subject) -> Findings:
    """gRPC uses a proxy even for localhost, unless no_proxy names it."""
    environment = {name.lower(): value for name, value in subject.environment.items()}
    named = [name for name in _PROXIES if environment.get(name)]
    direct = [host.strip() for host in environment.get("no_proxy", "").split(",")]
    missing = [host for host in _LOOPBACK if host not in direct]
    if named and missing and "*" not in direct:
        what = f"{', '.join(named)} without no_proxy for {' and '.join(missing)}"
        yield warn(what, f"set no_proxy={','.join([*filter(None, direct), *missing])}")


@check("Python and packages are as this package needs them")
def packages(subject: Subject) -> Findings:
    """`pip install --no-deps` leaves what a container has, which may be too old."""
    # `serve` has the OpenAI API wherever uvicorn is installed.
    extra = "openai" if subject.packages("uvicorn") else ""
    # Of httpx and httpcore too: the Containerfile adds them without their dependencies.
    for needs in (DISTRIBUTION, "httpx", "httpcore"):
        listed = importlib.metadata.requires(needs) if installed(needs) else None
        for requirement in map(Requirement, listed or ()):
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            version = subject.packages(requirement.name)
            if version is None:
                yield fault(f"no {requirement.name}", f"pip install '{requirement}'")
            elif not requirement.specifier.contains(version, prereleases=True):
                what = f"{requirement.name} {version}, {needs} needs {requirement.specifier}"
                mend = (
                    "install trtllm-bls into an environment of its own, or take a newer container"
                )
                if needs == "httpcore":  # which the Containerfile adds beside the image's h11
                    mend = (
                        "install another httpcore: --build-arg HTTPCORE=1.0.9 of the Containerfile"
                    )
                yield fault(what, mend)


def _server(subject: Subject) -> Any:
    """The server that is named, or else is found here."""
    with suppress(SetupError):
        return subject.server or checks.find_server(None)
    return None


@check(
    "there is a server, and it runs models on this Python and its numpy",
    lambda s: _serves_here(s) or _server(s),
    PREPARING,
)
def server_python(subject: Subject) -> None:
    installation, library = checks.find_server(subject.server), checks.libpython()
    paths = filter(None, (str(library.parent), subject.environment.get("LD_LIBRARY_PATH")))
    searched = {**subject.environment, "LD_LIBRARY_PATH": os.pathsep.join(paths)}
    checks.check_server(installation, searched)
    checks.check_numpy(installation, checks.embedded_numpy())


@check(
    "transformers is as TensorRT-LLM's Python package wants it",
    lambda s: s.packages("tensorrt-llm"),
)
def pins(subject: Subject) -> Findings:
    """Another one can break `import tensorrt_llm`, which builds engines but does not serve them."""
    present, release = subject.packages("transformers"), subject.packages("tensorrt-llm") or ""
    pinned = cpp.RELEASES.get(str(cpp_backend.parse_version(release)), {}).get("transformers")
    if present and pinned and _numbers(present, 2) != _numbers(pinned, 2):
        what = f"transformers {present} beside tensorrt-llm {release}, made with {pinned}"
        yield warn(what, f"pip install transformers=={pinned} before building engines here")


# --- parameters and engines: what TensorRT-LLM would ignore or refuse later -------------------


_GPUS = Path("/dev/nvidiactl")


@check(
    "configurations and engine directories can be read",
    lambda s: s.repository or s.engine_dir,
    LOADING,
)
def readable(subject: Subject) -> Findings:
    if subject.repository and not subject.configs and not subject.unreadable:
        yield fault(f"{subject.repository}: no model in it", "name the model repository")
    yield from map(Finding.of, subject.unreadable)
    for model in subject.configs:
        if unknown := unknown_field(Path(subject.repository or "", model, "config.pbtxt")):
            yield fault(f"{model}: {unknown}", "remove it, or correct its name")


@check("every template is filled in", lambda s: s.configs)
def placeholders(subject: Subject) -> Findings:
    """A parameter that still holds one counts as not set, or as that very text."""
    for model, config in subject.configs.items():
        values = subject.values(model)
        values |= {key: getattr(config, key) for key in ("name", "backend", "platform")}
        unfilled = [key for key, value in values.items() if "${" in value]
        if unfilled:
            mend = "fill them in or remove them; trtllm-bls configure --from does"
            yield fault(f"{model}: placeholders in {', '.join(unfilled)}", mend)


@check("every parameter is known and has a value that can be read", lambda s: s.configs)
def parameters(subject: Subject) -> Findings:
    for model, known in subject.known_models.items():
        for key, value in subject.values(model).items():
            if "${" in value or not value:
                continue
            try:
                if model in subject.cpp_models:
                    cpp_backend.check_backend(key, value, subject.release)
                else:
                    check_ours(known.name, key, value)
            except SettingsError as error:
                yield Finding.of(SettingsError(f"{model}.{key}: {error}"))


@check("every pipeline's own parameters can be read", lambda s: s.pipelines)
def pipeline_parameters(subject: Subject) -> Findings:
    for model, declared in subject.pipelines.items():
        texts = subject.values(model)
        for problem in undeclared(texts, declared):
            yield Finding.of(TrtllmBlsError(f"{model}: {problem}"), "warn")
        try:
            values = own_parameters(model, texts, declared)
        except SettingsError as error:
            yield Finding.of(error)
            continue
        if values:
            yield Finding("ok", f"{model}: " + ", ".join(f"{k} = {v!r}" for k, v in values.items()))


@check("the LLM API can be given its arguments", lambda s: s.llm_api_models)
def llm_api(subject: Subject) -> Findings:
    """As the model reads them when it loads; a release's arguments only where one is installed."""
    for model in subject.llm_api_models:
        values = subject.values(model)
        file = values.get("model_yaml")
        try:
            gpus_of(values.get("gpu_device_ids", ""), 0, instances_of(subject.configs[model]))
            config = ModelYaml.read((subject.repository or Path()) / file) if file else ModelYaml()
            config.load_processors()
        except SettingsError as error:
            yield Finding.of(error)
            continue
        ours = config.arguments.get("backend") in (None, "pytorch")  # another has others
        if subject.packages("tensorrt-llm") and ours:
            release = importlib.import_module("tensorrt_llm.llmapi.llm_args").TorchLlmArgs
            known = {n for name, f in release.model_fields.items() for n in (name, f.alias or name)}
            for key in sorted(config.arguments.keys() - known):
                what = f"model.yaml: the TensorRT-LLM that is installed has no argument {key}"
                yield fault(what, suggestion(key, known))


@check("Triton can load every model", lambda s: s.repository, LOADING)
def layout(subject: Subject) -> Findings:
    assert subject.repository is not None
    broken = {Path(str(error).partition(":")[0]).parent.name for error in subject.unreadable}
    for directory in sorted(filter(Path.is_dir, subject.repository.iterdir())):
        if directory.name not in subject.configs.keys() | broken:
            what = f"{directory.name}: a directory without a config.pbtxt, which Triton refuses"
            yield fault(what, "write one, or move the directory elsewhere")
    for model, config in subject.configs.items():
        directory = subject.repository / model
        problems = chain(
            refusals(config, directory),
            ensemble_refusals(model, subject.configs, subject.repository),
        )
        for problem in problems:
            yield Finding.of(SettingsError(f"{model}: {problem}"))


@check("every model is as this package and its engine need it", lambda s: s.configs)
def fitness(subject: Subject) -> Findings:
    assert subject.repository is not None
    for model, config in subject.configs.items():
        versions = served_versions(config, subject.repository / model)
        programs = [version / "model.py" for version in versions]
        for program in filter(Path.is_file, programs):
            for name in names_gone(program):
                what = f"{model}: its model.py imports {name}, which this version does not have"
                yield fault(what, f"run trtllm-bls upgrade {subject.repository}")
        engine = subject.engines.get(model)
        most = engine.max_batch_size if engine else None
        known = subject.known_models.get(model)
        has_batch = known and subject.values(model).get("tensors") != "llmapi"
        if has_batch and config.max_batch_size < 1:
            mend = f"every tensor has a batch dimension; set {most or 1} or so"
            yield fault(f"{model}: max_batch_size is {config.max_batch_size}", mend)
        elif most and config.max_batch_size > most:
            what = f"{model}: max_batch_size is {config.max_batch_size}, the engine's is {most}"
            yield fault(what, f"set at most {most}, or build a larger engine")


@check("every model that another one calls is there", lambda s: s.configs)
def wiring(subject: Subject) -> Findings:
    values = subject.values(BLS.name)
    if values.get("draft_source") == "model" and not subject.draft:
        what = f"{BLS.name}: draft_source is model, tensorrt_llm_draft_model_name is empty"
        yield fault(what, "name the draft model, or set draft_source to off")
    if BLS.name not in subject.configs or values.get("engine"):
        return
    for name in filter(None, (subject.target, subject.draft)):
        if name not in subject.configs and "${" not in name:
            yield fault(f"{BLS.name}: calls {name}, which is not there", "add it")


@check("every tensor is declared", lambda s: s.known_models)
def tensors(subject: Subject) -> Findings:
    """Triton refuses a request with an input that is not, and of another type."""
    for model, table in subject.known_models.items():
        config = subject.configs[model]
        kinds = {tensor.name: dtype_of(tensor) for tensor in (*config.input, *config.output)}
        rows = {tensor.name: tensor.dtype for tensor in (*table.inputs, *table.outputs)}
        for name, kind in rows.items():
            if kinds.get(name, kind) != kind:
                what = f"{model}.{name} is declared {kinds[name]}, it is {kind}"
                yield fault(what, f"declare it TYPE_{kind}")
        if missing := [name for name in rows if name not in kinds]:
            what = f"{model}: does not declare {', '.join(missing)}"
            yield fault(what, "write it again with trtllm-bls configure")


@check("every parameter that the release demands is there", lambda s: s.cpp_models)
def demanded_parameters(subject: Subject) -> Findings:
    """Without one of them the instance ends at load."""
    release = subject.release or cpp_backend.LAST
    for model in subject.cpp_models:
        values = subject.values(model)
        needed = {"gpt_model_path": "DIRECTORY", "gpt_model_type": "inflight_fused_batching"}
        for name, value in needed.items():
            if not values.get(name):
                yield fault(f"{model}: {name} is missing", f"set {name}={value}")
        keys = cpp_backend.keys_of(release)
        demanded = [name for name, key in keys.items() if key.is_demanded(release)]
        absent = [name for name in demanded if name not in values | needed]
        if absent:
            what = f"{model}: no {', '.join(absent)}"
            yield fault(what, "add them, with an empty value where nothing is meant")


@check("backend and engines are of one release", lambda s: s.engines)
def versions(subject: Subject) -> Findings:
    backend = subject.backend_version
    for model, engine in subject.engines.items():
        built, release = engine.version, engine.release()
        if release is None:
            what = f"{model}: config.json of {engine.path} names no release"
            yield warn(what, "build it with a released trtllm-build")
        elif backend and _numbers(built, 3) != _numbers(backend, 3):
            level: Level = "warn" if _numbers(built, 2) == _numbers(backend, 2) else "error"
            what = f"{model}: its engine is of {built}, the backend of {backend}"
            image = cpp.image_of(release)
            other = f", or serve it from {image}" if image else ""
            yield Finding(level, what, f"build it in the container that serves it{other}")


def _numbers(version: str, count: int) -> list[str]:
    return version.removeprefix("v").split(".")[:count]


@check("models stream, or answer once, as they are to", lambda s: s.configs)
def decoupled(subject: Subject) -> Findings:
    """An orchestrator that streams needs an engine that does; other models answer once."""
    policies = {n: c.model_transaction_policy.decoupled for n, c in subject.configs.items()}
    for model, streams in policies.items():
        parameter = subject.values(model).get("decoupled")
        if parameter is not None and is_true(parameter) != streams:
            what = f"{model}: is {'' if streams else 'not '}decoupled, whatever its parameter says"
            yield fault(what, "only model_transaction_policy counts; set it, or none")
        if streams and model in (PREPROCESSING.name, POSTPROCESSING.name):
            yield fault(f"{model}: is decoupled", "it answers once; leave the policy out")
    if policies.get(BLS.name, True) and not policies.get(subject.target, True):
        mend = "set model_transaction_policy { decoupled: true }"
        yield fault(f"{subject.target}: is not decoupled", mend)


@check("requests without drafts run to their end", lambda s: s.engines)
def one_step_drafts(subject: Subject) -> Findings:
    """Older releases end each request to an engine for external drafts after one step."""
    release = subject.release or cpp_backend.LAST
    for model, engine in subject.engines.items():
        if not cpp.ends_after_one_step(engine, release):
            continue
        if model != subject.target:
            mend = "build it without a speculative_decoding_mode"
            yield fault(f"{model}: drafts one token only ({cpp.EXTERNAL_DRAFTS})", mend)
        elif not is_true(subject.values(model).get("one_step_requests", "")):
            mend = f"set {model}.one_step_requests=true; trtllm-bls configure writes it"
            yield fault(f"{model}: requests without drafts answer one token", mend)


@check("the engines were built for what their parameters ask", lambda s: s.configs and s.engines)
def built_for(subject: Subject) -> Findings:
    for model in subject.engines.keys() & subject.configs.keys():
        values = subject.values(model)
        yield from map(Finding.of, cpp.misfits(model, subject.engines[model], values))
        guides = values.get(cpp_backend.GUIDES[1])
        if guides and not Path(guides).is_file():
            what = f"{model}.{cpp_backend.GUIDES[1]}: {guides} is not there"
            yield fault(what, "make it as docs/engines.md#guided-decoding says")


@check("the files of each engine are whole", lambda s: s.engines)
def engine_files(subject: Subject) -> Findings:
    for model, engine in subject.engines.items():
        for file in sorted(engine.path.glob("rank*.engine")):
            with file.open("rb") as opened:
                head = opened.read(16)
            if head.startswith(b"version https://"):
                yield fault(f"{model}: {file} is a pointer of Git LFS", "run git lfs pull")
            elif not head:
                yield fault(f"{model}: {file} is empty", "copy it again")
        room = subject.values(model).get("max_tokens_in_paged_kv_cache", "")
        if room.isdecimal() and 0 < int(room) < (engine.max_sequence_tokens or 0):
            what = f"{model}: max_tokens_in_paged_kv_cache is {room}, its longest sequence has"
            yield fault(f"{what} {engine.max_sequence_tokens} tokens", "raise it, or leave it out")


@check("ranks can be started", lambda s: any(e.ranks > 1 for e in s.engines.values()))
def ranks(subject: Subject) -> Findings:
    path = subject.environment.get("PATH", "")
    if not any(shutil.which(program, path=path) for program in ("mpirun", "srun")):
        counts = [f"{name}: {e.ranks} ranks" for name, e in subject.engines.items() if e.ranks > 1]
        what = f"{', '.join(counts)}, neither mpirun nor srun here"
        yield fault(what, "serve it in the container")


@check("the server here has every backend", lambda s: s.configs and _server(s), LOADING)
def backends(subject: Subject) -> Findings:
    with suppress(SetupError):  # told by the check of the server's Python
        there = checks.find_server(subject.server).backends
        for model, config in subject.configs.items():
            name = backend_of(config)
            groups = config.instance_group
            wants_gpu = any(g.kind == g.KIND_GPU or (not g.kind and g.gpus) for g in groups)
            if wants_gpu and not _GPUS.exists():
                mend = "set kind: KIND_CPU, without gpus"
                yield fault(f"{model}: an instance group on GPUs, and none is here", mend)
            if name and "${" not in name and not (there / name).is_dir():
                image = cpp.image_of(subject.release) if subject.release else None
                mend = f"serve it from {image or 'the container that has it'}"
                yield fault(f"{model}: no backend {name} in {there}", mend)


def _speculates(subject: Subject) -> bool:
    source = subject.values(BLS.name).get("draft_source", "off")
    return subject.target in subject.engines and (len(subject.engines) > 1 or source != "off")


@check("the target can verify drafts, and the draft can make them", _speculates)
def speculation(subject: Subject) -> None:
    reuse = {"enable_kv_cache_reuse": "true" if not subject.configs else ""}
    values = {name: reuse | subject.values(name) for name in subject.engines}
    target = subject.target
    engines = {ENGINE.name if name == target else name: e for name, e in subject.engines.items()}
    cpp.check_target(target, subject.engines[target], values[target])
    values[ENGINE.name] = values[target]
    cpp.check_drafting(engines, values, subject.release or cpp_backend.LAST)


@check("target and draft have logits of one type", lambda s: len(s.engines) > 1)
def logits_types(subject: Subject) -> Findings:
    """Triton refuses drafts' logits of another type than the target's input."""
    draft, target = subject.engines.get(subject.draft), subject.engines.get(subject.target)
    if draft and target and draft.logits != target.logits:
        mend = "build both with one --logits_dtype, or leave use_draft_logits off"
        yield warn(f"the draft's logits are {draft.logits}, the target takes {target.logits}", mend)


@check("a stalled engine is told from a slow one", lambda s: BLS.name in s.configs)
def time_limits(subject: Subject) -> Findings:
    values, declared = subject.values(BLS.name), parameters_of(BLS.name)
    keys = "engine_stall_seconds", "request_timeout_seconds"
    with suppress(ValueError):  # told by the check of parameters
        stall, timeout = (float(values.get(key) or declared[key].in_file) for key in keys)
        if timeout and stall > timeout:
            what = f"{keys[0]} {stall:g} is longer than {keys[1]} {timeout:g}"
            yield warn(what, f"a stalled engine is seen as a timeout; lower {keys[0]}")


@check("each engine has memory for its KV cache", lambda s: len(s.cpp_models) > 1)
def memory_shares(subject: Subject) -> Findings:
    """Shares are of what is free when an engine loads; the second finds what the first left."""
    gpus: dict[str, list[str]] = {}
    for model in subject.cpp_models:
        values = subject.values(model)
        with suppress(ValueError):  # told by the check of parameters
            large = float(values.get("kv_cache_free_gpu_mem_fraction") or 0.9) > 0.8
            if large and not values.get("max_tokens_in_paged_kv_cache"):
                gpus.setdefault(values.get("gpu_device_ids", ""), []).append(model)
    for models in gpus.values():
        if len(models) > 1:
            what = f"{' and '.join(models)} share GPUs and want 80 % or more of what is free each"
            mend = "set kv_cache_free_gpu_mem_fraction to 0.45 each, or gpu_device_ids apart"
            yield fault(what, mend)


# --- addresses: who listens there, and whether it serves this repository ----------------------


_ANSWER_S = 5.0
_LOCAL = (*_LOOPBACK, "[::1]")
_SERVER = "tritonserver"
_NO_SERVICE = {
    grpc.StatusCode.DEADLINE_EXCEEDED: "no answer",
    grpc.StatusCode.UNIMPLEMENTED: "not TensorRT-LLM's service",
}


def _engine_url(subject: Subject) -> str:
    """Where the engine of this server is; empty where another process has it."""
    return "" if _engines_elsewhere(subject) else subject.values(BLS.name).get("engine_url", "")


@check("the engine's port belongs to Triton, or to nobody yet", _engine_url)
def engine_port(subject: Subject) -> Findings:
    """With host networking another program or another Triton may own it."""
    url = _engine_url(subject)
    host, _, port = url.rpartition(":")
    here = host in _LOCAL
    if not host or not port.isdecimal() or "/" in host:
        yield fault(f"engine_url {url}: is no address", "write HOST:PORT")
        return
    names = _listeners(url)
    if here and not names and subject.url and subject.url.rpartition(":")[0] in _LOCAL:
        what = f"engine_url {url}: nobody listens there, and a server runs at {subject.url}"
        yield warn(what, "name that port; `serve` does so by itself (--grpc-port)")
    if not here and (problem := _unreachable(url)):
        mend = "name the gRPC port of the server that has the engine"
        yield fault(f"engine_url {url}: {problem}", mend)
    if set(names) - {_SERVER}:
        what = f"engine_url {url}: {' and '.join(names)} listens there, not {_SERVER}"
        yield fault(what, "stop it, or serve on another --grpc-port")


def _engines_elsewhere(subject: Subject) -> list[tuple[str, EngineKind]]:
    """The addresses that parameter ``engine`` names, where it is one of another process."""
    try:
        choice = parse_engine(subject.values(BLS.name).get("engine", ""))
    except ValueError:
        return []  # none, or told by the check of parameters
    return [(address, choice.kind) for address, _ in choice.addresses if choice.is_elsewhere]


@check("engines elsewhere are there", _engines_elsewhere)
def engine_addresses(subject: Subject) -> Findings:
    for address, kind in _engines_elsewhere(subject):
        if problem := _unreachable(address):
            mend = "start it (trtllm-serve MODEL --grpc), or mend the address"
            yield fault(f"engine at {address}: {problem}", mend)
        elif kind is EngineKind.TRTLLM and (problem := _service_problem(address)):
            yield fault(f"engine at {address}: {problem}", "see its own log")


def _unreachable(address: str) -> str:
    """Why nobody answers at ``host:port``; empty where somebody does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        return str(error.strerror or error)
    return ""


def _service_problem(address: str) -> str:
    """What a TrtllmService says of its health; empty where that is good, or the port has TLS."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        ask = channel.unary_unary(
            messages.SERVICE + "HealthCheck",
            request_serializer=messages.HealthCheckRequest.SerializeToString,
            response_deserializer=messages.HealthCheckResponse.FromString,
        )
        try:
            status = ask(messages.HealthCheckRequest(), timeout=_ANSWER_S).status
        except grpc.RpcError as error:
            return _NO_SERVICE.get(error.code(), "")
    return "" if status == "OK" else f"it is not healthy: {status}"


@check("the ports of serve are free", lambda s: s.repository and not s.url)
def ports(subject: Subject) -> Findings:
    """The default ports of ``serve``; a running server has taken them already."""
    for flag, port in subject.ports.items():
        names = _listeners(f"localhost:{port}")
        if names:
            what = f"port {port} is taken by {' and '.join(names)}"
            yield warn(what, f"if that is not your server, choose another with {flag}")


def _listeners(url: str) -> list[str]:
    """The names of the programs that listen at a port of this machine."""
    names = set()
    for process in listening_processes(url):
        with suppress(psutil.Error):
            names.add(psutil.Process(process).name())
    return sorted(names)


@check("the server answers and its models are ready", lambda s: s.url)
def server(subject: Subject) -> Findings:
    with _client(subject) as client:
        try:
            name = client.get_server_metadata(client_timeout=_ANSWER_S).name
            if name != "triton":
                yield fault(f"{subject.url}: {name} answers", "name Triton's gRPC port")
                return
            for model in sorted(subject.configs) or [BLS.name, subject.target]:
                if not client.is_model_ready(model, client_timeout=_ANSWER_S):
                    yield fault(f"{subject.url}: {model} is not ready", "see the server's log")
        except InferenceServerException as error:
            what = f"{subject.url}: no answer from Triton ({error.message()})"
            yield fault(what, "start the server, or name its gRPC port with --url")


@check("the server serves this repository", lambda s: s.url and s.repository)
def same_repository(subject: Subject) -> Findings:
    """Another Triton may answer, with models of the same names."""
    with _client(subject) as client:
        for model in sorted(subject.configs):
            with suppress(InferenceServerException):  # told by the check of the server
                answer = client.get_model_config(model, client_timeout=_ANSWER_S)
                values, mine = values_of(answer.config), subject.values(model)
                differing = [key for key in mine.keys() & values if mine[key] != values[key]]
                if differing:
                    what = f"{subject.url}: {model} has other values of {', '.join(differing)}"
                    mend = "is it another server, or one with other options, or an older one?"
                    yield warn(what, mend)


def _client(subject: Subject) -> Any:
    # A proxy that the environment names is not used here; the check of proxies reports it.
    args: list[tuple[str, Any]] = [("grpc.enable_http_proxy", 0)]
    files = {name: str(value) for name, value in vars(subject.tls or Tls()).items() if value}
    if name := files.pop("server_name", None):
        args.append(("grpc.ssl_target_name_override", name))
    return InferenceServerClient(subject.url, ssl=bool(subject.tls), channel_args=args, **files)


# --- tokenizers against the engines' vocabularies ---------------------------------------------


# Embeddings are padded to a multiple of 64 or 128 per GPU; more rows than that are another model's.
_MOST_PADDING = 1024


_loaded = cache(load_tokenizer)  # it takes seconds


@check("tokenizers can be loaded", lambda s: s.tokenizer)
def tokenizer(subject: Subject) -> None:
    for directory in (subject.tokenizer, subject.directory(BLS.name, "draft_tokenizer_dir")):
        if directory:
            _loaded(directory)


@check("all models have one tokenizer, and it can chat", lambda s: s.tokens)
def one_tokenizer(subject: Subject) -> Findings:
    """Another one in a step of the ensemble makes other text of the same ids."""
    assert subject.tokens is not None
    for model in (PREPROCESSING.name, POSTPROCESSING.name):
        directory = subject.directory(model, "tokenizer_dir")
        if directory and _loaded(directory).fingerprint != subject.tokens.fingerprint:
            what = f"{model}: the tokenizer in {directory} is another than {subject.tokenizer}"
            yield fault(what, "name one tokenizer in all models")
    if not subject.tokens.chat_template:
        what = f"{subject.tokenizer}: no chat template"
        yield warn(what, "messages and /v1/chat/completions need one; text does not")


@check("engines and tokenizers have one vocabulary", lambda s: s.tokens and s.engines)
def vocabulary(subject: Subject) -> Findings:
    """An id beyond the embeddings ends a request; other tokens than the draft's waste drafts."""
    assert subject.tokens is not None
    tokens, mend = subject.tokens.vocab_size, "use the tokenizer that the model was trained with"
    for model, engine in subject.engines.items():
        cpp.check_vocabulary(model, engine, subject.tokens)
        size = engine.vocab_size or tokens
        if tokens > size:
            what = f"{model}: {tokens - size} added tokens are beyond its embeddings"
            yield warn(what, "requests that use them are refused; " + mend)
        elif size - tokens > _MOST_PADDING:
            yield warn(f"{model}: {size} embeddings for the tokenizer's {tokens} tokens", mend)


@check("target and draft have one vocabulary", lambda s: len(s.engines) > 1)
def draft_vocabulary(subject: Subject) -> Findings:
    """Drafts are token ids: both models have to mean the same by them."""
    target = subject.engines.get(subject.target) or subject.engines.get(ENGINE.name)
    for model, engine in subject.engines.items():
        if target and target.vocab_size and engine.vocab_size not in (None, target.vocab_size):
            what = f"{model} has {engine.vocab_size} embeddings, the target {target.vocab_size}"
            yield warn(what, "take a draft of the same family, or leave draft logits off")
    drafts = subject.directory(BLS.name, "draft_tokenizer_dir")
    if subject.tokens and drafts and _loaded(drafts).fingerprint != subject.tokens.fingerprint:
        what = f"the tokenizer in {drafts} has another token table"
        yield fault(what, "the draft is not used; take one of the target's family")


# --- the command line -------------------------------------------------------------------------


_STYLES = {"ok": "green", "warn": "yellow", "error": "red"}


@click.command(name="doctor")
@options_of(Subject)
@options_of(TlsConnection)
@click.option("--json", "as_json", is_flag=True, help="One JSON object in place of lines.")
def command(as_json: bool, **options: Any) -> None:
    """Look for what would go wrong: in a repository, at a server, on this machine.

    Exit code 0: no errors; 1: errors; 2: wrong options.

    \b
    Examples:
      trtllm-bls doctor
      trtllm-bls doctor --model-repository . --version 0.19
      trtllm-bls doctor --url localhost:8001 --json
      trtllm-bls doctor --url gpu-host:8001 --tls
    """
    tls = Tls.of_options(options)
    named = {name: value for name, value in options.items() if not name.startswith("tls")}
    findings = list(examine(Subject(**named, tls=tls)))
    levels = [finding.level for _, finding in findings]
    count = {level: levels.count(level) for level in get_args(Level)}
    if as_json:
        rows = [{"check": name, **vars(finding)} for name, finding in findings]
        click.echo(json.dumps({"findings": rows, "count": count}, indent=1, ensure_ascii=False))
    else:
        console = Console(highlight=False)
        for name, finding in findings:
            level = (f"{finding.level:<5} ", _STYLES[finding.level])
            console.print(Text.assemble(level, f"{name}: {finding}"), soft_wrap=True)
        errors = "1 error" if count["error"] == 1 else f"{count['error']} errors"
        warnings = "1 warning" if count["warn"] == 1 else f"{count['warn']} warnings"
        click.echo(f"{errors}, {warnings}")
    sys.exit(1 if count["error"] else 0)


@click.command()
@click.option("--engine", default="embedded", help="embedded, llm_api or trtllm://HOST:PORT.")
@click.option("--model", "model_dir", required=True, type=_PATH, help="Directory of the model.")
@click.option("--model-yaml", type=_PATH, help="Arguments of the LLM API.")
def conformance(engine: str, **options: Any) -> None:
    """Send an engine requests whose answers are known, and print a report for an issue.

    The engine runs in this process, without Triton. Exit code 1: a check failed.

    \b
    Examples:
      trtllm-bls conformance --engine llm_api --model /models/llama
      trtllm-bls conformance --engine trtllm://127.0.0.1:50051 --model /models/llama
    """
    from trtllm_bls.engines.conformance import examine as ask
    from trtllm_bls.engines.local import local_engine

    check_ours(ENGINE.name, "engine", engine)
    packages = ("trtllm-bls", "tensorrt-llm", "torch", "transformers")
    versions = [f"{name} {version}" for name in packages if (version := installed(name))]
    click.echo(f"{', '.join(versions)}; {engine}\n\n| check | result |\n| --- | --- |")
    results = []

    async def run() -> None:
        load = partial(_loaded, options["model_dir"])
        opened = local_engine(engine, EngineParameters(engine=engine, **options), load)
        ids = tuple(load().encode("The capital of France is Paris. The capital of Japan is", True))
        try:
            async for name, result in ask(opened, ids, load().decode, load().eos_id or 0):
                results.append(result)
                click.echo(f"| {name} | {result} |")
        finally:
            await opened.close()

    asyncio.run(run())
    sys.exit(any("FAILED" in result for result in results))
