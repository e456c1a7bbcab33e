"""The command line of ``recipe``."""

from __future__ import annotations

from typing import Any

import click

from trtllm_bls.configure.build_flags import NEWEST
from trtllm_bls.configure.recipe import PRESETS, RecipeOptions, as_script, recipe
from trtllm_bls.configure.versions import parse_version
from trtllm_bls.parameters.cpp_backend import shown
from trtllm_bls.settings import options_of


def _lookahead(
    ctx: click.Context, param: click.Parameter, value: str
) -> tuple[int, int, int] | None:
    if value == "off":
        return None
    numbers = [int(part) for part in value.split(",") if part.strip().isdecimal()]
    if len(numbers) != 3 or min(numbers) < 1 or value.count(",") != 2:
        raise click.BadParameter(
            f"{value!r}: write window,n-gram,verification set, such as 7,7,7, or off", ctx, param
        )
    return numbers[0], numbers[1], numbers[2]


@click.command(name="recipe")
@click.argument("preset", type=click.Choice(list(PRESETS)))
@click.option("--release", default=shown(NEWEST), show_default=True, help="Of TensorRT-LLM.")
@options_of(RecipeOptions)
@click.option(
    "--lookahead",
    default="7,7,7",
    show_default=True,
    callback=_lookahead,
    help="Of latency; or off.",
)
def command(preset: str, release: str, **options: Any) -> None:
    """Print the commands from a Hugging Face checkpoint to an engine and its repository.

    \b
    Presets:
      throughput  many requests at once
      latency     FP8, plugins for small batches, lookahead decoding
      target      verifies the drafts of a draft engine
      draft       drafts for a target engine

    \b
    Examples:
      trtllm-bls recipe throughput --checkpoint ./llama --precision int4_awq
      trtllm-bls recipe target --release 0.20 --checkpoint ./llama --tp-size 2
    """
    version = NEWEST if release == "last" else parse_version(release, "--release")
    click.echo(as_script(recipe(preset, RecipeOptions(release=version, **options))), nl=False)
