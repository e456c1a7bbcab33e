"""The rows: five models, in the last form TensorRT-LLM shipped, plus renamed older spellings.

Encoder-decoder, multimodal and disaggregated-serving tensors are left out on purpose. Rows marked
"ours" are additions: always optional, and outputs among them are harmless to a client that does
not know them (docs/contract.md says when each one appears).
"""

from __future__ import annotations

from dataclasses import replace

from trtllm_bls.contract.tensors import Bounds, Model, Tensor

_COUNT = Bounds(low=1)
_SEQUENCES = Bounds(low=1, high=256)  # each costs memory before the engine sees any of them
_NOT_NEGATIVE = Bounds(low=0)
_POSITIVE = Bounds(low=0, above=True)
_FINITE = Bounds()
_SHARE = Bounds(low=0, high=1, above=True)
_UNSIGNED = Bounds(low=0, high=2**64 - 1)

# field, name in text models, name in tensorrt_llm, dtype, bounds. top_p <= 0 means "not set" on
# the wire, so its lower bound is open downwards.
_SAMPLING = (
    ("beam_width", "beam_width", "beam_width", "INT32", _COUNT),
    ("temperature", "temperature", "temperature", "FP32", _NOT_NEGATIVE),
    ("top_k", "top_k", "runtime_top_k", "INT32", _NOT_NEGATIVE),
    ("top_p", "top_p", "runtime_top_p", "FP32", Bounds(high=1)),
    ("length_penalty", "length_penalty", "len_penalty", "FP32", _FINITE),
    ("repetition_penalty", "repetition_penalty", "repetition_penalty", "FP32", _POSITIVE),
    ("min_tokens", "min_tokens", "min_tokens", "INT32", _NOT_NEGATIVE),
    ("min_tokens", "min_length", "min_length", "INT32", _NOT_NEGATIVE),
    ("presence_penalty", "presence_penalty", "presence_penalty", "FP32", _FINITE),
    ("frequency_penalty", "frequency_penalty", "frequency_penalty", "FP32", _FINITE),
    ("seed", "seed", "seed", "UINT64", _UNSIGNED),
    ("seed", "random_seed", "random_seed", "UINT64", _UNSIGNED),
)
# Only tensorrt_llm has these upstream; the text models take them under the same names (ours).
_FINE_SAMPLING = (
    ("top_p_min", "runtime_top_p_min", "FP32", _SHARE),
    ("top_p_decay", "runtime_top_p_decay", "FP32", _SHARE),
    ("top_p_reset_id", "runtime_top_p_reset_ids", "INT32", _NOT_NEGATIVE),
    ("early_stopping", "early_stopping", "BOOL", None),
    ("beam_search_diversity_rate", "beam_search_diversity_rate", "FP32", _NOT_NEGATIVE),
)

_TEXT_SAMPLING = tuple(
    Tensor(text, dtype, field=field, bounds=bounds) for field, text, _, dtype, bounds in _SAMPLING
)
_ENGINE_SAMPLING = tuple(
    Tensor(name, dtype, field=field, scalar=True, bounds=bounds)
    for field, name, dtype, bounds in (
        *((field, name, dtype, bounds) for field, _, name, dtype, bounds in _SAMPLING),
        *_FINE_SAMPLING,
    )
)

_LORA = (
    Tensor("lora_task_id", "UINT64", scalar=True),
    Tensor("lora_weights", "FP16", (-1, -1), ragged=True),
    Tensor("lora_config", "INT32", (-1, 3), ragged=True),
)
_PROMPT_TABLE = (
    Tensor("prompt_embedding_table", "FP16", (-1, -1), ragged=True),
    Tensor("prompt_vocab_size", "INT32", scalar=True),
)
_GUIDED = (
    Tensor("guided_decoding_guide_type", "STRING", ragged=True),
    Tensor("guided_decoding_guide", "STRING", ragged=True),
)
_TEXT_PROMPT_TABLE = (
    Tensor("prompt_embedding_table", "FP16", (-1, -1)),
    Tensor("prompt_vocab_size", "INT32"),
)


def _flags(*names: str, scalar: bool) -> tuple[Tensor, ...]:
    return tuple(Tensor(name, "BOOL", scalar=scalar) for name in names)


_RETURN_FLAGS = (
    "return_log_probs",
    "return_context_logits",
    "return_generation_logits",
    "return_perf_metrics",
    "return_num_input_tokens",
    "return_num_output_tokens",
)

