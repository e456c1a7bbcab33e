"""Parameters of the models (``parameters`` in ``config.pbtxt``): each declared once, and read.

A parameter is a field of its model's dataclass: the field's name is the key in ``config.pbtxt``,
``Kind.parameter`` gives the rest: what a value may be, its default, its variable, what it does.
Configuration files, checks, docs/parameters.md, the environment variables of ``serve``, ``--set``
and the options of ``openai`` follow from these fields. ``make generate`` writes the files again.

``cpp_backend`` knows the parameters of TensorRT-LLM's C++ backend, which are its own.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from trtllm_bls.errors import SettingsError
from trtllm_bls.settings.model_names import (
    BLS_NAME,
    ENGINE_NAME,
    POSTPROCESSING_NAME,
    PREPROCESSING_NAME,
)
from trtllm_bls.settings.request_limits import RequestLimits

GIVEN = "TRTLLM_BLS_GIVEN"  # MODEL.PARAMETER, ...: parameters that no variable overrides
# Keys by which ``upgrade`` knows which version wrote a configuration.
FORMAT_VERSION = "format_version"
WRITTEN_BY = "written_by"
# Keys that any model may have; the first two are Triton's own.
COMMON_KEYS = frozenset(
    {"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS", FORMAT_VERSION, WRITTEN_BY}
)

MODEL_DIR = "TRTLLM_BLS_MODEL_DIR"
DRAFT_MODEL_DIR = "TRTLLM_BLS_DRAFT_MODEL_DIR"
GRPC_URL = "TRTLLM_BLS_GRPC_URL"
MAX_STREAMS = "TRTLLM_BLS_MAX_STREAMS"
THREADS = "TRTLLM_BLS_ENGINE_THREADS"
STATUS_DIR = "TRTLLM_BLS_STATUS_DIR"
SESSION_DIR = "TRTLLM_BLS_SESSION_DIR"
TOOL_PARSER = "TRTLLM_BLS_TOOL_PARSER"
REASONING_PARSER = "TRTLLM_BLS_REASONING_PARSER"
ENGINE_TLS_PIN = "TRTLLM_BLS_ENGINE_TLS_PIN"
ENGINE_TRANSPORT = "TRTLLM_BLS_ENGINE_TRANSPORT"


_TRUE = {"true", "1", "t", "y", "yes"}
_FLAGS = dict.fromkeys(_TRUE, True) | dict.fromkeys(("false", "0", "f", "n", "no"), False)
_ParametersT = TypeVar("_ParametersT")


# --- what a value may be --------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of values.

    ``expected`` describes them in words, ``read`` reads a value's text, and ``allows`` tells which
    values are allowed. ``read`` raises ``ValueError`` or ``KeyError`` for a text that it cannot
    read. ``default`` is that of a parameter which names none, ``unset`` the value of one that has
    no text either.
    """

    expected: str
    read: Callable[[str], Any]
    allows: Callable[[Any], bool] = lambda value: True
    default: str = ""
    unset: Any = None

    def parse(self, text: str) -> Any:
        """Read a value; raises ``ValueError`` or ``KeyError`` for any other text."""
        value = self.read(text)
        if not self.allows(value):
            raise ValueError(text)
        return value

    def parameter(self, help: str, default: str | None = "", **options: str) -> Any:
        """Declare a field of a model's dataclass; ``options`` are further fields of ``Parameter``.

        ``default`` is written as in ``config.pbtxt``; empty, it is the kind's. The field's own
        default is the value that this text means.
        """
        if default == "":
            default = self.default
        parameter = Parameter(self, help, default, **options)
        metadata = {"parameter": parameter}
        if default is None:
            return dataclasses.field(metadata=metadata)
        return dataclasses.field(default=parameter.parse("", "", ""), metadata=metadata)


def is_true(text: str) -> bool:
    """Return True for a text that means true; any other, also an empty one, means false."""
    return text.strip().lower() in _TRUE


def _is_not_negative(number: float) -> bool:
    return 0 <= number < float("inf")


