"""The command line of ``configure``, and the repository that ``--from`` names.

An existing repository of TensorRT-LLM's own models is read as options of ``configure``: from each
``config.pbtxt``, after its template was filled in. A value that the new repository cannot hold, or
that had no effect, is left out and named in a note.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from trtllm_bls.configure.engine import parse_version, read_engine
from trtllm_bls.configure.repository import (
    DRAFT,
    ConfigureOptions,
    Repository,
    launcher_command,
    plan,
    slurm_script,
    write,
)
from trtllm_bls.contract import BLS, ENGINE, ENSEMBLE, MODELS, POSTPROCESSING, PREPROCESSING
from trtllm_bls.errors import SettingsError
from trtllm_bls.parameters import check
from trtllm_bls.parameters.cpp_backend import LAST, Version, check_backend, keys_of
from trtllm_bls.parameters.model_config import read_config, values_of
from trtllm_bls.settings import Override, options_of

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
    """Write a model repository for TensorRT-LLM's C++ backend.

    \b
    Examples:
      trtllm-bls configure --engine-dir ./engine --tokenizer-dir ./llama --out ./repository
      trtllm-bls configure --from ./old --out ./new --version 0.18
      trtllm-bls configure --engine-dir ./e --tokenizer-dir ./t --out ./r --set max_beam_width=2
    """
    slurm: Path | None = options.pop("slurm")
    sets, draft_sets = options.pop("sets"), options.pop("draft_sets")
    overrides = [
        *(_override(text, ENGINE.name) for text in sets),
        *(_override(f"{DRAFT}.{text}", DRAFT) for text in draft_sets),
    ]
    source: Path | None = options.pop("existing")
    notes: list[str] = []
    if source:  # options of the command line come before what the repository says
        found = Existing(source, options["version"])
        for name, value in found.options.items():
            if ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
                options[name] = value
        overrides, notes = [*found.overrides, *overrides], found.notes
    for name in ("engine_dir", "tokenizer_dir"):
        if options[name] is None:
            where = f", which is not in {source}" if source else ""
            raise click.UsageError(f"Missing option '--{name.replace('_', '-')}'{where}.", ctx)
    if draft_sets and options["draft_engine_dir"] is None:
        raise SettingsError(f"--set-draft {draft_sets[0]}: needs --draft-engine-dir")
    wanted = ConfigureOptions(overrides=tuple(overrides), **options)
    repository = plan(wanted)
    script = slurm_script(repository.launch, wanted.out) if slurm else ""
    if slurm and not slurm.absolute().parent.is_dir():
        raise SettingsError(f"--slurm {slurm}: there is no such directory")
    try:
        write(repository, wanted.out, wanted.force)
        if slurm:
            slurm.write_text(script, encoding="utf-8")
            click.echo(f"wrote {slurm}")
    except OSError as error:
        raise SettingsError(f"{error.filename}: cannot be written: {error.strerror}") from error
    _report(repository, wanted.out, notes)


def _override(text: str, model: str) -> Override:
    """Read ``[MODEL.]KEY=VALUE``; without a model it is a parameter of ``model``."""
    key, equals, _ = text.partition("=")
    return Override.parse(text if "." in key or not equals else f"{model}.{text}")


def _report(repository: Repository, out: Path, notes: list[str]) -> None:
    for name, config in repository.configs.items():
        click.echo(f"wrote {out / name} ({config.backend or config.platform})")
    for note in (*notes, *repository.warnings):
        click.echo(f"note: {note}")
    launch = repository.launch
    if launch.by_serve:
        click.echo(f"next: trtllm-bls serve --model-repository {out}")
    else:
        click.echo("next: start it with TensorRT-LLM's launcher, on a machine with these GPUs")
        click.echo(f"      {launcher_command(launch, out)}")


# --- the repository that --from names -------------------------------------------------------

# Not copied as they are: `configure` has options for them or sets them itself.
_NOT_COPIED = {
    *("gpt_model_path", "gpt_model_type", "gpu_device_ids", "exclude_input_in_output"),
    *("FORCE_CPU_ONLY_INPUT_TENSORS", "enable_trt_overlap", "worker_path"),
}
_TRUE_BY_DEFAULT_SINCE = Version(0, 11)  # preprocessing's add_special_tokens
_TEXT_PARAMETERS = {  # a parameter of one of their models, and our models that have it too
    (PREPROCESSING.name, "add_special_tokens"): (PREPROCESSING.name, BLS.name),
    (POSTPROCESSING.name, "skip_special_tokens"): (POSTPROCESSING.name, BLS.name),
    (BLS.name, "accumulate_tokens"): (BLS.name,),
}


class Existing:
    """``options`` of ``ConfigureOptions`` by name, parameters to set, and notes for the user.

    ``version`` is the container's release; if it is empty, the engine's counts. Raises
    ``SettingsError`` where ``directory`` has no target model or a file that cannot be read.
    """

    def __init__(self, directory: Path, version: str) -> None:
        self.options: dict[str, Any] = {}
        self.overrides: list[Override] = []
        self.notes: list[str] = []
        if not directory.is_dir():
            raise SettingsError(f"{directory}: no such directory")
        files = sorted(directory.glob("*/config.pbtxt"))
        self._configs = {path.parent.name: read_config(path) for path in files}
        self._values = {name: self._filled_in(name) for name in self._configs}
        bls = self._values.get(BLS.name, {})
        target = bls.get("tensorrt_llm_model_name", ENGINE.name)
        draft = bls.get("tensorrt_llm_draft_model_name")
        if target not in self._configs:
            there = ", ".join(self._configs) or "none"
            raise SettingsError(f"--from {directory}: it has no model {target}; there are: {there}")
        self._add_directory(target, "gpt_model_path", "engine_dir")
        self._add_directory(PREPROCESSING.name, "tokenizer_dir", "tokenizer_dir")
        engine = self.options.get("engine_dir")
        built = read_engine("--from", engine, check=False) if engine and not version else None
        self._release = (built.release() if built else parse_version(version or "last")) or LAST
        self._add_engine(target, ENGINE.name)
        if draft in self._configs:
            self._add_directory(draft, "gpt_model_path", "draft_engine_dir")
            self._add_engine(draft, DRAFT)
            self.overrides.append(Override(BLS.name, "draft_source", "off"))
            self.notes.append(
                "drafts are made for requests that ask for them (num_draft_tokens), as before; "
                "tensorrt_llm_bls.draft_source=model makes them for all"
            )
        elif draft:
            self.notes.append(f"there is no model {draft}, so no drafts of a model either")
        self._add_batching(self._configs[target])
        self._add_text_parameters()
        others = self._configs.keys() - {model.name for model in MODELS} - {target, draft}
        if others:
            self.notes.append(f"not converted: {', '.join(sorted(others))}")

    def _filled_in(self, model: str) -> dict[str, str]:
        values = values_of(self._configs[model])
        empty = [key for key, value in values.items() if "${" in value]
        if empty:
            self.notes.append(f"{model}: not filled in, so not set: {', '.join(empty)}")
        return {key: value for key, value in values.items() if value and key not in empty}

    def _add_directory(self, model: str, key: str, option: str) -> None:
        if directory := self._values.get(model, {}).get(key):
            self.options[option] = Path(directory)

    def _add_engine(self, old: str, new: str) -> None:
        """The parameters of the engine ``old`` that the release reads, for the model ``new``."""
        values = self._values[old]
        if new != old:
            self.notes.append(f"{old} is called {new} here; requests to it need the new name")
        if self._configs[old].backend == "python":
            self.notes.append(
                f"{old}: its Python backend is replaced by the C++ backend tensorrtllm"
            )
        if "inflight" not in values.get("gpt_model_type", "inflight"):
            self.notes.append(f"{old}: gpt_model_type {values['gpt_model_type']} becomes in-flight")
        if "gpu_device_ids" in values:
            name = "gpu_device_ids" if new == ENGINE.name else "draft_gpu_device_ids"
            self.options[name] = values["gpu_device_ids"]
        for key in [key for key in values if key not in _NOT_COPIED]:
            try:
                check_backend(key, values[key], self._release)
                self.overrides.append(Override(new, key, values[key]))
            except SettingsError as error:
                self.notes.append(
                    f"{old}.{key}={values[key]} is left out, as it had no effect: {error}"
                )

    def _add_batching(self, engine: Any) -> None:
        batching = engine.dynamic_batching
        self.options["max_batch_size"] = engine.max_batch_size or None
        self.options["max_queue_delay_us"] = batching.max_queue_delay_microseconds
        self.options["max_queue_size"] = batching.default_queue_policy.max_queue_size
        if BLS.name in self._configs:
            bls = self._configs[BLS.name]
            self.options["decoupled"] = bls.model_transaction_policy.decoupled
            count = max((group.count for group in bls.instance_group), default=1)
            if count > 1:
                self.notes.append(
                    f"tensorrt_llm_bls had {count} instances, one per request at a time; one "
                    "process serves them all here (--bls-instances for more)"
                )

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
        known = {"tokenizer_dir", "tensorrt_llm_model_name", "tensorrt_llm_draft_model_name"}
        for model in (PREPROCESSING.name, POSTPROCESSING.name, ENSEMBLE.name, BLS.name):
            for key, value in self._values.get(model, {}).items():
                try:
                    check(model, key, value)
                except SettingsError as error:
                    if key not in known:
                        self.notes.append(f"{model}.{key} is left out: {error}")