_SCORES = (
    Tensor("cum_log_probs", "FP32", (-1,)),
    Tensor("output_log_probs", "FP32", (-1, -1)),
    Tensor("context_logits", "FP32", (-1, -1)),
    Tensor("generation_logits", "FP32", (-1, -1, -1)),
)
_PERF_METRICS = (
    Tensor("kv_cache_alloc_new_blocks", "INT32"),
    Tensor("kv_cache_reused_blocks", "INT32"),
    Tensor("kv_cache_alloc_total_blocks", "INT32"),
    Tensor("arrival_time_ns", "INT64"),
    Tensor("first_scheduled_time_ns", "INT64"),
    Tensor("first_token_time_ns", "INT64"),
    Tensor("last_token_time_ns", "INT64"),
    Tensor("acceptance_rate", "FP32"),
    Tensor("total_accepted_draft_tokens", "INT32"),
    Tensor("total_draft_tokens", "INT32"),
)
_COUNTS = (Tensor("num_input_tokens", "INT32"), Tensor("num_output_tokens", "INT32"))
_INDICES = (Tensor("batch_index", "INT32"), Tensor("sequence_index", "INT32"))

ENGINE = Model(
    "tensorrt_llm",
    decoupled=True,
    inputs=(
        Tensor("input_ids", "INT32", (-1,), required=True, ragged=True),
        Tensor("input_lengths", "INT32", required=True, scalar=True),
        Tensor(
            "request_output_len",
            "INT32",
            field="max_tokens",
            required=True,
            scalar=True,
            bounds=_COUNT,
        ),
        Tensor("num_return_sequences", "INT32", scalar=True, bounds=_SEQUENCES),
        Tensor("draft_input_ids", "INT32", (-1,), ragged=True),
        Tensor("draft_logits", "FP32", (-1, -1), ragged=True),
        Tensor("draft_acceptance_threshold", "FP32", scalar=True, bounds=_SHARE),
        Tensor("end_id", "INT32", scalar=True, bounds=Bounds(low=-1)),
        Tensor("pad_id", "INT32", scalar=True),
        Tensor("stop_words_list", "INT32", (2, -1), field="stop_sequences", ragged=True),
        Tensor("bad_words_list", "INT32", (2, -1), field="bad_sequences", ragged=True),
        Tensor("embedding_bias", "FP32", (-1,), ragged=True),
        *_ENGINE_SAMPLING,
        *_flags(*_RETURN_FLAGS, "exclude_input_in_output", "stop", "streaming", scalar=True),
        *_PROMPT_TABLE,
        Tensor("prompt_table_extra_ids", "UINT64", (-1,), ragged=True),
        *_LORA,
        Tensor("retention_token_range_starts", "INT32", (-1,), ragged=True),
        Tensor("retention_token_range_ends", "INT32", (-1,), ragged=True),
        Tensor("retention_token_range_priorities", "INT32", (-1,), ragged=True),
        Tensor("retention_token_range_durations_ms", "INT32", (-1,), ragged=True),
        Tensor("retention_decode_priority", "INT32", ragged=True),
        Tensor("retention_decode_duration_ms", "INT32", ragged=True),
        *_GUIDED,
        Tensor("lookahead_window_size", "INT32", ragged=True),
        Tensor("lookahead_ngram_size", "INT32", ragged=True),
        Tensor("lookahead_verification_set_size", "INT32", ragged=True),
    ),
    outputs=(
        Tensor("output_ids", "INT32", (-1, -1)),
        Tensor("sequence_length", "INT32", (-1,)),
        *_SCORES,
        *_INDICES,
        *_PERF_METRICS,
        *_COUNTS,
    ),
)

_WORD_LISTS = (
    ("bad_words", "BAD_WORDS_DICT", "STRING"),
    ("stop_words", "STOP_WORDS_DICT", "STRING"),
    ("embedding_bias_words", "EMBEDDING_BIAS_WORDS", "STRING"),
    ("embedding_bias_weights", "EMBEDDING_BIAS_WEIGHTS", "FP32"),
)
_TEXT_WORDS = tuple(Tensor(name, dtype, (-1,)) for name, _, dtype in _WORD_LISTS)
_END = Tensor("end_id", "INT32", bounds=Bounds(low=-1))
_PAD = Tensor("pad_id", "INT32")
# Ours: a conversation instead of text_input, and whether BOS and the like are put before it.
_PROMPT_OPTIONS = (Tensor("messages", "STRING"), Tensor("add_special_tokens", "BOOL"))

