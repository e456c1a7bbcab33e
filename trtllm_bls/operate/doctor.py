"""``trtllm-bls doctor``: finds what is wrong with a deployment before the first request.

No check changes anything. Where a rule exists elsewhere in the package, the check asks there. The
last command, ``conformance``, asks an engine itself.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click
import grpc
import psutil
from packaging.requirements import Requirement
from packaging.version import Version
from rich.console import Console
from rich.text import Text
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from trtllm_bls.client.client import Tls
from trtllm_bls.configure import engine_dir as cpp
from trtllm_bls.engines.llm_api import IGNORED_MEND, ignored_fields
from trtllm_bls.engines.own_port import listening_processes
from trtllm_bls.engines.trtllm_service import service_messages as messages
from trtllm_bls.errors import SettingsError, SetupError, TrtllmBlsError
from trtllm_bls.operate import checks, model_code
from trtllm_bls.operate.findings import (
    CHECKS,
    Finding,
    Findings,
    Level,
    Subject,
    check,
    examine,
    fault,
    installed,
    loaded_tokenizer,
    warn,
)
from trtllm_bls.operate.judge import judge
from trtllm_bls.operate.preflight import has_server
from trtllm_bls.operate.triton_reasons import NO_GPU, remedy_of
from trtllm_bls.pipeline.streaming_model import own_parameters, undeclared_parameters
from trtllm_bls.settings import cpp_backend
from trtllm_bls.settings.command_options import TlsConnection, deprecated, options_of
from trtllm_bls.settings.model_config import (
    backend_of,
    dtype_of,
    instances_of,
    served_versions,
    values_of,
)
from trtllm_bls.settings.model_names import ENSEMBLE_PLATFORM
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
from trtllm_bls.wire.contract import BLS, ENGINE, POSTPROCESSING, PREPROCESSING

_DIRECTORY_OPTION = click.Path(path_type=Path)


def diagnose(subject: Subject) -> Iterator[tuple[str, Finding]]:
    """Run every check, those of ``serve`` first; yield each finding with its check's name."""
    return examine(subject, CHECKS)


# --- this machine: proxies, Python's packages ---------------------------------------------------

DISTRIBUTION = "trtllm-bls"
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
_LOOPBACK = ("localhost", "127.0.0.1")


@check("connections to this machine go past any proxy")
def proxies(subject: Subject) -> Findings:
    """gRPC uses a proxy even for localhost, unless no_proxy names it."""
    environment = {name.lower(): value for name, value in subject.environment.items()}
    variables = [name for name in _PROXIES if environment.get(name)]
    direct_hosts = list(filter(None, map(str.strip, environment.get("no_proxy", "").split(","))))
    missing = [host for host in _LOOPBACK if host not in direct_hosts]
    if variables and missing and "*" not in direct_hosts:
        yield warn(
            f"{', '.join(variables)} without no_proxy for {' and '.join(missing)}",
            f"set no_proxy={','.join([*direct_hosts, *missing])}",
        )


@check("Python and packages are as this package needs them")
def packages(subject: Subject) -> Findings:
    """`pip install --no-deps` leaves what a container has, which may be too old."""
    extra = ""
    if subject.packages("uvicorn"):  # `serve` has the OpenAI API wherever it is installed
        extra = "openai"
    # The Containerfile adds httpx and httpcore without their dependencies.
    for distribution in (DISTRIBUTION, "httpx", "httpcore"):
        if not installed(distribution):
            continue
        for requirement in map(Requirement, importlib.metadata.requires(distribution) or ()):
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            name = requirement.name
            specifier = requirement.specifier
            version = subject.packages(name)
            if version is None:
                yield fault(f"no {name}", f"pip install '{requirement}'")
            elif not specifier.contains(version, prereleases=True):
                yield fault(
                    f"{name} {version}, {distribution} needs {specifier}",
                    _PACKAGE_REMEDIES.get(distribution, _PACKAGE_REMEDY),
                )


_PACKAGE_REMEDY = "install trtllm-bls into an environment of its own, or take a newer container"
_PACKAGE_REMEDIES = {
    # The Containerfile adds httpcore beside the image's h11.
    "httpcore": "install another httpcore: --build-arg HTTPCORE=1.0.9 of the Containerfile",
}


@check(
    "transformers is as TensorRT-LLM's Python package wants it",
    lambda s: s.packages("tensorrt-llm"),
)
def pins(subject: Subject) -> Findings:
    """Another one can break `import tensorrt_llm`, which builds engines but does not serve them."""
    transformers = subject.packages("transformers")
    release = subject.packages("tensorrt-llm") or ""
    row = cpp.RELEASES.get(str(cpp_backend.parse_version(release)), {})
    pinned = row.get("transformers")
    if transformers and pinned and _numbers(transformers, 2) != _numbers(pinned, 2):
        yield warn(
            f"transformers {transformers} beside tensorrt-llm {release}, made with {pinned}",
            f"pip install transformers=={pinned} before building engines here",
        )


