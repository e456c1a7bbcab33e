"""The command line of ``configure``, and the repository that ``--from`` names.

An existing repository of TensorRT-LLM's own models is read as options of ``configure``: from each
``config.pbtxt``, after its template was filled in. A value that the new repository cannot hold, or
that had no effect, is left out and named in a note.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from tritonclient.grpc import model_config_pb2

from trtllm_bls.configure.engine_dir import LOGITS_DTYPES, read_engine
from trtllm_bls.configure.model_programs import is_ours
from trtllm_bls.configure.repository import (
    ConfigureOptions,
    Repository,
    launcher_command,
    plan,
    plan_llm_api,
    slurm_script,
    write,
)
from trtllm_bls.configure.upgrade import names_of
from trtllm_bls.errors import SettingsError
from trtllm_bls.settings.command_options import Override, option, options_of
from trtllm_bls.settings.cpp_backend import Version, check_backend, keys_of, parse_version
from trtllm_bls.settings.model_config import dtype_of, instances_of, read_config, values_of
from trtllm_bls.settings.model_names import DRAFT_NAME
from trtllm_bls.settings.model_yaml import ModelYaml
from trtllm_bls.settings.parameters import check
from trtllm_bls.wire.contract import (
    BLS,
    ENGINE,
    ENSEMBLE,
    LLMAPI,
    MODEL_NAMES,
    POSTPROCESSING,
    PREPROCESSING,
)

_OPTION_PATH = click.Path(path_type=Path)


def _print_keys(ctx: click.Context, param: click.Parameter, release: str | None) -> None:
    if release is None:
        return
    version = parse_version(release, "--keys")
    for name, key in sorted(keys_of(version).items()):
        line = f"{name}: {key.expected}"
        if key.is_required(version):
            line += " (always written)"
        click.echo(line)
    ctx.exit()


@click.command(name="configure")
@click.option(
    "--from",
    "source",
    type=_OPTION_PATH,
    metavar="REPOSITORY",
    help="Read engines, tokenizer and values from a repository of TensorRT-LLM's own models.",
)
@options_of(ConfigureOptions)
@click.option(
    "--strict",
    is_flag=True,
    help="Write nothing if the new repository lacks something of --from's.",
)
@click.option(
    "--map",
    "names",
    multiple=True,
    metavar="NAME=MODEL",
    help="The model NAME of --from's is upstream's MODEL.",
)
@click.option("--slurm", type=_OPTION_PATH, metavar="FILE", help="Write a Slurm job script too.")
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="[MODEL.]KEY=VALUE",
    help=f"Any parameter; of {ENGINE.name} where no model is named.",
)
@click.option(
    "--set-draft", "draft_sets", multiple=True, metavar="KEY=VALUE", help="The same, of the draft."
)
@click.option(
    "--keys",
    is_eager=True,
    expose_value=False,
    callback=_print_keys,
    metavar="RELEASE",
    help="Print what the C++ backend of a release reads, with the values allowed, and exit.",
)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Write a model repository for TensorRT-LLM's C++ backend, or its LLM API.

    \b
    Examples:
      trtllm-bls configure --engine-dir ./e --tokenizer-dir ./t --out ./repository
      trtllm-bls configure --from ./old --out ./new --version 0.18
      trtllm-bls configure --engine-dir ./e --tokenizer-dir ./t --out ./r \\
        --set max_beam_width=2
      trtllm-bls configure --engine llm_api --tokenizer-dir ./t \\
        --model-yaml ./model.yaml --out ./r
    """
    slurm = options.pop("slurm")
    source = options.pop("source")
    is_strict = options.pop("strict")
    names = names_of(options.pop("names"))
    overrides = []
    for text in options.pop("sets"):
        overrides.append(_override(text, ENGINE.name))
    for text in options.pop("draft_sets"):
        overrides.append(_override(f"{DRAFT_NAME}.{text}", DRAFT_NAME))
    repository, upstream = _plan(ctx, options, overrides, source, names)
    if is_strict and upstream.losses:
        raise SettingsError(f"--strict: {source} would lose: {'; '.join(upstream.losses)}")
    out: Path = options["out"]
    script = ""
    if slurm:
        script = slurm_script(repository.launch, out)
        if not slurm.absolute().parent.is_dir():
            raise SettingsError(f"--slurm {slurm}: there is no such directory")
    try:
        write(repository, out, options["force"])
        if slurm:
            slurm.write_text(script, encoding="utf-8")
            click.echo(f"wrote {slurm}")
    except OSError as error:
        raise SettingsError(f"{error.filename}: cannot be written: {error.strerror}") from error
    for name, config in repository.configs.items():
        click.echo(f"wrote {out / name} ({config.backend or config.platform})")
    for note in upstream.notes:
        click.echo(f"note: {note}")
    for loss in upstream.losses:
        click.echo(f"note: lost: {loss}")
    for warning in repository.warnings:
        click.echo(f"note: {warning}")
    launch = repository.launch
    if launch.world_size == 1 and not launch.orchestrator:  # one server process
        click.echo(f"next: trtllm-bls serve --model-repository {out}")
    else:
        click.echo("next: start it with TensorRT-LLM's launcher, on a machine with these GPUs")
        click.echo(f"      {launcher_command(launch, out)}")


