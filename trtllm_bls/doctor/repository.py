"""Checks of parameters and engines: what TensorRT-LLM would ignore or refuse later."""

from __future__ import annotations

from tritonclient.grpc import model_config_pb2

from trtllm_bls.configure.engine import (
    EXTERNAL_DRAFTS,
    check_drafting,
    check_engine,
    check_target,
    ends_after_one_step,
)
from trtllm_bls.configure.versions import image_of, models_for
from trtllm_bls.contract import BLS, ENGINE, MODELS
from trtllm_bls.doctor.findings import Finding, Findings, Level, check
from trtllm_bls.doctor.subject import Subject
from trtllm_bls.errors import SettingsError
from trtllm_bls.parameters import check as check_ours
from trtllm_bls.parameters import is_true, parameters_of
from trtllm_bls.parameters.cpp_backend import LAST, check_backend, keys_of

_LOGITS = ("context_logits", "generation_logits", "draft_logits")
# Slow, so that a limit which is too short is found: tokens per second of a prompt and an answer.
_SLOW_PREFILL, _SLOW_DECODING = 500, 20


def _speculates(subject: Subject) -> bool:
    source = subject.values(BLS.name).get("draft_source", "off")
    return subject.target in subject.engines and (len(subject.engines) > 1 or source != "off")


@check("configurations and engine directories can be read", lambda s: s.repository or s.engine_dir)
def readable(subject: Subject) -> Findings:
    """A file that cannot be read hides everything else."""
    models, _ = subject.configs, subject.engines
    if subject.repository and not models and not subject.unreadable:
        yield Finding("error", f"{subject.repository}: no model in it", "name the model repository")
    yield from map(Finding.of, subject.unreadable)


@check("every template is filled in", lambda s: s.configs)
def placeholders(subject: Subject) -> Findings:
    """A parameter that still holds one counts as not set, or as that very text."""
    for model in subject.configs:
        left = [key for key, value in subject.values(model).items() if "${" in value]
        if left:
            mend = "fill them in or remove them; trtllm-bls configure --from does"
            yield Finding("error", f"{model}: placeholders in {', '.join(left)}", mend)


@check("every parameter is known and has a value that can be read", lambda s: s.configs)
def parameters(subject: Subject) -> Findings:
    """Names and values, each judged by whoever reads them."""
    ours = {model.name for model in MODELS}
    for model in subject.configs:
        if model not in ours and model not in subject.cpp_models:
            continue
        for key, value in subject.values(model).items():
            if "${" in value or not value:
                continue
            try:
                if model in subject.cpp_models:
                    check_backend(key, value, subject.release)
                else:
                    check_ours(model, key, value)
            except SettingsError as error:
                yield Finding.of(SettingsError(f"{model}.{key}: {error}"))


@check("every parameter that the release demands is there", lambda s: s.cpp_models)
def demanded_parameters(subject: Subject) -> Findings:
    """Without one of them the instance ends at load."""
    release = subject.release or LAST
    for model in subject.cpp_models:
        demanded = [
            name
            for name, key in keys_of(release).items()
            if key.demanded and key.demanded <= release and name not in subject.values(model)
        ]
        if demanded:
            mend = "add them, with an empty value where nothing is meant"
            yield Finding("error", f"{model}: no {', '.join(demanded)}", mend)


@check("backend and engines are of one release", lambda s: s.engines)
def versions(subject: Subject) -> Findings:
    """An engine runs on the release that built it."""
    backend = subject.backend_version
    for model, engine in subject.engines.items():
        built, release = engine.version, engine.release()
        if release is None:
            what = f"{model}: config.json of {engine.path} names no release"
            yield Finding("warn", what, "build it with a released trtllm-build")
        elif backend and _numbers(built, 3) != _numbers(backend, 3):
            level: Level = "warn" if _numbers(built, 2) == _numbers(backend, 2) else "error"
            what = f"{model}: its engine is of {built}, the backend of {backend}"
            image = image_of(release)
            other = f", or serve it from {image}" if image else ""
            yield Finding(level, what, f"build it in the container that serves it{other}")


def _numbers(version: str, count: int) -> list[str]:
    return version.removeprefix("v").split(".")[:count]


@check("tensorrt_llm answers in streams", lambda s: s.target in s.configs)
def decoupled(subject: Subject) -> Findings:
    """The orchestrator asks for nothing else, also for a caller who wants one response."""
    if not subject.configs[subject.target].model_transaction_policy.decoupled:
        mend = "set model_transaction_policy { decoupled: true }"
        yield Finding("error", f"{subject.target}: is not decoupled", mend)


@check("requests without drafts run to their end", lambda s: s.engines)
def one_step_drafts(subject: Subject) -> Findings:
    """Older releases end each request to an engine for external drafts after one step."""
    release = subject.release or LAST
    for model, engine in subject.engines.items():
        told = is_true(subject.values(model).get("one_step_requests", ""))
        if not ends_after_one_step(engine, release) or (model == subject.target and told):
            continue
        if model != subject.target:
            mend = "build it without a speculative_decoding_mode"
            yield Finding("error", f"{model}: drafts one token only ({EXTERNAL_DRAFTS})", mend)
        else:
            mend = f"set {model}.one_step_requests=true; trtllm-bls configure writes it"
            yield Finding("error", f"{model}: requests without drafts answer one token", mend)