_BROKEN_SERVICE = Version("1.3.0rc22")
_STUBS_ARE_AN_EXTRA = Version("1.3.0rc25")
_SERVICE_STUBS = "smg-grpc-proto"


def _has_service(subject: Subject) -> bool:
    """True where the installed TensorRT-LLM is one whose gRPC service may not start."""
    release = subject.packages("tensorrt-llm")
    return bool(release and Version(release) >= _BROKEN_SERVICE)


@check("the installed TensorRT-LLM can start its gRPC service", _has_service)
def service(subject: Subject) -> Findings:
    """For an engine `trtllm://`; other engines do not need it."""
    release = Version(subject.packages("tensorrt-llm") or "0")
    if release == _BROKEN_SERVICE:
        yield warn(
            f"trtllm-serve --grpc of TensorRT-LLM {release} does not start",
            "for an engine trtllm:// take 1.3.0rc21, or a later release",
        )
    elif release >= _STUBS_ARE_AN_EXTRA and not subject.packages(_SERVICE_STUBS):
        yield warn(
            f"no {_SERVICE_STUBS}, which trtllm-serve --grpc of TensorRT-LLM {release} needs",
            "for an engine trtllm:// run `pip install 'smg-grpc-proto>=0.4.5'`",
        )


# --- parameters and engines, which TensorRT-LLM would ignore or refuse later ------------------


_GPUS = Path("/dev/nvidiactl")


@check(
    "configurations and engine directories can be read",
    lambda s: s.repository or s.engine_dir,
)
def readable(subject: Subject) -> Findings:
    if subject.repository and not subject.configs and not subject.unreadable:
        yield fault(f"{subject.repository}: no model in it", "name the model repository")
    yield from map(Finding.of, subject.unreadable)


@check("every template is filled in", lambda s: s.configs)
def placeholders(subject: Subject) -> Findings:
    """A parameter that still holds one counts as not set, or as that very text."""
    for model, config in subject.configs.items():
        values = subject.values(model)
        for key in ("name", "backend", "platform"):
            values[key] = getattr(config, key)
        templates = [key for key, value in values.items() if "${" in value]
        if templates:
            yield fault(
                f"{model}: placeholders in {', '.join(templates)}",
                "fill them in or remove them; trtllm-bls configure --from does",
            )


@check("every pipeline's own parameters can be read", lambda s: s.pipelines)
def pipeline_parameters(subject: Subject) -> Findings:
    for model, parameters in subject.pipelines.items():
        texts = subject.values(model)
        for problem in undeclared_parameters(texts, parameters):
            yield Finding.of(TrtllmBlsError(f"{model}: {problem}"), "warn")
        try:
            values = own_parameters(model, texts, parameters)
        except SettingsError as error:
            yield Finding.of(error)
            continue
        if values:
            settings = ", ".join(f"{key} = {value!r}" for key, value in values.items())
            yield Finding("ok", f"{model}: {settings}")


@check("the LLM API can be given its arguments", lambda s: s.llm_api_models)
def llm_api(subject: Subject) -> Findings:
    """As the model reads them when it loads; a release's arguments only where one is installed."""
    for model in subject.llm_api_models:
        values = subject.values(model)
        file = values.get("model_yaml")
        config = ModelYaml()
        try:
            gpus_of(values.get("gpu_device_ids", ""), 0, instances_of(subject.configs[model]))
            if file:
                config = ModelYaml.read((subject.repository or Path()) / file)
            config.load_processors()
        except SettingsError as error:
            yield Finding.of(error)
            continue
        release = subject.packages("tensorrt-llm")
        if not release:
            continue
        if warning := ignored_fields(release, config.arguments):
            yield warn(f"{model}: {warning}", IGNORED_MEND)
        if config.arguments.get("backend") in (None, "pytorch"):  # another has other arguments
            names = _llm_arguments()
            for key in sorted(config.arguments.keys() - names):
                yield fault(
                    f"model.yaml: the TensorRT-LLM that is installed has no argument {key}",
                    suggestion(key, names),
                )


def _llm_arguments() -> set[str]:
    """Return the arguments of the LLM API in the TensorRT-LLM that is installed."""
    arguments = importlib.import_module("tensorrt_llm.llmapi.llm_args").TorchLlmArgs
    names = set()
    for name, field in arguments.model_fields.items():
        names.add(name)
        if field.alias:
            names.add(field.alias)
    return names


