"""The wire contract: every tensor of the five models, declared once.

First comes the class of a tensor, then a row for each tensor. The rows are those of TensorRT-LLM's
last models, plus older spellings of the same tensors. The models, the client, validation and the
checked-in ``config.pbtxt`` files (``make generate``) are made from the rows. Nothing else in the
package spells a tensor's type, shape or bounds. configure/tensors.csv tells which releases of
TensorRT-LLM have each.

Tensors of multimodal and disaggregated serving are left out on purpose. Rows marked "ours" are
additions. They are optional, and a client that does not know such an output may ignore it
(docs/contract.md says when each one appears).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np

from trtllm_bls.errors import InvalidRequest, SettingsError, TrtllmBlsError, half_character
from trtllm_bls.settings.model_names import (
    BLS_NAME,
    ENGINE_NAME,
    ENSEMBLE_NAME,
    ENSEMBLE_PLATFORM,
    POSTPROCESSING_NAME,
    PREPROCESSING_NAME,
)
from trtllm_bls.types import GUIDE_KIND_INPUT, GUIDE_TEXT_INPUT, Array

NUMPY_TYPES: Mapping[str, type] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "BF16": np.float32,  # numpy has no BF16; wire/kserve.py packs it for Triton's protocol
    "FP64": np.float64,
    "STRING": np.object_,
}
_FLOATS = ("FP64", "FP32", "FP16", "BF16")


def array_of(name: str, value: Any, dtype: str = "") -> Array:
    """Convert a value to the array of a tensor of Triton's type ``dtype``, by default its own type.

    Every element keeps its value: texts become UTF-8, bytes stay, and only a float type rounds, to
    its own precision. A single value gets one dimension. Raises ``TrtllmBlsError``.
    """
    array = _unchanged_array(name, value, dtype)
    if dtype == "STRING" and not array.size:
        return np.empty(array.shape, np.object_)
    kind = array.dtype.kind
    if kind == "S":
        problem = "numpy drops NULs at the ends of such bytes; send a list, or dtype=object"
        raise TrtllmBlsError(f"{name}: {array.dtype}: {problem}")
    if kind not in "biufUO":
        raise TrtllmBlsError(f"{name}: {array.dtype} is no type of Triton")
    if kind in "UO":
        texts = [_utf8(name, text) for text in array.reshape(-1).tolist()]
        cast = np.array([*texts, None], np.object_)[:-1].reshape(array.shape)
        if dtype not in ("STRING", ""):
            raise _type_error(dtype, name, value)
    elif dtype == "STRING":
        raise _type_error(dtype, name, value)
    else:
        numpy_type: Any = np.float64  # Triton has no longer type
        if dtype:
            numpy_type = NUMPY_TYPES[dtype]
        elif array.dtype.itemsize <= 8:
            numpy_type = array.dtype.newbyteorder("=")
        with np.errstate(over="ignore", invalid="ignore"):
            cast = array.astype(numpy_type, copy=False)
            if dtype == "BF16":
                cast = (bf16_bits(cast).astype(np.uint32) << 16).view(np.float32)
        if not _is_exact(cast, array, value):
            raise _type_error(dtype, name, value)
    if not cast.ndim:
        cast = cast.reshape(1)
    return cast


def _is_exact(cast: Array, array: Array, value: Any) -> bool:
    """Return True if ``cast`` has the values of ``array``, which was made of ``value``.

    A float type may round, but not to infinity.
    """
    if cast.dtype.kind == "f":
        return not (np.isinf(cast) & ~np.isinf(array)).any()
    if not isinstance(value, np.ndarray):
        # numpy may have rounded some numbers of a list already.
        return bool(cast.tolist() == np.array(value, object).tolist())
    if cast.dtype.kind in "iu" and array.dtype.kind in "iu":
        bounds: Any = np.iinfo(cast.dtype)
        return not array.size or bool(bounds.min <= array.min() and array.max() <= bounds.max)
    return bool(cast.tolist() == array.tolist())


def _unchanged_array(name: str, value: Any, dtype: str) -> Array:
    """Convert the value to an array in which every element is unchanged."""
    if isinstance(value, np.ma.MaskedArray):  # numpy would ignore the mask
        raise TrtllmBlsError(f"{name}: is a masked array; fill it first, as with .filled(0)")
    try:
        value = _with_python_bytes(value, dtype)
        try:
            array = np.asarray(value)
            has_fixed_width = array.dtype.kind in "SU" and not isinstance(value, np.ndarray)
        except UnicodeDecodeError:  # a list of both bytes and texts
            has_fixed_width = True
        if has_fixed_width:
            # An array of fixed width drops NULs at the ends of texts and bytes, and has numbers
            # beside texts as texts.
            array = np.array(value, np.object_)
    except ValueError as error:
        raise TrtllmBlsError(f"{name}: its rows differ in length") from error
    except (TypeError, RuntimeError) as error:  # a torch tensor, say, makes an array of itself
        raise TrtllmBlsError(f"{name}: {error}") from error
    is_object = array.dtype.kind == "O" and dtype in _FLOATS
    if is_object and all(isinstance(item, (int, float)) for item in array.reshape(-1)):
        try:  # numpy has no type for whole numbers this large
            array = array.astype(np.float64)
        except OverflowError as error:
            raise _type_error(dtype, name, value) from error
    return array


def _with_python_bytes(value: Any, dtype: str) -> Any:
    """Convert ``numpy.bytes_`` to bytes, and for ``STRING`` also other buffers.

    In an array, ``numpy.bytes_`` lose NULs at their ends.
    """
    if isinstance(value, list) and value and not isinstance(value[0], (int, float)):
        return [_with_python_bytes(item, dtype) for item in value]
    is_buffer = dtype == "STRING" and isinstance(value, (bytearray, memoryview))
    if is_buffer or isinstance(value, np.bytes_):
        return bytes(value)
    return value


def bf16_bits(array: Array) -> Array:
    """Round numbers to BF16 and return their 16 bits: to the nearest, and ties to even.

    The oldest tritonclient that is supported has no such function.
    """
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(array), 0x7FC0, rounded).astype(np.uint16)


def _utf8(name: str, value: Any) -> bytes:
    try:
        if isinstance(value, str):
            return value.encode()
    except UnicodeEncodeError as error:
        raise TrtllmBlsError(f"{name}: {half_character(error)}") from error
    if not isinstance(value, bytes):
        kind = type(value).__name__
        raise TrtllmBlsError(f"{name}: holds a {kind}; a tensor holds numbers, texts or bytes")
    return bytes(value)  # ``numpy.bytes_`` lose NULs


def _type_error(dtype: str, name: str, value: Any) -> TrtllmBlsError:
    return TrtllmBlsError(f"{name}: {repr(value)[:80]} is not {dtype}")


@dataclass(frozen=True)
class Bounds:
    """The numbers that a tensor may hold. Error messages have their ``str``."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False  # True: ``low`` itself is not allowed

    def allow(self, value: float) -> bool:
        """Return True if ``value`` is a finite number within the bounds."""
        if not math.isfinite(value) or value > self.high:
            return False
        if self.above:
            return value > self.low
        return value >= self.low

    def __str__(self) -> str:
        bounds = []
        if not math.isinf(self.low):
            bounds.append(f"greater than {self.low:g}" if self.above else f"at least {self.low:g}")
        if not math.isinf(self.high):
            bounds.append(f"at most {self.high:g}")
        return " and ".join(bounds) or "finite"


