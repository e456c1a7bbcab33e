"""A model repository for TensorRT-LLM's LLM API, and one of upstream's ``llmapi`` model read.

Upstream's model has the name ``tensorrt_llm`` and takes text. Where its clients are to be kept,
that name is given to a model with its tensors, and the engine gets another one.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtllm_bls.configure.pbtxt import PARAMETERS, model_config
from trtllm_bls.configure.repository import ConfigureOptions, Launch, Repository
from trtllm_bls.contract import BLS, ENGINE, LLMAPI
from trtllm_bls.errors import SettingsError
from trtllm_bls.parameters import check
from trtllm_bls.parameters.model_config import values_of
from trtllm_bls.parameters.model_yaml import ModelYaml, gpus_of
from trtllm_bls.tokenizer import load_tokenizer

BEHIND = "tensorrt_llm_engine"  # the engine, where upstream's clients are kept


def upstreams_yaml(directory: Path) -> Path | None:
    """The ``model.yaml`` of upstream's ``llmapi`` repository; ``None`` if it is none."""
    version = directory / LLMAPI.name / "1"
    path = version / os.environ.get("LLM_CONFIG_PATH", "model.yaml")
    return path if path.is_file() and (version / "model.py").is_file() else None


def plan_llm_api(options: ConfigureOptions, upstreams: Any = None) -> Repository:
    """The configurations; raises ``SettingsError``. ``upstreams``: the configuration of its model,
    whose clients are kept."""
    config = ModelYaml.read(options.model_yaml) if options.model_yaml else ModelYaml()
    gpus, count = options.gpu_device_ids or "", 1
    if upstreams:
        gpus = gpus or values_of(upstreams).get("gpu_device_ids", "")
        count = max((group.count for group in upstreams.instance_group), default=1)
    count = max(count, len(gpus.split(";")))
    gpus_of(gpus, 0, count)
    name = BEHIND if upstreams else ENGINE.name
    tokenizer = str(options.tokenizer_dir.absolute())
    engine = dict(PARAMETERS[ENGINE.name]) | {"engine": "llm_api", "model_dir": tokenizer}
    engine |= {"gpu_device_ids": gpus, "max_batch": "0"}
    if options.model_yaml:
        engine["model_yaml"] = str(options.model_yaml.absolute())
    for key, argument in (("max_batch", "max_batch_size"), ("max_sequence_tokens", "max_seq_len")):
        engine[key] = str(config.arguments.get(argument) or engine[key])
    text = dict(PARAMETERS[BLS.name]) | {
        "tokenizer_dir": tokenizer,
        "tensorrt_llm_model_name": name,
        "decoupled": str(options.decoupled).lower(),
    }
    parameters = {name: engine, BLS.name: text}
    if upstreams:
        streams = str(config.decoupled).lower()
        parameters[LLMAPI.name] = text | {"tensors": "llmapi", "decoupled": streams}
    for override in options.overrides:
        model, key = override.model, override.parameter
        if model == ENGINE.name and key in engine:
            model = name
        if model not in parameters:
            known = ", ".join(parameters)
            raise SettingsError(f"--set {override}: no such model; there are {known}")
        check(ENGINE.name if model == name else BLS.name, key, override.value)
        parameters[model][key] = override.value
    if options.check:
        load_tokenizer(options.tokenizer_dir)
    served = model_config(replace(ENGINE, name=name), engine)
    served.instance_group[0].count = count
    configs = {name: served, BLS.name: model_config(BLS, text)}
    configs[BLS.name].instance_group[0].count = options.bls_instances
    if upstreams:
        configs[LLMAPI.name] = model_config(LLMAPI, parameters[LLMAPI.name], max_batch_size=0)
    code = {name: ENGINE.name} | ({LLMAPI.name: BLS.name} if upstreams else {})
    lines = _launch_lines(config.arguments, options.out) if count == 1 else ()  # without MPI
    return Repository(configs, Launch((name,)), lines, code)


def losses(upstreams: Any) -> list[str]:
    """What upstream's model has and the new repository does not."""
    known = {*LLMAPI.input_named, *LLMAPI.output_named}
    tensors = [each.name for each in (*upstreams.input, *upstreams.output)]
    lost = [f"tensor {name}" for name in tensors if name not in known]
    parameters = values_of(upstreams).keys() - {"gpu_device_ids"}
    return [*lost, *(f"parameter {name}" for name in sorted(parameters))]


def _launch_lines(arguments: Mapping[str, Any], out: Path) -> tuple[str, ...]:
    """How it is started where ``serve`` alone does not do."""
    sizes = [int(arguments.get(f"{name}_parallel_size") or 1) for name in ("tensor", "pipeline")]
    ranks = sizes[0] * sizes[1]
    serve = f"trtllm-bls serve --model-repository {shlex.quote(str(out.absolute()))}"
    launch = f"mpirun --allow-run-as-root -n {ranks} trtllm-llmapi-launch {serve}"
    lines = [f"if the load ends with MPI_ERR_SPAWN: {launch}"]
    if ranks > 1:
        each = "srun -N MACHINES --ntasks-per-node=GPUS_OF_EACH --mpi=pmix"
        lines.append(f"on several machines: {each} trtllm-llmapi-launch {serve}")
    return tuple(lines)