_JUDGEMENT_S = 60.0  # with no model
_MODEL_S = 2.0  # the addition for each model


def _is_judged(subject: Subject) -> bool:
    """True where no server runs that has loaded the models already."""
    return bool(subject.is_judged and subject.repository and not subject.url)


@check("Triton loads every model, as far as its configuration decides", _is_judged)
def judged_by_triton(subject: Subject) -> Findings:
    """The verdict of the tritonserver that is installed, on a scratch copy."""
    assert subject.repository is not None
    seconds = max(_JUDGEMENT_S, _MODEL_S * len(subject.configs))
    try:
        verdict = judge(
            subject.repository.absolute(),
            subject.configs,
            checks.find_server(subject.server),
            seconds=seconds,
            progress=subject.progress,
        )
    except SetupError as error:
        yield warn(f"not judged by Triton: {error}", "run doctor where the models are served")
        return
    for model, reason in sorted(verdict.reasons.items()):
        if model in subject.unreadable_models or "${" in reason:
            continue  # the checks of configurations and templates report it
        level: Level = "error"
        if NO_GPU.search(reason) and not _GPUS.exists():
            level = "warn"  # the configuration is for another machine
        yield Finding(level, f"{model}: {reason}", remedy_of(reason))
    if verdict.unsettled:
        yield warn(
            f"{', '.join(verdict.unsettled)}: Triton gave no verdict within {seconds:.0f} s",
            "run doctor again when the machine is less busy",
        )


def _interpreter_of(config: Any, directory: Path) -> Path | None:
    """Find the interpreter of a Python model; ``None`` where it is packed into an archive."""
    if "EXECUTION_ENV_PATH" not in config.parameters:
        return Path(sys.executable)
    place = config.parameters["EXECUTION_ENV_PATH"].string_value
    place = place.replace("$$TRITON_MODEL_DIRECTORY", str(directory))
    python = Path(place, "bin", "python3")
    if not python.is_file():
        return None
    return python


_CODE_S = 60.0


@check("every model's program can be read, and finds what it imports", lambda s: s.configs)
def programs(subject: Subject) -> Findings:
    """Asked of each model's own interpreter, with the path that it has inside Triton."""
    assert subject.repository is not None
    programs: dict[Path, list[tuple[str, Path]]] = {}
    for model, config in subject.configs.items():
        directory = subject.repository / model
        python = _interpreter_of(config, directory)
        has_code = backend_of(config) in ("", "python") and config.platform != ENSEMBLE_PLATFORM
        if not has_code or not python:
            continue
        for version in served_versions(config, directory):
            file = version / (config.default_model_filename or "model.py")
            if file.is_file():
                programs.setdefault(python, []).append((model, file))
    for python, files in programs.items():
        orders = []
        for _, file in files:
            import_path = [str(file.parent), str(file.parents[1])]
            orders.append([str(file), import_path])
        result = subprocess.run(
            [python, "-I", model_code.__file__],
            input=json.dumps(orders),
            capture_output=True,
            text=True,
            timeout=_CODE_S,
            check=False,
        )
        if result.returncode:
            yield warn(
                f"{python} cannot look at the models' programs: {result.stderr.strip()[-200:]}",
                "mend that environment",
            )
            continue
        for (model, file), problems in zip(files, json.loads(result.stdout), strict=True):
            name = f"{model}: {file.relative_to(file.parents[1])}"
            for kind, detail in problems:
                if kind == model_code.NO_PYTHON:
                    yield fault(f"{name} is no Python: {detail}", "mend it")
                elif kind == model_code.NO_CLASS:
                    yield warn(f"{name} has no class {detail}, as it seems", "name it so")
                else:
                    yield warn(
                        f"{name} imports {detail}, which {python} does not find",
                        "install it there, unless the program adds its place itself",
                    )


@check("every model is as this package and its engine need it", lambda s: s.configs)
def fitness(subject: Subject) -> Findings:
    for model, config in subject.configs.items():
        limit = 0  # none
        if model in subject.engines:
            limit = subject.engines[model].max_batch_size or 0
        size = config.max_batch_size
        is_llmapi = subject.values(model).get("tensors") == "llmapi"
        if size < 1 and model in subject.known_models and not is_llmapi:
            yield fault(
                f"{model}: max_batch_size is {size}",
                f"every tensor has a batch dimension; set {limit or 1} or so",
            )
        elif limit and size > limit:
            yield fault(
                f"{model}: max_batch_size is {size}, the engine's is {limit}",
                f"set at most {limit}, or build a larger engine",
            )