def _plan(
    ctx: click.Context,
    options: dict[str, Any],
    overrides: list[Override],
    source: Path | None,
    names: Mapping[str, str],
) -> tuple[Repository, Upstream]:
    """Plan the new repository. The values of ``source`` count where the command line has none."""
    if source and is_ours(source):
        raise SettingsError(
            f"--from {source}: a version of this package wrote it; copy it, then run trtllm-bls "
            f"upgrade on the copy: cp -r {source} {options['out']}"
        )
    typed_options = _typed_options(ctx)
    yaml = None
    if source:
        yaml = upstreams_yaml(source)
    for_llm_api = options["engine"] == "llm_api" or yaml is not None
    upstream = Upstream()
    if for_llm_api and (useless_options := sorted(typed_options - _OF_LLM_API)):
        raise SettingsError(
            f"{option(useless_options[0])}: has no meaning with the LLM API; see --model-yaml"
        )
    if source and yaml:
        upstream = read_llm_api(source, yaml)
    elif source and not for_llm_api:
        upstream = read_cpp(source, options["version"], names)
    inherited_options = upstream.options.keys() - typed_options
    for name in inherited_options:
        options[name] = upstream.options[name]
    if "decoupled" in typed_options:
        # The option is for the engines, too, so it replaces their policies of the old repository.
        upstream.overrides = [o for o in upstream.overrides if o.parameter != "decoupled"]
    required_options = ["tokenizer_dir"]
    if not for_llm_api:
        required_options.insert(0, "engine_dir")
    for name in required_options:
        if options[name] is not None:
            continue
        problem = f"Missing option '{option(name)}'"
        if source:
            problem += f", which is not in {source}"
        raise click.UsageError(f"{problem}.", ctx)
    configuration = ConfigureOptions(overrides=(*upstream.overrides, *overrides), **options)
    try:
        if for_llm_api:
            return plan_llm_api(configuration, upstream.llmapi), upstream
        return plan(configuration), upstream
    except SettingsError as error:
        if str(error).split()[0] not in map(option, inherited_options):
            raise
        raise SettingsError(f"--from {source}: {error}") from None


def _typed_options(ctx: click.Context) -> set[str]:
    """Return the names of the options that stand on the command line."""
    names = set()
    for name in ctx.params:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            names.add(name)
    return names


def _override(text: str, model: str) -> Override:
    """Read ``[MODEL.]KEY=VALUE``; without a model it is a parameter of ``model``."""
    key, equals, _ = text.partition("=")
    if equals and "." not in key:
        text = f"{model}.{text}"
    return Override.parse(text)


# --- the repository that --from names -------------------------------------------------------