PREPROCESSING = Model(
    "preprocessing",
    inputs=(
        Tensor("QUERY", "STRING", field="text_input"),
        # Needed all the same: an ensemble ends without a word where a step lacks an input that is
        # required, so the model itself refuses a request without it.
        Tensor("REQUEST_OUTPUT_LEN", "INT32", field="max_tokens"),
        *(Tensor(name, dtype, (-1,), field=field) for field, name, dtype in _WORD_LISTS),
        Tensor("END_ID", "INT32", field="end_id", bounds=Bounds(low=-1)),
        Tensor("PAD_ID", "INT32", field="pad_id"),
        Tensor("MESSAGES", "STRING", field="messages"),  # ours
        Tensor("ADD_SPECIAL_TOKENS", "BOOL", field="add_special_tokens"),  # ours
        Tensor("MIN_TOKENS", "INT32", field="min_tokens", bounds=_NOT_NEGATIVE),  # ours
        Tensor("MIN_LENGTH", "INT32", field="min_tokens", bounds=_NOT_NEGATIVE),  # ours
        Tensor("STREAM", "BOOL", field="stream"),  # ours: see the ensemble
    ),
    outputs=(
        Tensor("INPUT_ID", "INT32", (-1,)),
        Tensor("REQUEST_INPUT_LEN", "INT32"),
        Tensor("BAD_WORDS_IDS", "INT32", (2, -1)),
        Tensor("STOP_WORDS_IDS", "INT32", (2, -1)),
        Tensor("EMBEDDING_BIAS", "FP32", (-1,)),
        Tensor("REQUEST_OUTPUT_LEN", "INT32", (-1,)),
        Tensor("OUT_END_ID", "INT32"),
        Tensor("OUT_PAD_ID", "INT32"),
    ),
)

POSTPROCESSING = Model(
    "postprocessing",
    inputs=(
        Tensor("TOKENS_BATCH", "INT32", (-1, -1), required=True),
        Tensor("SEQUENCE_LENGTH", "INT32", (-1,), required=True),
    ),
    outputs=(Tensor("OUTPUT", "STRING", (-1,)),),
)

_TEXT_INPUTS = (
    Tensor("text_input", "STRING"),
    Tensor("max_tokens", "INT32", required=True, bounds=_COUNT),
    *_TEXT_WORDS,
    _END,
    _PAD,
    *_TEXT_SAMPLING,
    *_flags("stream", "exclude_input_in_output", scalar=False),
    *_PROMPT_OPTIONS,
)
_TEXT_OUTPUTS = (
    Tensor("text_output", "STRING", (-1,)),
    *_SCORES,
    *_INDICES,
    *_PERF_METRICS,
    *_COUNTS,
)

ENSEMBLE = Model(
    "ensemble",
    decoupled=True,
    backend="ensemble",
    inputs=(
        *(replace(tensor, required=False) for tensor in _TEXT_INPUTS),  # see preprocessing
        *_flags(*_RETURN_FLAGS, scalar=False),
        Tensor("num_return_sequences", "INT32", bounds=_SEQUENCES),
        *_TEXT_PROMPT_TABLE,
        Tensor("lora_task_id", "UINT64"),
        *_LORA[1:],
        *_GUIDED,
    ),
    outputs=_TEXT_OUTPUTS,
)

BLS = Model(
    "tensorrt_llm_bls",
    decoupled=True,
    inputs=(
        *_TEXT_INPUTS,
        *(
            Tensor(name, dtype, field=field, bounds=bounds)
            for field, name, dtype, bounds in _FINE_SAMPLING
        ),
        *_flags(*_RETURN_FLAGS, scalar=True),
        Tensor("num_return_sequences", "INT32", scalar=True, bounds=_SEQUENCES),
        Tensor("num_draft_tokens", "INT32", bounds=_NOT_NEGATIVE),
        *_flags("use_draft_logits", scalar=True),
        *_flags("include_stop", "skip_special_tokens", scalar=False),  # ours
        Tensor("draft_source", "STRING"),  # ours: off, model, ngram, mixed or prediction
        Tensor("prediction", "STRING"),  # ours
        Tensor("timeout_ms", "INT32", bounds=_COUNT),  # ours
        Tensor("stream_interval", "INT32", bounds=_COUNT),  # ours
        *_TEXT_PROMPT_TABLE,
        Tensor("prompt_table_extra_id", "UINT64", bounds=_UNSIGNED),
        *_LORA,
        Tensor("guided_decoding_guide_type", "STRING"),
        Tensor("guided_decoding_guide", "STRING"),
    ),
    outputs=(
        *_TEXT_OUTPUTS,
        # Ours, on each sequence's last response.
        Tensor("finish_reason", "STRING"),
        Tensor("stop_reason", "STRING"),
        Tensor("seed", "UINT64"),
        Tensor("num_draft_rounds", "INT32"),
    ),
)

MODELS = (PREPROCESSING, ENGINE, POSTPROCESSING, ENSEMBLE, BLS)