@check("every model that another one calls is there", lambda s: s.configs)
def wiring(subject: Subject) -> Findings:
    values = subject.values(BLS.name)
    if values.get("draft_source") == "model" and not subject.draft:
        yield fault(
            f"{BLS.name}: draft_source is model, tensorrt_llm_draft_model_name is empty",
            "name the draft model, or set draft_source to off",
        )
    if BLS.name not in subject.configs or values.get("engine"):
        return
    for name in filter(None, (subject.target, subject.draft)):
        if name not in subject.configs and "${" not in name:
            yield fault(f"{BLS.name}: calls {name}, which is not there", "add it")


@check("every tensor is declared", lambda s: s.known_models)
def tensors(subject: Subject) -> Findings:
    """Triton refuses a request with an input that is not, and of another type."""
    for model, contract in subject.known_models.items():
        config = subject.configs[model]
        dtypes = {tensor.name: dtype_of(tensor) for tensor in (*config.input, *config.output)}
        missing = []
        for tensor in (*contract.inputs, *contract.outputs):
            dtype = dtypes.get(tensor.name)
            if dtype is None:
                missing.append(tensor.name)
            elif dtype != tensor.dtype:
                yield fault(
                    f"{model}.{tensor.name} is declared {dtype}, it is {tensor.dtype}",
                    f"declare it TYPE_{tensor.dtype}",
                )
        if missing:
            yield fault(
                f"{model}: does not declare {', '.join(missing)}",
                "write it again with trtllm-bls configure",
            )


@check("every parameter that the release demands is there", lambda s: s.cpp_models)
def demanded_parameters(subject: Subject) -> Findings:
    """Without one of them the instance ends at load."""
    release = subject.release or cpp_backend.LAST
    for model in subject.cpp_models:
        values = subject.values(model)
        examples = {"gpt_model_path": "DIRECTORY", "gpt_model_type": "inflight_fused_batching"}
        for name, example in examples.items():
            if not values.get(name):
                yield fault(f"{model}: {name} is missing", f"set {name}={example}")
        missing = []
        for name, key in cpp_backend.keys_of(release).items():
            if key.is_required(release) and name not in values and name not in examples:
                missing.append(name)
        if missing:
            yield fault(
                f"{model}: no {', '.join(missing)}",
                "add them, with an empty value where nothing is meant",
            )


@check("backend and engines are of one release", lambda s: s.engines)
def versions(subject: Subject) -> Findings:
    backend = subject.backend_version
    for model, engine in subject.engines.items():
        release = engine.release()
        if release is None:
            yield warn(
                f"{model}: config.json of {engine.path} names no release",
                "build it with a released trtllm-build",
            )
        elif backend and not _is_one_release(engine.version, backend, 3):
            level: Level = "error"
            if _is_one_release(engine.version, backend, 2):
                level = "warn"
            remedy = "build it in the container that serves it"
            if image := cpp.image_of(release):
                remedy += f", or serve it from {image}"
            yield Finding(
                level,
                f"{model}: its engine is of {engine.version}, the backend of {backend}",
                remedy,
            )


def _is_one_release(engine: str, backend: str, count: int) -> bool:
    """Return True if the first ``count`` numbers are the same, where both versions have them."""
    pairs = zip(_numbers(engine, count), _numbers(backend, count), strict=False)
    return all(one == two for one, two in pairs)


def _numbers(version: str, count: int) -> list[str]:
    return version.removeprefix("v").split(".")[:count]


@check("models stream, or answer once, as they are to", lambda s: s.configs)
def decoupled(subject: Subject) -> Findings:
    """An orchestrator that streams needs an engine that does; other models answer once."""
    policies = {}
    for model, config in subject.configs.items():
        policies[model] = config.model_transaction_policy.decoupled
    for model, streams in policies.items():
        parameter = subject.values(model).get("decoupled")
        if parameter is not None and is_true(parameter) != streams:
            yield fault(
                f"{model}: is {'' if streams else 'not '}decoupled, whatever its parameter says",
                "only model_transaction_policy counts; set it, or none",
            )
        if streams and model in (PREPROCESSING.name, POSTPROCESSING.name):
            yield fault(f"{model}: is decoupled", "it answers once; leave the policy out")
    if policies.get(BLS.name, True) and not policies.get(subject.target, True):
        yield fault(
            f"{subject.target}: is not decoupled",
            "set model_transaction_policy { decoupled: true }",
        )