FLAG = Kind("true or false", lambda text: _FLAGS[text.strip().lower()], default="false")
NUMBER = Kind("a number that is not negative", float, _is_not_negative)
SECONDS = Kind("a number of seconds that is not negative", float, _is_not_negative)
TEXT = Kind("a text", str, unset="")
MODEL = Kind(
    "the name of a model of this server (an address is for `engine`)",
    str,
    lambda name: "/" not in name,
    unset="",
)
# They must exist. A relative path starts at the model repository.
DIRECTORY = Kind("a directory", Path)
FILE = Kind("a file", Path)


def count(minimum: int, unit: str = "") -> Kind:
    """Make the kind of whole numbers from ``minimum`` on; ``unit`` is such as ``tokens``."""
    expected = f"a whole number of at least {minimum}"
    if unit:
        expected = f"a whole number of {unit}, at least {minimum}"
    return Kind(expected, int, lambda number: number >= minimum)


def auto_or(kind: Kind) -> Kind:
    """Extend a kind by the word ``auto``, which is the default and is read as ``None``."""

    def read(text: str) -> Any:
        if text == "auto":
            return None
        return kind.parse(text)

    return Kind(f"{kind.expected}, or auto", read, default="auto")


def none_if_zero(kind: Kind) -> Kind:
    """Change a kind so that zero, which is the default, is read as ``None``."""
    return Kind(kind.expected, lambda text: kind.parse(text) or None, default="0")


def choice(*words: str, **meanings: Any) -> Kind:
    """Make the kind of these words, of which the first is the default.

    A word is read as itself, one of ``meanings`` as its value there.
    """
    values = {word: word for word in words} | meanings
    return Kind(f"one of: {', '.join(values)}", values.__getitem__, default=next(iter(values)))


