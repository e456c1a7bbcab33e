"""A repository for TensorRT-LLM's C++ backend or its LLM API: options, configurations, files.

Everything is checked before the first file is written.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import click
from google.protobuf import text_format

from trtllm_bls.bundled import REPOSITORY
from trtllm_bls.configure import engine_dir as cpp
from trtllm_bls.configure.engine_dir import EngineDir
from trtllm_bls.configure.pbtxt import MAX_BATCH_SIZE, PARAMETERS, TEMPLATES, model_config
from trtllm_bls.errors import SettingsError, SetupError
from trtllm_bls.settings.command_options import NotNegative, Override, Positive, option, setting
from trtllm_bls.settings.cpp_backend import LAST, Version, check_backend, parse_version
from trtllm_bls.settings.model_config import instances_of, values_of
from trtllm_bls.settings.model_names import DRAFT_NAME
from trtllm_bls.settings.model_yaml import ModelYaml, gpus_of
from trtllm_bls.settings.parameters import BlsParameters, check
from trtllm_bls.text.tokenizer import load_tokenizer
from trtllm_bls.wire.contract import BLS, ENGINE, LLMAPI, MODELS, POSTPROCESSING, PREPROCESSING

_FRACTION = "kv_cache_free_gpu_mem_fraction"


@dataclass(frozen=True, kw_only=True)
class ConfigureOptions:
    """The options of ``configure``; ``None`` or an empty text means the engine's own value."""

    engine_dir: Path = setting("Engine of the target model.", MISSING)
    tokenizer_dir: Path = setting("Its tokenizer.", MISSING)
    out: Path = setting("The model repository to write.", MISSING, required=True)
    draft_engine_dir: Path | None = setting("Engine of a draft model (speculation).")
    engine: Literal["cpp", "llm_api"] = setting(
        "What generates: TensorRT-LLM's C++ backend, or its LLM API in a Python model.", "cpp"
    )
    model_yaml: Path | None = setting("Arguments of the LLM API, as upstream's llmapi has them.")
    max_batch_size: Positive | None = setting("Requests in one batch.  [default: the engine's]")
    max_num_tokens: Positive | None = setting(
        "The --max_num_tokens that the engine was built with, if its config.json is not here."
    )
    logits_dtype: str | None = setting(
        "Type of the engines' logits, if their config.json is not here.  [default: float32]",
        type=click.Choice(list(cpp.LOGITS_DTYPES)),
    )
    max_queue_size: NotNegative = setting(
        "Requests that may wait in Triton; one more is refused. 0 = no limit.", 0
    )
    max_queue_delay_us: NotNegative = setting(
        "Microseconds that a request may wait for others to share its batch.", 0
    )
    kv_cache_free_gpu_mem_fraction: str | None = setting(
        "Share of free GPU memory per engine.  [default: 0.9; 0.45 each where two share GPUs]"
    )
    draft_kv_cache_free_gpu_mem_fraction: str | None = setting(
        "The share of the draft engine alone.", sets=(DRAFT_NAME, _FRACTION)
    )
    gpu_device_ids: str | None = setting(
        "GPUs of the target.  [default: all]", metavar="ID,…", sets=(ENGINE.name, "gpu_device_ids")
    )
    draft_gpu_device_ids: str | None = setting(
        "GPUs of the draft.", metavar="ID,…", sets=(DRAFT_NAME, "gpu_device_ids")
    )
    chunked_context: bool = setting(
        "Process long prompts in several steps.",
        False,
        sets=(ENGINE.name, "enable_chunked_context"),
    )
    version: str = setting(
        "TensorRT-LLM release of the container, from 0.9 on, or last.  [default: the engine's]", ""
    )
    decoupled: bool = setting(
        "false: all models answer unary infer, one response per request that repeats the prompt, "
        "and no streams.",
        True,
    )
    bls_instances: Positive = setting(f"Processes of {BLS.name}.", 1)
    engine_url: str | None = setting(
        "gRPC port behind which the engine is.", metavar="HOST:PORT", sets=(BLS.name, "engine_url")
    )
    disable_spawn_processes: bool = setting(
        "Orchestrator mode in which MPI or Slurm starts all ranks.", False
    )
    check: bool = setting(
        "Check that the directories hold what is needed.", True, flag="--check/--no-check"
    )
    force: bool = setting("Replace the models that --out has already.", False)
    overrides: tuple[Override, ...] = ()
    # Configurations by model, whose instances, queue policies and warm-up are kept.
    carried: Mapping[str, Any] = field(default_factory=dict)

    @property
    def separate_gpus(self) -> bool:
        """True if target and draft have no GPU in common."""
        gpus = set(re.findall("[^,;]+", self.gpu_device_ids or ""))
        draft_gpus = set(re.findall("[^,;]+", self.draft_gpu_device_ids or ""))
        are_set = bool(self.draft_engine_dir and gpus and draft_gpus)
        return are_set and gpus.isdisjoint(draft_gpus)