@check("the engines were built for what their parameters ask", lambda s: s.configs and s.engines)
def built_for(subject: Subject) -> Findings:
    """Reuse of the KV cache and chunked context need paged context attention."""
    for model in subject.engines.keys() & subject.configs.keys():
        values = {"enable_kv_cache_reuse": "", "enable_chunked_context": ""}
        try:
            check_engine(model, subject.engines[model], values | subject.values(model))
        except SettingsError as error:
            yield Finding.of(error)


@check("the target can verify drafts, and the draft can make them", _speculates)
def speculation(subject: Subject) -> Findings:
    """Paged context, reuse of the KV cache, the right mode, no fast logits."""
    reuse = {"enable_kv_cache_reuse": "true" if not subject.configs else ""}
    values = {name: reuse | subject.values(name) for name in subject.engines}
    target = subject.target
    engines = {ENGINE.name if name == target else name: e for name, e in subject.engines.items()}
    try:
        check_target(target, subject.engines[target], values[target])
        values[ENGINE.name] = values[target]
        check_drafting(engines, values, subject.release or LAST)
    except SettingsError as error:
        yield Finding.of(error)


@check("logits are declared in the engines' types", lambda s: s.cpp_models and s.engines)
def logits_types(subject: Subject) -> Findings:
    """Triton refuses a tensor of another type before the backend sees it."""
    for model in [name for name in subject.cpp_models if name in subject.engines]:
        table = models_for(subject.release or LAST, subject.engines[model].logits)[ENGINE.name]
        rows = {tensor.name: tensor for tensor in (*table.inputs, *table.outputs)}
        config = subject.configs[model]
        for tensor in (*config.input, *config.output):
            if tensor.name not in _LOGITS or tensor.name not in rows:
                continue
            found = model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_")
            expected = rows[tensor.name].dtype
            if found != expected:
                what = f"{model}.{tensor.name} is declared {found}, the engine's are {expected}"
                yield Finding("error", what, f"declare it TYPE_{expected}")
    yield from _draft_logits(subject)


def _draft_logits(subject: Subject) -> Findings:
    engines = subject.engines
    if subject.draft in engines and subject.target in engines:
        made, taken = engines[subject.draft].logits, engines[subject.target].logits
        if made != taken:
            what = f"the draft's logits are {made}, the target takes {taken}"
            mend = "build both with one --logits_dtype, or leave use_draft_logits off"
            yield Finding("warn", what, mend)


@check("time limits leave time for the longest request", lambda s: BLS.name in s.configs)
def time_limits(subject: Subject) -> Findings:
    """An engine says nothing while it reads a prompt; too short a limit gives it up."""
    told, engine = subject.values(subject.target), subject.engines.get(subject.target)
    try:
        stall = _ours(subject, "engine_stall_seconds")
        timeout = _ours(subject, "request_timeout_seconds")
        answer = _ours(subject, "max_output_tokens") or float(told.get("max_sequence_tokens") or 0)
        prompt = float(told.get("max_prompt_tokens") or 0)
    except ValueError:
        return  # told by the check of parameters
    prompt = prompt or (engine.max_prompt_tokens(chunked=True) if engine else 0) or 0
    if stall and prompt / _SLOW_PREFILL > stall:
        what = (
            f"engine_stall_seconds is {stall:g}; a prompt may have {prompt:.0f} tokens, "
            f"{prompt / _SLOW_PREFILL:.0f} s at {_SLOW_PREFILL} a second"
        )
        yield Finding("warn", what, f"raise {BLS.name}.engine_stall_seconds")
    if timeout and answer / _SLOW_DECODING > timeout:
        what = (
            f"request_timeout_seconds is {timeout:g}; the longest answer, {answer:.0f} tokens, "
            f"takes {answer / _SLOW_DECODING:.0f} s at {_SLOW_DECODING} a second and would be cut"
        )
        mend = f"raise it, or lower {BLS.name}.max_output_tokens"
        yield Finding("warn", what, mend)
    if timeout and stall > timeout:
        what = f"engine_stall_seconds {stall:g} is longer than request_timeout_seconds {timeout:g}"
        yield Finding("warn", what, "a stalled engine is seen as a timeout only; lower the former")


def _ours(subject: Subject, key: str) -> float:
    """A number among the parameters of ``tensorrt_llm_bls``; raises ``ValueError``."""
    return float(subject.values(BLS.name).get(key) or parameters_of(BLS.name)[key].default or 0)


@check("each engine has memory for its KV cache", lambda s: len(s.cpp_models) > 1)
def memory_shares(subject: Subject) -> Findings:
    """Shares are of what is free when an engine loads; the second finds what the first left."""
    gpus: dict[str, list[str]] = {}
    for model in subject.cpp_models:
        values = subject.values(model)
        share = values.get("kv_cache_free_gpu_mem_fraction") or "0.9"
        try:
            large = float(share) > 0.8
        except ValueError:
            continue  # told by the check of parameters
        if large and not values.get("max_tokens_in_paged_kv_cache"):
            gpus.setdefault(values.get("gpu_device_ids", ""), []).append(model)
    for models in gpus.values():
        if len(models) > 1:
            what = f"{' and '.join(models)} share GPUs and want 80 % or more of what is free each"
            mend = "set kv_cache_free_gpu_mem_fraction to 0.45 each, or gpu_device_ids apart"
            yield Finding("error", what, mend)
