"""What an existing repository of TensorRT-LLM's own models says, as options of ``configure``.

Its values are read where its models read them: in ``config.pbtxt``, template filled in. What has no
place in the new repository, or would have no effect there, is told in a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtllm_bls.configure.engine_dir import read_engine
from trtllm_bls.configure.options import DRAFT
from trtllm_bls.configure.versions import parse_version
from trtllm_bls.contract import BLS, ENGINE, ENSEMBLE, MODELS, POSTPROCESSING, PREPROCESSING
from trtllm_bls.errors import SettingsError
from trtllm_bls.parameters import check
from trtllm_bls.parameters.cpp_backend import LAST, Version, check_backend
from trtllm_bls.parameters.model_config import read_config, values_of
from trtllm_bls.settings import Override

# Read on their own, or decided by `configure`: the prompt is left out of answers unless a request
# asks for it, and one process of tensorrt_llm_bls serves many requests at once.
_HANDLED = {
    *("gpt_model_path", "gpt_model_type", "gpu_device_ids", "exclude_input_in_output"),
    *("FORCE_CPU_ONLY_INPUT_TENSORS", "enable_trt_overlap", "worker_path"),
}
_TRUE_BY_DEFAULT_SINCE: Version = (0, 11)  # preprocessing's add_special_tokens
_OURS = {  # parameters of their models that ours have too, and those of ours that take them
    (PREPROCESSING.name, "add_special_tokens"): (PREPROCESSING.name, BLS.name),
    (POSTPROCESSING.name, "skip_special_tokens"): (POSTPROCESSING.name, BLS.name),
    (BLS.name, "accumulate_tokens"): (BLS.name,),
}


@dataclass
class Existing:
    """``options`` of ``ConfigureOptions`` by name, parameters to set, and what to tell the user."""

    options: dict[str, Any] = field(default_factory=dict)
    overrides: list[Override] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_repository(directory: Path) -> dict[str, Any]:
    """Each model's configuration by name; raises ``SettingsError`` for one that cannot be read."""
    if not directory.is_dir():
        raise SettingsError(f"{directory}: no such directory")
    files = {path.parent.name: path for path in sorted(directory.glob("*/config.pbtxt"))}
    return {name: read_config(path) for name, path in files.items()}


def read_existing(directory: Path, version: str) -> Existing:
    """The repository's values; ``version`` is that of the container, if it was named.

    Raises ``SettingsError`` where there is no target model in it.
    """
    configs = read_repository(directory)
    found = Existing()
    models = {name: _filled_in(name, values_of(config), found) for name, config in configs.items()}
    bls = models.get(BLS.name, {})
    target = bls.get("tensorrt_llm_model_name", ENGINE.name)
    draft = bls.get("tensorrt_llm_draft_model_name")
    if target not in configs:
        there = ", ".join(configs) or "none"
        raise SettingsError(f"--from {directory}: it has no model {target}; there are: {there}")
    release = parse_version(version) if version else _engine_release(models[target]) or LAST
    _take_directory(models[target], "gpt_model_path", "engine_dir", found)
    _take_directory(models.get(PREPROCESSING.name, {}), "tokenizer_dir", "tokenizer_dir", found)
    _take_engine(ENGINE.name, target, configs[target], models[target], (found, release))
    if draft in models:
        _take_directory(models[draft], "gpt_model_path", "draft_engine_dir", found)
        _take_engine(DRAFT, draft, configs[draft], models[draft], (found, release))
        found.overrides.append(Override(BLS.name, "draft_source", "off"))
        found.notes.append(
            "drafts are made for requests that ask for them (num_draft_tokens), as before; "
            "tensorrt_llm_bls.draft_source=model makes them for all"
        )
    elif draft:
        found.notes.append(f"there is no model {draft}, so no drafts of a model either")
    _take_batching(configs, target, found)
    _take_ours(models, release, found)
    others = configs.keys() - {model.name for model in MODELS} - {target, draft}
    if others:
        found.notes.append(f"not converted: {', '.join(sorted(others))}")
    return found


def _filled_in(model: str, values: Mapping[str, str], found: Existing) -> dict[str, str]:
    empty = [key for key, value in values.items() if "${" in value]
    if empty:
        found.notes.append(f"{model}: not filled in, so not set: {', '.join(empty)}")
    return {key: value for key, value in values.items() if value and key not in empty}


def _engine_release(parameters: Mapping[str, str]) -> Version | None:
    directory = parameters.get("gpt_model_path")
    return read_engine("--from", Path(directory), check=False).release() if directory else None


def _take_directory(parameters: Mapping[str, str], key: str, option: str, found: Existing) -> None:
    if key in parameters:
        found.options[option] = Path(parameters[key])


def _take_engine(
    new: str, old: str, config: Any, values: Mapping[str, str], state: tuple[Existing, Version]
) -> None:
    """The engine's parameters that the release reads and understands."""
    found, release = state
    if new != old:
        found.notes.append(f"{old} is called {new} here; requests to it need the new name")
    if config.backend == "python":
        found.notes.append(f"{old}: its Python backend is replaced by the C++ backend tensorrtllm")
    if "inflight" not in values.get("gpt_model_type", "inflight"):
        found.notes.append(f"{old}: gpt_model_type {values['gpt_model_type']} becomes in-flight")
    if "gpu_device_ids" in values:
        name = "gpu_device_ids" if new == ENGINE.name else "draft_gpu_device_ids"
        found.options[name] = values["gpu_device_ids"]
    for key, value in values.items():
        if key in _HANDLED:
            continue
        try:
            check_backend(key, value, release)
        except SettingsError as error:
            found.notes.append(f"{old}.{key}={value} is left out, as it had no effect: {error}")
        else:
            found.overrides.append(Override(new, key, value))


def _take_batching(configs: Mapping[str, Any], target: str, found: Existing) -> None:
    engine = configs[target]
    found.options["max_batch_size"] = engine.max_batch_size or None
    batching = engine.dynamic_batching
    found.options["max_queue_delay_us"] = batching.max_queue_delay_microseconds
    found.options["max_queue_size"] = batching.default_queue_policy.max_queue_size
    if BLS.name in configs:
        bls = configs[BLS.name]
        found.options["decoupled"] = bls.model_transaction_policy.decoupled
        count = max((group.count for group in bls.instance_group), default=1)
        if count > 1:
            found.notes.append(
                f"tensorrt_llm_bls had {count} instances, one per request at a time; one process "
                "serves them all here (--bls-instances for more)"
            )


def _take_ours(models: Mapping[str, Mapping[str, str]], release: Version, found: Existing) -> None:
    """The text models' parameters, with the defaults that the release had."""
    for (model, key), takers in _OURS.items():
        value = models.get(model, {}).get(key)
        if value is None and key == "add_special_tokens" and release < _TRUE_BY_DEFAULT_SINCE:
            value = "false"
            found.notes.append("add_special_tokens was not set, which meant false before 0.11")
        if value is not None:
            found.overrides += [Override(taker, key, value) for taker in takers]
    known = {"tokenizer_dir", "tensorrt_llm_model_name", "tensorrt_llm_draft_model_name"}
    for model in (PREPROCESSING.name, POSTPROCESSING.name, ENSEMBLE.name, BLS.name):
        for key, value in models.get(model, {}).items():
            try:
                check(model, key, value)
            except SettingsError:
                if key not in known:
                    found.notes.append(f"{model}.{key} has no place here and is left out")