@check("requests without drafts run to their end", lambda s: s.engines)
def one_step_drafts(subject: Subject) -> Findings:
    """Older releases end each request to an engine for external drafts after one step."""
    release = subject.release or cpp_backend.LAST
    for model, engine in subject.engines.items():
        if not cpp.ends_after_one_step(engine, release):
            continue
        if model != subject.target:
            yield fault(
                f"{model}: drafts one token only ({cpp.EXTERNAL_DRAFTS})",
                "build it without a speculative_decoding_mode",
            )
        elif not is_true(subject.values(model).get("one_step_requests", "")):
            yield fault(
                f"{model}: requests without drafts answer one token",
                f"set {model}.one_step_requests=true; trtllm-bls configure writes it",
            )


@check("the engines were built for what their parameters ask", lambda s: s.configs and s.engines)
def built_for(subject: Subject) -> Findings:
    for model in subject.engines.keys() & subject.configs.keys():
        values = subject.values(model)
        yield from map(Finding.of, cpp.misfits(model, subject.engines[model], values))
        guides = values.get(cpp_backend.GUIDES[1])
        if guides and not Path(guides).is_file():
            yield fault(
                f"{model}.{cpp_backend.GUIDES[1]}: {guides} is not there",
                "make it as docs/engines.md#guided-decoding says",
            )


@check("the files of each engine are whole", lambda s: s.engines)
def engine_files(subject: Subject) -> Findings:
    for model, engine in subject.engines.items():
        for file in sorted(engine.path.glob("rank*.engine")):
            with file.open("rb") as stream:
                head = stream.read(16)
            if head.startswith(b"version https://"):
                yield fault(f"{model}: {file} is a pointer of Git LFS", "run git lfs pull")
            elif not head:
                yield fault(f"{model}: {file} is empty", "copy it again")
        tokens = subject.values(model).get("max_tokens_in_paged_kv_cache", "")
        if tokens.isdecimal() and 0 < int(tokens) < (engine.max_sequence_tokens or 0):
            yield fault(
                f"{model}: max_tokens_in_paged_kv_cache is {tokens}, its longest sequence has "
                f"{engine.max_sequence_tokens} tokens",
                "raise it, or leave it out",
            )


@check("ranks can be started", lambda s: any(e.ranks > 1 for e in s.engines.values()))
def ranks(subject: Subject) -> Findings:
    path = subject.environment.get("PATH", "")
    if not shutil.which("mpirun", path=path) and not shutil.which("srun", path=path):
        counts = []
        for model, engine in subject.engines.items():
            if engine.ranks > 1:
                counts.append(f"{model}: {engine.ranks} ranks")
        yield fault(
            f"{', '.join(counts)}, neither mpirun nor srun here", "serve it in the container"
        )


@check("the server here has every backend", lambda s: s.configs and has_server(s))
def backends(subject: Subject) -> Findings:
    with suppress(SetupError):  # the check of the server's Python reports it
        directory = checks.find_server(subject.server).backends
        image = "the container that has it"
        if subject.release:
            image = cpp.image_of(subject.release) or image
        for model, config in subject.configs.items():
            name = backend_of(config)
            if name and "${" not in name and not (directory / name).is_dir():
                yield fault(f"{model}: no backend {name} in {directory}", f"serve it from {image}")


def _speculates(subject: Subject) -> bool:
    source = subject.values(BLS.name).get("draft_source", "off")
    return subject.target in subject.engines and (len(subject.engines) > 1 or source != "off")


@check("the target can verify drafts, and the draft can make them", _speculates)
def speculation(subject: Subject) -> None:
    defaults = {"enable_kv_cache_reuse": ""}
    if not subject.configs:
        defaults = {"enable_kv_cache_reuse": "true"}
    target = subject.target
    values = defaults | subject.values(target)
    cpp.check_target(target, subject.engines[target], values)
    # ``check_drafting`` knows the target by its usual name.
    engines = {}
    parameters = {}
    for model, engine in subject.engines.items():
        name = model
        if model == target:
            name = ENGINE.name
        engines[name] = engine
        parameters[name] = defaults | subject.values(model)
    cpp.check_drafting(engines, parameters, subject.release or cpp_backend.LAST)


@check("target and draft have logits of one type", lambda s: len(s.engines) > 1)
def logits_types(subject: Subject) -> Findings:
    """Triton refuses drafts' logits of another type than the target's input."""
    draft = subject.engines.get(subject.draft)
    target = subject.engines.get(subject.target)
    if draft and target and draft.logits != target.logits:
        yield warn(
            f"the draft's logits are {draft.logits}, the target takes {target.logits}",
            "build both with one --logits_dtype, or leave use_draft_logits off",
        )


