"""``serve`` and ``demo``: their options. What runs a server is imported when one runs."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import click

from trtllm_bls.settings.command_options import ServeSettings, options_of

_SETTINGS_OF_DEMO = (  # those of ``serve`` that ``demo`` has too
    *("model", "engine", "draft_model", "model_repository", "server", "threads", "overrides"),
)
_VERBOSE = click.option("--verbose", is_flag=True, help="Show every line of the server's log.")


@click.command(context_settings={"allow_extra_args": True})
@options_of(ServeSettings)
@_VERBOSE
@click.pass_context
def command(context: click.Context, /, verbose: bool, **options: Any) -> None:
    """Serve a model until Ctrl-C or SIGTERM; a second one does not wait for running requests.

    \b
    Examples:
      trtllm-bls serve
      trtllm-bls serve --model ./llama --draft-model ./llama-small
      trtllm-bls serve --http-port 7000 --grpc-port 7001 --metrics-port 7002
      trtllm-bls serve --set tensorrt_llm.max_batch=8 --log-file triton.log
    """
    if context.args:  # other servers take the model as an argument
        model = shlex.quote(context.args[0])
        raise click.UsageError(f"serve takes no argument; a model is an option: --model {model}")
    from trtllm_bls.operate.serve import serve

    sys.exit(serve(ServeSettings(**options), verbose))


@click.command()
@options_of(ServeSettings, *_SETTINGS_OF_DEMO)
@_VERBOSE
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=320,
    show_default=True,
    help="Longest answer, in tokens.",
)
def demo(verbose: bool, max_tokens: int, **options: Any) -> None:
    """Start a server on free ports, show answers as they stream, stop it.

    \b
    Examples:
      trtllm-bls demo
      trtllm-bls demo --model ./llama --max-tokens 200
    """
    from trtllm_bls.operate import serve

    settings = ServeSettings(**options, http_port=0, grpc_port=0, metrics_port=0, openai_port=0)
    sys.exit(serve.demo(settings, verbose, max_tokens))