# Not copied as they are: `configure` has options for them or sets them itself.
_NOT_COPIED = {"gpt_model_path", "gpt_model_type", "gpu_device_ids"}
_TRUE_BY_DEFAULT_SINCE = Version(0, 11)  # preprocessing's add_special_tokens
_WORKER_PATH_RENAMED = Version(0, 10)
_TEXT_PARAMETERS = {  # a parameter of one of upstream's models, and our models that have it too
    (PREPROCESSING.name, "add_special_tokens"): (PREPROCESSING.name, BLS.name),
    (POSTPROCESSING.name, "skip_special_tokens"): (POSTPROCESSING.name, BLS.name),
    (BLS.name, "accumulate_tokens"): (BLS.name,),
}
_NOT_REPORTED = {  # parameters that `configure` sets itself, or that nothing needs
    *("tokenizer_dir", "tokenizer_type", "tensorrt_llm_model_name"),
    "tensorrt_llm_draft_model_name",
}
# Inputs of upstream's features that are not here. Nothing else changes without them.
_UNSUPPORTED_INPUTS = {
    *("encoder_input_features", "encoder_output_lengths", "cross_attention_mask"),
    *("skip_cross_attn_blocks", "context_phase_params", "mrope_rotary_cos_sin"),
    *("mrope_position_deltas", "return_kv_cache_reuse_stats", "runtime_top_p_min"),
}
_TEXT_MODELS = (PREPROCESSING, POSTPROCESSING, ENSEMBLE, BLS)
# One process of ``tensorrt_llm_bls`` serves all requests, in batches that it makes itself.
_NOT_CARRIED = ((BLS.name, "instance_group"), (BLS.name, "dynamic_batching"))
_CARRIED_FIELDS = ("instance_group", "dynamic_batching", "model_warmup")
_WRITTEN_FIELDS = {  # those of a configuration that `configure` writes or has an option for
    *("name", "platform", "backend", "max_batch_size", "input", "output", "parameters"),
    *("model_transaction_policy", "ensemble_scheduling", "default_model_filename", "runtime"),
}
_OF_LLM_API = {  # the options that have a meaning for the LLM API
    *("source", "names", "engine", "model_yaml", "tokenizer_dir", "out", "gpu_device_ids"),
    *("decoupled", "bls_instances", "check", "force", "sets", "strict"),
}


@dataclass
class Upstream:
    """Upstream's repository, as ``options`` of ``ConfigureOptions`` and as parameters to set.

    The user reads the ``notes``, on what has another meaning here, and the ``losses``, which the
    new repository does not have. ``llmapi`` is the configuration of upstream's ``llmapi`` model,
    where it is its repository.
    """

    options: dict[str, Any] = field(default_factory=dict)
    overrides: list[Override] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    llmapi: Any = None


def upstreams_yaml(directory: Path) -> Path | None:
    """Find the ``model.yaml`` of upstream's ``llmapi`` repository; ``None`` if it is none."""
    version = directory / LLMAPI.name / "1"
    path = version / os.environ.get("LLM_CONFIG_PATH", "model.yaml")
    if not path.is_file() or not (version / "model.py").is_file():
        return None
    return path


def read_llm_api(directory: Path, yaml: Path) -> Upstream:
    """Read upstream's ``llmapi`` repository with this ``model.yaml``; raises ``SettingsError``."""
    upstream = Upstream({"model_yaml": yaml})
    upstream.llmapi = read_config(directory / LLMAPI.name / "config.pbtxt")
    tensors = LLMAPI.input_named.keys() | LLMAPI.output_named.keys()
    for tensor in (*upstream.llmapi.input, *upstream.llmapi.output):
        if tensor.name not in tensors:
            upstream.losses.append(f"tensor {tensor.name}")
    for key in values_of(upstream.llmapi):
        if key != "gpu_device_ids":
            upstream.losses.append(f"parameter {key}")
    if model := ModelYaml.read(yaml).arguments.get("model"):
        upstream.options["tokenizer_dir"] = Path(model)
    return upstream