@dataclass(frozen=True)
class Tensor:
    """An input or output of a model.

    ``dims``: the shape without the batch dimension. ``scalar``: the input arrives at a Python model
    as ``[B]``, although clients send ``[B, 1]`` (``reshape`` in the configuration). ``field``: the
    value's name inside the package; two tensors with the same field are two spellings of a value.
    """

    name: str
    dtype: str
    dims: tuple[int, ...] = (1,)
    field: str = ""
    required: bool = False
    scalar: bool = False
    ragged: bool = False
    bounds: Bounds | None = None
    key: str = dataclasses.field(init=False)  # the value's name inside the package
    numpy_type: type = dataclasses.field(init=False)  # the elements' type; object for STRING
    single: bool = dataclasses.field(init=False)  # exactly one element per batch row

    def __post_init__(self) -> None:
        """Set attributes, not properties: they are read for every value of every request."""
        if self.dtype not in NUMPY_TYPES:
            raise SettingsError(f"{self.name}: {self.dtype!r} is none of {', '.join(NUMPY_TYPES)}")
        object.__setattr__(self, "key", self.field or self.name)
        object.__setattr__(self, "numpy_type", NUMPY_TYPES[self.dtype])
        object.__setattr__(self, "single", self.dims == (1,))

    @property
    def datatype(self) -> str:
        """The type as Triton's protocol names it."""
        if self.dtype == "STRING":
            return "BYTES"
        return self.dtype

    def array(self, value: Any, *, rows: bool = False) -> Array:
        """Convert a value to this tensor's array with ``array_of``, and check its shape.

        A single value gets as many dimensions as are declared. With ``rows`` the first dimension
        is the batch; a value without it is one row. Raises ``TrtllmBlsError``.
        """
        array = array_of(self.name, value, self.dtype)
        dims = self.dims
        if rows:
            dims = (-1, *dims)
        if array.size == 1 and array.ndim == 1 and len(self.dims) != 1:
            array = array.reshape([1] * len(self.dims))
        if rows and array.ndim == len(self.dims):
            array = array[None]
        fits = array.ndim == len(dims)
        for dim, size in zip(dims, array.shape, strict=False):
            fits = fits and dim in (-1, size)
        if not fits:
            problem = f"shape {list(array.shape)}, declared {list(dims)}"
            raise TrtllmBlsError(f"{self.name}: {problem}")
        return array

    def check(self, value: float) -> None:
        """Raise ``InvalidRequest`` if the value is outside the tensor's bounds."""
        if self.bounds is not None and not self.bounds.allow(value):
            expected = str(self.bounds)
            if not math.isfinite(value):
                expected = "finite"
            raise InvalidRequest(self.name, f"{value} is not allowed; it must be {expected}")