def _overrides(options: ConfigureOptions) -> Iterator[tuple[str, Override]]:
    """Yield the parameters that options set, each with its option, in the order of precedence.

    A later one replaces an earlier one. Raises ``SettingsError`` for an option about a draft engine
    that is not there.
    """
    models = [ENGINE.name]
    fraction = "0.9"
    if options.draft_engine_dir is not None:
        models.append(DRAFT_NAME)
        # An engine's share is of the memory that is free when it loads, so two engines on the same
        # GPU must divide it.
        if not options.separate_gpus:
            fraction = "0.45"
    fraction = options.kv_cache_free_gpu_mem_fraction or fraction
    if options.engine_url is not None and "://" in options.engine_url:
        raise SettingsError(
            f"--engine-url {options.engine_url}: write HOST:PORT; an engine of another kind "
            f"needs no repository: trtllm-bls serve --engine {options.engine_url} --model DIR"
        )
    for model in models:
        yield f"--kv-cache-free-gpu-mem-fraction {fraction}", Override(model, _FRACTION, fraction)
    for field_ in fields(options):
        value = getattr(options, field_.name)
        if field_.metadata.get("sets") is None or value in (None, False):
            continue
        model, key = field_.metadata["sets"]
        if value is True:
            value = "true"
        source = f"{option(field_.name)} {value}"
        if model == DRAFT_NAME and options.draft_engine_dir is None:
            raise SettingsError(f"{source}: needs --draft-engine-dir")
        yield source, Override(model, key, value)
    for override in options.overrides:
        yield f"--set {override}", override


# --- how it is started -----------------------------------------------------------------------

_NO_SPAWN_SINCE = Version(0, 13)
# Each stream may hold one of the Python backend's threads until its first token; the additional
# ones are for streams that are ending.
_THREADS = BlsParameters.max_streams + 32


@dataclass(frozen=True)
class Launch:
    """The launch of a repository's engines: ``models``, in ``world_size`` MPI processes.

    An engine of several ranks needs one tritonserver process for each rank, all but the first of
    which load the engines alone (leader mode). Engines of unequal ranks, or on GPUs of their own,
    need ``orchestrator`` mode: one server has a worker process for each rank. It starts them, over
    MPI, unless ``participants`` says which ranks belong to which model: then MPI or Slurm
    starts them, and rank 0 is the orchestrator's own.
    """

    models: tuple[str, ...]
    world_size: int = 1
    orchestrator: bool = False
    participants: Mapping[str, str] = field(default_factory=dict)


def plan_launch(
    options: ConfigureOptions, engines: Mapping[str, EngineDir], version: Version
) -> Launch:
    """Decide how to start the engines; raises ``SettingsError`` if the release has no such mode."""
    models = tuple(engines)
    rank_counts = [engine.ranks or 1 for engine in engines.values()]
    gpu_lists = f"{options.gpu_device_ids}{options.draft_gpu_device_ids}"
    has_instances = ";" in gpu_lists  # it separates the lists of a model's instances
    is_uneven = len(set(rank_counts)) > 1
    orchestrator = options.separate_gpus or has_instances or is_uneven
    if not options.disable_spawn_processes:
        if orchestrator:
            return Launch(models, 1, orchestrator=True)
        return Launch(models, rank_counts[0])
    if version < _NO_SPAWN_SINCE:
        raise SettingsError("--disable-spawn-processes: TensorRT-LLM has it since 0.13")
    participants = {}
    next_rank = 1  # rank 0 is the orchestrator's
    for name, count in zip(engines, rank_counts, strict=True):
        participants[name] = ",".join(map(str, range(next_rank, next_rank + count)))
        next_rank += count
    return Launch(models, next_rank, orchestrator=True, participants=participants)


def launcher_command(launch: Launch, repository: Path) -> str:
    """Return the line for TensorRT-LLM's own launcher."""
    words = ["python3", "launch_triton_server.py", "--world_size", str(launch.world_size)]
    words += ["--model_repo", str(repository.absolute())]
    words += ["--tensorrt_llm_model_name", ",".join(launch.models)]
    if launch.orchestrator:
        words.append("--multi-model")
    if launch.participants:
        words.append("--disable-spawn-processes")
    return shlex.join(words)