# --- declaring ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """The declaration of one parameter.

    ``default`` holds where a configuration does not have the key; ``None`` means that the key is
    required. ``shipped`` is the value in the checked-in ``config.pbtxt`` where that is another
    one. ``env`` names the variable that overrides both, ``draft_env`` the one that does so in its
    place for a draft model (``is_draft``).
    """

    kind: Kind
    help: str
    default: str | None = ""
    env: str = ""
    shipped: str | None = None
    draft_env: str = ""

    @property
    def in_file(self) -> str:
        """The value in the checked-in configuration."""
        if self.shipped is not None:
            return self.shipped
        return self.default or ""

    def parse(self, model: str, key: str, text: str) -> Any:
        """Read the value that ``text`` means; an empty text means the default.

        Raises ``SettingsError``. A path need not exist.
        """
        if "${" in text:
            raise refusal(model, key, text, "fill in the template or remove the parameter")
        text = text or self.default or ""
        if not text:
            return self.kind.unset
        try:
            return self.kind.parse(text)
        except (ValueError, KeyError):
            raise refusal(model, key, text, f"use {self.kind.expected}") from None


def parameters_in(dataclass_type: type) -> dict[str, Parameter]:
    """Return the parameters that a dataclass declares, by key."""
    parameters = {}
    for field in dataclasses.fields(dataclass_type):
        if "parameter" in field.metadata:
            parameters[field.name] = field.metadata["parameter"]
    return parameters


def refusal(model: str, key: str, value: str, remedy: str) -> SettingsError:
    """Make the error for a value that cannot be used."""
    return SettingsError(f"model {model}: parameter {key} = '{value}': {remedy}")


def suggestion(key: str, names: Iterable[str]) -> str:
    """Suggest names instead of an unknown key: the most similar one, or else all of them."""
    names = sorted(names)
    return nearest(key, names) or f"there are: {', '.join(names) or 'none'}"


def nearest(key: str, names: Iterable[str]) -> str:
    """Ask for the name that is most similar to a key; empty where none is similar."""
    by_letters = {name.replace("_", "").lower(): name for name in names}
    letters = key.replace("_", "").lower()
    matches = difflib.get_close_matches(letters, by_letters, n=1, cutoff=0.7)
    if not matches:
        return ""
    return f"did you mean {by_letters[matches[0]]}?"


# --- the parameter `engine` ------------------------------------------------------------------


class EngineKind(str, Enum):
    """A kind of engine; the value is the beginning of its text."""

    TRITON = "triton:"  # a model of this server
    TRITON_GRPC = "triton+grpc://"  # the same model of other servers
    TRTLLM = "trtllm://"  # TensorRT-LLM's own gRPC service


@dataclass(frozen=True)
class EngineChoice:
    """The engine that a text names; ``addresses`` has (``host:port``, model) of each server.

    The address is empty for a model of this server, the model for TensorRT-LLM's service.
    """

    kind: EngineKind
    addresses: tuple[tuple[str, str], ...]

    @property
    def is_elsewhere(self) -> bool:
        """True if no model of this server is needed."""
        return self.kind is not EngineKind.TRITON


def parse_engine(text: str) -> EngineChoice:
    """Read the text of a choice; raises ``ValueError`` for any other form.

    With several addresses of ``triton+grpc``, those that name no model have the first one's.
    """
    for kind in EngineKind:
        if text.startswith(kind.value):
            break
    else:
        raise ValueError(text)
    target = text.removeprefix(kind.value)
    if kind is EngineKind.TRITON:
        if not target or "/" in target or "," in target:
            raise ValueError(text)
        return EngineChoice(kind, (("", target),))
    addresses: list[tuple[str, str]] = []
    for part in target.rstrip("/").split(","):
        address, _, model = part.strip().partition("/")
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535 or "/" in model:
            raise ValueError(text)
        if not model and addresses:
            model = addresses[0][1]
        if bool(model) != (kind is EngineKind.TRITON_GRPC):
            raise ValueError(text)
        addresses.append((address, model))
    return EngineChoice(kind, tuple(addresses))


def _is_local(text: str) -> bool:
    """Return True for an engine whose tokens the Python model ``tensorrt_llm`` sends."""
    if text in ("embedded", "llm_api"):
        return True
    choice = parse_engine(text)
    return choice.kind is EngineKind.TRTLLM and len(choice.addresses) == 1


LOCAL_ENGINE = Kind("embedded, llm_api or trtllm://HOST:PORT", str, _is_local)
ENGINE_CHOICE = Kind(
    "triton:MODEL, triton+grpc://HOST:PORT/MODEL or trtllm://HOST:PORT (several with commas)",
    parse_engine,
)


_DEMO_MODEL = "../assets/demo/target"
_BYTES = count(1, "bytes")
_TOKEN_COUNT = count(0, "tokens")
_SWITCH = choice(auto=None, on=True, off=False)


def own_grpc_url() -> str:
    """Return this server's gRPC port, ``host:port``, of the environment or Triton's default."""
    return os.environ.get(GRPC_URL) or "localhost:8001"


# --- parameters of several models -----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelParameters:
    """The parameters of every model."""

    max_request_bytes: int = _BYTES.parameter(
        "Size of all inputs of a request; adapters and prompt tables may need more.",
        str(RequestLimits.max_request_bytes),
    )

    @property
    def limits(self) -> RequestLimits:
        """The limits of one request; each model has parameters for some of them."""
        limits = {}
        for field in dataclasses.fields(RequestLimits):
            if hasattr(self, field.name):
                limits[field.name] = getattr(self, field.name)
        return RequestLimits(**limits)


@dataclass(frozen=True, kw_only=True)
class _Tokenizer(ModelParameters):
    tokenizer_dir: Path = DIRECTORY.parameter(
        "Directory of the target model's tokenizer.",
        default=None,
        shipped=_DEMO_MODEL,
        env=MODEL_DIR,
    )


@dataclass(frozen=True, kw_only=True)
class _Encoding(_Tokenizer):
    add_special_tokens: bool = FLAG.parameter(
        "Put the tokenizer's special tokens (BOS) before the prompt of a request that does not "
        "say.",
        "true",
    )
    max_prompt_bytes: int = _BYTES.parameter(
        "Size of `text_input`, `messages`, or any other text of one row.",
        str(RequestLimits.max_prompt_bytes),
    )


@dataclass(frozen=True, kw_only=True)
class _Decoding(_Tokenizer):
    skip_special_tokens: bool = FLAG.parameter(
        "Leave special tokens out of the text of a request that does not say.", "true"
    )


@dataclass(frozen=True, kw_only=True)
class _Generating(ModelParameters):
    max_output_tokens: int | None = none_if_zero(_TOKEN_COUNT).parameter(
        "Largest `max_tokens` of a request; 0 = any: the model's longest sequence ends the answer."
    )
    max_logits_bytes: int = count(0, "bytes").parameter(
        "All context and generation logits that a request may ask for, over all sequences and "
        "responses.",
        str(RequestLimits.max_logits_bytes),
    )
    max_guide_bytes: int = _BYTES.parameter(
        "Size of a guide: the JSON schema, regular expression or grammar of guided decoding. "
        "Compiling it costs far more than reading it.",
        str(RequestLimits.max_guide_bytes),
    )
    max_guide_depth: int = count(1).parameter(
        "How deep brackets nest in a guide.", str(RequestLimits.max_guide_depth)
    )
    max_guide_nodes: int = count(1).parameter(
        "Brackets, commas and alternatives in a guide.",
        str(RequestLimits.max_guide_nodes),
    )
    expose_kv_cache_metrics: bool = FLAG.parameter(
        "Answer `return_perf_metrics` also with how many KV-cache blocks were new and how many "
        "were reused, in place of zeros, and tell `cached_tokens` of the prompt. That tells a "
        "caller whether another prompt began with the same text.",
        env="TRTLLM_BLS_EXPOSE_KV_CACHE_METRICS",
    )
    decoupled: bool = FLAG.parameter(
        "Answer in streams. `false`: each request gets exactly one response, so unary `infer` "
        "works and streams are refused. Written in `model_transaction_policy`, not in "
        "`parameters`.",
        shipped="true",
    )

    # These two are no parameters. Triton says which of the model's processes this is, and how many
    # there are.
    instance: int = 0
    instances: int = 1


# --- preprocessing and postprocessing -------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PreprocessingParameters(_Encoding):
    """The parameters of ``preprocessing``."""

    max_request_bytes: int = _BYTES.parameter("Size of all inputs of a request.", "4194304")


@dataclass(frozen=True, kw_only=True)
class PostprocessingParameters(_Decoding):
    """The parameters of ``postprocessing``."""

    max_request_bytes: int = _BYTES.parameter("Size of all inputs of a request.", "4194304")


# --- tensorrt_llm ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EngineParameters(_Generating):
    """The parameters of the Python ``tensorrt_llm``, most of which are for the embedded engine."""

    model_dir: Path = DIRECTORY.parameter(
        "Directory of the checkpoint.",
        default=None,
        shipped=_DEMO_MODEL,
        env=MODEL_DIR,
        draft_env=DRAFT_MODEL_DIR,
    )
    exclude_input_in_output: bool = FLAG.parameter(
        "Leave the prompt out of the answer to a request that does not say.", shipped="true"
    )
    engine: str = LOCAL_ENGINE.parameter(
        "What generates the tokens: the embedded engine, TensorRT-LLM's LLM API in this process, "
        "or TensorRT-LLM's own gRPC service.",
        "embedded",
    )
    model_yaml: Path | None = FILE.parameter(
        "Arguments of `tensorrt_llm.LLM` for the engine `llm_api`, in the form of upstream's "
        "`llmapi` model; they come before the sizes below.",
        env="LLM_CONFIG_PATH",
    )
    gpu_device_ids: str = TEXT.parameter(
        "With the engine `llm_api` and several instances: the GPUs of each, as `0,1;2,3`."
    )
    max_batch: int = count(0).parameter("Sequences that run at once.", "32")
    max_queue_size: int = count(0).parameter(
        "Sequences that may wait; one more is refused. 0 = the engine's choice.", "0"
    )
    max_tokens_per_step: int = _TOKEN_COUNT.parameter(
        "Rows of one forward pass. A prompt is processed in pieces of this size, each of which "
        "delays the running streams.",
        "512",
    )
    max_sequence_tokens: int = _TOKEN_COUNT.parameter(
        "Longest prompt and completion together; 0 = the engine's choice.", "0"
    )
    max_draft_len: int = _TOKEN_COUNT.parameter("Longest draft that a request may bring.", "32")
    guide_compile_seconds: float = SECONDS.parameter(
        "CPU time that compiling one guide may take, in a process apart.", "2"
    )
    threads: int = count(0).parameter(
        "Threads of the engine; 0 = half of the cores.", "0", env=THREADS
    )
    is_draft: bool = FLAG.parameter(
        f"This is the draft model: `{DRAFT_MODEL_DIR}` names its checkpoint."
    )


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """The facts of an engine's ``config.json`` that the orchestrator needs.

    ``configure`` writes these parameters for the C++ backend, which does not read them.
    """

    max_sequence_tokens: int | None = count(1, "tokens").parameter(
        "Longest prompt and completion together."
    )
    max_prompt_tokens: int | None = count(1, "tokens").parameter(
        "Longest prompt; with drafts, the text generated before them and the draft count too."
    )
    max_draft_len: int | None = _TOKEN_COUNT.parameter(
        "Longest draft that a request may bring; 0 = it cannot verify drafts."
    )
    speculative_decoding_mode: str = TEXT.parameter(
        "What the engine was built for, such as `none`, `draft_tokens_external`, `medusa`."
    )
    one_step_requests: bool = FLAG.parameter(
        "Every request ends after one step, also one without a draft."
    )


# --- tensorrt_llm_bls -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BlsParameters(_Encoding, _Decoding, _Generating):
    """The parameters of ``tensorrt_llm_bls``, and which of the model's processes this is."""

    accumulate_tokens: bool = FLAG.parameter(
        "Each response of a stream holds all text so far, not only the new text."
    )
    exclude_input_in_output: bool = FLAG.parameter(
        "Leave the prompt out of an answer that is not streamed, where the request does not say.",
        "true",
    )
    engine: EngineChoice | None = ENGINE_CHOICE.parameter(
        "Where tokens come from: a model of this server, models of other Triton servers, or "
        "TensorRT-LLM's own gRPC service. With several addresses each request goes to the least "
        "loaded one. Empty: `triton:` and `tensorrt_llm_model_name`."
    )
    engine_max_sequence_tokens: int | None = none_if_zero(_TOKEN_COUNT).parameter(
        "Longest prompt and completion together of a `trtllm://` engine, which reports it only if "
        "it was started with `--max_seq_len`; 0 = what it reports."
    )
    engine_resume: bool = FLAG.parameter(
        "With several addresses: a greedy or seeded request continues on another engine when its "
        "own is lost."
    )
    engine_affinity: bool = FLAG.parameter(
        "With several addresses: a request goes to the engine that was last sent the beginning of "
        "its prompt, while that runs at most 25 % more sequences than another."
    )
    engine_transport: str = choice("auto", "grpc").parameter(
        "Whose gRPC port `engine_url` is to be: this server's own (auto), or whichever server's "
        "(grpc).",
        env=ENGINE_TRANSPORT,
    )
    engine_url: str = TEXT.parameter(
        "`host:port` of the gRPC port behind which the engine is.", "localhost:8001", env=GRPC_URL
    )
    engine_tls_ca: Path | None = FILE.parameter(
        "Certificates of the authorities to trust at `engine_url`, in PEM; empty = no TLS."
    )
    engine_tls_cert: Path | None = FILE.parameter(
        "Certificate to show at `engine_url`, in PEM, where that port asks for one."
    )
    engine_tls_key: Path | None = FILE.parameter("Key of `engine_tls_cert`, in PEM.")
    engine_tls_pin: Path | None = FILE.parameter(
        "The certificate that `engine_url` itself shows, first in a PEM file. It is trusted "
        "instead of `engine_tls_ca`, whatever names it has.",
        env=ENGINE_TLS_PIN,
    )
    engine_stall_seconds: float = SECONDS.parameter(
        "Fail a request when its engine has sent nothing for so long; 0 = never.", "120"
    )
    request_timeout_seconds: float = SECONDS.parameter(
        "Time limit of a request that names none; 0 = `max_timeout_seconds`.", "600"
    )
    max_timeout_seconds: float | None = none_if_zero(SECONDS).parameter(
        "Longest time limit that a request may name, and the limit of all requests where "
        "`request_timeout_seconds` is 0; 0 = any.",
        "3600",
    )
    tensors: str = choice("bls", "llmapi").parameter(
        "Inputs and outputs of this model: its own, or those of upstream's `llmapi` model, as "
        "`configure --from` writes them."
    )
    tensorrt_llm_model_name: str = MODEL.parameter("Name of the target model.", ENGINE_NAME)
    tensorrt_llm_draft_model_name: str = MODEL.parameter("Name of the draft model; empty = none.")
    draft_tokenizer_dir: Path | None = DIRECTORY.parameter(
        "Directory of the draft model's tokenizer, which is compared with the target's; empty = "
        "no comparison.",
        env=DRAFT_MODEL_DIR,
    )
    draft_source: str = choice("off", "model", "ngram", "mixed").parameter(
        "Where drafts come from for a request that does not say."
    )
    num_draft_tokens: int | None = none_if_zero(_TOKEN_COUNT).parameter(
        "Length of a draft for a request that does not say, whatever the load; 0 = as many tokens "
        "as pay off."
    )
    max_draft_len: int = _TOKEN_COUNT.parameter(
        "Longest draft, beside the engine's own limit.", "32"
    )
    draft_memory_tokens: int = _TOKEN_COUNT.parameter(
        "Tokens of finished answers that n-gram drafts may come from, for each API key of the "
        "OpenAI API; 0 = none.",
        "0",
    )
    draft_deadline_seconds: float = SECONDS.parameter(
        "How long a round waits for the draft model before it goes on without.", "0.5"
    )
    overlap_drafts: bool | None = _SWITCH.parameter(
        "Draft while the target verifies; auto = where that measures faster."
    )
    unverifiable_drafts: str = choice("refuse", "ignore").parameter(
        "What to do with a request for drafts where the engine verifies none, such as a "
        "`trtllm://` engine: refuse it, or ignore the drafts and decode plainly."
    )
    max_streams: int = count(1).parameter(
        "Requests that the connection to the engine and the server's threads are sized for.",
        "256",
        env=MAX_STREAMS,
    )
    max_running_requests: int | None = auto_or(count(1)).parameter(
        "Requests that may run at once; a request with several sequences or rows counts once for "
        "each. More requests wait. auto = `max_streams`; where the model has several processes, "
        "twice its share of that for each process, since requests are not spread evenly."
    )
    max_queued_requests: int | None = auto_or(count(0)).parameter(
        "Requests that may wait for a running one to end, counted in the same way; one more is "
        "refused at once. auto = 4 times as many as may run."
    )
    max_queue_seconds: float = SECONDS.parameter(
        "Longest time that a request may wait before it is refused; 0 = its own time limit.", "60"
    )
    one_core: bool | None = _SWITCH.parameter(
        "Keep a process's threads on one core while that core has little other work: they run one "
        "at a time, which costs less there. auto = where the machine has at least eight "
        "cores, and four for each process."
    )
    status_dir: str = TEXT.parameter(
        "Directory where the model writes its state and reads whether to drain; empty = none.",
        env=STATUS_DIR,
    )
    log_requests: bool = FLAG.parameter(
        "Log one line for each request when it ends (docs/metrics.md).", "true"
    )
    log_format: str = choice("logfmt", "json").parameter("Form of the line of each request.")
    log_prompts: bool = FLAG.parameter("Log the prompt too, cut to 900 characters.")

    @property
    def max_running(self) -> int:
        """Sequences that this process runs at once."""
        if self.max_running_requests is not None:
            return self.max_running_requests
        return share_of(self.max_streams, self.instances)

    @property
    def max_queued(self) -> int:
        """Sequences that may wait in this process."""
        if self.max_queued_requests is not None:
            return self.max_queued_requests
        return 4 * self.max_running

    @property
    def keeps_one_core(self) -> bool:
        """True if this process keeps its threads on one core.

        By itself it does so where a core is left for it beside those of the engine and the server.
        """
        if self.one_core is not None:
            return self.one_core
        return len(os.sched_getaffinity(0)) >= max(8, 4 * self.instances)