@check("a stalled engine is told from a slow one", lambda s: BLS.name in s.configs)
def time_limits(subject: Subject) -> Findings:
    values = subject.values(BLS.name)
    parameters = parameters_of(BLS.name)

    def seconds(key: str) -> float:
        return float(values.get(key) or parameters[key].in_file)

    with suppress(ValueError):  # the check of parameters reports it
        stall = seconds("engine_stall_seconds")
        timeout = seconds("request_timeout_seconds")
        if timeout and stall > timeout:
            yield warn(
                f"engine_stall_seconds {stall:g} is longer than "
                f"request_timeout_seconds {timeout:g}",
                "a stalled engine is seen as a timeout; lower engine_stall_seconds",
            )


@check("each engine has memory for its KV cache", lambda s: len(s.cpp_models) > 1)
def memory_shares(subject: Subject) -> Findings:
    """An engine's share is of the memory that is free when it loads, less the share of another."""
    gpus: dict[str, list[str]] = {}
    for model in subject.cpp_models:
        values = subject.values(model)
        with suppress(ValueError):  # the check of parameters reports it
            large = float(values.get("kv_cache_free_gpu_mem_fraction") or 0.9) > 0.8
            if large and not values.get("max_tokens_in_paged_kv_cache"):
                gpus.setdefault(values.get("gpu_device_ids", ""), []).append(model)
    for models in gpus.values():
        if len(models) > 1:
            yield fault(
                f"{' and '.join(models)} share GPUs and want 80 % or more of what is free each",
                "set kv_cache_free_gpu_mem_fraction to 0.45 each, or gpu_device_ids apart",
            )


# --- addresses: the programs that listen there, and the repository that they serve ------------


_SERVICE_ANSWER_S = 5.0
_LOCAL = (*_LOOPBACK, "[::1]")
_SERVER = "tritonserver"
_NO_SERVICE = {
    grpc.StatusCode.DEADLINE_EXCEEDED: "no answer",
    grpc.StatusCode.UNIMPLEMENTED: "not TensorRT-LLM's service",
}


def _engine_url(subject: Subject) -> str:
    """Return the address of this server's engine; empty where another process has it."""
    if _engines_elsewhere(subject):
        return ""
    return subject.values(BLS.name).get("engine_url", "")


@check("the engine's port belongs to Triton, or to nobody yet", _engine_url)
def engine_port(subject: Subject) -> Findings:
    """With host networking another program or another Triton may own it."""
    url = _engine_url(subject)
    host, _, port = url.rpartition(":")
    is_local = host in _LOCAL
    if not host or not port.isdecimal() or "/" in host:
        yield fault(f"engine_url {url}: is no address", "write HOST:PORT")
        return
    names = _listeners(url)
    if is_local and not names and subject.url and subject.url.rpartition(":")[0] in _LOCAL:
        yield warn(
            f"engine_url {url}: nobody listens there, and a server runs at {subject.url}",
            "name that port; `serve` does so by itself (--grpc-port)",
        )
    if not is_local and (problem := _unreachable(url)):
        yield fault(
            f"engine_url {url}: {problem}", "name the gRPC port of the server that has the engine"
        )
    if set(names) - {_SERVER}:
        yield fault(
            f"engine_url {url}: {' and '.join(names)} listens there, not {_SERVER}",
            "stop it, or serve on another --grpc-port",
        )


def _engines_elsewhere(subject: Subject) -> list[tuple[str, EngineKind]]:
    """Return the addresses that parameter ``engine`` names, if another process has the engine."""
    try:
        choice = parse_engine(subject.values(BLS.name).get("engine", ""))
    except ValueError:
        return []  # there is none, or the check of parameters reports it
    if not choice.is_elsewhere:
        return []
    return [(address, choice.kind) for address, _ in choice.addresses]


@check("engines elsewhere are there", _engines_elsewhere)
def engine_addresses(subject: Subject) -> Findings:
    for address, kind in _engines_elsewhere(subject):
        if problem := _unreachable(address):
            yield fault(
                f"engine at {address}: {problem}",
                "start it (trtllm-serve MODEL --grpc, which 1.3.0rc22 cannot), or mend the address",
            )
        elif kind is EngineKind.TRTLLM and (problem := _service_problem(address)):
            yield fault(f"engine at {address}: {problem}", "see its own log")


