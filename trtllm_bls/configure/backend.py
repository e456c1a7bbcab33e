"""The parameters of the C++ ``tensorrt_llm``, and what each may be.

The backend takes a value that it cannot read for "not set" and goes on with its default, so a slip
is refused here.
"""

from __future__ import annotations

import re

from trtllm_bls.configure.engine_dir import EngineDir
from trtllm_bls.errors import SettingsError

_WORKER = "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"

# What a value must be, the pattern that says so, and the keys it is said of.
_KINDS = (
    (
        "true or false",
        r"true|True|TRUE|1|false|False|FALSE|0",
        "enable_kv_cache_reuse enable_chunked_context exclude_input_in_output normalize_log_probs "
        "kv_cache_onboard_blocks enable_context_fmha_fp32_acc multi_block_mode cuda_graph_mode "
        "speculative_decoding_fast_logits",
    ),
    (
        "a whole number, at least 0",
        r"[0-9]+",
        "kv_cache_host_memory_bytes sink_token_length stats_check_period_ms recv_poll_period_ms "
        "iter_stats_max_iterations request_stats_max_iterations cuda_graph_cache_size "
        "lora_cache_host_memory_bytes max_sequence_tokens max_draft_len",
    ),
    (
        "a whole number, at least 1",
        r"0*[1-9][0-9]*",
        "max_beam_width max_tokens_in_paged_kv_cache cancellation_check_period_ms num_nodes "
        "lookahead_window_size lookahead_ngram_size lookahead_verification_set_size "
        "lora_cache_optimal_adapter_size lora_cache_max_adapter_size",
    ),
    (
        "a number greater than 0 and at most 1",
        r"0?\.0*[1-9][0-9]*|1(\.0*)?",
        "kv_cache_free_gpu_mem_fraction lora_cache_gpu_memory_fraction",
    ),
    ("a number from 0 to 1", r"0?\.[0-9]+|0|1(\.0*)?", "gpu_weights_percent"),
    (
        "guaranteed_no_evict or max_utilization",
        r"guaranteed_no_evict|max_utilization",
        "batch_scheduler_policy",
    ),
    ("inflight_fused_batching", r"inflight_(fused_)?batching", "gpt_model_type"),
    (
        "not empty",
        r".+",
        "gpt_model_path executor_worker_path gpu_device_ids participant_ids "
        "max_attention_window_size decoding_mode medusa_choices eagle_choices lora_prefetch_dir "
        "guided_decoding_backend xgrammar_tokenizer_info_path tokenizer_dir",
    ),
)
_RULES = {
    key: (expected, re.compile(pattern))
    for expected, pattern, keys in _KINDS
    for key in keys.split()
}


def checked(option: str, key: str, value: str) -> str:
    """``value`` if the backend will understand it; else ``SettingsError`` naming ``option``."""
    if key not in _RULES:
        raise SettingsError(f"{option}: the C++ backend has no parameter {key}")
    expected, pattern = _RULES[key]
    if not pattern.fullmatch(value) or "${" in value:
        raise SettingsError(f"{option}: {value!r} is not allowed; it must be {expected}")
    return value


def engine_parameters(engine: EngineDir, policy: str, fraction: str) -> dict[str, str]:
    """What the backend must be told, and the two limits that ``tensorrt_llm_bls`` reads there."""
    parameters = {
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": str(engine.path),
        "batch_scheduler_policy": policy,
        "kv_cache_free_gpu_mem_fraction": fraction,
        "max_beam_width": "1",
        "enable_kv_cache_reuse": "false" if engine.paged_context is False else "true",
        "enable_chunked_context": "false",
        "exclude_input_in_output": "true",
        "normalize_log_probs": "true",
        "cancellation_check_period_ms": "100",
        "stats_check_period_ms": "100",
        "executor_worker_path": _WORKER,
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
    }
    if engine.max_sequence_tokens is not None:
        parameters["max_sequence_tokens"] = str(engine.max_sequence_tokens)
    if engine.max_draft_tokens is not None:
        parameters["max_draft_len"] = str(engine.max_draft_tokens)
    return parameters
