"""The rows of the parameter table that bound what one request, or all of them, may cost."""

from __future__ import annotations

from trtllm_bls.parameters.kinds import FLAG, NUMBER, Parameter, count, count_or_auto

_BLS, _ENGINE = ("tensorrt_llm_bls",), ("tensorrt_llm",)
_PRE, _POST = ("preprocessing",), ("postprocessing",)

LIMITS = (
    Parameter(
        "max_running_requests",
        _BLS,
        count_or_auto(1),
        "auto",
        "Requests that may run at once; one with several sequences or rows counts once for each. "
        "More wait. auto = `max_streams`, shared among the model's instances.",
    ),
    Parameter(
        "max_queued_requests",
        _BLS,
        count_or_auto(0),
        "auto",
        "Requests that may wait for one that runs to end, counted alike; one more is refused at "
        "once. auto = 4 times as many as may run.",
    ),
    Parameter(
        "max_queue_seconds",
        _BLS,
        NUMBER,
        "60",
        "Longest time that a request may wait so; then it is refused. 0 = its own time limit.",
    ),
    Parameter(
        "max_timeout_seconds",
        _BLS,
        NUMBER,
        "3600",
        "Longest time limit that a request may name, and the limit of all where "
        "`request_timeout_seconds` is 0; 0 = any.",
    ),
    Parameter(
        "max_prompt_bytes",
        (*_PRE, *_BLS),
        count(1),
        "1048576",
        "Bytes of `text_input`, of `messages`, or of any other text of one row.",
    ),
    Parameter(
        "max_request_bytes",
        (*_ENGINE, *_BLS),
        count(1),
        "67108864",
        "Bytes of all inputs of a request together; adapters and prompt tables may need more.",
    ),
    Parameter(
        "max_request_bytes",
        (*_PRE, *_POST),
        count(1),
        "4194304",
        "Bytes of all inputs of a request together.",
    ),
    Parameter(
        "max_output_tokens",
        (*_ENGINE, *_BLS),
        count(0),
        "0",
        "Largest `max_tokens` of a request; 0 = any: the model's longest sequence ends the answer.",
    ),
    Parameter(
        "max_logits_bytes",
        (*_ENGINE, *_BLS),
        count(0),
        "268435456",
        "Bytes of all context and generation logits that a request may ask for, over all "
        "sequences and responses.",
    ),
    Parameter(
        "expose_kv_cache_metrics",
        (*_ENGINE, *_BLS),
        FLAG,
        "false",
        "Answer `return_perf_metrics` also with how many KV-cache blocks were new and how many "
        "reused, which tells a caller whether somebody else's prompt began alike.",
    ),
)