def _unreachable(address: str) -> str:
    """Tell why nobody answers at ``host:port``; empty where somebody does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_SERVICE_ANSWER_S).close()
    except OSError as error:
        return str(error.strerror or error)
    return ""


def _service_problem(address: str) -> str:
    """Ask a TrtllmService for its health; empty where that is good, or the port has TLS."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        health_check = channel.unary_unary(
            messages.SERVICE + "HealthCheck",
            request_serializer=messages.HealthCheckRequest.SerializeToString,
            response_deserializer=messages.HealthCheckResponse.FromString,
        )
        try:
            answer = health_check(messages.HealthCheckRequest(), timeout=_SERVICE_ANSWER_S)
        except grpc.RpcError as error:
            return _NO_SERVICE.get(error.code(), "")
    if answer.status == "OK":
        return ""
    return f"it is not healthy: {answer.status}"


@check("the ports of serve are free", lambda s: s.repository and not s.url)
def ports(subject: Subject) -> Findings:
    """The default ports of ``serve``; a running server has taken them already."""
    for flag, port in subject.ports.items():
        names = _listeners(f"localhost:{port}")
        if names:
            yield warn(
                f"port {port} is taken by {' and '.join(names)}",
                f"if that is not your server, choose another with {flag}",
            )


def _listeners(url: str) -> list[str]:
    """Return the names of the programs that listen at a port of this machine."""
    names = set()
    for process in listening_processes(url):
        with suppress(psutil.Error):
            names.add(psutil.Process(process).name())
    return sorted(names)


@check("the server answers and its models are ready", lambda s: s.url)
def server(subject: Subject) -> Findings:
    with _client(subject) as client:
        try:
            name = client.get_server_metadata(client_timeout=_SERVICE_ANSWER_S).name
            if name != "triton":
                yield fault(f"{subject.url}: {name} answers", "name Triton's gRPC port")
                return
            for model in sorted(subject.configs) or [BLS.name, subject.target]:
                if not client.is_model_ready(model, client_timeout=_SERVICE_ANSWER_S):
                    yield fault(f"{subject.url}: {model} is not ready", "see the server's log")
        except InferenceServerException as error:
            yield fault(
                f"{subject.url}: no answer from Triton ({error.message()})",
                "start the server, or name its gRPC port with --url",
            )


@check("the server serves this repository", lambda s: s.url and s.repository)
def same_repository(subject: Subject) -> Findings:
    """Another Triton may answer, with models of the same names."""
    with _client(subject) as client:
        for model in sorted(subject.configs):
            with suppress(InferenceServerException):  # the check of the server reports it
                answer = client.get_model_config(model, client_timeout=_SERVICE_ANSWER_S)
                server_values = values_of(answer.config)
                differing = []
                for key, value in subject.values(model).items():
                    if server_values.get(key, value) != value:
                        differing.append(key)
                if differing:
                    yield warn(
                        f"{subject.url}: {model} has other values of {', '.join(differing)}",
                        "is it another server, or one with other options, or an older one?",
                    )


def _client(subject: Subject) -> Any:
    # A proxy that the environment names is not used here; the check of proxies reports it.
    args: list[tuple[str, Any]] = [("grpc.enable_http_proxy", 0)]
    files = {name: str(value) for name, value in vars(subject.tls or Tls()).items() if value}
    if name := files.pop("server_name", None):
        args.append(("grpc.ssl_target_name_override", name))
    return InferenceServerClient(subject.url, ssl=bool(subject.tls), channel_args=args, **files)


# --- tokenizers against the engines' vocabularies ---------------------------------------------


# Embeddings are padded to a multiple of 64 or 128 per GPU; more rows than that are another model's.
_MAX_PADDING = 1024


@check("tokenizers can be loaded", lambda s: s.tokenizer)
def tokenizer(subject: Subject) -> None:
    for directory in (subject.tokenizer, subject.directory(BLS.name, "draft_tokenizer_dir")):
        if directory:
            loaded_tokenizer(directory)


@check("all models have one tokenizer, and it can chat", lambda s: s.tokens)
def one_tokenizer(subject: Subject) -> Findings:
    """Another one in a step of the ensemble makes other text of the same ids."""
    assert subject.tokens is not None
    for model in (PREPROCESSING.name, POSTPROCESSING.name):
        directory = subject.directory(model, "tokenizer_dir")
        if directory and loaded_tokenizer(directory).fingerprint != subject.tokens.fingerprint:
            yield fault(
                f"{model}: the tokenizer in {directory} is another than {subject.tokenizer}",
                "name one tokenizer in all models",
            )
    if not subject.tokens.chat_template:
        yield warn(
            f"{subject.tokenizer}: no chat template",
            "messages and /v1/chat/completions need one; text does not",
        )


