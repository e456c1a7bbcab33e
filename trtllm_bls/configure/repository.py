"""A model repository as configurations first and then as files: nothing is written by halves."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Set
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
from trtllm_bls.configure.launch import Launch, participants, plan_launch
from trtllm_bls.configure.options import DRAFT, ConfigureOptions, Setting, settings
from trtllm_bls.configure.pbtxt import MAX_BATCH_SIZE, PARAMETERS, model_config
from trtllm_bls.configure.versions import models_for, parse_version
from trtllm_bls.contract import BLS, ENGINE, MODELS, POSTPROCESSING, PREPROCESSING
from trtllm_bls.errors import SettingsError, SetupError
from trtllm_bls.parameters import check
from trtllm_bls.parameters.cpp_backend import LAST, Version, check_backend
from trtllm_bls.parameters.model_config import values_of
from trtllm_bls.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Repository:
    """What is to be written: each model's configuration (Triton's ``ModelConfig``) by name."""

    configs: Mapping[str, Any]
    launch: Launch
    warnings: tuple[str, ...] = ()


def plan(options: ConfigureOptions) -> Repository:
    """The configurations; raises ``SetupError`` naming the option that cannot be used."""
    engines = _engines(options)
    target = engines[ENGINE.name]
    version = parse_version(options.version) if options.version else target.release() or LAST
    models = models_for(version, target.logits)
    steps = (models[PREPROCESSING.name], models[ENGINE.name], models[POSTPROCESSING.name])
    if DRAFT in engines:
        drafting = models_for(version, engines[DRAFT].logits)
        models[DRAFT] = replace(drafting[ENGINE.name], name=DRAFT)
    launch = plan_launch(options, engines, version)
    parameters = _parameters(options, engines, version, launch)
    size = _batch_size(options.max_batch_size, engines)
    configs = {
        name: model_config(model, parameters[name], steps, size) for name, model in models.items()
    }
    configs[BLS.name].instance_group[0].count = options.bls_instances
    for name in engines:
        batching = configs[name].dynamic_batching
        batching.preferred_batch_size.append(size)
        batching.max_queue_delay_microseconds = options.max_queue_delay_us
        batching.default_queue_policy.max_queue_size = options.max_queue_size
    if options.check:
        _check_tokenizer(options.tokenizer_dir)  # last, since it takes seconds
    return Repository(configs, launch, tuple(warnings(target, version, parameters)))


def write(repository: Repository, out: Path, force: bool) -> None:
    """Write every model below ``out``; with ``force`` models of these names are replaced."""
    if out.exists() and not out.is_dir():
        raise SettingsError(f"--out {out}: is a file")
    if not force and out.is_dir() and any(out.iterdir()):
        raise SettingsError(f"--out {out}: is not empty; add --force to replace its models")
    replaced = {out / name for name in (DRAFT, *(model.name for model in MODELS))}
    _check_unused(replaced, repository.configs)
    for place in replaced:
        shutil.rmtree(place, ignore_errors=True)
    for name, config in repository.configs.items():
        version = out / name / "1"
        version.mkdir(parents=True)
        text = text_format.MessageToString(config)
        (out / name / "config.pbtxt").write_text(text, encoding="utf-8")
        if config.backend == "python":
            shutil.copyfile(REPOSITORY / name / "1" / "model.py", version / "model.py")


def _check_unused(replaced: Set[Path], configs: Mapping[str, Any]) -> None:
    """Some engines lie in the version directory of the very model that is replaced."""
    gone = {place.resolve() for place in replaced}
    for config in configs.values():
        for key in ("gpt_model_path", "tokenizer_dir"):
            used = values_of(config).get(key)
            if used and any(Path(used).resolve().is_relative_to(place) for place in gone):
                raise SettingsError(f"--force: would delete {used}; choose another --out")


# --- parameters -----------------------------------------------------------------------------


def _engines(options: ConfigureOptions) -> dict[str, EngineDir]:
    target = read_engine("--engine-dir", options.engine_dir, options.check)
    if options.max_num_tokens is not None:
        built = target.max_step_tokens
        if built not in (None, options.max_num_tokens):
            raise SettingsError(
                f"--max-num-tokens {options.max_num_tokens}: the engine was built for {built}; "
                "build another, or leave the option out"
            )
        target = replace(target, max_step_tokens=options.max_num_tokens)
    engines = {ENGINE.name: target}
    if options.draft_engine_dir is not None:
        engines[DRAFT] = read_engine("--draft-engine-dir", options.draft_engine_dir, options.check)
    return engines


def _parameters(
    options: ConfigureOptions, engines: Mapping[str, EngineDir], version: Version, launch: Launch
) -> dict[str, dict[str, str]]:
    values = {name: dict(shipped) for name, shipped in PARAMETERS.items()}
    tokenizer = str(options.tokenizer_dir.absolute())
    for name in (PREPROCESSING.name, POSTPROCESSING.name, BLS.name):
        values[name]["tokenizer_dir"] = tokenizer
    values[BLS.name]["decoupled"] = str(options.decoupled).lower()
    placed = participants(launch, engines)
    for name, engine in engines.items():
        values[name] = engine_parameters(engine, version, options.batch_scheduler_policy)
        if name in placed:
            values[name]["participant_ids"] = placed[name]
    if DRAFT in engines:
        values[BLS.name] |= {"tensorrt_llm_draft_model_name": DRAFT, "draft_source": "model"}
    for setting in settings(options):
        override = setting.override
        _check_setting(setting, values, engines, version)
        values[override.model][override.parameter] = override.value
    for name, engine in engines.items():
        check_engine(name, engine, values[name])
        values[name] = engine_facts(engine, version, values[name]) | values[name]
    _check_speculation(engines, values, version)
    return values


def _check_setting(
    setting: Setting, models: Iterable[str], engines: Iterable[str], version: Version
) -> None:
    override = setting.override
    if override.model not in models:
        raise SettingsError(f"{setting.option}: no such model; there are {', '.join(models)}")
    try:
        if override.model in engines:
            check_backend(override.parameter, override.value, version)
        else:
            check(override.model, override.parameter, override.value)
    except SettingsError as error:
        raise SettingsError(f"{setting.option}: {error}") from None


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
    try:
        load_tokenizer(directory)
    except SetupError as error:
        raise SettingsError(f"--tokenizer-dir: {error}") from error
