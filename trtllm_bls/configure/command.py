"""The command line of ``configure``, and the repository that ``--from`` names.

An existing repository of TensorRT-LLM's own models is read as options of ``configure``: from each
``config.pbtxt``, after its template was filled in. A value that the new repository cannot hold, or
that had no effect, is left out and named in a note.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from tritonclient.grpc import model_config_pb2

from trtllm_bls.configure.engine import LOGITS_DTYPES, read_engine
from trtllm_bls.configure.repository import (
    DRAFT,
    ConfigureOptions,
    Repository,
    launcher_command,
    plan,
    plan_llm_api,
    slurm_script,
    write,
)
from trtllm_bls.contract import BLS, ENGINE, ENSEMBLE, LLMAPI, MODELS, POSTPROCESSING, PREPROCESSING
from trtllm_bls.errors import SettingsError
from trtllm_bls.parameters import check
from trtllm_bls.parameters.cpp_backend import LAST, Version, check_backend, keys_of, parse_version
from trtllm_bls.parameters.model_config import dtype_of, instances_of, read_config, values_of
from trtllm_bls.parameters.model_yaml import ModelYaml
from trtllm_bls.settings import Override, option, options_of

_PATH = click.Path(path_type=Path)


def _print_keys(ctx: click.Context, param: click.Parameter, release: str | None) -> None:
    if release is None:
        return
    version = parse_version(release, "--keys")
    for name, key in sorted(keys_of(version).items()):
        demanded = key.demanded is not None and key.demanded <= version
        click.echo(f"{name}: {key.expected}{' (always written)' if demanded else ''}")
    ctx.exit()


@click.command(name="configure")
@click.option(
    "--from",
    "existing",
    type=_PATH,
    metavar="REPOSITORY",
    help="Read engines, tokenizer and values from a repository of TensorRT-LLM's own models.",
)
@options_of(ConfigureOptions)
@click.option(
    "--strict",
    is_flag=True,
    help="Write nothing if the new repository lacks something of --from's.",
)
@click.option("--slurm", type=_PATH, metavar="FILE", help="Write a Slurm job script too.")
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="[MODEL.]KEY=VALUE",
    help="Any parameter; of tensorrt_llm where no model is named.",
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
    slurm, source = options.pop("slurm"), options.pop("existing")
    sets, draft_sets, strict = (options.pop(name) for name in ("sets", "draft_sets", "strict"))
    overrides = [
        *(_override(text, ENGINE.name) for text in sets),
        *(_override(f"{DRAFT}.{text}", DRAFT) for text in draft_sets),
    ]
    for_llm_api = options["engine"] == "llm_api" or (source and upstreams_yaml(source))
    planned = _plan_llm_api if for_llm_api else _plan_cpp
    repository, notes, lost = planned(ctx, options, overrides, source)
    if strict and lost:
        raise SettingsError(f"--strict: {source} would lose: {'; '.join(lost)}")
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
    for note in (*notes, *(f"lost: {loss}" for loss in lost), *repository.warnings):
        click.echo(f"note: {note}")
    launch = repository.launch
    if launch.world_size == 1 and not launch.orchestrator:  # one server process
        click.echo(f"next: trtllm-bls serve --model-repository {out}")
    else:
        click.echo("next: start it with TensorRT-LLM's launcher, on a machine with these GPUs")
        click.echo(f"      {launcher_command(launch, out)}")


Planned = tuple[Repository, list[str], list[str]]  # with notes, and what --from's would lose


def _plan_cpp(
    ctx: click.Context, options: dict[str, Any], overrides: list[Override], source: Path | None
) -> Planned:
    """For TensorRT-LLM's C++ backend; what ``source`` has counts where the command line does not
    say."""
    found = Existing(source, options["version"]) if source else None
    taken: set[str] = set()  # the options that the command line has left to the repository
    if found:
        given = {name for name in options if _is_given(ctx, name)}
        taken = {option(name) for name in found.options.keys() - given}
        options |= {name: value for name, value in found.options.items() if name not in given}
        kept = [
            o for o in found.overrides if o.parameter != "decoupled" or "decoupled" not in given
        ]
        overrides = [*kept, *overrides]  # --decoupled holds for the engines, too
    for name in ("engine_dir", "tokenizer_dir"):
        if options[name] is None:
            where = f", which is not in {source}" if source else ""
            raise click.UsageError(f"Missing option '{option(name)}'{where}.", ctx)
    try:
        repository = plan(ConfigureOptions(overrides=tuple(overrides), **options))
    except SettingsError as error:
        if str(error).split()[0] not in taken:
            raise
        raise SettingsError(f"--from {source}: {error}") from None
    return repository, found.notes if found else [], found.losses if found else []


def _is_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


_OF_LLM_API = {  # the options that have a meaning there
    *("existing", "engine", "model_yaml", "tokenizer_dir", "out", "gpu_device_ids", "decoupled"),
    *("bls_instances", "check", "force", "sets", "strict"),
}


def upstreams_yaml(directory: Path) -> Path | None:
    """The ``model.yaml`` of upstream's ``llmapi`` repository; ``None`` if it is none."""
    version = directory / LLMAPI.name / "1"
    path = version / os.environ.get("LLM_CONFIG_PATH", "model.yaml")
    return path if path.is_file() and (version / "model.py").is_file() else None


