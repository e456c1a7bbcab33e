"""The command line of ``configure``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from trtllm_bls.configure.existing import Existing
from trtllm_bls.configure.repository import (
    DRAFT,
    ConfigureOptions,
    Repository,
    launcher_command,
    plan,
    slurm_script,
    write,
)
from trtllm_bls.configure.versions import parse_version
from trtllm_bls.contract import ENGINE
from trtllm_bls.errors import SettingsError
from trtllm_bls.parameters.cpp_backend import keys_of
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
    notes = _apply_existing(ctx, source, options, overrides) if source else []
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


def _apply_existing(
    ctx: click.Context, source: Path, options: dict[str, Any], overrides: list[Override]
) -> list[str]:
    """Fill in what the repository ``source`` says; options of the command line come before it.

    Returns the notes for the user.
    """
    found = Existing(source, options["version"])
    for name, value in found.options.items():
        if ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            options[name] = value
    overrides[:0] = found.overrides
    return found.notes


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