def slurm_script(launch: Launch, repository: Path) -> str:
    """Return a job script that starts one server process per rank, without the launcher.

    Raises ``SettingsError`` where the orchestrator would have to spawn: Slurm starts all processes.
    """
    if launch.orchestrator and not launch.participants:
        raise SettingsError("--slurm: engines of unequal ranks need --disable-spawn-processes too")
    gpus = launch.world_size
    if launch.orchestrator:
        gpus -= 1
    variables = {
        "REPOSITORY": str(repository.absolute()),
        "LOAD_ENGINES": " ".join(f"--load-model={name}" for name in launch.models),
        "THREADS": str(_THREADS),
    }
    if launch.orchestrator:
        variables |= {"TRTLLM_ORCHESTRATOR": "1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "0"}
    head = "#!/bin/bash\n#SBATCH --job-name=trtllm-bls\n"
    head += f"#SBATCH --ntasks={launch.world_size}\n#SBATCH --gpus={gpus}\n"
    for name, value in variables.items():
        head += f"export {name}={shlex.quote(value)}\n"
    return head + (TEMPLATES / "slurm.sh").read_text(encoding="utf-8")


# --- the configurations ----------------------------------------------------------------------


@dataclass(frozen=True)
class Repository:
    """The content of a repository: each model's configuration (``ModelConfig``) by name.

    ``code`` names the model of this package whose program a model has, where their names differ.
    ``copies`` are files by their place in the repository.
    """

    configs: Mapping[str, Any]
    launch: Launch
    warnings: tuple[str, ...] = ()
    code: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, Path] = field(default_factory=dict)


def plan(options: ConfigureOptions) -> Repository:
    """Plan the configurations; raises ``SetupError`` naming the option that cannot be used."""
    engines = _engines(options)
    target = engines[ENGINE.name]
    version = _version(options, target)
    models = cpp.models_for(version, target.logits)
    steps = (models[PREPROCESSING.name], models[ENGINE.name], models[POSTPROCESSING.name])
    if DRAFT_NAME in engines:
        draft = cpp.models_for(version, engines[DRAFT_NAME].logits)[ENGINE.name]
        models[DRAFT_NAME] = replace(draft, name=DRAFT_NAME)
    launch = plan_launch(options, engines, version)
    parameters = _parameters(options, engines, version, launch)
    batch_size = _batch_size(options, engines)
    configs = {}
    for name, model in models.items():
        configs[name] = model_config(model, parameters[name], steps, batch_size)
    configs[BLS.name].instance_group[0].count = options.bls_instances
    for name in options.carried.keys() & configs.keys():
        for descriptor, _ in options.carried[name].ListFields():
            configs[name].ClearField(descriptor.name)
        configs[name].MergeFrom(options.carried[name])
    for name in engines:
        batching = configs[name].dynamic_batching
        batching.preferred_batch_size[:] = [batch_size]
        batching.max_queue_delay_microseconds = options.max_queue_delay_us
        batching.default_queue_policy.max_queue_size = options.max_queue_size
    if options.check and version != LAST:
        cpp.check_releases(engines, version)
    else:
        cpp.check_releases(engines, None)
    if options.check:
        try:
            tokenizer = load_tokenizer(options.tokenizer_dir)  # last, since it takes seconds
            for name, engine in engines.items():
                cpp.check_vocabulary(name, engine, tokenizer)
        except SetupError as error:
            raise SettingsError(f"--tokenizer-dir: {error}") from error
    return Repository(configs, launch, tuple(cpp.warnings(target, version, parameters)))


def _version(options: ConfigureOptions, target: EngineDir) -> Version:
    if options.version:
        return parse_version(options.version)
    return target.release() or LAST


def _batch_size(options: ConfigureOptions, engines: Mapping[str, EngineDir]) -> int:
    sizes = [engine.max_batch_size for engine in engines.values() if engine.max_batch_size]
    if not sizes:
        return options.max_batch_size or MAX_BATCH_SIZE
    limit = min(sizes)
    size = options.max_batch_size or limit
    if size > limit:
        raise SettingsError(
            f"--max-batch-size {size}: the engine was built for at most {limit}; "
            f"add --max-batch-size {limit}"
        )
    return size


BEHIND = "tensorrt_llm_engine"  # the LLM API's engine, where the clients of upstream are kept


