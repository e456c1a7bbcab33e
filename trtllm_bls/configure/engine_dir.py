"""TensorRT-LLM's releases, and one engine: the facts of its directory, and its limits.

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
from trtllm_bls.settings.cpp_backend import GUIDES, Version, keys_of, parse_version
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
_RESHAPED_SINCE = Version(0, 12)
_RESHAPED_LATER = {"request_output_len", "stop", "streaming"}


def _rows(file_name: str, key: str) -> dict[str, dict[str, str]]:
    """Return the rows of a table beside this file, by the value in their column ``key``."""
    with Path(__file__).with_name(file_name).open(encoding="utf-8") as file:
        return {row[key]: row for row in csv.DictReader(file)}


_LOGITS_TYPED_SINCE = Version(0, 17)  # FP32 before
_LOGITS = {"draft_logits", "context_logits", "generation_logits"}

# A row per release: the last tritonserver:…-trtllm-python-py3, by Triton's published matrix, and
# the transformers that TensorRT-LLM's own package was made with. The notes of 0.18 and its
# requirements name different ones.
RELEASES = _rows("releases.csv", "release")
# A row per tensor that not every release has: the first release with it, or never, and the last.
_TENSORS = _rows("tensors.csv", "tensor")


def image_of(version: Version) -> str | None:
    """Return the public image that serves engines of a release; ``None`` where none is known."""
    row = RELEASES.get(str(version))
    if row is None:
        return None
    return f"nvcr.io/nvidia/tritonserver:{row['image']}-trtllm-python-py3"


def models_for(version: Version, logits: str) -> dict[str, Model]:
    """Return the five models by name, the C++ backend among them.

    A tensor that a release does not know is left out, so that a request for it is refused by name
    instead of being ignored. ``logits`` is the engine's type; the tensors of ``tensorrt_llm_bls``
    are FP32 always.
    """
    if version < _LOGITS_TYPED_SINCE:
        logits = "FP32"
    models = {}
    for model in (PREPROCESSING, ENGINE, POSTPROCESSING, ENSEMBLE):
        inputs = tuple(_tensors_of(model.inputs, version, logits))
        outputs = tuple(_tensors_of(model.outputs, version, logits))
        models[model.name] = replace(model, inputs=inputs, outputs=outputs)
    models[ENGINE.name] = replace(models[ENGINE.name], backend=CPP_BACKEND)
    # ``tensorrt_llm_bls`` asks the engine which tensors it has, and takes both spellings.
    models[BLS.name] = BLS
    return models


def _tensors_of(tensors: tuple[Tensor, ...], version: Version, logits: str) -> Iterator[Tensor]:
    """Yield the tensors that a release has, as it has them."""
    for tensor in tensors:
        if row := _TENSORS.get(tensor.name):
            if row["since"] == "never" or version < parse_version(row["since"]):
                continue
            if version > parse_version(row["until"] or "last"):
                continue
        if version < _RESHAPED_SINCE and tensor.name in _RESHAPED_LATER:
            tensor = replace(tensor, scalar=False)
        if tensor.name in _LOGITS:
            tensor = replace(tensor, dtype=logits)
        yield tensor


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
LOOKAHEAD_SIZES = (
    "lookahead_window_size",
    "lookahead_ngram_size",
    "lookahead_verification_set_size",
)
# An older release ends every request to an engine for external drafts after one step, also a
# request without a draft.
MANY_STEPS_SINCE = Version(0, 19)


@dataclass(frozen=True, kw_only=True)
class EngineDir:
    """An engine; ``None`` or an empty text is a value that the directory does not have.

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
        """Return the release of TensorRT-LLM, if the directory names one.

        Raises ``SettingsError`` where ``version`` is no release.
        """
        if not self.version:
            return None
        return parse_version(self.version, f"{self.path}: version")

    def max_prompt_tokens(self, chunked: bool) -> int | None:
        """Return the longest prompt, behind which one generated token must fit.

        Without chunked context the whole prompt must fit into one forward pass, too.
        """
        limits = []
        if self.max_input_tokens is not None:
            limits.append(self.max_input_tokens)
        elif self.max_sequence_tokens is not None:
            limits.append(self.max_sequence_tokens - 1)
        if not chunked and self.max_step_tokens is not None:
            limits.append(self.max_step_tokens)
        return min(filter(None, limits), default=None)


