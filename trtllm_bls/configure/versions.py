"""Which tensors each release of TensorRT-LLM's backend has, as rows of what is newer than 0.9.

A tensor that a release does not know is left out, so that a request for it is refused by name
instead of being ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import replace

from trtllm_bls.contract import BLS, ENGINE, ENSEMBLE, POSTPROCESSING, PREPROCESSING, Model, Tensor
from trtllm_bls.errors import SettingsError
from trtllm_bls.parameters.cpp_backend import LAST, OLDEST, Version

_RENAMED: Version = (0, 20)  # min_length became min_tokens, random_seed became seed
_SINCE: Mapping[Version, str] = {
    (0, 10): "draft_acceptance_threshold runtime_top_p_decay runtime_top_p_reset_ids "
    "early_stopping beam_search_diversity_rate",
    (0, 12): "batch_index",
    (0, 13): "prompt_table_extra_ids",
    (0, 14): "num_return_sequences exclude_input_in_output sequence_index",
    (0, 17): "retention_token_range_starts retention_token_range_ends "
    "retention_token_range_priorities retention_token_range_durations_ms "
    "retention_decode_priority retention_decode_duration_ms",
    (0, 19): "return_perf_metrics kv_cache_alloc_new_blocks kv_cache_reused_blocks "
    "kv_cache_alloc_total_blocks arrival_time_ns first_scheduled_time_ns first_token_time_ns "
    "last_token_time_ns acceptance_rate total_accepted_draft_tokens total_draft_tokens "
    "guided_decoding_guide_type guided_decoding_guide lookahead_window_size "
    "lookahead_ngram_size lookahead_verification_set_size",
    _RENAMED: "min_tokens seed",
    (1, 0): "return_num_input_tokens return_num_output_tokens num_input_tokens num_output_tokens",
}
# The C++ backend looks for it under another name, so it would have no effect in any release.
_NEVER = {"runtime_top_p_min"}
_NOT_RESHAPED_BEFORE: Version = (0, 12)
_NOT_RESHAPED = {"request_output_len", "stop", "streaming"}
_LOGITS_TYPED_SINCE: Version = (0, 17)  # FP32 before
_LOGITS = {"draft_logits", "context_logits", "generation_logits"}

# The last tritonserver:…-trtllm-python-py3 with each release, by Triton's published matrix.
_IMAGES: Mapping[Version, str] = {
    (0, 9): "24.05",
    (0, 10): "24.06",
    (0, 11): "24.07",
    (0, 12): "24.08",
    (0, 13): "24.09",
    (0, 14): "24.10",
    (0, 15): "24.11",
    (0, 16): "24.12",
    (0, 17): "25.02",
    (0, 18): "25.04",
    (0, 19): "25.05",
    (0, 20): "25.07",
    (0, 21): "25.08",
    (1, 0): "25.11",
    (1, 1): "26.02",
    (1, 2): "26.07",
}


def image_of(version: Version) -> str | None:
    """The public image that serves engines of a release; ``None`` where none is known."""
    tag = _IMAGES.get(version)
    return f"nvcr.io/nvidia/tritonserver:{tag}-trtllm-python-py3" if tag else None


def parse_version(text: str, option: str = "--version") -> Version:
    """``0.19``, ``0.20.0rc1``, ``v1.0`` or ``last``; raises ``SettingsError`` naming ``option``."""
    if text == "last":
        return LAST
    match = re.match(r"v?(\d+)\.(\d+)(\D|$)", text)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < OLDEST:
        raise SettingsError(f"{option} {text}: use a release such as 0.19, from 0.9 on, or last")
    return version


def models_for(version: Version, logits: str) -> dict[str, Model]:
    """The five models by name, the C++ backend among them.

    ``logits`` is the engine's type; the tensors of ``tensorrt_llm_bls`` are FP32 always.
    """
    gone = set(_NEVER)
    for since, names in _SINCE.items():
        gone |= set(names.split()) if version < since else set()
    gone |= {"min_length", "random_seed"} if version >= _RENAMED else set()
    logits = logits if version >= _LOGITS_TYPED_SINCE else "FP32"
    reshaped = version >= _NOT_RESHAPED_BEFORE
    engine = _without(ENGINE, gone, logits)
    inputs = (
        replace(t, scalar=t.scalar and (reshaped or t.name not in _NOT_RESHAPED))
        for t in engine.inputs
    )
    models = (
        _without(PREPROCESSING, gone, logits),
        replace(engine, backend="tensorrtllm", inputs=tuple(inputs)),
        POSTPROCESSING,
        _without(ENSEMBLE, gone, logits),
        BLS,  # it asks the engine which tensors there are, and takes both spellings
    )
    return {model.name: model for model in models}


def _without(model: Model, gone: Set[str], logits: str) -> Model:
    def left(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(
            replace(t, dtype=logits) if t.name in _LOGITS else t
            for t in tensors
            if t.name.lower() not in gone
        )

    return replace(model, inputs=left(model.inputs), outputs=left(model.outputs))