def plan_llm_api(options: ConfigureOptions, llmapi: Any = None) -> Repository:
    """Plan the configurations for TensorRT-LLM's LLM API; raises ``SettingsError``.

    ``llmapi``: the configuration of upstream's ``llmapi`` model, whose clients are kept. It has
    the name ``tensorrt_llm`` and takes text, so a model with its tensors gets that name and the
    engine gets another one.
    """
    config = ModelYaml()
    if options.model_yaml:
        config = ModelYaml.read(options.model_yaml)
    gpus = options.gpu_device_ids or ""
    count = 1
    name = ENGINE.name
    if llmapi:
        gpus = gpus or values_of(llmapi).get("gpu_device_ids", "")
        count = instances_of(llmapi)
        name = BEHIND
    count = max(count, len(gpus.split(";")))
    gpus_of(gpus, 0, count)  # raises for lists that do not fit the instances
    tokenizer = str(options.tokenizer_dir.absolute())
    engine = {
        **PARAMETERS[ENGINE.name],
        "engine": "llm_api",
        "model_dir": tokenizer,
        "gpu_device_ids": gpus,
        "max_batch": str(config.arguments.get("max_batch_size") or 0),
    }
    copies = {}
    if options.model_yaml:
        engine["model_yaml"] = f"{name}/1/model.yaml"
        copies[engine["model_yaml"]] = options.model_yaml
    if max_seq_len := config.arguments.get("max_seq_len"):
        engine["max_sequence_tokens"] = str(max_seq_len)
    text = {
        **PARAMETERS[BLS.name],
        "tokenizer_dir": tokenizer,
        "tensorrt_llm_model_name": name,
        "decoupled": str(options.decoupled).lower(),
    }
    parameters = {name: engine, BLS.name: text}
    if llmapi:
        parameters[LLMAPI.name] = text | {
            "tensors": "llmapi",
            "decoupled": str(config.decoupled).lower(),
            "accumulate_tokens": "true",  # each response has the text so far
            "exclude_input_in_output": "false",  # an answer in one piece begins with the prompt
        }
    for override in options.overrides:
        model = override.model
        key = override.parameter
        if model == ENGINE.name and key in engine:
            model = name
        if model not in parameters:
            models = ", ".join(parameters)
            raise SettingsError(f"--set {override}: no such model; there are {models}")
        if model == name:
            check(ENGINE.name, key, override.value)
        else:
            check(BLS.name, key, override.value)
        parameters[model][key] = override.value
    if options.check:
        load_tokenizer(options.tokenizer_dir)
    configs = {
        name: model_config(replace(ENGINE, name=name), engine),
        BLS.name: model_config(BLS, text),
    }
    configs[name].instance_group[0].count = count
    configs[BLS.name].instance_group[0].count = options.bls_instances
    code = {name: ENGINE.name}
    if llmapi:
        configs[LLMAPI.name] = model_config(LLMAPI, parameters[LLMAPI.name], max_batch_size=0)
        code[LLMAPI.name] = BLS.name
    notes = []
    if count == 1:  # several instances do without MPI
        tensor_parallel = int(config.arguments.get("tensor_parallel_size") or 1)
        ranks = tensor_parallel * int(config.arguments.get("pipeline_parallel_size") or 1)
        serve = f"trtllm-bls serve --model-repository {shlex.quote(str(options.out.absolute()))}"
        launch = f"mpirun --allow-run-as-root -n {ranks} trtllm-llmapi-launch {serve}"
        notes.append(f"if the load ends with MPI_ERR_SPAWN: {launch}")
        if ranks > 1:
            srun = "srun -N MACHINES --ntasks-per-node=GPUS_OF_EACH --mpi=pmix"
            notes.append(f"on several machines: {srun} trtllm-llmapi-launch {serve}")
    return Repository(configs, Launch((name,)), tuple(notes), code, copies)


# --- the files -------------------------------------------------------------------------------