def _plan_llm_api(
    ctx: click.Context, options: dict[str, Any], overrides: list[Override], source: Path | None
) -> Planned:
    """``source``: a repository of upstream's ``llmapi`` model."""
    for name in ctx.params.keys() - _OF_LLM_API:
        if _is_given(ctx, name):
            what = "has no meaning with the LLM API; see --model-yaml"
            raise SettingsError(f"{option(name)}: {what}")
    upstreams: Any = None
    losses: list[str] = []
    if source and (yaml := upstreams_yaml(source)):
        upstreams = read_config(source / LLMAPI.name / "config.pbtxt")
        known = {*LLMAPI.input_named, *LLMAPI.output_named}
        names = [tensor.name for tensor in (*upstreams.input, *upstreams.output)]
        losses = [f"tensor {name}" for name in names if name not in known]
        losses += [f"parameter {k}" for k in values_of(upstreams) if k != "gpu_device_ids"]
        options["model_yaml"] = options["model_yaml"] or yaml
        model = ModelYaml.read(yaml).arguments.get("model")
        options["tokenizer_dir"] = options["tokenizer_dir"] or (model and Path(model))
    if not options["tokenizer_dir"]:
        raise click.UsageError("Missing option '--tokenizer-dir'.", ctx)
    wanted = ConfigureOptions(overrides=tuple(overrides), **options)
    return plan_llm_api(wanted, upstreams), [], losses


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
_TOLD_ELSEWHERE = {  # which our models need not be told again
    *("tokenizer_dir", "tokenizer_type", "tensorrt_llm_model_name"),
    "tensorrt_llm_draft_model_name",
}
# Inputs that upstream declares for what is not here, without which nothing else changes.
_NOT_HERE = {
    *("encoder_input_features", "encoder_output_lengths", "cross_attention_mask"),
    *("skip_cross_attn_blocks", "context_phase_params", "mrope_rotary_cos_sin"),
    *("mrope_position_deltas", "return_kv_cache_reuse_stats", "runtime_top_p_min"),
}
_TEXT = (PREPROCESSING, POSTPROCESSING, ENSEMBLE, BLS)
# One process of it serves all requests, and takes those that came meanwhile as one batch.
_NOT_CARRIED = ((BLS.name, "instance_group"), (BLS.name, "dynamic_batching"))
_CARRIED = ("instance_group", "dynamic_batching", "model_warmup")
_WRITTEN = {  # fields of a configuration that `configure` writes, or of which it has an option
    *("name", "platform", "backend", "max_batch_size", "input", "output", "parameters"),
    *("model_transaction_policy", "ensemble_scheduling", "default_model_filename", "runtime"),
}


