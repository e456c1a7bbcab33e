"""TensorRT-LLM's releases, and one engine: what its directory says, and what it cannot do.

The engine itself is not opened. Parameters are those of the C++ backend for this engine.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trtllm_bls.errors import SettingsError
from trtllm_bls.settings.cpp_backend import GUIDES, OLDEST, Version, keys_of, parse_version
from trtllm_bls.settings.parameters import is_true
from trtllm_bls.text.tokenizer import Tokenizer
from trtllm_bls.wire.contract import (
    BLS,
    ENGINE,
    ENSEMBLE,
    POSTPROCESSING,
    PREPROCESSING,
    Model,
    Tensor,
)

# --- the releases: their containers, and the models as each of them has them -----------------

CPP_BACKEND = "tensorrtllm"
_NOT_RESHAPED_BEFORE = Version(0, 12)
_NOT_RESHAPED = {"request_output_len", "stop", "streaming"}
_LOGITS_TYPED_SINCE = Version(0, 17)  # FP32 before
_LOGITS = {"draft_logits", "context_logits", "generation_logits"}

# Of each release the last tritonserver:…-trtllm-python-py3, by Triton's published matrix, and the
# transformers that TensorRT-LLM's own package was made with. Of 0.18 its notes and its requirements
# name different ones.
with Path(__file__).with_name("releases.csv").open(encoding="utf-8") as _file:
    RELEASES = {row["release"]: row for row in csv.DictReader(_file)}
# Tensors that not every release has: the first that has each, or never, and the last.
with Path(__file__).with_name("tensors.csv").open(encoding="utf-8") as _file:
    _TENSORS = {row["tensor"]: row for row in csv.DictReader(_file)}
_ALWAYS = {"since": str(OLDEST), "until": ""}


def image_of(version: Version) -> str | None:
    """The public image that serves engines of a release; ``None`` where none is known."""
    row = RELEASES.get(str(version))
    return f"nvcr.io/nvidia/tritonserver:{row['image']}-trtllm-python-py3" if row else None


def models_for(version: Version, logits: str) -> dict[str, Model]:
    """The five models by name, the C++ backend among them.

    A tensor that a release does not know is left out, so that a request for it is refused by name
    instead of being ignored. ``logits`` is the engine's type; the tensors of ``tensorrt_llm_bls``
    are FP32 always.
    """
    typed = logits if version >= _LOGITS_TYPED_SINCE else "FP32"
    not_reshaped = _NOT_RESHAPED if version < _NOT_RESHAPED_BEFORE else set()

    def known(tensors: tuple[Tensor, ...]) -> Iterator[Tensor]:
        for tensor in tensors:
            name, row = tensor.name, _TENSORS.get(tensor.name, _ALWAYS)
            if row["since"] == "never" or version < parse_version(row["since"]):
                continue
            if version <= parse_version(row["until"] or "last"):
                scalar = tensor.scalar and name not in not_reshaped
                dtype = typed if name in _LOGITS else tensor.dtype
                yield replace(tensor, dtype=dtype, scalar=scalar)

    models = {}
    for model in (PREPROCESSING, ENGINE, POSTPROCESSING, ENSEMBLE):
        inputs, outputs = tuple(known(model.inputs)), tuple(known(model.outputs))
        backend = CPP_BACKEND if model is ENGINE else model.backend
        models[model.name] = replace(model, inputs=inputs, outputs=outputs, backend=backend)
    # It asks the engine which tensors the engine has, and takes both spellings.
    return {**models, BLS.name: BLS}


# --- one engine ------------------------------------------------------------------------------

LOGITS_DTYPES = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}
# The bits of ``speculative_decoding_mode`` in config.json, in TensorRT-LLM's order.
_MODES = (
    "none",
    "draft_tokens_external",
    "medusa",
    "lookahead_decoding",
    "explicit_draft_tokens",
    "eagle",
    "ngram",
    "user_provided",
    "save_hidden_states",
    "auto",
)
EXTERNAL_DRAFTS = "draft_tokens_external"
_WORKER = "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"
LOOKAHEAD_SIZES = tuple(f"lookahead_{n}_size" for n in ("window", "ngram", "verification_set"))
# An older release ends every request to an engine for external drafts after one step, also a
# request without a draft.
MANY_STEPS_SINCE = Version(0, 19)


@dataclass(frozen=True, kw_only=True)
class EngineDir:
    """One engine; ``None`` or an empty text is a value that the directory does not have.

    ``ranks`` counts the engine files, one for each GPU; 0 where the engine is not here. KV cache
    reuse, chunked context and the verification of drafts need ``paged_context`` (paged context
    attention), in-flight batching a paged KV cache (``paged_cache``). ``mode`` is the
    ``speculative_decoding_mode`` that the engine was built for.
    """

    path: Path
    ranks: int = 0
    version: str = ""
    logits: str = "FP32"
    vocab_size: int | None = None  # its embeddings, padding included
    max_batch_size: int | None = None
    max_beam_width: int | None = None
    max_sequence_tokens: int | None = None
    max_input_tokens: int | None = None  # named by engines before 0.11 alone
    max_step_tokens: int | None = None  # the rows of one forward pass
    max_draft_tokens: int | None = None
    mode: str = ""
    paged_context: bool | None = None
    paged_cache: bool = True

    def release(self) -> Version | None:
        """The release of TensorRT-LLM; raises ``SettingsError`` if ``version`` names none."""
        return parse_version(self.version, f"{self.path}: version") if self.version else None

    def max_prompt_tokens(self, chunked: bool) -> int | None:
        """The longest prompt: one generated token must fit behind it. Without chunked context the
        whole prompt must fit into one forward pass, too."""
        longest = self.max_input_tokens
        if longest is None and self.max_sequence_tokens is not None:
            longest = self.max_sequence_tokens - 1
        step = None if chunked else self.max_step_tokens
        return min((n for n in (longest, step) if n), default=None)


def read_engine(option: str, directory: Path, check: bool) -> EngineDir:
    """Read the engine in ``directory``; with ``check`` raises ``SettingsError`` if there is none.

    ``option`` is the option that errors name. Without ``check`` the directory may be on another
    machine; if it is here, it is still read.
    """
    path = Path(os.path.abspath(directory))  # links stay links, as in the server's configuration
    file, place = path / "config.json", f"{option} {directory}"
    ranks = len(list(path.glob("rank*.engine")))
    if check and not path.is_dir():
        raise SettingsError(f"{place}: no such directory")
    if check and not (file.is_file() and ranks):
        missing = "rank*.engine" if file.is_file() else "config.json"
        raise SettingsError(f"{place}: no {missing} in it; name the directory trtllm-build wrote")
    if not file.is_file():
        return EngineDir(path=path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        build = config.get("build_config", {})
        pretrained = config.get("pretrained_config", {})
        logits = pretrained.get("logits_dtype", "float32")
        plugins = build.get("plugin_config", {})
        before_0_11 = [int(build.get(key) or 0) for key in ("max_input_len", "max_output_len")]
        world = pretrained.get("mapping", {}).get("world_size") or ranks
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise SettingsError(f"{place}: config.json cannot be read: {error}") from error
    if check and ranks != world:
        what = f"{ranks} rank*.engine in it, it was built for {world} ranks; copy the others too"
        raise SettingsError(f"{place}: {what}")
    if logits not in LOGITS_DTYPES:
        mend = "build it with --logits_dtype float32"
        raise SettingsError(f"{place}: its logits are {logits}; {mend}")
    mode, longest = build.get("speculative_decoding_mode"), build.get("max_seq_len")
    if isinstance(mode, int) and mode > 0:
        bit = mode.bit_length() - 1
        mode = _MODES[bit] if bit < len(_MODES) else f"mode_{mode}"
    return EngineDir(
        path=path,
        ranks=ranks,
        version=str(config.get("version", "")),
        logits=LOGITS_DTYPES[logits],
        vocab_size=pretrained.get("vocab_size"),
        max_batch_size=build.get("max_batch_size"),
        max_beam_width=build.get("max_beam_width"),
        max_sequence_tokens=longest or (sum(before_0_11) if all(before_0_11) else None),
        max_input_tokens=None if longest else build.get("max_input_len"),
        max_step_tokens=build.get("max_num_tokens"),
        max_draft_tokens=build.get("max_draft_len"),
        mode=str(mode or "").rpartition(".")[2].lower(),
        paged_context=plugins.get("use_paged_context_fmha"),
        # An enum since 0.13, a plugin before.
        paged_cache=str(build.get("kv_cache_type") or "paged").lower().endswith("paged")
        and plugins.get("paged_kv_cache") not in (False, "disable"),
    )


# --- its parameters -------------------------------------------------------------------------


def engine_parameters(engine: EngineDir, version: Version) -> dict[str, str]:
    """The parameters that ``version`` of the C++ backend reads."""
    values = {
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": str(engine.path),
        "batch_scheduler_policy": "guaranteed_no_evict",  # the other may pause a request
        "max_beam_width": "1",
        "enable_kv_cache_reuse": "false" if engine.paged_context is False else "true",
        "enable_chunked_context": "false",
        "exclude_input_in_output": "true",
        "normalize_log_probs": "true",
        "cancellation_check_period_ms": "100",
        "stats_check_period_ms": "100",
        "executor_worker_path": _WORKER,
    }
    parameters = {}
    for name, key in keys_of(version).items():
        if name in values or key.is_required(version):
            parameters[name] = values.get(name, "")
    return parameters | {"FORCE_CPU_ONLY_INPUT_TENSORS": "no"}


def engine_facts(
    engine: EngineDir, version: Version, parameters: Mapping[str, str]
) -> dict[str, str]:
    """The ``EngineFacts`` of the engine as it will run with ``parameters``."""
    chunked = is_true(parameters["enable_chunked_context"])
    takes_drafts = _drafting_problem(engine, parameters) == ""
    facts = {
        "max_sequence_tokens": engine.max_sequence_tokens,
        "max_prompt_tokens": engine.max_prompt_tokens(chunked),
        "max_draft_len": engine.max_draft_tokens if takes_drafts else 0,
        "speculative_decoding_mode": engine.mode or None,
        "one_step_requests": "true" if ends_after_one_step(engine, version) else None,
    }
    return {key: str(value) for key, value in facts.items() if value is not None}


def ends_after_one_step(engine: EngineDir, version: Version) -> bool:
    """Whether every request to this engine ends after one step, also one without a draft."""
    return engine.mode == EXTERNAL_DRAFTS and version < MANY_STEPS_SINCE


def misfits(
    model: str, engine: EngineDir, parameters: Mapping[str, str]
) -> Iterator[SettingsError]:
    """What is wrong with each parameter of ``model`` that its engine was not built for, or that
    needs another one."""

    def misfit(key: str, why: str) -> SettingsError:
        return SettingsError(f"--set {model}.{key}={parameters.get(key, '')}: {why}")

    for key in ("enable_kv_cache_reuse", "enable_chunked_context"):
        if engine.paged_context is False and is_true(parameters.get(key, "")):
            what = f"the engine in {engine.path} was built without paged context attention"
            yield misfit(key, f"{what}; build it with --use_paged_context_fmha enable")
    if not engine.paged_cache:
        what = "it has no paged KV cache, which in-flight batching needs"
        mend = "build it with --kv_cache_type paged (before 0.13 --paged_kv_cache enable)"
        yield misfit("gpt_model_path", f"{what}; {mend}")
    beams = parameters.get("max_beam_width", "")
    if engine.max_beam_width and beams.isdecimal() and int(beams) > engine.max_beam_width:
        yield misfit("max_beam_width", f"the engine was built for at most {engine.max_beam_width}")
    # Of each instance of the model one list, as long as the engine has ranks.
    lists = [ids.split(",") for ids in parameters.get("gpu_device_ids", "").split(";") if ids]
    if engine.ranks and any(len(ids) != engine.ranks for ids in lists):
        yield misfit("gpu_device_ids", f"the engine has {engine.ranks} ranks; name as many GPUs")
    if parameters.get("encoder_model_path"):
        yield misfit(
            "encoder_model_path", "models with an encoder are not served here; leave it out"
        )
    absent = [key for key in LOOKAHEAD_SIZES if not parameters.get(key)]
    if parameters.get("decoding_mode") == "lookahead" and absent:
        yield misfit("decoding_mode", f"set {', '.join(absent)} too, as the engine was built for")
    backend, file = (parameters.get(key) for key in GUIDES)
    if backend and not file:
        page = "docs/engines.md#guided-decoding"
        yield misfit(GUIDES[0], f"without {GUIDES[1]} nothing would be guided; set it too ({page})")
    if file and not backend:
        yield misfit(GUIDES[1], f"nobody reads it without {GUIDES[0]}; set that to xgrammar")


def check_releases(engines: Mapping[str, EngineDir], version: Version | None) -> None:
    """Raises ``SettingsError`` for engines of different releases, or of another than ``version``
    (``None`` = any). An engine whose directory names no release is not judged."""
    for name, engine in engines.items():
        if not re.match(r"v?\d", engine.version):
            continue
        release = engine.release()
        version = version or release
        if release != version:
            what = f"is of TensorRT-LLM {release}, which {version} does not load; build it again"
            raise SettingsError(f"{name}: the engine in {engine.path} {what}")


def check_vocabulary(name: str, engine: EngineDir, tokenizer: Tokenizer) -> None:
    """Raises ``SettingsError`` for a tokenizer of another model: of tokens without embeddings."""
    trained_ids = set(range(tokenizer.vocab_size)) - tokenizer.added_ids
    largest, size = max(trained_ids, default=0), engine.vocab_size
    if size and largest >= size:
        mend = "use the tokenizer that the model was trained with"
        what = f"the tokenizer has ids up to {largest}, the engine {size} embeddings"
        raise SettingsError(f"{name}: {what}; {mend}")


def _drafting_problem(engine: EngineDir, parameters: Mapping[str, str]) -> str:
    """Why the engine cannot verify drafts; empty where it can, as far as its directory says."""
    build = "build it with --speculative_decoding_mode draft_tokens_external --max_draft_len 10"
    if engine.mode not in ("", EXTERNAL_DRAFTS):
        return f"was built for speculative_decoding_mode {engine.mode}; {build}"
    if engine.max_draft_tokens == 0:
        return f"cannot verify drafts; {build}"
    if engine.paged_context is False:
        return "has no paged context attention; build it with --use_paged_context_fmha enable"
    if not is_true(parameters["enable_kv_cache_reuse"]):
        return "cannot verify drafts without its KV cache; set enable_kv_cache_reuse=true"
    return ""


def check_target(option: str, engine: EngineDir, parameters: Mapping[str, str]) -> None:
    """Raises ``SettingsError`` naming ``option`` if the engine cannot verify drafts."""
    if problem := _drafting_problem(engine, parameters):
        raise SettingsError(f"{option}: the engine in {engine.path} {problem}")


def check_drafting(
    engines: Mapping[str, EngineDir], parameters: Mapping[str, Mapping[str, str]], version: Version
) -> None:
    """Raises ``SettingsError`` if a target and a draft engine cannot work together."""
    key = "speculative_decoding_fast_logits"
    for name, engine in engines.items():
        if is_true(parameters[name].get(key, "")):
            what = "the draft would send a ticket instead of logits"
            mend = f"which {BLS.name} cannot pass on; leave it false"
            raise SettingsError(f"--set {name}.{key}: {what}, {mend}")
        if name != ENGINE.name and ends_after_one_step(engine, version):
            mode = f"built for speculative_decoding_mode {engine.mode}"
            what = f"the engine in {engine.path} was {mode} and would draft one token only"
            mend = f"build {name} without a speculative_decoding_mode"
            raise SettingsError(f"--draft-engine-dir: {what}; {mend}")


def warnings(
    engine: EngineDir, version: Version, models: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    """Surprises of a target engine that is served with these parameters of the models."""
    parameters = models[ENGINE.name]
    if engine.paged_context is False:
        yield "KV cache reuse is off: the engine was built without paged context attention"
    if ends_after_one_step(engine, version):
        what = f"an engine built for {EXTERNAL_DRAFTS} ends every request after one step"
        where = "(draft_source off, several sequences, the ensemble)"
        mend = f"requests without drafts {where} need an engine without it"
        yield f"on TensorRT-LLM {version} {what}: {mend}; {ENGINE.name} has one_step_requests=true"
    elif engine.mode == EXTERNAL_DRAFTS and version == MANY_STEPS_SINCE:
        yield (
            f"it is not certain that 0.19 lets requests without drafts run on with an engine "
            f"built for {EXTERNAL_DRAFTS}: try one, and set {ENGINE.name}.one_step_requests=true "
            "if it ends after one token"
        )
    if not engine.mode and engine.max_draft_tokens:
        yield "config.json has no speculative_decoding_mode: the engine may refuse drafts"
    longest = engine.max_prompt_tokens(chunked=True)
    limit = int(parameters.get("max_prompt_tokens") or 0)
    if longest and limit < longest:
        drafts = models[BLS.name]["draft_source"] != "off"
        what = f"prompts{' and, with drafts, whole answers' * drafts} are limited to {limit} tokens"
        yield f"{what} by max_num_tokens; --chunked-context would allow {longest}"
    if engine.mode == "lookahead_decoding" and parameters.get("decoding_mode") != "lookahead":
        mend = f"set decoding_mode=lookahead and {', '.join(LOOKAHEAD_SIZES)}"
        yield f"the engine was built for lookahead decoding, which is off: {mend}"