def share_of(limit: int, processes: int) -> int:
    """Return how much of ``limit`` one of several ``processes`` may take."""
    # Requests are not spread evenly: if each process took only its own share, some would wait in
    # one process while another has room.
    return min(limit, max(1, 2 * limit // processes))


_MODEL_PARAMETERS: Mapping[str, type] = {
    BLS_NAME: BlsParameters,
    ENGINE_NAME: EngineParameters,
    PREPROCESSING_NAME: PreprocessingParameters,
    POSTPROCESSING_NAME: PostprocessingParameters,
}


def parameters_of(model: str) -> dict[str, Parameter]:
    """Return the parameters of one of our models, by key; none for another model."""
    if model not in _MODEL_PARAMETERS:
        return {}
    return parameters_in(_MODEL_PARAMETERS[model])


def check(
    model: str, key: str, value: str, parameters: Mapping[str, Parameter] | None = None
) -> None:
    """Raise ``SettingsError`` if our ``model`` has no parameter ``key`` or it cannot be ``value``.

    ``parameters`` are those of the model, where not all of them count. What depends on the machine,
    such as whether a directory exists, is not checked.
    """
    if parameters is None:
        parameters = parameters_of(model)
    if key in parameters:
        parameters[key].parse(model, key, value)
    elif key not in COMMON_KEYS:
        raise SettingsError(f"{model} has no parameter {key}; {suggestion(key, parameters)}")


# --- reading a model's own, once, at load ---------------------------------------------------


class Parameters:
    """A model's parameters as Triton hands them to ``initialize``.

    Variables of ``environment`` override them, except those that ``GIVEN`` lists: so the checked-in
    files load as they stand, and ``serve`` still sets paths, addresses and sizes. Every error names
    the model and the key.
    """

    def __init__(
        self, args: Mapping[str, str], environment: Mapping[str, str] = os.environ
    ) -> None:
        config: Mapping[str, Any] = json.loads(args["model_config"])
        self._model = args.get("model_name") or config["name"]
        self._texts: dict[str, str] = {}
        for key, value in config.get("parameters", {}).items():
            self._texts[key] = value["string_value"]
        decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self._texts["decoupled"] = str(decoupled)
        self._environment = environment
        self._fixed = environment.get(GIVEN, "").split(",")  # which no variable overrides
        self._repository = Path(args["model_repository"]).parent  # the folder of all models
        # As in "tensorrt_llm_bls_0_3": the third number of Triton's name for this process.
        instance = args.get("model_instance_name", "")
        self.instance = int(instance[len(instance.rstrip("0123456789")) :] or 0)
        groups = config.get("instance_group", [])
        self.instances = max(1, sum(int(group.get("count", 1)) for group in groups))

    def read(self, parameters_type: type[_ParametersT]) -> _ParametersT:
        """Fill the dataclass with its parameters' values. Raises ``SettingsError``.

        Its fields ``instance`` and ``instances``, if it has them, are set too.
        """
        parameters = parameters_in(parameters_type)
        values = {}
        for field in dataclasses.fields(parameters_type):  # type: ignore[arg-type]
            if field.name in parameters:
                values[field.name] = self._value(field.name, parameters[field.name])
            else:
                values[field.name] = getattr(self, field.name)
        return parameters_type(**values)

    def _value(self, key: str, parameter: Parameter) -> Any:
        variable = parameter.env
        if parameter.draft_env and is_true(self._texts.get("is_draft", "")):
            variable = parameter.draft_env
        if f"{self._model}.{key}" in self._fixed:
            variable = ""
        text = self._environment.get(variable) or self._texts.get(key, "")
        value = parameter.parse(self._model, key, text)
        if parameter.kind not in (DIRECTORY, FILE):
            return value
        if value is None:
            if parameter.default is None:
                raise refusal(self._model, key, "", f"name {parameter.kind.expected}")
            return None
        # Symbolic links are not resolved: in a repository of links, what is named relative to the
        # repository lies beside the links.
        path = Path(os.path.abspath(self._repository / value))
        if parameter.kind is DIRECTORY and not path.is_dir():
            raise refusal(self._model, key, str(path), "no such directory")
        if parameter.kind is FILE and not path.is_file():
            raise refusal(self._model, key, str(path), "no such file")
        return path
