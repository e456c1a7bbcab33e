"""The command line of ``configure``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trtllm_bls.configure.repository import ConfigureOptions, Repository, plan, write
from trtllm_bls.settings import Override

_DIRECTORY = click.Path(path_type=Path)


@click.command(name="configure")
@click.option("--engine-dir", type=_DIRECTORY, required=True, help="Engine of the target model.")
@click.option("--tokenizer-dir", type=_DIRECTORY, required=True, help="Its tokenizer.")
@click.option("--out", type=_DIRECTORY, required=True, help="The model repository to write.")
@click.option("--draft-engine-dir", type=_DIRECTORY, help="Engine of a draft model (speculation).")
@click.option("--max-batch-size", type=click.IntRange(1), help="[default: the engine's]")
@click.option(
    "--max-queue-size",
    type=click.IntRange(0),
    default=ConfigureOptions.max_queue_size,
    help="Requests waiting beyond this are refused; 0 = no limit.",
)
@click.option(
    "--max-queue-delay-us", type=click.IntRange(0), default=ConfigureOptions.max_queue_delay_us
)
@click.option(
    "--kv-cache-free-gpu-mem-fraction",
    help="Share of free GPU memory per engine.  [default: 0.9; 0.45 each with a draft engine]",
)
@click.option(
    "--batch-scheduler-policy",
    type=click.Choice(["guaranteed_no_evict", "max_utilization"]),
    default=ConfigureOptions.batch_scheduler_policy,
)
@click.option(
    "--version",
    default=ConfigureOptions.version,
    help="TensorRT-LLM release of the container, from 0.9 on, or last.  [default: the engine's]",
)
@click.option(
    "--decoupled",
    type=bool,
    default=ConfigureOptions.decoupled,
    show_default=True,
    help="false: tensorrt_llm_bls answers unary infer, one response per request, and no streams.",
)
@click.option(
    "--bls-instances",
    type=click.IntRange(1),
    default=ConfigureOptions.bls_instances,
    show_default=True,
    help="Processes of tensorrt_llm_bls.",
)
@click.option("--set", "sets", multiple=True, metavar="MODEL.KEY=VALUE", help="Any parameter.")
@click.option("--check/--no-check", default=True, help="Look into the directories.")
@click.option("--force", is_flag=True, help="Replace the models of a repository that is there.")
def command(sets: tuple[str, ...], **options: Any) -> None:
    """Write a model repository for TensorRT-LLM's C++ backend."""
    wanted = ConfigureOptions(overrides=tuple(map(Override.parse, sets)), **options)
    repository = plan(wanted)
    write(repository, wanted.out, wanted.force)
    _report(repository, wanted.out)


def _report(repository: Repository, out: Path) -> None:
    for name, config in repository.configs.items():
        click.echo(f"wrote {out / name} ({config.backend or config.platform})")
    for warning in repository.warnings:
        click.echo(f"note: {warning}")
    if repository.target.ranks == 1:
        click.echo(f"next: trtllm-bls serve --model-repository {out}")
    else:
        ranks = repository.target.ranks
        click.echo(f"next: start {ranks} ranks with TensorRT-LLM's launch_triton_server.py")
        click.echo(f"      --world_size {ranks} --model_repo {out}")
