"""The table of parameters: key, models, what a value may be, default, variable, meaning."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
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
    Kind,
    Parameter,
    choice,
    count,
    count_or_auto,
)

MODEL_DIR = "TRTLLM_BLS_MODEL_DIR"
DRAFT_MODEL_DIR = "TRTLLM_BLS_DRAFT_MODEL_DIR"
GRPC_URL = "TRTLLM_BLS_GRPC_URL"
MAX_STREAMS = "TRTLLM_BLS_MAX_STREAMS"
THREADS = "TRTLLM_BLS_ENGINE_THREADS"
STATUS_DIR = "TRTLLM_BLS_STATUS_DIR"
ENGINE_TLS_PIN = "TRTLLM_BLS_ENGINE_TLS_PIN"
ENGINE_TRANSPORT = "TRTLLM_BLS_ENGINE_TRANSPORT"
GIVEN = "TRTLLM_BLS_GIVEN"  # MODEL.PARAMETER, ...: what no variable overrides

_MODELS = {
    "bls": "tensorrt_llm_bls",
    "engine": "tensorrt_llm",
    "pre": "preprocessing",
    "post": "postprocessing",
}
_KINDS = {
    "flag": FLAG,
    "number": NUMBER,
    "text": TEXT,
    "model": MODEL,
    "directory": DIRECTORY,
    "file": FILE,
    "engine": ENGINE,
    "local_engine": LOCAL_ENGINE,
    "count>=0": count(0),
    "count>=1": count(1),
    "count>=0|auto": count_or_auto(0),
    "count>=1|auto": count_or_auto(1),
}

# Key, models, kind (of ``_KINDS``, or words to choose from); what else ``Parameter`` has, where it
# is not empty; below, the meaning.
_ROWS = """
tokenizer_dir  pre,post,bls  directory  shipped=../assets/demo/target  env=TRTLLM_BLS_MODEL_DIR
    Directory of the target model's tokenizer.
add_special_tokens  pre,bls  flag  default=true
    Put the tokenizer's special tokens (BOS) to a prompt that does not say.
skip_special_tokens  post,bls  flag  default=true
    Leave special tokens out of the text.
accumulate_tokens  bls  flag  default=false
    Each response of a stream holds all text so far, not the new text alone.
engine  bls  engine
    Where tokens come from: a model of this server, of other Triton servers, or TensorRT-LLM's
    own gRPC service. Of several addresses each request takes the least loaded. Empty:
    `triton:` and `tensorrt_llm_model_name`.
engine_max_sequence_tokens  bls  count>=0  default=0
    Longest prompt and completion together, in tokens, of a `trtllm://` engine, which does not
    tell unless it was started with `--max_seq_len`; 0 = what it tells.
engine_resume  bls  flag  default=false
    With several addresses: a greedy or seeded request goes on when its engine is lost.
engine_transport  bls  auto|bls|grpc  default=auto  env=TRTLLM_BLS_ENGINE_TRANSPORT
    How the engine is called: over this server's own gRPC port (`auto`), over the gRPC port at
    `engine_url` whosever it is (`grpc`), or inside Triton (`bls`), for servers without gRPC.
engine_url  bls  text  default=localhost:8001  env=TRTLLM_BLS_GRPC_URL
    `host:port` of the gRPC port behind which the engine is.
engine_tls_ca  bls  file  optional
    Certificates of whom to trust at `engine_url`, in PEM; empty = no TLS.
engine_tls_cert  bls  file  optional
    Certificate to show at `engine_url`, in PEM, where that port asks for one.
engine_tls_key  bls  file  optional
    Key of `engine_tls_cert`, in PEM.
engine_tls_pin  bls  file  env=TRTLLM_BLS_ENGINE_TLS_PIN  optional
    The certificate that `engine_url` itself shows, first in a PEM file: trusted instead of
    `engine_tls_ca`, whatever its names.
engine_stall_seconds  bls  number  default=120
    Give an engine up that sends nothing for so long; 0 = never.
request_timeout_seconds  bls  number  default=600
    Time limit of a request that names none; 0 = `max_timeout_seconds`.
tensorrt_llm_model_name  bls  model  default=tensorrt_llm
    Name of the target model.
tensorrt_llm_draft_model_name  bls  model
    Name of the draft model; empty = none.
draft_tokenizer_dir  bls  directory  env=TRTLLM_BLS_DRAFT_MODEL_DIR  optional
    Directory of the draft model's tokenizer, to compare with the target's; empty: not done.
draft_source  bls  off|model|ngram|mixed  default=off
    Where drafts come from for a request that does not say.
num_draft_tokens  bls  count>=0  default=0
    Tokens per draft for a request that does not say; 0 = as many as pay off.
max_draft_len  bls  count>=0  default=10
    Longest draft, in tokens, beside the engine's own limit.
draft_deadline_seconds  bls  number  default=0.5
    A round goes on without a draft that takes longer.
overlap_drafts  bls  auto|on|off  default=auto
    Draft while the target verifies; auto = where that measures faster.
unverifiable_drafts  bls  refuse|ignore  default=refuse
    What a request for drafts meets where the engine verifies none, as a `trtllm://` one: a
    refusal, or plain decoding.
