"""The parameters of the C++ ``tensorrtllm`` backend: which release reads which, and their values.

The backend ignores a key that it does not know, and treats a value that it cannot read as not set.
So a misspelled key or value is refused here. The rows follow the backend's sources at its release
tags.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from trtllm_bls.errors import SettingsError
from trtllm_bls.parameters.declaration import TRITON_KEYS, check_in, parameters_in, suggestion
from trtllm_bls.parameters.models import EngineFacts


class Version(NamedTuple):
    """A release of TensorRT-LLM."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


# Without both of them the backend ignores every guide.
GUIDES = ("guided_decoding_backend", "xgrammar_tokenizer_info_path")
OLDEST = Version(0, 9)
LAST = Version(99, 0)


@dataclass(frozen=True)
class Key:
    """One parameter in the releases ``since`` to ``until``, both included.

    ``demanded``: the first release that does not load without the key; an empty value is enough.
    """

    name: str
    expected: str  # what a value must be, in words
    pattern: re.Pattern[str]
    since: Version
    until: Version
    demanded: Version | None


_KINDS = {
    "flag": ("true or false", r"true|True|TRUE|1|false|False|FALSE|0"),
    "count": ("a whole number, at least 0", r"[0-9]+"),
    "number": ("a whole number, at least 1", r"0*[1-9][0-9]*"),
    "part": ("a number greater than 0 and at most 1", r"0?\.0*[1-9][0-9]*|1(\.0*)?"),
    "share": ("a number from 0 to 1", r"0?\.[0-9]+|0|1(\.0*)?"),
    "policy": (
        "guaranteed_no_evict or max_utilization",
        r"guaranteed_no_evict|max_utilization",
    ),
    "batching": ("inflight_fused_batching", r"inflight_(fused_)?batching"),
    "text": ("not empty", r".+"),
    "mode": (
        "one of top_k, top_p, top_k_top_p, beam_search, medusa, redrafter, lookahead, eagle",
        r"top_k|top_p|top_k_top_p|beam_search|medusa|redrafter|lookahead|eagle",
    ),
    # One list per instance of the model: "0,1;2,3".
    "ids": ("whole numbers such as 0,1", r"[0-9]+(,[0-9]+)*(;[0-9]+(,[0-9]+)*)*"),
    "sizes": ("whole numbers such as 1024,2048", r"0*[1-9][0-9]*(,0*[1-9][0-9]*)*"),
    "tree": (
        "paths through a tree such as {0}, {0, 0}, {1}",
        r"\{[0-9]+(, *[0-9]+)*\}(, *\{[0-9]+(, *[0-9]+)*\})*",
    ),
    "guide": ("xgrammar", r"xgrammar"),
}
# name, kind, the releases that read it ("0.12-0.14"; "0.12" = since then), and after "!" the first
# release whose constructor throws where the key is absent.
_ROWS = """
batch_scheduler_policy            policy    0.9
cancellation_check_period_ms      number    0.10
cross_kv_cache_fraction           share     0.14
cuda_graph_cache_size             count     0.15
cuda_graph_mode                   flag      0.15
decoding_mode                     mode      0.9
eagle_choices                     tree      0.16
enableContextFMHAFP32Acc          flag      0.12-0.14
enable_chunked_context            flag      0.9
enable_context_fmha_fp32_acc      flag      0.15
enable_kv_cache_reuse             flag      0.9
enable_trt_overlap                flag      0.9
encoder_model_path                text      0.11
exclude_input_in_output           flag      0.9
executor_worker_path              text      0.10
gpt_model_path                    text      0.9        !0.9
gpt_model_type                    batching  0.9        !0.9
gpu_device_ids                    ids       0.9
gpu_weights_percent               share     0.10
guided_decoding_backend           guide     0.19       !0.19
iter_stats_max_iterations         count     0.10
kv_cache_free_gpu_mem_fraction    part      0.9
kv_cache_host_memory_bytes        count     0.10
kv_cache_onboard_blocks           flag      0.10
lookahead_ngram_size              number    0.19
lookahead_verification_set_size   number    0.19
lookahead_window_size             number    0.19
lora_cache_gpu_memory_fraction    part      0.9
lora_cache_host_memory_bytes      count     0.9
lora_cache_max_adapter_size       number    0.9
lora_cache_optimal_adapter_size   number    0.9
lora_prefetch_dir                 text      0.19
max_attention_window_size         number    0.9-0.12
max_attention_window_size         sizes     0.13
max_beam_width                    number    0.9
max_tokens_in_paged_kv_cache      number    0.9
medusa_choices                    tree      0.9
multiBlockMode                    flag      0.12-0.14
multi_block_mode                  flag      0.15
normalize_log_probs               flag      0.9
num_nodes                         number    0.19
participant_ids                   ids       0.13
recv_poll_period_ms               count     0.13
request_stats_max_iterations      count     0.10
sink_token_length                 count     0.10
speculative_decoding_fast_logits  flag      0.15
stats_check_period_ms             count     0.10
tokenizer_dir                     text      0.19       !0.19
worker_path                       text      0.9
xgrammar_tokenizer_info_path      text      0.19       !0.19
"""


def parse_releases(text: str, last: Version = LAST) -> tuple[Version, Version]:
    """The first and the last release of ``0.12-0.14``; of ``0.12`` they are 0.12 and ``last``."""
    since, _, until = text.partition("-")
    return _version(since), _version(until) if until else last


def _version(text: str) -> Version:
    major, minor = text.split(".")
    return Version(int(major), int(minor))


def _keys() -> Iterator[Key]:
    for row in _ROWS.strip().splitlines():
        name, kind, releases, *demanded = row.split()
        expected, pattern = _KINDS[kind]
        since, until = parse_releases(releases)
        first = _version(demanded[0][1:]) if demanded else None
        yield Key(name, expected, re.compile(pattern), since, until, first)


KEYS = tuple(_keys())
_FACTS = parameters_in(EngineFacts)


def keys_of(version: Version) -> dict[str, Key]:
    """What one release reads, by name."""
    return {key.name: key for key in KEYS if key.since <= version <= key.until}


def check_backend(key: str, value: str, version: Version | None = None) -> None:
    """Raises ``SettingsError`` if the backend does not read ``key`` or cannot read ``value``.

    Without a ``version`` it is enough that any release does. The ``EngineFacts``, which the
    orchestrator reads, are allowed too.
    """
    if key in _FACTS or key in TRITON_KEYS:
        check_in(_FACTS, "tensorrt_llm", key, value)
        return
    known = KEYS if version is None else keys_of(version).values()
    rows = [row for row in known if row.name == key]
    if not rows:
        backend = "the C++ backend"
        if version is not None and any(row.name == key for row in KEYS):
            backend += f" of {version}"
        mend = suggestion(key, [row.name for row in known])
        raise SettingsError(f"{backend} has no parameter {key}; {mend}")
    if "${" in value or not any(row.pattern.fullmatch(value) for row in rows):
        raise SettingsError(f"{value!r} is not allowed; it must be {rows[-1].expected}")
