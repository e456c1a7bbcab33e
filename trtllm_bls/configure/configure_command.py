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
    MODELS,
    POSTPROCESSING,
    PREPROCESSING,
)

_OPTION_PATH = click.Path(path_type=Path)


def _print_keys(ctx: click.Context, param: click.Parameter, release: str | None) -> None:
    if release is None:
        return
    version = parse_version(release, "--keys")
    for name, key in sorted(keys_of(version).items()):
        always = " (always written)" if key.is_required(version) else ""
        click.echo(f"{name}: {key.expected}{always}")
    ctx.exit()


@click.command(name="configure")
@click.option(
    "--from",
    "existing",
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
      trtllm-bls configure --engine-dir ./engine --tokenizer-dir ./llama --out ./repository
      trtllm-bls configure --from ./old --out ./new --version 0.18
      trtllm-bls configure --engine-dir ./e --tokenizer-dir ./t --out ./r --set max_beam_width=2
      trtllm-bls configure --engine llm_api --tokenizer-dir ./llama --model-yaml ./y --out ./r
    """
    slurm, source, strict = (options.pop(name) for name in ("slurm", "existing", "strict"))
    names = names_of(options.pop("names"))
    overrides = [_override(text, ENGINE.name) for text in options.pop("sets")]
    for text in options.pop("draft_sets"):
        overrides.append(_override(f"{DRAFT_NAME}.{text}", DRAFT_NAME))
    repository, upstream = _plan(ctx, options, overrides, source, names)
    if strict and upstream.losses:
        raise SettingsError(f"--strict: {source} would lose: {'; '.join(upstream.losses)}")
    out: Path = options["out"]
    script = slurm_script(repository.launch, out) if slurm else ""
    if slurm and not slurm.absolute().parent.is_dir():
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
    losses = [f"lost: {loss}" for loss in upstream.losses]
    for note in (*upstream.notes, *losses, *repository.warnings):
        click.echo(f"note: {note}")
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
    """What ``source`` has counts where the command line does not say."""
    if source and is_ours(source):
        mend = f"copy it, then run trtllm-bls upgrade on the copy: cp -r {source} {options['out']}"
        raise SettingsError(f"--from {source}: a version of this package wrote it; {mend}")
    command_line = ParameterSource.COMMANDLINE
    typed = {name for name in ctx.params if ctx.get_parameter_source(name) is command_line}
    yaml = upstreams_yaml(source) if source else None
    for_llm_api = options["engine"] == "llm_api" or yaml is not None
    upstream = Upstream()
    if for_llm_api and (unread := sorted(typed - _OF_LLM_API)):
        what = "has no meaning with the LLM API; see --model-yaml"
        raise SettingsError(f"{option(unread[0])}: {what}")
    if source and yaml:
        upstream = read_llm_api(source, yaml)
    elif source and not for_llm_api:
        upstream = read_cpp(source, options["version"], names)
    inherited = upstream.options.keys() - typed
    options |= {name: upstream.options[name] for name in inherited}
    if "decoupled" in typed:  # the option is for the engines, too
        for_engines = upstream.overrides
        upstream.overrides = [o for o in for_engines if o.parameter != "decoupled"]
    for name in ("tokenizer_dir",) if for_llm_api else ("engine_dir", "tokenizer_dir"):
        if options[name] is None:
            where = f", which is not in {source}" if source else ""
            raise click.UsageError(f"Missing option '{option(name)}'{where}.", ctx)
    configuration = ConfigureOptions(overrides=(*upstream.overrides, *overrides), **options)
    try:
        if for_llm_api:
            return plan_llm_api(configuration, upstream.llmapi), upstream
        return plan(configuration), upstream
    except SettingsError as error:
        if str(error).split()[0] not in map(option, inherited):
            raise
        raise SettingsError(f"--from {source}: {error}") from None


def _override(text: str, model: str) -> Override:
    """Read ``[MODEL.]KEY=VALUE``; without a model it is a parameter of ``model``."""
    key, equals, _ = text.partition("=")
    return Override.parse(text if "." in key or not equals else f"{model}.{text}")


# --- the repository that --from names -------------------------------------------------------

# Not copied as they are: `configure` has options for them or sets them itself.
_NOT_COPIED = {"gpt_model_path", "gpt_model_type", "gpu_device_ids"}
_TRUE_BY_DEFAULT_SINCE = Version(0, 11)  # preprocessing's add_special_tokens
_WORKER_PATH_RENAMED = Version(0, 10)
_TEXT_PARAMETERS = {  # a parameter of one of their models, and our models that have it too
    (PREPROCESSING.name, "add_special_tokens"): (PREPROCESSING.name, BLS.name),
    (POSTPROCESSING.name, "skip_special_tokens"): (POSTPROCESSING.name, BLS.name),
    (BLS.name, "accumulate_tokens"): (BLS.name,),
}
_TOLD_ELSEWHERE = {  # parameters that `configure` sets itself, or that nothing needs
    *("tokenizer_dir", "tokenizer_type", "tensorrt_llm_model_name"),
    "tensorrt_llm_draft_model_name",
}
# Inputs that upstream declares for what is not here, without which nothing else changes.
_NOT_HERE = {
    *("encoder_input_features", "encoder_output_lengths", "cross_attention_mask"),
    *("skip_cross_attn_blocks", "context_phase_params", "mrope_rotary_cos_sin"),
    *("mrope_position_deltas", "return_kv_cache_reuse_stats", "runtime_top_p_min"),
}
_TEXT_MODELS = (PREPROCESSING, POSTPROCESSING, ENSEMBLE, BLS)
# One process of ``tensorrt_llm_bls`` serves all requests, in batches that it makes itself.
_NOT_CARRIED = ((BLS.name, "instance_group"), (BLS.name, "dynamic_batching"))
_CARRIED = ("instance_group", "dynamic_batching", "model_warmup")
_WRITTEN = {  # fields of a configuration that `configure` writes, or of which it has an option
    *("name", "platform", "backend", "max_batch_size", "input", "output", "parameters"),
    *("model_transaction_policy", "ensemble_scheduling", "default_model_filename", "runtime"),
}
_OF_LLM_API = {  # the options that have a meaning for the LLM API
    *("existing", "names", "engine", "model_yaml", "tokenizer_dir", "out", "gpu_device_ids"),
    *("decoupled", "bls_instances", "check", "force", "sets", "strict"),
}


@dataclass
class Upstream:
    """``options`` of ``ConfigureOptions`` by name, parameters to set, and what the user is told.

    ``notes`` say what is meant otherwise here, ``losses`` what the new repository does not have.
    ``llmapi`` is the configuration of upstream's ``llmapi`` model, where it is its repository.
    """

    options: dict[str, Any] = field(default_factory=dict)
    overrides: list[Override] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    llmapi: Any = None


def upstreams_yaml(directory: Path) -> Path | None:
    """The ``model.yaml`` of upstream's ``llmapi`` repository; ``None`` if it is none."""
    version = directory / LLMAPI.name / "1"
    path = version / os.environ.get("LLM_CONFIG_PATH", "model.yaml")
    return path if path.is_file() and (version / "model.py").is_file() else None


def read_llm_api(directory: Path, yaml: Path) -> Upstream:
    """Upstream's ``llmapi`` repository, which has this ``model.yaml``; raises ``SettingsError``."""
    upstream = Upstream({"model_yaml": yaml})
    upstream.llmapi = read_config(directory / LLMAPI.name / "config.pbtxt")
    known = {*LLMAPI.input_named, *LLMAPI.output_named}
    names = [tensor.name for tensor in (*upstream.llmapi.input, *upstream.llmapi.output)]
    unread = [key for key in values_of(upstream.llmapi) if key != "gpu_device_ids"]
    upstream.losses += [f"tensor {name}" for name in names if name not in known]
    upstream.losses += [f"parameter {key}" for key in unread]
    if model := ModelYaml.read(yaml).arguments.get("model"):
        upstream.options["tokenizer_dir"] = Path(model)
    return upstream


def read_cpp(directory: Path, version: str, names: Mapping[str, str] = {}) -> Upstream:
    """A repository of the models for the C++ backend.

    ``version`` is the container's release; if it is empty, the engine's counts. ``names``: which
    of upstream's models those of other names are. Raises ``SettingsError`` where ``directory`` has
    no target model or a file that cannot be read.
    """
    upstream = Upstream()
    if not directory.is_dir():
        raise SettingsError(f"{directory}: no such directory")
    files = sorted(directory.glob("*/config.pbtxt"))
    configs = {names.get(path.parent.name, path.parent.name): read_config(path) for path in files}
    for name, model in names.items():
        if not (directory / name / "config.pbtxt").is_file():
            raise SettingsError(f"--map {name}={model}: {directory} has no model {name}")
        upstream.notes.append(f"{name} is called {model} here; requests to it need the new name")
    for code in sorted(directory.glob("*/1/model.py")):
        what = "is not taken over; changes of your own in it are lost"
        upstream.notes.append(f"{code.relative_to(directory)} {what}")
    values = {}
    for model, config in configs.items():
        filled = {key: text for key, text in values_of(config).items() if "${" not in text}
        if empty := [key for key in values_of(config) if key not in filled]:
            upstream.notes.append(f"{model}: not filled in, so not set: {', '.join(empty)}")
        values[model] = {key: text for key, text in filled.items() if text}
    bls = values.get(BLS.name, {})
    # As the models are called in ``configs``: --map may have renamed them.
    target = bls.get("tensorrt_llm_model_name", ENGINE.name)
    target = names.get(target, target)
    draft = bls.get("tensorrt_llm_draft_model_name", "")
    draft = names.get(draft, draft)
    if target not in configs:
        there = ", ".join(configs) or "none"
        raise SettingsError(f"--from {directory}: it has no model {target}; there are: {there}")
    for name, key, to in (
        (target, "gpt_model_path", "engine_dir"),
        (PREPROCESSING.name, "tokenizer_dir", "tokenizer_dir"),
        (draft, "gpt_model_path", "draft_engine_dir"),
    ):
        if path := values.get(name, {}).get(key):
            upstream.options[to] = Path(path)
    place, old = upstream.options.get("engine_dir"), configs[target]
    engine = read_engine("--from", place, check=False) if place else None
    built_by = engine.release() if engine and not version else None
    release = built_by or parse_version(version or "last")
    _add_engine(upstream, target, ENGINE.name, old, values[target], release)
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
        types = {tensor.name: dtype_of(tensor) for tensor in old.output}
        names_of_types = {dtype: name for name, dtype in LOGITS_DTYPES.items()}
        dtype = types.get("generation_logits", "")
        upstream.options["logits_dtype"] = names_of_types.get(dtype)
    first, batching = configs.get(BLS.name, old), old.dynamic_batching
    upstream.options |= {
        "max_batch_size": old.max_batch_size or None,
        "max_queue_delay_us": batching.max_queue_delay_microseconds,
        "max_queue_size": batching.default_queue_policy.max_queue_size,
        "decoupled": first.model_transaction_policy.decoupled,
    }
    if not upstream.options["decoupled"] and "exclude_input_in_output" not in values[target]:
        upstream.notes.append("answers begin with the prompt, as before")
    count = instances_of(first)
    if first is not old and count > 1:
        upstream.notes.append(
            f"{BLS.name} had {count} instances, one per request at a time; one process "
            "serves them all here (--bls-instances for more)"
        )
    new_names = {target: ENGINE.name, draft: DRAFT_NAME} | {
        model.name: model.name for model in _TEXT_MODELS
    }
    _add_fields(upstream, new_names, configs)
    _add_text_parameters(upstream, values, release)
    others = configs.keys() - {model.name for model in MODELS} - {target, draft}
    upstream.losses += [f"{name}: a model that is not converted" for name in sorted(others)]
    return upstream


def _add_engine(
    upstream: Upstream, old: str, new: str, config: Any, values: dict[str, str], release: Version
) -> None:
    """The parameters of the engine ``old`` that the release reads, for the model ``new``."""
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
        name = "gpu_device_ids" if new == ENGINE.name else "draft_gpu_device_ids"
        upstream.options[name] = values["gpu_device_ids"]
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
            what = f"{old}.{key}={value} is left out"
            upstream.notes.append(f"{what}, as it had no effect: {error}")
    policy = str(config.model_transaction_policy.decoupled).lower()
    upstream.overrides.append(Override(new, "decoupled", policy))
    known = {tensor.name: tensor.dtype for tensor in ENGINE.inputs}
    for tensor in config.input:
        name, dtype = tensor.name, dtype_of(tensor)
        if name not in known.keys() | _NOT_HERE:
            upstream.losses.append(f"{config.name}: input {name} is left out")
        elif dtype != known.get(name, dtype) and name != "draft_logits":  # its type is the engine's
            what = f"input {name} is {known[name]} here, not {dtype}"
            upstream.losses.append(f"{config.name}: {what}")


def _add_fields(
    upstream: Upstream, new_names: Mapping[str, str], configs: Mapping[str, Any]
) -> None:
    """What is carried over as it is: instances, queue policies, warm-up. The rest is named."""
    carried = upstream.options["carried"] = {}
    for old, new in new_names.items():
        for descriptor, value in configs[old].ListFields() if old in configs else ():
            name = descriptor.name
            has_files = name == "model_warmup" and "input_data_file" in str(value)
            if name in _CARRIED and (new, name) not in _NOT_CARRIED and not has_files:
                part = model_config_pb2.ModelConfig(**{name: value})
                carried.setdefault(new, model_config_pb2.ModelConfig()).MergeFrom(part)
            elif name not in _WRITTEN and (new, name) != _NOT_CARRIED[0]:
                why = "; copy its files" if has_files else ""
                upstream.losses.append(f"{old}.{name} is left out: set it by hand{why}")


def _add_text_parameters(
    upstream: Upstream, values: Mapping[str, Mapping[str, str]], release: Version
) -> None:
    """The text models' parameters, with the defaults that the release had."""
    for (model, key), models in _TEXT_PARAMETERS.items():
        value = values.get(model, {}).get(key)
        if value is None and key == "add_special_tokens" and release < _TRUE_BY_DEFAULT_SINCE:
            value = "false"
            upstream.notes.append("add_special_tokens was not set, which meant false before 0.11")
        if value is not None:
            upstream.overrides += [Override(name, key, value) for name in models]
    for text_model in _TEXT_MODELS:
        for key, value in values.get(text_model.name, {}).items():
            try:
                check(text_model.name, key, value)
            except SettingsError as error:
                if key not in _TOLD_ELSEWHERE:
                    upstream.losses.append(f"{text_model.name}.{key} is left out: {error}")