class Existing:
    """``options`` of ``ConfigureOptions`` by name, parameters to set, and what the user is told.

    ``notes`` say what is meant otherwise here, ``losses`` what the new repository does not have.
    ``version`` is the container's release; if it is empty, the engine's counts. Raises
    ``SettingsError`` where ``directory`` has no target model or a file that cannot be read.
    """

    def __init__(self, directory: Path, version: str) -> None:
        self.options: dict[str, Any] = {}
        self.overrides: list[Override] = []
        self.notes: list[str] = []
        self.losses: list[str] = []
        if not directory.is_dir():
            raise SettingsError(f"{directory}: no such directory")
        files = sorted(directory.glob("*/config.pbtxt"))
        self._configs = {path.parent.name: read_config(path) for path in files}
        self._values: dict[str, dict[str, str]] = {}
        for model, config in self._configs.items():
            values = values_of(config)
            empty = [key for key, value in values.items() if "${" in value]
            if empty:
                self.notes.append(f"{model}: not filled in, so not set: {', '.join(empty)}")
            self._values[model] = {k: v for k, v in values.items() if v and k not in empty}
        bls = self._values.get(BLS.name, {})
        target = bls.get("tensorrt_llm_model_name", ENGINE.name)
        draft = bls.get("tensorrt_llm_draft_model_name", "")
        if target not in self._configs:
            there = ", ".join(self._configs) or "none"
            raise SettingsError(f"--from {directory}: it has no model {target}; there are: {there}")
        for name, key, field in (
            (target, "gpt_model_path", "engine_dir"),
            (PREPROCESSING.name, "tokenizer_dir", "tokenizer_dir"),
            (draft, "gpt_model_path", "draft_engine_dir"),
        ):
            if path := self._values.get(name, {}).get(key):
                self.options[field] = Path(path)
        engine, old = self.options.get("engine_dir"), self._configs[target]
        built = read_engine("--from", engine, check=False) if engine else None
        release = built.release() if built and not version else parse_version(version or "last")
        self._release = release or LAST
        self._add_engine(target, ENGINE.name)
        if draft in self._configs:
            self._add_engine(draft, DRAFT)
            self.overrides.append(Override(BLS.name, "draft_source", "off"))
            self.notes.append(
                "drafts are made for requests that ask for them (num_draft_tokens), as before; "
                "tensorrt_llm_bls.draft_source=model makes them for all"
            )
        elif draft:
            self.losses.append(f"there is no model {draft}, so no drafts of a model either")
        if built and not (built.path / "config.json").is_file():
            types = {tensor.name: dtype_of(tensor) for tensor in old.output}
            spelled = {dtype: name for name, dtype in LOGITS_DTYPES.items()}
            self.options["logits_dtype"] = spelled.get(types.get("generation_logits", ""))
        self.options["max_batch_size"] = old.max_batch_size or None
        batching = old.dynamic_batching
        self.options["max_queue_delay_us"] = batching.max_queue_delay_microseconds
        self.options["max_queue_size"] = batching.default_queue_policy.max_queue_size
        first = self._configs.get(BLS.name, old)
        decoupled = self.options["decoupled"] = first.model_transaction_policy.decoupled
        if not decoupled and "exclude_input_in_output" not in self._values[target]:
            self.notes.append("answers begin with the prompt, as before")
        count = instances_of(first)
        if first is not old and count > 1:
            self.notes.append(
                f"tensorrt_llm_bls had {count} instances, one per request at a time; one "
                "process serves them all here (--bls-instances for more)"
            )
        self._add_fields({target: ENGINE.name, draft: DRAFT} | {m.name: m.name for m in _TEXT})
        self._add_text_parameters()
        others = self._configs.keys() - {model.name for model in MODELS} - {target, draft}
        self.losses += [f"{name}: a model that is not converted" for name in sorted(others)]

    def _add_engine(self, old: str, new: str) -> None:
        """The parameters of the engine ``old`` that the release reads, for the model ``new``."""
        values, config = self._values[old], self._configs[old]
        if new != old:
            self.notes.append(f"{old} is called {new} here; requests to it need the new name")
        if config.backend == "python":
            told = "its Python backend is replaced by the C++ backend tensorrtllm"
            self.notes.append(f"{old}: {told}")
        kind = values.get("gpt_model_type", "inflight")
        if "inflight" not in kind:
            self.losses.append(f"{old}: gpt_model_type {kind} becomes in-flight batching")
        if "gpu_device_ids" in values:
            name = "gpu_device_ids" if new == ENGINE.name else "draft_gpu_device_ids"
            self.options[name] = values["gpu_device_ids"]
        for key, value in values.items():
            if key in _NOT_COPIED:
                continue
            if key == "worker_path" and self._release >= _WORKER_PATH_RENAMED:
                key = "executor_worker_path"
            try:
                check_backend(key, value, self._release)
                self.overrides.append(Override(new, key, value))
                if key == "exclude_input_in_output" and new == ENGINE.name:
                    self.overrides.append(Override(BLS.name, key, value))
            except SettingsError as error:
                why = f"as it had no effect: {error}"
                self.notes.append(f"{old}.{key}={value} is left out, {why}")
        policy = str(config.model_transaction_policy.decoupled).lower()
        self.overrides.append(Override(new, "decoupled", policy))
        known = {tensor.name: tensor.dtype for tensor in ENGINE.inputs}
        for tensor in config.input:
            name, dtype = tensor.name, dtype_of(tensor)
            if name not in known.keys() | _NOT_HERE:
                self.losses.append(f"{config.name}: input {name} is left out")
            elif dtype != known.get(name, dtype) and name != "draft_logits":  # by the engine
                here = f"{known[name]} here, not {dtype}"
                self.losses.append(f"{config.name}: input {name} is {here}")

    def _add_fields(self, names: dict[str, str]) -> None:
        """What is carried over as it is: instances, queue policies, warm-up. The rest is named."""
        carried = self.options["carried"] = {}
        for old, new in names.items():
            config = self._configs.get(old)
            for field, _ in config.ListFields() if config else ():
                kept = field.name in _CARRIED and (new, field.name) not in _NOT_CARRIED
                files = field.name == "model_warmup" and "input_data_file" in str(config)
                if kept and not files:
                    part = model_config_pb2.ModelConfig(**{field.name: getattr(config, field.name)})
                    carried.setdefault(new, model_config_pb2.ModelConfig()).MergeFrom(part)
                elif field.name not in _WRITTEN and (new, field.name) != _NOT_CARRIED[0]:
                    why = "; copy its files" if files else ""
                    self.losses.append(f"{old}.{field.name} is left out: set it by hand{why}")

    def _add_text_parameters(self) -> None:
        """The text models' parameters, with the defaults that the release had."""
        meant_false = self._release < _TRUE_BY_DEFAULT_SINCE
        for (model, key), models in _TEXT_PARAMETERS.items():
            value = self._values.get(model, {}).get(key)
            if value is None and key == "add_special_tokens" and meant_false:
                value = "false"
                self.notes.append("add_special_tokens was not set, which meant false before 0.11")
            if value is not None:
                self.overrides += [Override(name, key, value) for name in models]
        for name in [model.name for model in _TEXT]:
            for key, value in self._values.get(name, {}).items():
                try:
                    check(name, key, value)
                except SettingsError as error:
                    if key not in _TOLD_ELSEWHERE:
                        self.losses.append(f"{name}.{key} is left out: {error}")