def write(repository: Repository, out: Path, force: bool) -> None:
    """Write every model below ``out``; with ``force`` models of these names are replaced.

    Refuses to delete an engine or a tokenizer that lies inside a model that is replaced.
    """
    if out.exists() and not out.is_dir():
        raise SettingsError(f"--out {out}: is a file")
    if not force and out.is_dir() and any(out.iterdir()):
        raise SettingsError(f"--out {out}: is not empty; add --force to replace its models")
    old_directories = {out / DRAFT_NAME}
    for model in MODELS:
        old_directories.add(out / model.name)
    for name in repository.configs:
        old_directories.add(out / name)
    sources = list(map(str, repository.copies.values()))
    for config in repository.configs.values():
        values = values_of(config)
        sources += [values.get("gpt_model_path", ""), values.get("tokenizer_dir", "")]
    for source in filter(None, sources):
        path = Path(os.path.realpath(source))
        for directory in old_directories:
            if path.is_relative_to(os.path.realpath(directory)):
                raise SettingsError(f"--force: would delete {source}; choose another --out")
    for directory in old_directories:
        shutil.rmtree(directory, ignore_errors=True)
    for name, config in repository.configs.items():
        version = out / name / "1"
        version.mkdir(parents=True)
        text = text_format.MessageToString(config)
        (out / name / "config.pbtxt").write_text(text, encoding="utf-8")
        if config.backend == "python":
            ours = repository.code.get(name, name)
            shutil.copyfile(REPOSITORY / ours / "1" / "model.py", version / "model.py")
    for place, file in repository.copies.items():
        shutil.copyfile(file, out / place)


# --- parameters -----------------------------------------------------------------------------


def _engines(options: ConfigureOptions) -> dict[str, EngineDir]:
    target = cpp.read_engine("--engine-dir", options.engine_dir, options.check)
    engines = {ENGINE.name: target}
    if (draft := options.draft_engine_dir) is not None:
        engines[DRAFT_NAME] = cpp.read_engine("--draft-engine-dir", draft, options.check)
    rows = options.max_num_tokens
    if rows is not None:
        if target.max_step_tokens not in (None, rows):
            raise SettingsError(
                f"--max-num-tokens {rows}: the engine was built for {target.max_step_tokens}; "
                "build another, or leave the option out"
            )
        engines[ENGINE.name] = replace(target, max_step_tokens=rows)
    if options.logits_dtype is None:
        return engines
    logits = cpp.LOGITS_DTYPES[options.logits_dtype]
    for engine in engines.values():
        if (engine.path / "config.json").is_file() and engine.logits != logits:
            raise SettingsError(
                f"--logits-dtype {options.logits_dtype}: {engine.path} has {engine.logits}; "
                "leave the option out"
            )
    return {name: replace(engine, logits=logits) for name, engine in engines.items()}


def _parameters(
    options: ConfigureOptions, engines: Mapping[str, EngineDir], version: Version, launch: Launch
) -> dict[str, dict[str, str]]:
    values = {name: dict(shipped) for name, shipped in PARAMETERS.items()}
    tokenizer = str(options.tokenizer_dir.absolute())
    for name in (PREPROCESSING.name, POSTPROCESSING.name, BLS.name):
        values[name]["tokenizer_dir"] = tokenizer
    for name, engine in engines.items():
        values[name] = cpp.engine_parameters(engine, version)
        if name in launch.participants:
            values[name]["participant_ids"] = launch.participants[name]
    # A model that answers once repeats the prompt, as TensorRT-LLM's own does.
    text = str(options.decoupled).lower()
    for name in (BLS.name, *engines):
        values[name] |= {"decoupled": text, "exclude_input_in_output": text}
    if DRAFT_NAME in engines:
        values[BLS.name] |= {"tensorrt_llm_draft_model_name": DRAFT_NAME, "draft_source": "model"}
    for source, override in _overrides(options):
        model = override.model
        key = override.parameter
        value = override.value
        if model not in values:
            problem = f"{source}: no such model; there are {', '.join(values)}"
            if model == DRAFT_NAME:
                problem += f"; --draft-engine-dir adds {DRAFT_NAME}"
            raise SettingsError(problem)
        try:
            if model not in engines:
                check(model, key, value)
            elif key == "decoupled":
                check(ENGINE.name, key, value)
            else:
                check_backend(key, value, version)
        except SettingsError as error:
            raise SettingsError(f"{source}: {error}") from None
        values[model][key] = value
    for name, engine in engines.items():
        for misfit in cpp.misfits(name, engine, values[name]):
            raise misfit
        values[name] = cpp.engine_facts(engine, version, values[name]) | values[name]
    draft_source = values[BLS.name]["draft_source"]
    if DRAFT_NAME in engines or draft_source != "off":
        source = f"--set {BLS.name}.draft_source={draft_source}"
        if DRAFT_NAME in engines:
            source = "--draft-engine-dir"
        cpp.check_target(source, engines[ENGINE.name], values[ENGINE.name])
        cpp.check_drafting(engines, values, version)
    return values
