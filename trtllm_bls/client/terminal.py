"""Options, exit codes, Ctrl-C, errors and figures of an answer for all command-line clients."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, TypeVar

import click
import numpy as np

from trtllm_bls.client.client import Client, Event, Model, Stream, Tls
from trtllm_bls.errors import ConnectionFailed, DeadlineExceeded, SetupError, TrtllmBlsError
from trtllm_bls.orchestrator.output import checked_output
from trtllm_bls.settings.command_options import GrpcAddress, TlsConnection, options_of

Command = TypeVar("Command", bound=Callable[..., Any])

_EXIT_CODES = """\b
Exit codes:
  0    finished, or stopped as asked
  1    the request failed or was refused
  2    wrong usage
  3    the server cannot be reached, or the connection broke
  4    the deadline passed
  130  interrupted"""

# Inputs of the text model that have an option of their own, and its help. Flag, type and whether it
# repeats follow from the contract.
TEXT_INPUTS = {
    "temperature": "0 is greedy; higher is more random.",
    "top_k": "Choose among the k likeliest tokens; 0 is no limit.",
    "top_p": "Choose among the likeliest tokens that together reach this probability.",
    "runtime_top_p_min": "Lower bound of a decaying top-p.",
    "runtime_top_p_decay": "Factor on top-p after each token.",
    "runtime_top_p_reset_ids": "Token id that resets the decay.",
    "min_p": "Leave out tokens less likely than this share of the likeliest's probability.",
    "no_repeat_ngram_size": "Never repeat so many tokens in a row.",
    "repetition_penalty": "Above 1 discourages tokens that were seen.",
    "presence_penalty": "Subtracted from tokens that were generated.",
    "frequency_penalty": "Subtracted for each time a token was generated.",
    "min_tokens": "No end before this many tokens.",
    "seed": "Same seed, same sampled text.",
    "beam_width": "Beams; not while streaming.",
    "length_penalty": "Beam search: above 0 favours longer answers.",
    "early_stopping": "Beam search: end with the first full set of beams.",
    "beam_search_diversity_rate": "Beam search: penalty on siblings.",
    "num_return_sequences": "Independent answers to the prompt.",
    "stop_words": "End before this string; repeatable, taken literally.",
    "bad_words": "Never produce this string; repeatable, taken literally.",
    "include_stop": "Keep the stop string in the text.",
    "end_id": "Token id that ends the answer; -1 for none.",
    "add_special_tokens": "Tokens such as BOS around the prompt.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "num_draft_tokens": "Speculation: tokens drafted per round; 0 turns it off.",
    "use_draft_logits": "Speculation: verify by the draft's logits.",
    "timeout_ms": "Let the server end the answer with what there is after this many ms.",
    "draft_source": "Speculation: where drafts come from (off, model, ngram, mixed).",
    "prediction": "Speculation: a text that the answer is expected to resemble.",
    "return_log_probs": "Log probabilities of the tokens; seen with --json.",
    "return_context_logits": "Logits of the prompt; seen with --json.",
    "return_generation_logits": "Logits of the answer; seen with --json.",
    "return_perf_metrics": "The engine's own figures; seen with --json.",
}

# The remedy where gRPC's message has these words.
_HTTP = "; this is an HTTP port: give --url the gRPC port, which is --grpc-port of serve (8001)"
_CONNECTION_REMEDIES = {
    "Connection refused": "; nothing listens there: `trtllm-bls serve` starts a server",
    "http1.x server": _HTTP,
    "Expected SETTINGS frame": _HTTP,
    "Failed parsing HTTP/2": _HTTP,
}


class Exit(IntEnum):
    """The exit codes of a client's command."""

    FINISHED = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    DEADLINE = 4
    INTERRUPTED = 130

    @classmethod
    def of(cls, error: TrtllmBlsError) -> Exit:
        """Return the code for an expected failure."""
        if isinstance(error, ConnectionFailed):
            return cls.UNREACHABLE
        if isinstance(error, DeadlineExceeded):
            return cls.DEADLINE
        if isinstance(error, SetupError):
            return cls.USAGE
        return cls.FAILED