def read_engine(option: str, directory: Path, check: bool) -> EngineDir:
    """Read the engine in ``directory``; with ``check`` raises ``SettingsError`` if there is none.

    ``option`` is the option that errors name. Without ``check`` the directory may be on another
    machine; if it is here, it is still read.
    """
    path = Path(os.path.abspath(directory))  # links stay links, as in the server's configuration
    file = path / "config.json"
    place = f"{option} {directory}"
    ranks = len(list(path.glob("rank*.engine")))
    if check and not path.is_dir():
        raise SettingsError(f"{place}: no such directory")
    if not file.is_file():
        if check:
            raise SettingsError(
                f"{place}: no config.json in it; name the directory trtllm-build wrote"
            )
        return EngineDir(path=path)
    if check and not ranks:
        raise SettingsError(
            f"{place}: no rank*.engine in it; name the directory trtllm-build wrote"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        build = config.get("build_config", {})
        pretrained = config.get("pretrained_config", {})
        logits = pretrained.get("logits_dtype", "float32")
        plugins = build.get("plugin_config", {})
        # Engines before 0.11 have these two instead of max_seq_len.
        max_input_len = int(build.get("max_input_len") or 0)
        max_output_len = int(build.get("max_output_len") or 0)
        world_size = pretrained.get("mapping", {}).get("world_size") or ranks
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise SettingsError(f"{place}: config.json cannot be read: {error}") from error
    if check and ranks != world_size:
        raise SettingsError(
            f"{place}: {ranks} rank*.engine in it, it was built for {world_size} ranks; "
            "copy the others too"
        )
    if logits not in LOGITS_DTYPES:
        raise SettingsError(
            f"{place}: its logits are {logits}; build it with --logits_dtype float32"
        )
    max_sequence_tokens = build.get("max_seq_len") or None
    max_input_tokens = None
    if max_sequence_tokens is None:
        max_input_tokens = build.get("max_input_len")
        if max_input_len and max_output_len:
            max_sequence_tokens = max_input_len + max_output_len
    return EngineDir(
        path=path,
        ranks=ranks,
        version=str(config.get("version", "")),
        logits=LOGITS_DTYPES[logits],
        vocab_size=pretrained.get("vocab_size"),
        max_batch_size=build.get("max_batch_size"),
        max_beam_width=build.get("max_beam_width"),
        max_sequence_tokens=max_sequence_tokens,
        max_input_tokens=max_input_tokens,
        max_step_tokens=build.get("max_num_tokens"),
        max_draft_tokens=build.get("max_draft_len"),
        mode=_mode_name(build.get("speculative_decoding_mode")),
        paged_context=plugins.get("use_paged_context_fmha"),
        # An enum since 0.13, a plugin before.
        paged_cache=str(build.get("kv_cache_type") or "paged").lower().endswith("paged")
        and plugins.get("paged_kv_cache") not in (False, "disable"),
    )


def _mode_name(mode: object) -> str:
    """Return the name of a ``speculative_decoding_mode``, which may be written as a bit."""
    if isinstance(mode, int) and mode > 0:
        bit = mode.bit_length() - 1
        if bit >= len(_MODES):
            return f"mode_{mode}"
        return _MODES[bit]
    return str(mode or "").rpartition(".")[2].lower()


# --- its parameters -------------------------------------------------------------------------


def engine_parameters(engine: EngineDir, version: Version) -> dict[str, str]:
    """Return the parameters that ``version`` of the C++ backend reads."""
    values = {
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": str(engine.path),
        "batch_scheduler_policy": "guaranteed_no_evict",  # the other may pause a request
        "max_beam_width": "1",
        "enable_kv_cache_reuse": str(engine.paged_context is not False).lower(),
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
    """Return the ``EngineFacts`` of the engine as it will run with ``parameters``."""
    chunked = is_true(parameters["enable_chunked_context"])
    max_draft_len = engine.max_draft_tokens
    if _drafting_problem(engine, parameters):
        max_draft_len = 0
    facts = {
        "max_sequence_tokens": engine.max_sequence_tokens,
        "max_prompt_tokens": engine.max_prompt_tokens(chunked),
        "max_draft_len": max_draft_len,
        "speculative_decoding_mode": engine.mode or None,
    }
    texts = {key: str(value) for key, value in facts.items() if value is not None}
    if ends_after_one_step(engine, version):
        texts["one_step_requests"] = "true"
    return texts


def ends_after_one_step(engine: EngineDir, version: Version) -> bool:
    """Return True if every request to this engine ends after one step, also without a draft."""
    return engine.mode == EXTERNAL_DRAFTS and version < MANY_STEPS_SINCE


def misfits(
    model: str, engine: EngineDir, parameters: Mapping[str, str]
) -> Iterator[SettingsError]:
    """Yield an error for each parameter of ``model`` that its engine cannot run with.

    The engine was not built for it, or it needs another parameter.
    """

    def misfit(key: str, problem: str) -> SettingsError:
        return SettingsError(f"--set {model}.{key}={parameters.get(key, '')}: {problem}")

    for key in ("enable_kv_cache_reuse", "enable_chunked_context"):
        if engine.paged_context is False and is_true(parameters.get(key, "")):
            yield misfit(
                key,
                f"the engine in {engine.path} was built without paged context attention; "
                "build it with --use_paged_context_fmha enable",
            )
    if not engine.paged_cache:
        yield misfit(
            "gpt_model_path",
            "it has no paged KV cache, which in-flight batching needs; "
            "build it with --kv_cache_type paged (before 0.13 --paged_kv_cache enable)",
        )
    beams = parameters.get("max_beam_width", "")
    if engine.max_beam_width and beams.isdecimal() and int(beams) > engine.max_beam_width:
        yield misfit("max_beam_width", f"the engine was built for at most {engine.max_beam_width}")
    # Each instance of the model has a list, as long as the engine has ranks.
    device_lists = list(filter(None, parameters.get("gpu_device_ids", "").split(";")))
    for device_ids in device_lists:
        if engine.ranks and device_ids.count(",") + 1 != engine.ranks:
            problem = f"the engine has {engine.ranks} ranks; name as many GPUs"
            yield misfit("gpu_device_ids", problem)
            break
    if parameters.get("encoder_model_path"):
        yield misfit(
            "encoder_model_path", "models with an encoder are not served here; leave it out"
        )
    missing = [key for key in LOOKAHEAD_SIZES if not parameters.get(key)]
    if parameters.get("decoding_mode") == "lookahead" and missing:
        yield misfit("decoding_mode", f"set {', '.join(missing)} too, as the engine was built for")
    backend_key, file_key = GUIDES
    has_backend = bool(parameters.get(backend_key))
    has_file = bool(parameters.get(file_key))
    if has_backend and not has_file:
        yield misfit(
            backend_key,
            f"without {file_key} nothing would be guided; "
            "set it too (docs/engines.md#guided-decoding)",
        )
    if has_file and not has_backend:
        yield misfit(file_key, f"nobody reads it without {backend_key}; set that to xgrammar")


def check_releases(engines: Mapping[str, EngineDir], version: Version | None) -> None:
    """Raise ``SettingsError`` for engines of different releases, or of another than ``version``.

    ``None`` is any version. An engine whose directory names no release is not judged.
    """
    for name, engine in engines.items():
        if not re.match(r"v?\d", engine.version):
            continue
        release = engine.release()
        version = version or release
        if release != version:
            raise SettingsError(
                f"{name}: the engine in {engine.path} is of TensorRT-LLM {release}, "
                f"which {version} does not load; build it again"
            )


def check_vocabulary(name: str, engine: EngineDir, tokenizer: Tokenizer) -> None:
    """Raise ``SettingsError`` for a tokenizer of another model, with tokens without embeddings."""
    trained_ids = set(range(tokenizer.vocab_size)) - tokenizer.added_ids
    largest = max(trained_ids, default=0)
    size = engine.vocab_size
    if size and largest >= size:
        raise SettingsError(
            f"{name}: the tokenizer has ids up to {largest}, the engine {size} embeddings; "
            "use the tokenizer that the model was trained with"
        )


def _drafting_problem(engine: EngineDir, parameters: Mapping[str, str]) -> str:
    """Tell why the engine cannot verify drafts.

    Empty where it can, as far as its directory says.
    """
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
    """Raise ``SettingsError`` naming ``option`` if the engine cannot verify drafts."""
    if problem := _drafting_problem(engine, parameters):
        raise SettingsError(f"{option}: the engine in {engine.path} {problem}")


def check_drafting(
    engines: Mapping[str, EngineDir], parameters: Mapping[str, Mapping[str, str]], version: Version
) -> None:
    """Raise ``SettingsError`` if a target and a draft engine cannot work together."""
    key = "speculative_decoding_fast_logits"
    for name, engine in engines.items():
        if is_true(parameters[name].get(key, "")):
            raise SettingsError(
                f"--set {name}.{key}: the draft would send a ticket instead of logits, "
                f"which {BLS.name} cannot pass on; leave it false"
            )
        if name != ENGINE.name and ends_after_one_step(engine, version):
            raise SettingsError(
                f"--draft-engine-dir: the engine in {engine.path} was built for "
                f"speculative_decoding_mode {engine.mode} and would draft one token only; "
                f"build {name} without a speculative_decoding_mode"
            )


def warnings(
    engine: EngineDir, version: Version, models: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    """Yield the surprises of a target engine that is served with these parameters."""
    parameters = models[ENGINE.name]
    if engine.paged_context is False:
        yield "KV cache reuse is off: the engine was built without paged context attention"
    if ends_after_one_step(engine, version):
        yield (
            f"on TensorRT-LLM {version} an engine built for {EXTERNAL_DRAFTS} ends every request "
            "after one step: requests without drafts (draft_source off, several sequences, the "
            f"ensemble) need an engine without it; {ENGINE.name} has one_step_requests=true"
        )
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
        texts = "prompts"
        if models[BLS.name]["draft_source"] != "off":
            texts = "prompts and, with drafts, whole answers"
        yield (
            f"{texts} are limited to {limit} tokens by max_num_tokens; "
            f"--chunked-context would allow {longest}"
        )
    if engine.mode == "lookahead_decoding" and parameters.get("decoding_mode") != "lookahead":
        yield (
            "the engine was built for lookahead decoding, which is off: "
            f"set decoding_mode=lookahead and {', '.join(LOOKAHEAD_SIZES)}"
        )
