"""A model repository as configurations first and then as files: nothing is written by halves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from trtllm_bls.bundled import REPOSITORY
from trtllm_bls.configure.backend import checked, engine_parameters
from trtllm_bls.configure.engine_dir import EngineDir, read_engine
from trtllm_bls.configure.versions import models_for, parse_version
from trtllm_bls.contract import BLS, ENGINE, MODELS, POSTPROCESSING, PREPROCESSING
from trtllm_bls.contract.pbtxt import MAX_BATCH_SIZE, PARAMETERS, model_config
from trtllm_bls.errors import SettingsError, SetupError
from trtllm_bls.parameters import BlsParameters, Parameters
from trtllm_bls.settings import Override

DRAFT = "tensorrt_llm_draft"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What ``configure`` was told; ``None`` and an empty version leave it to the engine."""

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
    overrides: tuple[Override, ...] = ()
    check: bool = True
    force: bool = False


@dataclass(frozen=True)
class Repository:
    """What is to be written: each model's configuration (Triton's ``ModelConfig``) by name."""

    target: EngineDir
    configs: Mapping[str, Any]


def plan(wanted: Wanted) -> Repository:
    """The configurations; raises ``SetupError`` naming the option that cannot be used."""
    target = read_engine("--engine-dir", wanted.engine_dir, wanted.check)
    engines = {ENGINE.name: target}
    if wanted.draft_engine_dir is not None:
        engines[DRAFT] = read_engine("--draft-engine-dir", wanted.draft_engine_dir, wanted.check)
        if target.max_draft_tokens == 0:
            raise SettingsError(
                f"--draft-engine-dir: the engine in {wanted.engine_dir} cannot verify drafts; "
                "build it with --speculative_decoding_mode draft_tokens_external --max_draft_len 10"
            )
    models = models_for(parse_version(wanted.version or target.version or "last"), target.logits)
    steps = (models[PREPROCESSING.name], models[ENGINE.name], models[POSTPROCESSING.name])
    if DRAFT in engines:
        models[DRAFT] = replace(models[ENGINE.name], name=DRAFT)
    parameters = _parameters(wanted, engines)
    configs = {name: model_config(model, parameters[name], steps) for name, model in models.items()}
    size = _batch_size(wanted.max_batch_size, engines)
    for config in configs.values():
        config.max_batch_size = size
    for name in engines:
        batching = configs[name].dynamic_batching
        batching.preferred_batch_size.append(size)
        batching.max_queue_delay_microseconds = wanted.max_queue_delay_us
        batching.default_queue_policy.max_queue_size = wanted.max_queue_size
    if wanted.check:
        _check_tokenizer(wanted.tokenizer_dir)  # last, since it takes seconds
    return Repository(target, configs)


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


def _parameters(wanted: Wanted, engines: Mapping[str, EngineDir]) -> dict[str, dict[str, str]]:
    values = {name: dict(shipped) for name, shipped in PARAMETERS.items()}
    tokenizer = str(wanted.tokenizer_dir.absolute())
    for name in (PREPROCESSING.name, POSTPROCESSING.name, BLS.name):
        values[name]["tokenizer_dir"] = tokenizer
    # Of the memory that is free when an engine loads, so two that share a GPU must share it.
    fraction = wanted.kv_cache_free_gpu_mem_fraction or ("0.9" if len(engines) == 1 else "0.45")
    checked("--kv-cache-free-gpu-mem-fraction", "kv_cache_free_gpu_mem_fraction", fraction)
    for name, engine in engines.items():
        values[name] = engine_parameters(engine, wanted.batch_scheduler_policy, fraction)
    if DRAFT in engines:
        values[BLS.name] |= {"tensorrt_llm_draft_model_name": DRAFT, "draft_source": "model"}
    for override in wanted.overrides:
        option = f"--set {override.model}.{override.parameter}={override.value}"
        if override.model not in values:
            raise SettingsError(f"{option}: no such model; there are {', '.join(values)}")
        if override.model in engines:
            checked(option, override.parameter, override.value)
        elif override.parameter not in values[override.model]:
            raise SettingsError(f"{option}: {override.model} has no such parameter")
        values[override.model][override.parameter] = override.value
    _check_doors(values)
    return values


def _check_doors(values: Mapping[str, Mapping[str, str]]) -> None:
    """Let the models' own readers judge; the tokenizer directory has been looked at."""

    def reader(name: str) -> Parameters:
        here = {**values[name], "tokenizer_dir": str(Path.cwd())}
        strings = {key: {"string_value": value} for key, value in here.items()}
        config = json.dumps({"name": name, "parameters": strings})
        return Parameters({"model_config": config, "model_repository": name})

    BlsParameters.read(reader(BLS.name))
    reader(PREPROCESSING.name).flag("add_special_tokens", True)
    reader(POSTPROCESSING.name).flag("skip_special_tokens", True)


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
