"""``tensorrt_llm.llmapi.llm_args``: which arguments a release has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

_ALWAYS = (
    *("model", "tokenizer", "skip_tokenizer_init", "tensor_parallel_size"),
    *("pipeline_parallel_size", "gpus_per_node", "backend", "dtype", "trust_remote_code"),
    *("max_batch_size", "max_num_tokens", "max_seq_len", "max_beam_width", "kv_cache_config"),
    *("guided_decoding_backend", "speculative_config", "lora_config", "enable_chunked_prefill"),
    *("scheduler_config", "cuda_graph_config", "disable_overlap_scheduler", "stream_interval"),
)
_SINCE = {
    "1.0.0": ("enable_trtllm_sampler", "enable_mixed_sampler", "kv_cache_dtype"),
    "1.2.1": ("sampler_type", "return_perf_metrics", "orchestrator_type"),
    "1.4.0rc1": ("sampler_type", "return_perf_metrics", "telemetry_config", "hf_revision"),
}


class TorchLlmArgs:
    model_fields: ClassVar[dict[str, Any]] = {}

    @classmethod
    def use(cls, release: str) -> None:
        names = (*_ALWAYS, *_SINCE[release])
        cls.model_fields = {name: SimpleNamespace(alias=None) for name in names}
