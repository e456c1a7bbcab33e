"""The parameters of the C++ ``tensorrt_llm`` for one engine, and what cannot go together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trtllm_bls.configure.engine_dir import EXTERNAL_DRAFTS, EngineDir
from trtllm_bls.contract import BLS, ENGINE
from trtllm_bls.errors import SettingsError
from trtllm_bls.parameters import is_true
from trtllm_bls.parameters.cpp_backend import Version, keys_of, shown

_WORKER = "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"
_LOOKAHEAD = "lookahead_decoding"
LOOKAHEAD_SIZES = tuple(f"lookahead_{n}_size" for n in ("window", "ngram", "verification_set"))
# Before it, an engine for external drafts ends every request after one step, drafts or not.
MANY_STEPS_SINCE: Version = (0, 19)


def engine_parameters(engine: EngineDir, version: Version, policy: str) -> dict[str, str]:
    """The parameters that ``version`` reads, and what the orchestrator reads beside them."""
    wanted = {
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": str(engine.path),
        "batch_scheduler_policy": policy,
        "max_beam_width": "1",
        "enable_kv_cache_reuse": "false" if engine.paged_context is False else "true",
        "enable_chunked_context": "false",
        "exclude_input_in_output": "true",
        "normalize_log_probs": "true",
        "cancellation_check_period_ms": "100",
        "stats_check_period_ms": "100",
        "executor_worker_path": _WORKER,
    }
    keys = keys_of(version)
    demanded = {name: "" for name, key in keys.items() if key.demanded and key.demanded <= version}
    read = {name: value for name, value in wanted.items() if name in keys}
    return demanded | read | {"FORCE_CPU_ONLY_INPUT_TENSORS": "no"}


def engine_facts(
    engine: EngineDir, version: Version, parameters: Mapping[str, str]
) -> dict[str, str]:
    """What the orchestrator has to know of the engine as it will run with ``parameters``."""
    chunked = is_true(parameters["enable_chunked_context"])
    takes_drafts = engine.takes_drafts and is_true(parameters["enable_kv_cache_reuse"])
    facts = {
        "max_sequence_tokens": engine.max_sequence_tokens,
        "max_prompt_tokens": engine.max_prompt_tokens(chunked),
        "max_draft_len": engine.max_draft_tokens if takes_drafts else 0,
        "speculative_decoding_mode": engine.mode or None,
    }
    named = {key: str(value) for key, value in facts.items() if value is not None}
    if ends_after_one_step(engine, version):
        named["one_step_requests"] = "true"
    return named


def ends_after_one_step(engine: EngineDir, version: Version) -> bool:
    """Whether every request to this engine ends after one step, also one without a draft."""
    return engine.mode == EXTERNAL_DRAFTS and version < MANY_STEPS_SINCE


def check_engine(model: str, engine: EngineDir, parameters: Mapping[str, str]) -> None:
    """Raises ``SettingsError`` for parameters of ``model`` that its engine was not built for."""
    for key in ("enable_kv_cache_reuse", "enable_chunked_context"):
        if engine.paged_context is False and is_true(parameters[key]):
            raise SettingsError(
                f"--set {model}.{key}={parameters[key]}: the engine in {engine.path} was built "
                "without paged context attention; build it with --use_paged_context_fmha enable"
            )

    absent = [key for key in LOOKAHEAD_SIZES if not parameters.get(key)]
    if parameters.get("decoding_mode") == "lookahead" and absent:
        raise SettingsError(
            f"--set {model}.decoding_mode=lookahead: set {', '.join(absent)} too, "
            "as the engine was built for"
        )


def check_target(option: str, engine: EngineDir, parameters: Mapping[str, str]) -> None:
    """Raises ``SettingsError`` naming ``option`` if the engine cannot verify drafts."""
    build = "build it with --speculative_decoding_mode draft_tokens_external --max_draft_len 10"
    problem = ""
    if engine.mode not in ("", EXTERNAL_DRAFTS):
        problem = f"was built for speculative_decoding_mode {engine.mode}; {build}"
    elif engine.max_draft_tokens == 0:
        problem = f"cannot verify drafts; {build}"
    elif engine.paged_context is False:
        problem = "has no paged context attention; build it with --use_paged_context_fmha enable"
    elif not is_true(parameters["enable_kv_cache_reuse"]):
        problem = "cannot verify drafts without its KV cache; set enable_kv_cache_reuse=true"
    if problem:
        raise SettingsError(f"{option}: the engine in {engine.path} {problem}")


def check_drafting(
    engines: Mapping[str, EngineDir], parameters: Mapping[str, Mapping[str, str]], version: Version
) -> None:
    """Raises ``SettingsError`` if a target and a draft engine cannot work together."""
    for name in engines:
        if is_true(parameters[name].get("speculative_decoding_fast_logits", "")):
            raise SettingsError(
                f"--set {name}.speculative_decoding_fast_logits: the draft would answer a ticket "
                "in place of logits, which tensorrt_llm_bls cannot pass on; leave it false"
            )
    for name, engine in engines.items():
        if name != ENGINE.name and ends_after_one_step(engine, version):
            raise SettingsError(
                f"--draft-engine-dir: the engine in {engine.path} was built for "
                f"speculative_decoding_mode {engine.mode} and would draft one token only; build "
                f"{name} without a speculative_decoding_mode"
            )


def warnings(
    engine: EngineDir, version: Version, models: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    """What the user should know of the target before it serves with the models' parameters."""
    parameters = models[ENGINE.name]
    if engine.paged_context is False:
        yield "KV cache reuse is off: the engine was built without paged context attention"
    if ends_after_one_step(engine, version):
        yield (
            f"on TensorRT-LLM {shown(version)} an engine built for "
            f"{EXTERNAL_DRAFTS} ends every request after one step: requests without drafts "
            "(draft_source off, several sequences, the ensemble) need an engine without it; "
            "tensorrt_llm has one_step_requests=true"
        )
    elif engine.mode == EXTERNAL_DRAFTS and version == MANY_STEPS_SINCE:
        yield (
            f"it is not certain that 0.19 lets requests without drafts run on with an engine "
            f"built for {EXTERNAL_DRAFTS}: try one, and set tensorrt_llm.one_step_requests=true "
            "if it ends after one token"
        )
    if not engine.mode and engine.max_draft_tokens:
        yield "config.json tells no speculative_decoding_mode: the engine may refuse drafts"
    longest = engine.max_prompt_tokens(chunked=True)
    limit = int(parameters.get("max_prompt_tokens") or 0)
    if longest and limit < longest:
        what = "prompts are limited"
        if models[BLS.name]["draft_source"] != "off":
            what = "prompts and, with drafts, whole answers are limited"
        yield (
            f"{what} to {limit} tokens by max_num_tokens; --chunked-context would allow {longest}"
        )
    if engine.mode == _LOOKAHEAD and parameters.get("decoding_mode") != "lookahead":
        yield (
            "the engine was built for lookahead decoding, which is off: set decoding_mode=lookahead"
            f" and {', '.join(LOOKAHEAD_SIZES)}"
        )