max_streams  bls  count>=1  default=256  env=TRTLLM_BLS_MAX_STREAMS
    Requests that the connection to the engine and the server's threads are made for.
one_core  bls  auto|on|off  default=auto
    Keep a process's threads on one core while that core has little other work: they run one at
    a time, and cheaper so. auto = where the model has one process, or the machine four cores
    for each.
status_dir  bls  text  env=TRTLLM_BLS_STATUS_DIR
    Directory where the model tells what it does, and is asked to drain; empty = none.
log_requests  bls  flag  default=true
    Log one line per request when it is over (docs/metrics.md).
log_format  bls  logfmt|json  default=logfmt
    Form of that line.
log_prompts  bls  flag  default=false
    Log the prompt too, cut to 900 characters.
decoupled  bls  flag  default=false  shipped=true
    Answer in streams. `false`: each request gets exactly one response, so unary `infer` works
    and streams are refused. Stands in `model_transaction_policy`, not in `parameters`.
model_dir  engine  directory  shipped=../assets/demo/target  env=TRTLLM_BLS_MODEL_DIR
    Directory of the checkpoint.
exclude_input_in_output  engine  flag  default=false  shipped=true
    Leave the prompt out of the answer to a request that does not say.
engine  engine  local_engine  default=embedded
    What makes the tokens: the embedded engine, TensorRT-LLM's LLM API in this process, or
    TensorRT-LLM's own gRPC service.
max_batch  engine  count>=0  default=32
    Sequences that run at once.
max_queue_size  engine  count>=0  default=0
    Sequences that may wait; one more is refused. 0 = the engine's choice.
max_tokens_per_step  engine  count>=0  default=512
    Rows of one forward pass; so many of a prompt hold up running streams.
max_sequence_tokens  engine  count>=0  default=0
    Longest prompt and completion together, in tokens; 0 = the engine's choice.
max_draft_len  engine  count>=0  default=16
    Longest draft that a request may bring, in tokens.
threads  engine  count>=0  default=0  env=TRTLLM_BLS_ENGINE_THREADS
    Threads of the engine; 0 = half of the cores.
is_draft  engine  flag  default=false
    This is the draft model: its checkpoint follows `TRTLLM_BLS_DRAFT_MODEL_DIR`.
max_running_requests  bls  count>=1|auto  default=auto
    Requests that may run at once; one with several sequences or rows counts once for each.
    More wait. auto = `max_streams`; where the model has several processes, for each of them
    twice its share of that, since requests are not spread evenly.
max_queued_requests  bls  count>=0|auto  default=auto
    Requests that may wait for one that runs to end, counted alike; one more is refused at
    once. auto = 4 times as many as may run.
max_queue_seconds  bls  number  default=60
    Longest time that a request may wait so; then it is refused. 0 = its own time limit.
max_timeout_seconds  bls  number  default=3600
    Longest time limit that a request may name, and the limit of all where
    `request_timeout_seconds` is 0; 0 = any.
max_prompt_bytes  pre,bls  count>=1  default=1048576
    Bytes of `text_input`, of `messages`, or of any other text of one row.
max_request_bytes  engine,bls  count>=1  default=67108864
    Bytes of all inputs of a request together; adapters and prompt tables may need more.
max_request_bytes  pre,post  count>=1  default=4194304
    Bytes of all inputs of a request together.
max_output_tokens  engine,bls  count>=0  default=0
    Largest `max_tokens` of a request; 0 = any: the model's longest sequence ends the answer.
max_logits_bytes  engine,bls  count>=0  default=268435456
    Bytes of all context and generation logits that a request may ask for, over all sequences
    and responses.
expose_kv_cache_metrics  engine,bls  flag  default=false
    Answer `return_perf_metrics` also with how many KV-cache blocks were new and how many
    reused, which tells a caller whether somebody else's prompt began alike.
"""

# What an engine's configuration tells the orchestrator. ``configure`` writes them for the C++
# backend, which does not read them.
_FACT_ROWS = """
max_sequence_tokens  engine  count>=1
    Longest prompt and completion together, in tokens.
max_prompt_tokens  engine  count>=1
    Longest prompt, in tokens, drafts and what was generated before them included.
max_draft_len  engine  count>=0
    Longest draft that a request may bring, in tokens; 0 = it cannot verify drafts.
speculative_decoding_mode  engine  text
    What the engine was built for, such as `none`, `draft_tokens_external`, `medusa`.
one_step_requests  engine  flag  default=false
    Every request ends after one step, also one without a draft.
"""


def _read(text: str) -> Iterator[Parameter]:
    """The rows of a table written as above."""
    for row, meaning in re.findall(r"^(\S.*)\n((?:    .*\n)+)", text, re.MULTILINE):
        key, models, kind, *rest = row.split()
        told = dict(word.split("=", 1) for word in rest if word != "optional")
        yield Parameter(
            key=key,
            models=tuple(_MODELS[model] for model in models.split(",")),
            kind=_kind(kind),
            default=told.pop("default", ""),
            meaning=" ".join(meaning.split()),
            optional="optional" in rest,
            **told,
        )


def _kind(name: str) -> Kind:
    return _KINDS.get(name) or choice(*name.split("|"))


TABLE = tuple(_read(_ROWS))
ENGINE_FACTS = tuple(_read(_FACT_ROWS))

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