def program() -> Callable[[Callable[..., Any]], click.Command]:
    """Make a client's command of a function; exit codes follow its help."""
    settings = {"help_option_names": ["-h", "--help"]}
    return click.command(epilog=_EXIT_CODES, context_settings=settings)


def complain(error: TrtllmBlsError) -> Exit:
    """Print the error on stderr; return its exit code."""
    click.echo(f"error: {error}", err=True)
    return Exit.of(error)


def run(work: Callable[[], Exit]) -> None:
    """Do ``work`` and leave the process with its exit code.

    Characters that standard output cannot encode are written as ``\\uXXXX``. Output that cannot be
    written is an error of one line.
    """
    try:
        with checked_output():
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(errors="backslashreplace")
            code = work()
    except TrtllmBlsError as error:
        code = complain(error)
    except KeyboardInterrupt:
        code = Exit.INTERRUPTED
    sys.exit(code)


def options(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Join option decorators into one, which keeps their order."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def connection_options(*key_flags: str) -> Callable[[Command], Command]:
    """Add ``--url``, ``--retries`` and TLS; ``key_flags`` also spell ``--tls-key``."""
    return options(
        click.option(
            "-u",
            "--url",
            type=GrpcAddress(),
            default="localhost:8001",
            show_default=True,
            metavar="HOST:PORT",
            help="gRPC port of the server.",
        ),
        click.option(
            "--retries",
            type=click.IntRange(0),
            default=0,
            show_default=True,
            help="Send the request again, with back-off, up to so many times, if the server cannot "
            "be reached or is overloaded and nothing of the answer has arrived.",
        ),
        options_of(TlsConnection, tls_key=key_flags),
    )


@contextlib.asynccontextmanager
async def open_client(
    url: str, options: Mapping[str, Any], compression: str | None = None
) -> AsyncIterator[Client]:
    """Open the client that ``connection_options`` describe.

    Where a request in this block finds no gRPC server, its error ends with a remedy.
    """
    tls = Tls.of_options(options)
    retries = options.get("retries", 0)
    async with Client(url, tls=tls, compression=compression, retries=retries) as client:
        try:
            yield client
        except ConnectionFailed as error:
            text = str(error)
            for words, remedy in _CONNECTION_REMEDIES.items():
                if words in text:
                    text += remedy
                    break
            raise ConnectionFailed(text) from error


def tensor_options(model: Model, inputs: Mapping[str, str]) -> Callable[[Command], Command]:
    """Add an option per input, by wire name, with its help; type and flag follow."""
    decorators = []
    for name, text in inputs.items():
        tensor = model.input_named[name]
        flag = "--" + tensor.key.replace("_", "-")
        kind = {"FP32": click.FLOAT, "STRING": click.STRING}.get(tensor.dtype, click.INT)
        is_list = tensor.dtype == "STRING" and not tensor.single
        if tensor.dtype == "BOOL":
            decorators.append(
                click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=text)
            )
        else:
            decorators.append(click.option(flag, name, type=kind, multiple=is_list, help=text))
    return options(*decorators)


# For every input that has no flag; ``assignments`` reads it.
other_inputs_option = click.option(
    "--set",
    "other_inputs",
    multiple=True,
    metavar="NAME=VALUE",
    help="Any other input of the model; VALUE is JSON, or else taken as a string.",
)


def assignments(option: str, texts: Sequence[str]) -> dict[str, Any]:
    """Read a repeated ``option`` NAME=VALUE: the values by name, as JSON or else as texts."""
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint=option)
        try:
            values[name] = json.loads(value)
        except json.JSONDecodeError:
            values[name] = value
    return values


@contextlib.contextmanager
def interruptible(
    stream: Stream | asyncio.Task[Any],
    signals: Sequence[int] = (signal.SIGINT, signal.SIGTERM),
) -> Iterator[asyncio.Event]:
    """Let Ctrl-C and SIGTERM cancel the request on the server, and set the event that is yielded.

    They raise nothing here. The second Ctrl-C ends the process at once. ``signals``: the signals
    that do so, for a caller that handles the other one itself.
    """
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()

    def interrupt() -> None:
        interrupted.set()
        stream.cancel()
        release()

    def release() -> None:
        for number in signals:
            loop.remove_signal_handler(number)

    for number in signals:
        loop.add_signal_handler(number, interrupt)
    try:
        yield interrupted
    finally:
        release()


