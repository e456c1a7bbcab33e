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
from trtllm_bls.operate.triton_reasons import NO_GPU, mend_of
from trtllm_bls.pipeline.streaming_model import own_parameters, undeclared
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
        what = f"trtllm-serve --grpc of TensorRT-LLM {release} does not start"
        yield warn(what, "for an engine trtllm:// take 1.3.0rc21, or a later release")
    elif release >= _STUBS_ARE_AN_EXTRA and not subject.packages(_SERVICE_STUBS):
        what = f"no {_SERVICE_STUBS}, which trtllm-serve --grpc of TensorRT-LLM {release} needs"
        mend = "for an engine trtllm:// run `pip install 'smg-grpc-proto>=0.4.5'`"
        yield warn(what, mend)


# --- parameters and engines: what TensorRT-LLM would ignore or refuse later -------------------


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
        values |= {key: getattr(config, key) for key in ("name", "backend", "platform")}
        unfilled = [key for key, value in values.items() if "${" in value]
        if unfilled:
            mend = "fill them in or remove them; trtllm-bls configure --from does"
            yield fault(f"{model}: placeholders in {', '.join(unfilled)}", mend)


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
        release_here = subject.packages("tensorrt-llm")
        if release_here and (warning := ignored_fields(release_here, config.arguments)):
            yield warn(f"{model}: {warning}", IGNORED_MEND)
        ours = config.arguments.get("backend") in (None, "pytorch")  # another has others
        if subject.packages("tensorrt-llm") and ours:
            release = importlib.import_module("tensorrt_llm.llmapi.llm_args").TorchLlmArgs
            known = {n for name, f in release.model_fields.items() for n in (name, f.alias or name)}
            for key in sorted(config.arguments.keys() - known):
                what = f"model.yaml: the TensorRT-LLM that is installed has no argument {key}"
                yield fault(what, suggestion(key, known))


_LEAST_S = 60.0
_MODEL_S = 2.0


def _is_judged(subject: Subject) -> bool:
    """True where no server runs that has loaded the models already."""
    return bool(subject.is_judged and subject.repository and not subject.url)


@check("Triton loads every model, as far as its configuration decides", _is_judged)
def judged_by_triton(subject: Subject) -> Findings:
    """The verdict of the tritonserver that is installed, on a scratch copy."""
    assert subject.repository is not None
    seconds = max(_LEAST_S, _MODEL_S * len(subject.configs))
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
            continue  # told by the checks of configurations and templates
        is_elsewhere = NO_GPU.search(reason) and not _GPUS.exists()
        yield Finding("warn" if is_elsewhere else "error", f"{model}: {reason}", mend_of(reason))
    if verdict.unsettled:
        what = f"{', '.join(verdict.unsettled)}: Triton gave no verdict within {seconds:.0f} s"
        yield warn(what, "run doctor again when the machine is less busy")


def _interpreter_of(config: Any, directory: Path) -> Path | None:
    """The interpreter of a Python model; ``None`` where it is packed into an archive."""
    if "EXECUTION_ENV_PATH" not in config.parameters:
        return Path(sys.executable)
    place = config.parameters["EXECUTION_ENV_PATH"].string_value
    place = place.replace("$$TRITON_MODEL_DIRECTORY", str(directory))
    python = Path(place, "bin", "python3")
    return python if python.is_file() else None


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
        orders = [[str(file), [str(file.parent), str(file.parents[1])]] for _, file in files]
        answer = subprocess.run(
            [python, "-I", model_code.__file__],
            input=json.dumps(orders),
            capture_output=True,
            text=True,
            timeout=_CODE_S,
            check=False,
        )
        if answer.returncode:
            what = f"{python} cannot look at the models' programs: {answer.stderr.strip()[-200:]}"
            yield warn(what, "mend that environment")
            continue
        for (model, file), problems in zip(files, json.loads(answer.stdout), strict=True):
            name = f"{model}: {file.relative_to(file.parents[1])}"
            for kind, detail in problems:
                if kind == model_code.NO_PYTHON:
                    yield fault(f"{name} is no Python: {detail}", "mend it")
                elif kind == model_code.NO_CLASS:
                    yield warn(f"{name} has no class {detail}, as it seems", "name it so")
                else:
                    what = f"{name} imports {detail}, which {python} does not find"
                    yield warn(what, "install it there, unless the program adds its place itself")