@dataclass(frozen=True)
class Model:
    """A model of the repository, with its tensors in the order of the configuration file."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    decoupled: bool = False
    backend: str = "python"

    @cached_property
    def input_named(self) -> Mapping[str, Tensor]:
        """Inputs by wire name."""
        return by_name(self.inputs)

    @cached_property
    def output_named(self) -> Mapping[str, Tensor]:
        """Outputs by wire name."""
        return by_name(self.outputs)

    def input_names(self, key: str) -> list[str]:
        """Return the wire names of the inputs that have this key, the first spelling first."""
        return [tensor.name for tensor in self.inputs if tensor.key == key]


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_NamedT = TypeVar("_NamedT", bound=_Named)


def by_name(items: Iterable[_NamedT]) -> dict[str, _NamedT]:
    """Return tensors or models by name."""
    return {item.name: item for item in items}


# --- the rows ----------------------------------------------------------------------------------

_AT_LEAST_ONE = Bounds(low=1)
_SEQUENCES = Bounds(low=1, high=256)  # a sequence costs memory before the engine gets the request
_NOT_NEGATIVE = Bounds(low=0)
_POSITIVE = Bounds(low=0, above=True)
_FINITE = Bounds()
_PROBABILITY = Bounds(low=0, high=1, above=True)
_UNSIGNED = Bounds(low=0, high=2**64 - 1)
_ALTERNATIVES = Bounds(low=0, high=20)


def _alike(dtype: str, *names: str, **options: Any) -> tuple[Tensor, ...]:
    return tuple(Tensor(name, dtype, **options) for name in names)


def _changed(tensors: Iterable[Tensor], **fields: Any) -> tuple[Tensor, ...]:
    """Return copies of the tensors with other values in these fields."""
    return tuple(replace(tensor, **fields) for tensor in tensors)


# The text models' names. A top_p <= 0 means "not set" on the wire, so it has no lower bound.
_TEXT_SAMPLING = (
    Tensor("beam_width", "INT32", bounds=_AT_LEAST_ONE),
    Tensor("temperature", "FP32", bounds=_NOT_NEGATIVE),
    Tensor("top_k", "INT32", bounds=_NOT_NEGATIVE),
    Tensor("top_p", "FP32", bounds=Bounds(high=1)),
    Tensor("length_penalty", "FP32", bounds=_FINITE),
    Tensor("repetition_penalty", "FP32", bounds=_POSITIVE),
    Tensor("min_tokens", "INT32", bounds=_NOT_NEGATIVE),
    Tensor("min_length", "INT32", field="min_tokens", bounds=_NOT_NEGATIVE),
    Tensor("presence_penalty", "FP32", bounds=_FINITE),
    Tensor("frequency_penalty", "FP32", bounds=_FINITE),
    Tensor("seed", "UINT64", bounds=_UNSIGNED),
    Tensor("random_seed", "UINT64", field="seed", bounds=_UNSIGNED),
)
# Upstream, only tensorrt_llm has these. Our tensorrt_llm_bls has them too, under the same names.
# The C++ backend looks for runtime_top_p_min under another name and does not read min_p, so no
# release has these two. It reads no_repeat_ngram_size, which upstream's configuration lacks.
_FINE_SAMPLING = (
    Tensor("runtime_top_p_min", "FP32", field="top_p_min", bounds=_PROBABILITY),
    Tensor("runtime_top_p_decay", "FP32", field="top_p_decay", bounds=_PROBABILITY),
    Tensor("runtime_top_p_reset_ids", "INT32", field="top_p_reset_id", bounds=_NOT_NEGATIVE),
    Tensor("min_p", "FP32", bounds=Bounds(low=0, high=1)),
    Tensor("no_repeat_ngram_size", "INT32", bounds=_NOT_NEGATIVE),
    Tensor("early_stopping", "BOOL"),
    Tensor("beam_search_diversity_rate", "FP32", bounds=_NOT_NEGATIVE),
)
_ENGINE_NAMES = {
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
}


def _as_engine_input(tensor: Tensor) -> Tensor:
    name = _ENGINE_NAMES.get(tensor.name, tensor.name)
    return replace(tensor, name=name, field=tensor.key, scalar=True)


_ENGINE_SAMPLING = tuple(map(_as_engine_input, (*_TEXT_SAMPLING, *_FINE_SAMPLING)))

_LORA = (
    Tensor("lora_task_id", "UINT64", scalar=True),
    Tensor("lora_weights", "FP16", (-1, -1), ragged=True),
    Tensor("lora_config", "INT32", (-1, 3), ragged=True),
)
_PROMPT_TABLE = (
    Tensor("prompt_embedding_table", "FP16", (-1, -1), ragged=True),
    Tensor("prompt_vocab_size", "INT32", scalar=True),
)
_TEXT_PROMPT_TABLE = _changed(_PROMPT_TABLE, ragged=False, scalar=False)

_RETURN_FLAGS = (
    *("return_log_probs", "return_context_logits", "return_generation_logits"),
    *("return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens"),
)


_GUIDED = _alike("STRING", GUIDE_KIND_INPUT, GUIDE_TEXT_INPUT, ragged=True)
# Ours, for TensorRT-LLM's LLM API. An adapter is one of the server's model.yaml, or any one by
# name, id (lora_task_id) and directory, as in upstream's llmapi model. Prompts share KV cache
# blocks only with prompts of the same salt. priority ranks waiting requests. The logits
# post-processor is one of model.yaml.
_LLM_API = (
    *_alike("STRING", "lora_name", "lora_path", "lora_ckpt_source", "cache_salt", ragged=True),
    Tensor("priority", "FP32", ragged=True, bounds=Bounds(low=0, high=1)),
    Tensor("logits_post_processor_name", "STRING", ragged=True),
)
_SCORE_OUTPUTS = (
    Tensor("cum_log_probs", "FP32", (-1,)),
    Tensor("output_log_probs", "FP32", (-1, -1)),
    Tensor("context_logits", "FP32", (-1, -1)),
    Tensor("generation_logits", "FP32", (-1, -1, -1)),
)
_NEW_BLOCKS = Tensor("kv_cache_alloc_new_blocks", "INT32")
_TOTAL_BLOCKS = Tensor("kv_cache_alloc_total_blocks", "INT32")
_SPEED_METRICS = (
    *_alike("INT64", "arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns"),
    Tensor("last_token_time_ns", "INT64"),
    Tensor("acceptance_rate", "FP32"),
    *_alike("INT32", "total_accepted_draft_tokens", "total_draft_tokens"),
)
_PERF_METRICS = (
    _NEW_BLOCKS,
    Tensor("kv_cache_reused_blocks", "INT32"),
    _TOTAL_BLOCKS,
    *_SPEED_METRICS,
)
_COUNT_OUTPUTS = _alike("INT32", "num_input_tokens", "num_output_tokens")
_INDICES = _alike("INT32", "batch_index", "sequence_index")

ENGINE = Model(
    ENGINE_NAME,
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
            bounds=_AT_LEAST_ONE,
        ),
        Tensor("num_return_sequences", "INT32", scalar=True, bounds=_SEQUENCES),
        Tensor("draft_input_ids", "INT32", (-1,), ragged=True),
        Tensor("draft_logits", "FP32", (-1, -1), ragged=True),
        Tensor("draft_acceptance_threshold", "FP32", scalar=True, bounds=_PROBABILITY),
        Tensor("end_id", "INT32", scalar=True, bounds=Bounds(low=-1)),
        Tensor("pad_id", "INT32", scalar=True),
        Tensor("stop_words_list", "INT32", (2, -1), field="stop_sequences", ragged=True),
        Tensor("bad_words_list", "INT32", (2, -1), field="bad_sequences", ragged=True),
        Tensor("embedding_bias", "FP32", (-1,), ragged=True),
        *_ENGINE_SAMPLING,
        *_alike(
            "BOOL", *_RETURN_FLAGS, "exclude_input_in_output", "stop", "streaming", scalar=True
        ),
        *_PROMPT_TABLE,
        Tensor("prompt_table_extra_ids", "UINT64", (-1,), ragged=True),
        *_LORA,
        # For models with an encoder, which we have none of. Upstream's clients pass them on from
        # preprocessing, so ours answers with them, too.
        Tensor("decoder_input_ids", "INT32", (-1,), ragged=True),
        Tensor("decoder_input_lengths", "INT32", scalar=True),
        Tensor("retention_token_range_starts", "INT32", (-1,), ragged=True),
        Tensor("retention_token_range_ends", "INT32", (-1,), ragged=True),
        Tensor("retention_token_range_priorities", "INT32", (-1,), ragged=True),
        Tensor("retention_token_range_durations_ms", "INT32", (-1,), ragged=True),
        *_alike("INT32", "retention_decode_priority", "retention_decode_duration_ms", ragged=True),
        *_GUIDED,
        # Ours.
        Tensor("return_top_log_probs", "INT32", scalar=True, bounds=_ALTERNATIVES),
        *_alike("INT32", "lookahead_window_size", "lookahead_ngram_size", ragged=True),
        Tensor("lookahead_verification_set_size", "INT32", ragged=True),
        *_LLM_API,
    ),
    outputs=(
        Tensor("output_ids", "INT32", (-1, -1)),
        Tensor("sequence_length", "INT32", (-1,)),
        *_SCORE_OUTPUTS,
        *_INDICES,
        *_PERF_METRICS,
        *_COUNT_OUTPUTS,
        # Ours.
        Tensor("top_log_prob_ids", "INT32", (-1, -1)),
        Tensor("top_log_probs", "FP32", (-1, -1)),
        Tensor("cached_tokens", "INT32"),
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
# Ours: a conversation instead of text_input, and whether special tokens such as BOS precede it.
_PROMPT_OPTIONS = (Tensor("messages", "STRING"), Tensor("add_special_tokens", "BOOL"))

PREPROCESSING = Model(
    PREPROCESSING_NAME,
    inputs=(
        Tensor("QUERY", "STRING", field="text_input"),
        # Required, but declared optional: Triton ends an ensemble without an answer if a step lacks
        # a required input. So the model itself refuses a request without it.
        Tensor("REQUEST_OUTPUT_LEN", "INT32", field="max_tokens"),
        *(Tensor(name, dtype, (-1,), field=field) for field, name, dtype in _WORD_LISTS),
        Tensor("END_ID", "INT32", field="end_id", bounds=Bounds(low=-1)),
        Tensor("PAD_ID", "INT32", field="pad_id"),
        Tensor("MESSAGES", "STRING", field="messages"),  # ours
        Tensor("ADD_SPECIAL_TOKENS", "BOOL", field="add_special_tokens"),  # ours
        # Ours. The ensemble passes these two on from its own inputs; STREAM has no effect.
        *_alike("INT32", "MIN_TOKENS", "MIN_LENGTH", field="min_tokens", bounds=_NOT_NEGATIVE),
        Tensor("STREAM", "BOOL", field="stream"),
    ),
    outputs=(
        Tensor("INPUT_ID", "INT32", (-1,)),
        Tensor("REQUEST_INPUT_LEN", "INT32"),
        *_alike("INT32", "BAD_WORDS_IDS", "STOP_WORDS_IDS", dims=(2, -1)),
        Tensor("EMBEDDING_BIAS", "FP32", (-1,)),
        Tensor("REQUEST_OUTPUT_LEN", "INT32", (-1,)),
        *_alike("INT32", "OUT_END_ID", "OUT_PAD_ID"),
        Tensor("DECODER_INPUT_ID", "INT32", (-1,)),
        Tensor("REQUEST_DECODER_INPUT_LEN", "INT32"),
    ),
)

POSTPROCESSING = Model(
    POSTPROCESSING_NAME,
    inputs=(
        Tensor("TOKENS_BATCH", "INT32", (-1, -1), required=True),
        Tensor("SEQUENCE_LENGTH", "INT32", (-1,), required=True),
    ),
    outputs=(Tensor("OUTPUT", "STRING", (-1,)),),
)

_TEXT_INPUTS = (
    Tensor("text_input", "STRING"),
    Tensor("max_tokens", "INT32", required=True, bounds=_AT_LEAST_ONE),
    *_TEXT_WORDS,
    _END,
    _PAD,
    *_TEXT_SAMPLING,
    *_alike("BOOL", "stream", "exclude_input_in_output"),
    *_PROMPT_OPTIONS,
)
_TEXT_OUTPUTS = (
    Tensor("text_output", "STRING", (-1,)),
    *_SCORE_OUTPUTS,
    *_INDICES,
    *_PERF_METRICS,
    *_COUNT_OUTPUTS,
)

ENSEMBLE = Model(
    ENSEMBLE_NAME,
    decoupled=True,
    backend=ENSEMBLE_PLATFORM,
    inputs=(
        *_changed(_TEXT_INPUTS, required=False),  # see REQUEST_OUTPUT_LEN
        *_alike("BOOL", *_RETURN_FLAGS),
        Tensor("num_return_sequences", "INT32", bounds=_SEQUENCES),
        *_TEXT_PROMPT_TABLE,
        Tensor("lora_task_id", "UINT64"),
        *_LORA[1:],
        *_GUIDED,
    ),
    outputs=_TEXT_OUTPUTS,
)

BLS = Model(
    BLS_NAME,
    decoupled=True,
    inputs=(
        *_TEXT_INPUTS,
        *_FINE_SAMPLING,
        *_alike("BOOL", *_RETURN_FLAGS, scalar=True),
        Tensor("num_return_sequences", "INT32", scalar=True, bounds=_SEQUENCES),
        Tensor("num_draft_tokens", "INT32", bounds=_NOT_NEGATIVE),
        *_alike("BOOL", "use_draft_logits", scalar=True),
        *_alike("BOOL", "include_stop", "skip_special_tokens"),  # ours
        Tensor("draft_source", "STRING"),  # ours: off, model, ngram, mixed or prediction
        Tensor("prediction", "STRING"),  # ours
        Tensor("timeout_ms", "INT32", bounds=_AT_LEAST_ONE),  # ours
        Tensor("stream_interval", "INT32", bounds=_AT_LEAST_ONE),  # ours
        *_TEXT_PROMPT_TABLE,
        Tensor("prompt_table_extra_id", "UINT64", bounds=_UNSIGNED),
        *_LORA,
        *_changed((*_GUIDED, *_LLM_API), ragged=False),
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

# Upstream's ``llmapi`` model, which has the engine's name: text in, text out, one prompt, no batch.
# ``configure --from`` writes it with the code of tensorrt_llm_bls. The field of an input is the
# name of that model's input with the same meaning. No engine of ours reports kv_cache_missed_block
# and kv_cache_hit_rate.
_TEXT_TENSORS = by_name((*_TEXT_SAMPLING, *_TEXT_INPUTS))


def _as_sampling_param(name: str) -> Tensor:
    tensor = _TEXT_TENSORS[name]
    return replace(tensor, name=f"sampling_param_{name}", field=name, required=False)


LLMAPI = Model(
    ENGINE_NAME,
    inputs=(
        Tensor("text_input", "STRING", (-1,), required=True),
        Tensor("streaming", "BOOL", field="stream"),
        Tensor("sampling_param_best_of", "INT32"),
        _as_sampling_param("top_k"),
        _as_sampling_param("max_tokens"),
        _as_sampling_param("temperature"),
        _as_sampling_param("top_p"),
        _as_sampling_param("frequency_penalty"),
        _as_sampling_param("presence_penalty"),
        _as_sampling_param("seed"),
        Tensor("sampling_param_stop", "STRING", (-1,), field="stop_words"),
        Tensor("sampling_param_exclude_input_from_output", "BOOL", field="exclude_input_in_output"),
        Tensor("sampling_param_return_perf_metrics", "BOOL", field="return_perf_metrics"),
        Tensor(
            "sampling_param_logits_post_processor_name",
            "STRING",
            field="logits_post_processor_name",
        ),
        Tensor("return_finish_reason", "BOOL"),
        Tensor("return_stop_reason", "BOOL"),
        Tensor("return_cumulative_logprob", "BOOL", field="return_log_probs"),
        Tensor("stop", "BOOL"),
        Tensor("lora_id", "UINT64", field="lora_task_id"),
        *_changed(_LLM_API[:3], ragged=False),
    ),
    outputs=(
        Tensor("text_output", "STRING", (-1,)),
        Tensor("finish_reason", "STRING", (-1,)),
        Tensor("stop_reason", "STRING", (-1,)),
        Tensor("cumulative_logprob", "FP32", (-1,), field="cum_log_probs"),
        Tensor("kv_cache_reused_block", "INT32", (-1,), field="kv_cache_reused_blocks"),
        # Declared, so that a request may name them; never sent.
        Tensor("kv_cache_missed_block", "INT32", (-1,)),
        Tensor("kv_cache_hit_rate", "FP32", (-1,)),
        *_changed((_NEW_BLOCKS, _TOTAL_BLOCKS), dims=(-1,)),
        *_SPEED_METRICS,
    ),
)

MODELS = (PREPROCESSING, ENGINE, POSTPROCESSING, ENSEMBLE, BLS)
MODEL_NAMES = tuple([model.name for model in MODELS])
