"""The table of parameters: key, models, what a value may be, default, variable, meaning."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from trtllm_bls.errors import SettingsError
from trtllm_bls.parameters.engine_choice import ENGINE, LOCAL_ENGINE
from trtllm_bls.parameters.kinds import (
    DIRECTORY,
    FILE,
    FLAG,
    MODEL,
    NUMBER,
    TEXT,
    Parameter,
    choice,
    count,
)
from trtllm_bls.parameters.limits import LIMITS

MODEL_DIR = "TRTLLM_BLS_MODEL_DIR"
DRAFT_MODEL_DIR = "TRTLLM_BLS_DRAFT_MODEL_DIR"
GRPC_URL = "TRTLLM_BLS_GRPC_URL"
MAX_STREAMS = "TRTLLM_BLS_MAX_STREAMS"
THREADS = "TRTLLM_BLS_ENGINE_THREADS"
STATUS_DIR = "TRTLLM_BLS_STATUS_DIR"
ENGINE_TLS_PIN = "TRTLLM_BLS_ENGINE_TLS_PIN"
GIVEN = "TRTLLM_BLS_GIVEN"  # MODEL.PARAMETER, ...: what no variable overrides

_BLS, _ENGINE = ("tensorrt_llm_bls",), ("tensorrt_llm",)
_PRE, _POST = ("preprocessing",), ("postprocessing",)
_DEMO = "../assets/demo/target"

TABLE = (
    Parameter(
        "tokenizer_dir",
        (*_PRE, *_POST, *_BLS),
        DIRECTORY,
        "",
        "Directory of the target model's tokenizer.",
        env=MODEL_DIR,
        shipped=_DEMO,
    ),
    Parameter(
        "add_special_tokens",
        (*_PRE, *_BLS),
        FLAG,
        "true",
        "Put the tokenizer's special tokens (BOS) to a prompt that does not say.",
    ),
    Parameter(
        "skip_special_tokens",
        (*_POST, *_BLS),
        FLAG,
        "true",
        "Leave special tokens out of the text.",
    ),
    Parameter(
        "accumulate_tokens",
        _BLS,
        FLAG,
        "false",
        "Each response of a stream holds all text so far, not the new text alone.",
    ),
    Parameter(
        "engine",
        _BLS,
        ENGINE,
        "",
        "Where tokens come from: a model of this server, of other Triton servers, or "
        "TensorRT-LLM's own gRPC service. Of several addresses each request takes the least "
        "loaded. Empty: `triton:` and `tensorrt_llm_model_name`.",
    ),
    Parameter(
        "engine_max_sequence_tokens",
        _BLS,
        count(0),
        "0",
        "Longest prompt and completion together, in tokens, of a `trtllm://` engine, which does "
        "not tell unless it was started with `--max_seq_len`; 0 = what it tells.",
    ),
    Parameter(
        "engine_resume",
        _BLS,
        FLAG,
        "false",
        "With several addresses: a greedy or seeded request goes on when its engine is lost.",
    ),
    Parameter(
        "engine_transport",
        _BLS,
        choice("auto", "bls", "grpc"),
        "auto",
        "How the engine is called: over Triton's gRPC port, inside Triton, or whichever works.",
    ),
    Parameter(
        "engine_url",
        _BLS,
        TEXT,
        "localhost:8001",
        "`host:port` of the gRPC port behind which the engine is.",
        env=GRPC_URL,
    ),
    Parameter(
        "engine_tls_ca",
        _BLS,
        FILE,
        "",
        "Certificates of whom to trust at `engine_url`, in PEM; empty = no TLS.",
        optional=True,
    ),
    Parameter(
        "engine_tls_cert",
        _BLS,
        FILE,
        "",
        "Certificate to show at `engine_url`, in PEM, where that port asks for one.",
        optional=True,
    ),
    Parameter(
        "engine_tls_key",
        _BLS,
        FILE,
        "",
        "Key of `engine_tls_cert`, in PEM.",
        optional=True,
    ),
    Parameter(
        "engine_tls_pin",
        _BLS,
        FILE,
        "",
        "The certificate that `engine_url` itself shows, first in a PEM file: trusted instead of "
        "`engine_tls_ca`, whatever its names.",
        env=ENGINE_TLS_PIN,
        optional=True,
    ),
    Parameter(
        "engine_stall_seconds",
        _BLS,
        NUMBER,
        "120",
        "Give an engine up that sends nothing for so long; 0 = never.",
    ),
    Parameter(
        "request_timeout_seconds",
        _BLS,
        NUMBER,
        "600",
        "Time limit of a request that names none; 0 = `max_timeout_seconds`.",
    ),
    Parameter(
        "tensorrt_llm_model_name",
        _BLS,
        MODEL,
        "tensorrt_llm",
        "Name of the target model.",
    ),
    Parameter(
        "tensorrt_llm_draft_model_name",
        _BLS,
        MODEL,
        "",
        "Name of the draft model; empty = none.",
    ),
    Parameter(
        "draft_tokenizer_dir",
        _BLS,
        DIRECTORY,
        "",
        "Directory of the draft model's tokenizer, to compare with the target's; empty: not done.",
        env=DRAFT_MODEL_DIR,
        optional=True,
    ),
    Parameter(
        "draft_source",
        _BLS,
        choice("off", "model", "ngram", "mixed"),
        "off",
        "Where drafts come from for a request that does not say.",
    ),
    Parameter(
        "num_draft_tokens",
        _BLS,
        count(0),
        "0",
        "Tokens per draft for a request that does not say; 0 = as many as pay off.",
    ),
    Parameter(
        "max_draft_len",
        _BLS,
        count(0),
        "10",
        "Longest draft, in tokens, beside the engine's own limit.",
    ),
    Parameter(
        "draft_deadline_seconds",
        _BLS,
        NUMBER,
        "0.5",
        "A round goes on without a draft that takes longer.",
    ),
    Parameter(
        "overlap_drafts",
        _BLS,
        choice("auto", "on", "off"),
        "auto",
        "Draft while the target verifies; auto = where that measures faster.",
    ),
    Parameter(
        "unverifiable_drafts",
        _BLS,
        choice("refuse", "ignore"),
        "refuse",
        "What a request for drafts meets where the engine verifies none, as a `trtllm://` one: a "
        "refusal, or plain decoding.",
    ),
    Parameter(
        "max_streams",
        _BLS,
        count(1),
        "256",
        "Requests that the connection to the engine and the server's threads are made for.",
        env=MAX_STREAMS,
    ),
    Parameter(
        "status_dir",
        _BLS,
        TEXT,
        "",
        "Directory where the model tells what it does, and is asked to drain; empty = none.",
        env=STATUS_DIR,
    ),
    Parameter(
        "log_requests",
        _BLS,
        FLAG,
        "true",
        "Log one line per request when it is over (docs/metrics.md).",
    ),
    Parameter(
        "log_format",
        _BLS,
        choice("logfmt", "json"),
        "logfmt",
        "Form of that line.",
    ),
    Parameter(
        "log_prompts",
        _BLS,
        FLAG,
        "false",
        "Log the prompt too, cut to 900 characters.",
    ),
    Parameter(
        "decoupled",
        _BLS,
        FLAG,
        "false",
        "Answer in streams. `false`: each request gets exactly one response, so unary `infer` "
        "works and streams are refused. Stands in `model_transaction_policy`, not in `parameters`.",
        shipped="true",
    ),
    Parameter(
        "model_dir",
        _ENGINE,
        DIRECTORY,
        "",
        "Directory of the checkpoint.",
        env=MODEL_DIR,
        shipped=_DEMO,
    ),
    Parameter(
        "exclude_input_in_output",
        _ENGINE,
        FLAG,
        "false",
        "Leave the prompt out of the answer to a request that does not say.",
        shipped="true",
    ),
    Parameter(
        "engine",
        _ENGINE,
        LOCAL_ENGINE,
        "embedded",
        "What makes the tokens: the embedded engine, TensorRT-LLM's LLM API in this process, or "
        "TensorRT-LLM's own gRPC service.",
    ),
    Parameter("max_batch", _ENGINE, count(0), "32", "Sequences that run at once."),
    Parameter(
        "max_queue_size",
        _ENGINE,
        count(0),
        "0",
        "Sequences that may wait; one more is refused. 0 = the engine's choice.",
    ),
    Parameter(
        "max_tokens_per_step",
        _ENGINE,
        count(0),
        "512",
        "Rows of one forward pass; so many of a prompt hold up running streams.",
    ),
    Parameter(
        "max_sequence_tokens",
        _ENGINE,
        count(0),
        "0",
        "Longest prompt and completion together, in tokens; 0 = the engine's choice.",
    ),
    Parameter(
        "max_draft_len",
        _ENGINE,
        count(0),
        "16",
        "Longest draft that a request may bring, in tokens.",
    ),
    Parameter(
        "threads",
        _ENGINE,
        count(0),
        "0",
        "Threads of the engine; 0 = half of the cores.",
        env=THREADS,
    ),
    Parameter(
        "is_draft",
        _ENGINE,
        FLAG,
        "false",
        f"This is the draft model: its checkpoint follows `{DRAFT_MODEL_DIR}`.",
    ),
    *LIMITS,
)

# What an engine's configuration tells the orchestrator. ``configure`` writes them for the C++
# backend, which does not read them.
ENGINE_FACTS = (
    Parameter(
        "max_sequence_tokens",
        _ENGINE,
        count(1),
        "",
        "Longest prompt and completion together, in tokens.",
    ),
    Parameter(
        "max_prompt_tokens",
        _ENGINE,
        count(1),
        "",
        "Longest prompt, in tokens, drafts and what was generated before them included.",
    ),
    Parameter(
        "max_draft_len",
        _ENGINE,
        count(0),
        "",
        "Longest draft that a request may bring, in tokens; 0 = it cannot verify drafts.",
    ),
    Parameter(
        "speculative_decoding_mode",
        _ENGINE,
        TEXT,
        "",
        "What the engine was built for, such as `none`, `draft_tokens_external`, `medusa`.",
    ),
    Parameter(
        "one_step_requests",
        _ENGINE,
        FLAG,
        "false",
        "Every request ends after one step, also one without a draft.",
    ),
)

# Triton's own keys, which any model may have.
TRITON_KEYS = frozenset({"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"})


def rows_of(model: str) -> dict[str, Parameter]:
    """The rows of one of our models, by key."""
    return {row.key: row for row in TABLE if model in row.models}


def check(model: str, key: str, value: str, table: Iterable[Parameter] = TABLE) -> None:
    """Raises ``SettingsError`` if our ``model`` has no parameter ``key`` or it cannot be ``value``.

    What depends on the machine, as whether a directory exists, is not looked at.
    """
    rows = {row.key: row for row in table if model in row.models}
    if key in rows:
        parsed(model, rows[key], value)
    elif key not in TRITON_KEYS:
        raise SettingsError(f"{model} has no parameter {key}; {suggestion(key, rows)}")


def suggestion(key: str, known: Iterable[str]) -> str:
    """What to write instead of an unknown key: the one that looks like it, or all there are."""
    spelled = {_letters(name): name for name in known}
    close = difflib.get_close_matches(_letters(key), spelled, n=1, cutoff=0.7)
    if close:
        return f"did you mean {spelled[close[0]]}?"
    return f"there are: {', '.join(sorted(spelled.values())) or 'none'}"


def _letters(key: str) -> str:
    return key.replace("_", "").lower()


def parsed(model: str, row: Parameter, value: str) -> Any:
    """``value`` in the type of the row's kind; an empty one counts as not set.

    Raises ``SettingsError``.
    """
    if "${" in value:
        raise error(model, row.key, value, "fill in the template or remove the parameter")
    if not value and not row.default:
        return None if row.kind in (DIRECTORY, FILE) else value
    try:
        return row.kind.parse(value or row.default)
    except ValueError:
        raise error(model, row.key, value, f"use {row.kind.expected}") from None


def error(model: str, key: str, value: str, mend: str) -> SettingsError:
    """What to raise for a value that cannot be used."""
    return SettingsError(f"model {model}: parameter {key} = '{value}': {mend}")