@check("every model is as this package and its engine need it", lambda s: s.configs)
def fitness(subject: Subject) -> Findings:
    for model, config in subject.configs.items():
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
        demanded = [name for name, key in keys.items() if key.is_required(release)]
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
        elif backend and not _is_one_release(built, backend, 3):
            level: Level = "warn" if _is_one_release(built, backend, 2) else "error"
            what = f"{model}: its engine is of {built}, the backend of {backend}"
            image = cpp.image_of(release)
            other = f", or serve it from {image}" if image else ""
            yield Finding(level, what, f"build it in the container that serves it{other}")


def _is_one_release(version: str, other: str, count: int) -> bool:
    """True where the first ``count`` numbers are the same, of those that both name."""
    pairs = zip(_numbers(version, count), _numbers(other, count), strict=False)
    return all(one == two for one, two in pairs)


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


@check("the server here has every backend", lambda s: s.configs and has_server(s))
def backends(subject: Subject) -> Findings:
    with suppress(SetupError):  # told by the check of the server's Python
        there = checks.find_server(subject.server).backends
        for model, config in subject.configs.items():
            name = backend_of(config)
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


_SERVICE_ANSWER_S = 5.0
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
            mend = (
                "start it (trtllm-serve MODEL --grpc, which 1.3.0rc22 cannot), or mend the address"
            )
            yield fault(f"engine at {address}: {problem}", mend)
        elif kind is EngineKind.TRTLLM and (problem := _service_problem(address)):
            yield fault(f"engine at {address}: {problem}", "see its own log")


def _unreachable(address: str) -> str:
    """Why nobody answers at ``host:port``; empty where somebody does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_SERVICE_ANSWER_S).close()
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
            status = ask(messages.HealthCheckRequest(), timeout=_SERVICE_ANSWER_S).status
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
            name = client.get_server_metadata(client_timeout=_SERVICE_ANSWER_S).name
            if name != "triton":
                yield fault(f"{subject.url}: {name} answers", "name Triton's gRPC port")
                return
            for model in sorted(subject.configs) or [BLS.name, subject.target]:
                if not client.is_model_ready(model, client_timeout=_SERVICE_ANSWER_S):
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
                answer = client.get_model_config(model, client_timeout=_SERVICE_ANSWER_S)
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
    if (
        subject.tokens
        and drafts
        and loaded_tokenizer(drafts).fingerprint != subject.tokens.fingerprint
    ):
        what = f"the tokenizer in {drafts} has another token table"
        yield fault(what, "the draft is not used; take one of the target's family")


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
    named = {name: value for name, value in options.items() if not name.startswith("tls")}
    with Console(stderr=True).status("looking") as status:
        findings = list(diagnose(Subject(**named, tls=tls, progress=status.update)))
    levels = [finding.level for _, finding in findings]
    count = {level: levels.count(level) for level in get_args(Level)}
    if as_json:
        rows = [{"check": name, **vars(finding)} for name, finding in findings]
        click.echo(json.dumps({"findings": rows, "count": count}, indent=1, ensure_ascii=False))
    else:
        console = Console(highlight=False)
        for name, finding in findings:
            level = (f"{finding.level:<5} ", _FINDING_STYLES[finding.level])
            console.print(Text.assemble(level, f"{name}: {finding}"), soft_wrap=True)
        errors = "1 error" if count["error"] == 1 else f"{count['error']} errors"
        warnings = "1 warning" if count["warn"] == 1 else f"{count['warn']} warnings"
        click.echo(f"{errors}, {warnings}")
    sys.exit(1 if count["error"] else 0)


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
      trtllm-bls conformance --engine trtllm://127.0.0.1:50051 --model /models/llama
    """
    from trtllm_bls.engines.conformance import examine as ask
    from trtllm_bls.engines.opening import open_local_engine

    check_ours(ENGINE.name, "engine", engine)
    packages = ("trtllm-bls", "tensorrt-llm", "torch", "transformers")
    versions = [f"{name} {version}" for name in packages if (version := installed(name))]
    click.echo(f"{', '.join(versions)}; {engine}\n\n| check | result |\n| --- | --- |")
    results = []

    async def run() -> None:
        load = partial(loaded_tokenizer, options["model_dir"])
        opened = open_local_engine(engine, EngineParameters(engine=engine, **options), load)
        ids = tuple(load().encode("The capital of France is Paris. The capital of Japan is", True))
        try:
            async for name, result in ask(opened, ids, load().decode, load().eos_id or 0):
                results.append(result)
                click.echo(f"| {name} | {result} |")
        finally:
            await opened.close()

    asyncio.run(run())
    sys.exit(any("FAILED" in result for result in results))