def read_cpp(directory: Path, version: str, names: Mapping[str, str] = {}) -> Upstream:
    """Read a repository of the models for the C++ backend.

    ``version`` is the container's release; if it is empty, the engine's counts. ``names`` maps
    other names of upstream's models to theirs. Raises ``SettingsError`` where ``directory`` has no
    target model or a file that cannot be read.
    """
    upstream = Upstream()
    configs = _read_configs(upstream, directory, names)
    values = {}
    for model, config in configs.items():
        values[model] = _set_values(upstream, model, config)
    bls = values.get(BLS.name, {})
    # --map may have renamed the models, so ``configs`` has them under other names.
    target = bls.get("tensorrt_llm_model_name", ENGINE.name)
    target = names.get(target, target)
    draft = bls.get("tensorrt_llm_draft_model_name", "")
    draft = names.get(draft, draft)
    if target not in configs:
        models = ", ".join(configs) or "none"
        raise SettingsError(f"--from {directory}: it has no model {target}; there are: {models}")
    for model, key, option_name in (
        (target, "gpt_model_path", "engine_dir"),
        (PREPROCESSING.name, "tokenizer_dir", "tokenizer_dir"),
        (draft, "gpt_model_path", "draft_engine_dir"),
    ):
        if value := values.get(model, {}).get(key):
            upstream.options[option_name] = Path(value)
    target_config = configs[target]
    engine = None
    if "engine_dir" in upstream.options:
        engine = read_engine("--from", upstream.options["engine_dir"], check=False)
    release = None
    if engine and not version:
        release = engine.release()
    if release is None:
        release = parse_version(version or "last")
    _add_engine(upstream, target, ENGINE.name, target_config, values[target], release)
    if draft in configs:
        _add_engine(upstream, draft, DRAFT_NAME, configs[draft], values[draft], release)
        upstream.overrides.append(Override(BLS.name, "draft_source", "off"))
        upstream.notes.append(
            "drafts are made for requests that ask for them (num_draft_tokens), as before; "
            f"{BLS.name}.draft_source=model makes them for all"
        )
    elif draft:
        upstream.losses.append(f"there is no model {draft}, so no drafts of a model either")
    if engine and not (engine.path / "config.json").is_file():
        upstream.options["logits_dtype"] = _logits_dtype(target_config)
    _add_serving(upstream, target, configs, values[target])
    new_names = {target: ENGINE.name, draft: DRAFT_NAME}
    for text_model in _TEXT_MODELS:
        new_names[text_model.name] = text_model.name
    _add_fields(upstream, new_names, configs)
    _add_text_parameters(upstream, values, release)
    converted = {target, draft, *MODEL_NAMES}
    for name in sorted(configs.keys() - converted):
        upstream.losses.append(f"{name}: a model that is not converted")
    return upstream


def _read_configs(upstream: Upstream, directory: Path, names: Mapping[str, str]) -> dict[str, Any]:
    """Read the configuration of each model, by upstream's name for it."""
    if not directory.is_dir():
        raise SettingsError(f"{directory}: no such directory")
    configs = {}
    for path in sorted(directory.glob("*/config.pbtxt")):
        name = path.parent.name
        configs[names.get(name, name)] = read_config(path)
    for name, model in names.items():
        if not (directory / name / "config.pbtxt").is_file():
            raise SettingsError(f"--map {name}={model}: {directory} has no model {name}")
        upstream.notes.append(f"{name} is called {model} here; requests to it need the new name")
    for code in sorted(directory.glob("*/1/model.py")):
        upstream.notes.append(
            f"{code.relative_to(directory)} is not taken over; changes of your own in it are lost"
        )
    return configs


def _add_serving(
    upstream: Upstream, target: str, configs: Mapping[str, Any], values: Mapping[str, str]
) -> None:
    """Add the options about batches, queues, streams and processes.

    ``values`` are the parameters of the model ``target``.
    """
    target_config = configs[target]
    batching = target_config.dynamic_batching
    client_config = configs.get(BLS.name, target_config)  # that of the model which clients call
    upstream.options |= {
        "max_batch_size": target_config.max_batch_size or None,
        "max_queue_delay_us": batching.max_queue_delay_microseconds,
        "max_queue_size": batching.default_queue_policy.max_queue_size,
        "decoupled": client_config.model_transaction_policy.decoupled,
    }
    if not upstream.options["decoupled"] and "exclude_input_in_output" not in values:
        upstream.notes.append("answers begin with the prompt, as before")
    count = instances_of(client_config)
    if BLS.name in configs and count > 1:
        upstream.notes.append(
            f"{BLS.name} had {count} instances, one per request at a time; one process "
            "serves them all here (--bls-instances for more)"
        )


def _set_values(upstream: Upstream, model: str, config: Any) -> dict[str, str]:
    """Return the parameters of a model that have a value; note those of an unfilled template."""
    values = {}
    placeholders = []
    for key, text in values_of(config).items():
        if "${" in text:
            placeholders.append(key)
        elif text:
            values[key] = text
    if placeholders:
        upstream.notes.append(f"{model}: not filled in, so not set: {', '.join(placeholders)}")
    return values


