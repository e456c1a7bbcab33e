"""Text in, text out, as it arrives: a terminal client of ``tensorrt_llm_bls`` and ``ensemble``.

Owns options and output; ``trtllm_bls.client`` owns the wire.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from trtllm_bls.client.client import BLS, Event
from trtllm_bls.client.terminal import (
    TEXT_INPUTS,
    ClientReply,
    Exit,
    assignments,
    complain,
    connection_options,
    interruptible,
    open_client,
    other_inputs_option,
    program,
    run,
    tensor_options,
)
from trtllm_bls.errors import TrtllmBlsError

_EXIT_REASONS = {Exit.DEADLINE: "deadline", Exit.UNREACHABLE: "connection lost"}


@program()
@click.argument("words", nargs=-1, metavar="[PROMPT]")
@click.option("-p", "--prompt", "prompt_option", help="The prompt, for those used to the option.")
@click.option(
    "-f",
    "--file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read the prompt from this file (UTF-8).",
)
@click.option("--model-name", default=BLS.name, show_default=True)
@click.option(
    "-o",
    "--max-tokens",
    "--output-len",
    "max_tokens",
    type=int,
    default=128,
    show_default=True,
    help="Most tokens to generate.",
)
@click.option("-S", "--stream/--no-stream", default=True, help="Text in pieces or in one.")
@click.option("--chat", is_flag=True, help="Send the prompt as a user's message.")
@click.option("--system", help="A system message before it; implies --chat.")
@click.option("--echo", is_flag=True, help="Show the prompt before the answer.")
@tensor_options(BLS, TEXT_INPUTS)
@other_inputs_option
@click.option("--request-id", help="Shown in the server's log; made up when absent.")
@click.option(
    "-t",
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    help="Deadline of the whole request in seconds.",
)
@click.option(
    "--stop-after-ms", type=click.IntRange(min=0), help="Cancel the request after this time."
)
@click.option(
    "--overwrite-output-text",
    is_flag=True,
    help="The server sends all text so far each time (accumulate_tokens).",
)
@click.option("--counts/--no-counts", default=True, help="Ask the server to count tokens.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per event, then a summary.")
@click.option("-q", "--quiet", is_flag=True, help="No summary.")
@connection_options()
def main(**options: Any) -> None:
    """Send a prompt and show the answer as it arrives.

    The prompt is the argument, or --file, or standard input. Text goes to standard output, the
    summary and errors to standard error.

    \b
    Examples:
      trtllm-bls generate "Once upon a time" -o 64
      trtllm-bls generate --chat --system "Be brief." "What is a B-tree?"
      trtllm-bls generate "1, 2, 3," --stop-words "10" --stop-words $'\\n'
      git diff | trtllm-bls generate --json -o 200 | jq -r .text
      trtllm-bls generate "Count to a thousand:" -o 1000 --stop-after-ms 500
    """
    run(lambda: asyncio.run(_ask(options, _fields(options))))


async def _ask(options: dict[str, Any], fields: dict[str, Any]) -> Exit:
    sequences = max(fields.get("beam_width") or 1, fields.get("num_return_sequences") or 1)
    display: JsonDisplay | TextDisplay = TextDisplay(
        shows_at_end=sequences > 1, accumulates=options["overwrite_output_text"]
    )
    if options["as_json"]:
        display = JsonDisplay()
    elif options["echo"] and fields["stream"]:
        click.echo(fields.get("text_input", ""), nl=False)  # servers repeat no prompt in a stream
    stop_after_ms = options["stop_after_ms"]
    reply = ClientReply(fields["max_tokens"])
    failure: TrtllmBlsError | None = None
    try:
        async with (
            open_client(options["url"], options) as client,
            client.stream(
                options["model_name"],
                deadline_s=options["timeout"],
                request_id=options["request_id"],
                **fields,
            ) as stream,
        ):
            reply.sent_at = time.perf_counter()
            with interruptible(stream) as interrupted:
                if stop_after_ms is not None:
                    loop = asyncio.get_running_loop()
                    loop.call_later(stop_after_ms / 1000, stream.cancel)
                async for event in stream:
                    reply.add(event)
                    display.event(event, (event.received_at - reply.sent_at) * 1000)
        if interrupted.is_set() and stream.cancelled:
            reply.ended_here = "interrupted"
        elif stream.cancelled:
            reply.ended_here = f"stopped after {stop_after_ms} ms"
    except TrtllmBlsError as error:
        failure = error
        reply.ended_here = _EXIT_REASONS.get(Exit.of(error), "error")
    display.end(reply, failure)
    if not options["quiet"] and (failure is None or reply.arrivals):
        click.echo("\n".join(reply.lines()), err=True)
    if failure is not None:
        return complain(failure)
    if reply.ended_here == "interrupted":
        return Exit.INTERRUPTED
    return Exit.FINISHED


def _fields(options: dict[str, Any]) -> dict[str, Any]:
    """Return the request by wire name, with the fields that the user has set."""
    prompt = _prompt(options)
    fields = {name: options[name] for name in TEXT_INPUTS if options[name] not in (None, ())}
    fields |= {"max_tokens": options["max_tokens"], "stream": options["stream"]}
    if options["chat"] or options["system"] is not None:
        messages = []
        if options["system"]:
            messages.append({"role": "system", "content": options["system"]})
        messages.append({"role": "user", "content": prompt})
        fields["messages"] = json.dumps(messages, ensure_ascii=False)
    else:
        fields["text_input"] = prompt
    if options["echo"]:
        fields["exclude_input_in_output"] = False
    if options["counts"]:
        fields |= {"return_num_input_tokens": True, "return_num_output_tokens": True}
    return fields | assignments("--set", options["other_inputs"])


def _prompt(options: dict[str, Any]) -> str:
    words = options["words"]
    if len(words) > 1:
        prompt = " ".join(words)
        raise click.UsageError(
            f"The prompt is one argument; put it in quotes: {shlex.quote(prompt)}"
        )
    sources: list[str | Path] = [*words]
    for source in (options["prompt_option"], options["file"]):
        if source is not None:
            sources.append(source)
    if len(sources) > 1:
        raise click.UsageError("Give the prompt once: as argument, with --prompt or with --file.")
    if not sources:
        if sys.stdin is None or sys.stdin.isatty():
            raise click.UsageError(
                "No prompt: give it as argument, with --file or on standard input."
            )
        sources.append("-")
    source = sources[0]
    if isinstance(source, str) and source != "-":
        return source
    try:
        content = source.read_bytes() if isinstance(source, Path) else sys.stdin.buffer.read()
        return content.decode("utf-8-sig")  # a byte order mark is no part of the prompt
    except UnicodeDecodeError as error:
        position = f"byte {error.start}: {error.reason}"
        raise click.UsageError(f"The prompt is not UTF-8 ({position}).") from error
    except OSError as error:
        raise click.UsageError(f"The prompt cannot be read: {error.strerror}.") from error


@dataclass
class TextDisplay:
    """A printer of the text alone, as it arrives.

    With ``shows_at_end`` sequences are printed one after another at the end, since several would
    mix. With ``accumulates`` each event has all text so far instead of the new text.
    """

    shows_at_end: bool
    accumulates: bool
    texts: dict[tuple[int, int, int], str] = field(default_factory=dict)  # by row, sequence, beam

    def event(self, event: Event, at_ms: float) -> None:
        for beam, text in enumerate(event.texts):
            key = (event.batch_index, event.sequence_index, beam)
            old_text = self.texts.get(key, "")
            if not self.accumulates:
                text = old_text + text
            self.texts[key] = text
            if self.shows_at_end:
                continue
            if text.startswith(old_text):
                click.echo(text[len(old_text) :], nl=False)
            else:
                # The server has taken back some text, so the new one begins a line.
                click.echo(f"\n{text}", nl=False)

    def end(self, reply: ClientReply, failure: TrtllmBlsError | None) -> None:
        """Finish the line, or show all sequences."""
        if self.shows_at_end:
            for number, (_, text) in enumerate(sorted(self.texts.items())):
                click.echo(f"--- {number} ---\n{text}")
        elif any(text and not text.endswith("\n") for text in self.texts.values()):
            click.echo()


class JsonDisplay:
    """A printer of an object per event, and a last one of type ``summary``."""

    def event(self, event: Event, at_ms: float) -> None:
        """Show the event; ``at_ms`` is its arrival after sending."""
        members = {name: value for name, value in vars(event).items() if name != "received_at"}
        if len(event.texts) <= 1:
            del members["texts"]
        members["outputs"] = {name: _plain(array) for name, array in event.outputs.items()}
        self._line(type="event", at_ms=round(at_ms, 3), text=event.text, **members)

    def end(self, reply: ClientReply, failure: TrtllmBlsError | None) -> None:
        self._line(type="summary", **reply.figures(), error=failure and str(failure))

    def _line(self, **values: Any) -> None:
        ascii = sys.stdout.encoding != "utf-8"  # every escape must be JSON's
        click.echo(json.dumps(values, ensure_ascii=ascii, allow_nan=False))


def _plain(array: NDArray[Any]) -> Any:
    if array.dtype.kind == "O":
        array = np.char.decode(array.astype(bytes), "utf-8", "replace")
    elif array.dtype.kind == "f":  # JSON has no infinity
        finite = np.isfinite(array)
        array = array.astype(object)
        array[~finite] = None
    return array.tolist()