@check("engines and tokenizers have one vocabulary", lambda s: s.tokens and s.engines)
def vocabulary(subject: Subject) -> Findings:
    """An id beyond the embeddings ends a request; other tokens than the draft's waste drafts."""
    assert subject.tokens is not None
    tokens = subject.tokens.vocab_size
    remedy = "use the tokenizer that the model was trained with"
    for model, engine in subject.engines.items():
        cpp.check_vocabulary(model, engine, subject.tokens)
        size = engine.vocab_size or tokens
        if tokens > size:
            yield warn(
                f"{model}: {tokens - size} added tokens are beyond its embeddings",
                "requests that use them are refused; " + remedy,
            )
        elif size - tokens > _MAX_PADDING:
            yield warn(f"{model}: {size} embeddings for the tokenizer's {tokens} tokens", remedy)


@check("target and draft have one vocabulary", lambda s: len(s.engines) > 1)
def draft_vocabulary(subject: Subject) -> Findings:
    """Drafts are token ids: both models have to mean the same by them."""
    target = subject.engines.get(subject.target) or subject.engines.get(ENGINE.name)
    for model, engine in subject.engines.items():
        if target and target.vocab_size and engine.vocab_size not in (None, target.vocab_size):
            yield warn(
                f"{model} has {engine.vocab_size} embeddings, the target {target.vocab_size}",
                "take a draft of the same family, or leave draft logits off",
            )
    drafts = subject.directory(BLS.name, "draft_tokenizer_dir")
    if (
        subject.tokens
        and drafts
        and loaded_tokenizer(drafts).fingerprint != subject.tokens.fingerprint
    ):
        yield fault(
            f"the tokenizer in {drafts} has another token table",
            "the draft is not used; take one of the target's family",
        )


# --- the command line -------------------------------------------------------------------------


_FINDING_STYLES = {"ok": "green", "warn": "yellow", "error": "red"}


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
    subject_options = {name: value for name, value in options.items() if not name.startswith("tls")}
    with Console(stderr=True).status("looking") as status:
        subject = Subject(**subject_options, tls=tls, progress=status.update)
        findings = list(diagnose(subject))
    count: dict[str, int] = dict.fromkeys(get_args(Level), 0)
    rows = []
    for name, finding in findings:
        count[finding.level] += 1
        rows.append(finding.row(name))
    if as_json:
        click.echo(json.dumps({"findings": rows, "count": count}, indent=1, ensure_ascii=False))
    else:
        console = Console(highlight=False)
        for name, finding in findings:
            level = (f"{finding.level:<5} ", _FINDING_STYLES[finding.level])
            console.print(Text.assemble(level, f"{name}: {finding}"), soft_wrap=True)
        errors = _counted(count["error"], "error")
        warnings = _counted(count["warn"], "warning")
        click.echo(f"{errors}, {warnings}")
    sys.exit(bool(count["error"]))


def _counted(count: int, noun: str) -> str:
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}s"


@click.command()
@click.option("--engine", default="embedded", help="embedded, llm_api or trtllm://HOST:PORT.")
@click.option(
    "--model", "model_dir", required=True, type=_DIRECTORY_OPTION, help="Directory of the model."
)
@click.option("--model-yaml", type=_DIRECTORY_OPTION, help="Arguments of the LLM API.")
@deprecated("use prove --only conformance")
def conformance(engine: str, **options: Any) -> None:
    """Send an engine requests whose answers are known, and print a report for an issue.

    The engine runs in this process, without Triton. Exit code 1: a check failed.

    Deprecated: prove --only conformance asks through a server, as callers do.

    \b
    Examples:
      trtllm-bls conformance --engine llm_api --model /models/llama
      trtllm-bls conformance --engine trtllm://gpu-host:50051 --model ./llama
    """
    from trtllm_bls.engines.conformance import examine as examine_engine
    from trtllm_bls.engines.opening import open_local_engine

    check_ours(ENGINE.name, "engine", engine)
    versions = []
    for package in ("trtllm-bls", "tensorrt-llm", "torch", "transformers"):
        if version := installed(package):
            versions.append(f"{package} {version}")
    click.echo(f"{', '.join(versions)}; {engine}\n\n| check | result |\n| --- | --- |")
    results = []

    async def run() -> None:
        load = partial(loaded_tokenizer, options["model_dir"])
        local_engine = open_local_engine(engine, EngineParameters(engine=engine, **options), load)
        prompt = "The capital of France is Paris. The capital of Japan is"
        tokenizer = load()
        ids = tuple(tokenizer.encode(prompt, True))
        try:
            async for name, result in examine_engine(
                local_engine, ids, tokenizer.decode, tokenizer.eos_id or 0
            ):
                results.append(result)
                click.echo(f"| {name} | {result} |")
        finally:
            await local_engine.close()

    asyncio.run(run())
    sys.exit(any("FAILED" in result for result in results))