def _logits_dtype(config: Any) -> str | None:
    """Return the type of an engine's logits as ``configure`` spells it; ``None`` if not there."""
    names = {dtype: name for name, dtype in LOGITS_DTYPES.items()}
    for tensor in config.output:
        if tensor.name == "generation_logits":
            return names.get(dtype_of(tensor))
    return None


def _add_engine(
    upstream: Upstream, old: str, new: str, config: Any, values: dict[str, str], release: Version
) -> None:
    """Give the model ``new`` the parameters of the engine ``old`` that the release reads."""
    if new != old:
        upstream.notes.append(f"{old} is called {new} here; requests to it need the new name")
    if config.backend == "python":
        upstream.notes.append(
            f"{old}: its Python backend is replaced by the C++ backend tensorrtllm"
        )
    kind = values.get("gpt_model_type", "inflight")
    if "inflight" not in kind:
        upstream.losses.append(f"{old}: gpt_model_type {kind} becomes in-flight batching")
    if "gpu_device_ids" in values:
        option_name = "draft_gpu_device_ids"
        if new == ENGINE.name:
            option_name = "gpu_device_ids"
        upstream.options[option_name] = values["gpu_device_ids"]
    for key, value in values.items():
        if key in _NOT_COPIED:
            continue
        if key == "worker_path" and release >= _WORKER_PATH_RENAMED:
            key = "executor_worker_path"
        try:
            check_backend(key, value, release)
            upstream.overrides.append(Override(new, key, value))
            if key == "exclude_input_in_output" and new == ENGINE.name:
                upstream.overrides.append(Override(BLS.name, key, value))
        except SettingsError as error:
            upstream.notes.append(f"{old}.{key}={value} is left out, as it had no effect: {error}")
    policy = str(config.model_transaction_policy.decoupled).lower()
    upstream.overrides.append(Override(new, "decoupled", policy))
    dtypes = {tensor.name: tensor.dtype for tensor in ENGINE.inputs}
    dtypes.pop("draft_logits")  # its type is the engine's
    for tensor in config.input:
        name = tensor.name
        dtype = dtype_of(tensor)
        if name in dtypes and dtype != dtypes[name]:
            upstream.losses.append(
                f"{config.name}: input {name} is {dtypes[name]} here, not {dtype}"
            )
        elif name not in ENGINE.input_named and name not in _UNSUPPORTED_INPUTS:
            upstream.losses.append(f"{config.name}: input {name} is left out")


def _add_fields(
    upstream: Upstream, new_names: Mapping[str, str], configs: Mapping[str, Any]
) -> None:
    """Carry instances, queue policies and warm-ups over as they are; report other fields."""
    carried = upstream.options["carried"] = {}
    for old, new in new_names.items():
        if old not in configs:
            continue
        for descriptor, value in configs[old].ListFields():
            name = descriptor.name
            has_files = name == "model_warmup" and "input_data_file" in str(value)
            if name in _CARRIED_FIELDS and (new, name) not in _NOT_CARRIED and not has_files:
                part = model_config_pb2.ModelConfig(**{name: value})
                carried.setdefault(new, model_config_pb2.ModelConfig()).MergeFrom(part)
            elif name not in _WRITTEN_FIELDS and (new, name) != _NOT_CARRIED[0]:
                loss = f"{old}.{name} is left out: set it by hand"
                if has_files:
                    loss += "; copy its files"
                upstream.losses.append(loss)


def _add_text_parameters(
    upstream: Upstream, values: Mapping[str, Mapping[str, str]], release: Version
) -> None:
    """Add the text models' parameters, with the defaults that the release had."""
    for (model, key), models in _TEXT_PARAMETERS.items():
        value = values.get(model, {}).get(key)
        if value is None and key == "add_special_tokens" and release < _TRUE_BY_DEFAULT_SINCE:
            value = "false"
            upstream.notes.append("add_special_tokens was not set, which meant false before 0.11")
        if value is not None:
            for name in models:
                upstream.overrides.append(Override(name, key, value))
    for text_model in _TEXT_MODELS:
        for key, value in values.get(text_model.name, {}).items():
            try:
                check(text_model.name, key, value)
            except SettingsError as error:
                if key not in _NOT_REPORTED:
                    upstream.losses.append(f"{text_model.name}.{key} is left out: {error}")
