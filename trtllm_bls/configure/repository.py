"""A model repository as configurations first and then as files: nothing is written by halves."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from trtllm_bls.bundled import REPOSITORY
from trtllm_bls.configure.engine_dir import EngineDir, read_engine
from trtllm_bls.configure.engine_parameters import (
    check_drafting,
    check_engine,
    check_target,
    engine_facts,
    engine_parameters,
    warnings,
)
from trtllm_bls.configure.pbtxt import MAX_BATCH_SIZE, PARAMETERS, model_config
from trtllm_bls.configure.versions import models_for, parse_version
from trtllm_bls.contract import BLS, ENGINE, MODELS, POSTPROCESSING, PREPROCESSING
from trtllm_bls.errors import SettingsError, SetupError
from trtllm_bls.parameters import check
from trtllm_bls.parameters.cpp_backend import Version, check_backend
from trtllm_bls.settings import Override

DRAFT = "tensorrt_llm_draft"


@dataclass(frozen=True, kw_only=True)
class ConfigureOptions:
    """The options of ``configure``; ``None`` and an empty version leave it to the engine."""

    engine_dir: Path
    tokenizer_dir: Path
    out: Path
    draft_engine_dir: Path | None = None
    max_batch_size: int | None = None
    max_queue_size: int = 0
    max_queue_delay_us: int = 0
    kv_cache_free_gpu_mem_fraction: str | None = None
    batch_scheduler_policy: str = "guaranteed_no_evict"
    version: str = ""
    decoupled: bool = True
    bls_instances: int = 1
    overrides: tuple[Override, ...] = ()
    check: bool = True
    force: bool = False


@dataclass(frozen=True)
class Repository:
    """What is to be written: each model's configuration (Triton's ``ModelConfig``) by name."""

    target: EngineDir
    configs: Mapping[str, Any]
    warnings: tuple[str, ...] = ()


def plan(options: ConfigureOptions) -> Repository:
    """The configurations; raises ``SetupError`` naming the option that cannot be used."""
    target = read_engine("--engine-dir", options.engine_dir, options.check)
    engines = {ENGINE.name: target}
    if options.draft_engine_dir is not None:
        engines[DRAFT] = read_engine("--draft-engine-dir", options.draft_engine_dir, options.check)
    version = parse_version(options.version or target.version or "last")
    models = models_for(version, target.logits)
    steps = (models[PREPROCESSING.name], models[ENGINE.name], models[POSTPROCESSING.name])
    if DRAFT in engines:
        drafting = models_for(version, engines[DRAFT].logits)
        models[DRAFT] = replace(drafting[ENGINE.name], name=DRAFT)
    parameters = _parameters(options, engines, version)
    configs = {name: model_config(model, parameters[name], steps) for name, model in models.items()}
    size = _batch_size(options.max_batch_size, engines)
    for config in configs.values():
        config.max_batch_size = size
    configs[BLS.name].instance_group[0].count = options.bls_instances
    for name in engines:
        batching = configs[name].dynamic_batching
        batching.preferred_batch_size.append(size)
        batching.max_queue_delay_microseconds = options.max_queue_delay_us
        batching.default_queue_policy.max_queue_size = options.max_queue_size
    if options.check:
        _check_tokenizer(options.tokenizer_dir)  # last, since it takes seconds
    return Repository(target, configs, tuple(warnings(target, version, parameters[ENGINE.name])))


def write(repository: Repository, out: Path, force: bool) -> None:
    """Write every model below ``out``; with ``force`` models of these names are replaced."""
    if out.exists() and not out.is_dir():
        raise SettingsError(f"--out {out}: is a file")
    if not force and out.is_dir() and any(out.iterdir()):
        raise SettingsError(f"--out {out}: is not empty; add --force to replace its models")
    for name in {DRAFT, *(model.name for model in MODELS)}:
        shutil.rmtree(out / name, ignore_errors=True)
    for name, config in repository.configs.items():
        version = out / name / "1"
        version.mkdir(parents=True)
        text = text_format.MessageToString(config)
        (out / name / "config.pbtxt").write_text(text, encoding="utf-8")
        if config.backend == "python":
            shutil.copyfile(REPOSITORY / name / "1" / "model.py", version / "model.py")


# --- parameters -----------------------------------------------------------------------------


def _parameters(
    options: ConfigureOptions, engines: Mapping[str, EngineDir], version: Version
) -> dict[str, dict[str, str]]:
    values = {name: dict(shipped) for name, shipped in PARAMETERS.items()}
    tokenizer = str(options.tokenizer_dir.absolute())
    for name in (PREPROCESSING.name, POSTPROCESSING.name, BLS.name):
        values[name]["tokenizer_dir"] = tokenizer
    values[BLS.name]["decoupled"] = str(options.decoupled).lower()
    # Of the memory that is free when an engine loads, so two that share a GPU must share it.
    fraction = options.kv_cache_free_gpu_mem_fraction or ("0.45" if DRAFT in engines else "0.9")
    _check_backend(
        f"--kv-cache-free-gpu-mem-fraction {fraction}",
        "kv_cache_free_gpu_mem_fraction",
        fraction,
        version,
    )
    for name, engine in engines.items():
        values[name] = engine_parameters(engine, version, options.batch_scheduler_policy, fraction)
    if DRAFT in engines:
        values[BLS.name] |= {"tensorrt_llm_draft_model_name": DRAFT, "draft_source": "model"}
    for override in options.overrides:
        _check_override(override, values, engines, version)
        values[override.model][override.parameter] = override.value
    for name, engine in engines.items():
        check_engine(name, engine, values[name])
        values[name] = engine_facts(engine, version, values[name]) | values[name]
    _check_speculation(engines, values, version)
    return values


def _check_override(
    override: Override, models: Iterable[str], engines: Iterable[str], version: Version
) -> None:
    option = f"--set {override}"
    if override.model not in models:
        raise SettingsError(f"{option}: no such model; there are {', '.join(models)}")
    if override.model in engines:
        _check_backend(option, override.parameter, override.value, version)
        return
    try:
        check(override.model, override.parameter, override.value)
    except SettingsError as error:
        raise SettingsError(f"{option}: {error}") from None


def _check_backend(option: str, key: str, value: str, version: Version) -> None:
    try:
        check_backend(key, value, version)
    except SettingsError as error:
        raise SettingsError(f"{option}: {error}") from None


def _check_speculation(
    engines: Mapping[str, EngineDir], values: Mapping[str, Mapping[str, str]], version: Version
) -> None:
    source = values[BLS.name]["draft_source"]
    if DRAFT not in engines and source == "off":
        return
    option = "--draft-engine-dir" if DRAFT in engines else f"--set {BLS.name}.draft_source={source}"
    check_target(option, engines[ENGINE.name], values[ENGINE.name])
    check_drafting(engines, values, version)


def _batch_size(asked: int | None, engines: Mapping[str, EngineDir]) -> int:
    known = [engine.max_batch_size for engine in engines.values() if engine.max_batch_size]
    most = min(known, default=None)
    if asked is not None and most is not None and asked > most:
        raise SettingsError(f"--max-batch-size {asked}: the engine was built for at most {most}")
    return asked or most or MAX_BATCH_SIZE


def _check_tokenizer(directory: Path) -> None:
    from trtllm_bls.tokenizer import load_tokenizer

    try:
        load_tokenizer(directory)
    except SetupError as error:
        raise SettingsError(f"--tokenizer-dir: {error}") from error