# --- one answer as it arrives, and its figures ------------------------------------------------


class ClientReply:
    """An answer so far, to a request for ``max_tokens``.

    Times are seconds of ``time.perf_counter()``. ``ended_here`` says why this side ended it, where
    the server did not.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.text = ""
        self.sent_at = time.perf_counter()
        self.arrivals: list[float] = []  # the times of responses with text
        self.finish_reason: str | None = None
        self.endings: dict[tuple[int, int], str] = {}  # by batch row and sequence
        self.ended_here: str | None = None
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None

    def add(self, event: Event) -> None:
        """Add a response. Some servers count the tokens of each response, others at the end."""
        self.text += event.text
        if any(event.texts):
            self.arrivals.append(event.received_at)
        if event.finish_reason:
            self.finish_reason = event.finish_reason
            ending = event.finish_reason
            if event.stop_reason:
                ending += f" at {event.stop_reason!r}"
            self.endings[event.batch_index, event.sequence_index] = ending
        if event.num_input_tokens is not None:
            self.prompt_tokens = event.num_input_tokens
        if event.num_output_tokens is not None:
            self.completion_tokens = (self.completion_tokens or 0) + event.num_output_tokens

    @property
    def ttft_s(self) -> float | None:
        """The seconds from sending to the first text."""
        if not self.arrivals:
            return None
        return self.arrivals[0] - self.sent_at

    def figures(self) -> dict[str, Any]:
        """Measure the answer; a figure that cannot be told is ``None``.

        ``ended`` is the server's finish reason, of each sequence. ``num_output_tokens`` is ``None``
        where the server did not count. ``gap_p50_ms`` and ``gap_p99_ms`` are times between
        consecutive responses with text; a response may bring several tokens. ``tokens_per_s`` is
        from sending to the last text.
        """
        duration_s = 0.0
        ttft_ms = None
        gap_p50_ms = None
        gap_p99_ms = None
        tokens_per_s = None
        if self.ttft_s is not None:
            ttft_ms = self.ttft_s * 1000
            duration_s = self.arrivals[-1] - self.sent_at
        if len(self.arrivals) > 1:
            gaps = np.diff(self.arrivals) * 1000
            gap_p50_ms = float(np.percentile(gaps, 50))
            gap_p99_ms = float(np.percentile(gaps, 99))
        if self.completion_tokens and duration_s > 0:
            tokens_per_s = self.completion_tokens / duration_s
        reasons = ", ".join(reason for _, reason in sorted(self.endings.items()))
        return {
            "ended": self.ended_here or reasons or "complete",
            "max_tokens": self.max_tokens,
            "num_input_tokens": self.prompt_tokens,
            "num_output_tokens": self.completion_tokens,
            "responses": len(self.arrivals),
            "ttft_ms": ttft_ms,
            "gap_p50_ms": gap_p50_ms,
            "gap_p99_ms": gap_p99_ms,
            "duration_ms": duration_s * 1000,
            "tokens_per_s": tokens_per_s,
        }

    def lines(self) -> list[str]:
        """Write the figures as lines for people."""
        figures = self.figures()
        count = len(self.arrivals)
        # Every text takes a token at least; an answer cut short comes without a count.
        tokens = f"at least {count}"
        if self.completion_tokens is not None:
            tokens = str(self.completion_tokens)
        tokens += f" of {self.max_tokens} asked for"
        if (self.completion_tokens or 0) > self.max_tokens:
            tokens += " in each answer"
        if self.prompt_tokens is not None:
            tokens += f", {self.prompt_tokens} in the prompt"
        lines = [
            f"ended: {figures['ended']}",
            f"tokens: {tokens}",
            f"responses with text: {count} in {figures['duration_ms'] / 1000:.2f} s",
        ]
        if count:
            lines.append(f"first text: {figures['ttft_ms']:.1f} ms after sending")
        if count > 1:
            p50 = figures["gap_p50_ms"]
            p99 = figures["gap_p99_ms"]
            lines.append(f"between responses: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
        if figures["tokens_per_s"] is not None:
            speed = f"{figures['tokens_per_s']:.1f} tokens/s"
            lines.append(f"speed: {speed} from sending to the last text")
        return lines
