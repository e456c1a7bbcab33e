"""Token ids in, token ids out: a command-line client of the engine model ``tensorrt_llm``.

Has the flags and the messages of the client that users of TensorRT-LLM's Triton backend know
(docs/contract.md lists them). Owns options and output; ``trtllm_bls.client`` owns the wire.
"""

from __future__ import annotations

import asyncio
import csv
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from trtllm_bls.client.client import ENGINE, Client, Event, Model, Stream
from trtllm_bls.client.terminal import (
    TEXT_INPUTS,
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
from trtllm_bls.errors import EngineError, SettingsError, TrtllmBlsError
from trtllm_bls.text.tokenizer import Tokenizer, load_tokenizer

_PRINTED_IDS = 256
_INPUT_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)

# Inputs that are sent only if their options are, with the help of these options.
_OPTIONAL = {
    "repetition_penalty": TEXT_INPUTS["repetition_penalty"],
    "presence_penalty": TEXT_INPUTS["presence_penalty"],
    "frequency_penalty": TEXT_INPUTS["frequency_penalty"],
    "seed": TEXT_INPUTS["seed"],
    "lora_task_id": "Adapter to use; with --lora-path it is sent along.",
    "exclude_input_in_output": "Answers without the prompt; the server decides when not given.",
}
for _name in ENGINE.input_named:
    if _name.startswith("return_"):
        _OPTIONAL[_name] = ""
_LOOKAHEAD = (
    "lookahead_window_size",
    "lookahead_ngram_size",
    "lookahead_verification_set_size",
)


@program()
@click.option("-v", "--verbose", is_flag=True, help="Show the request on standard error.")
@click.option("--text", default="Once upon a time", show_default=True)
@click.option(
    "--input-tokens-csv", type=_INPUT_FILE, help="First row: prompt ids; no tokenizer needed."
)
@click.option("--draft-tokens-csv", type=_INPUT_FILE, help="First row: draft ids to verify.")
@click.option("--output-tokens-csv", type=_INPUT_FILE, help="First row: expected ids, for -c.")
@click.option("--tokenizer-dir", type=_FOLDER, help="To encode --text and to show text.")
@click.option("--tokenizer-type", hidden=True, help="Accepted; the directory says it all.")
@click.option("--end-id", type=int, default=-1, show_default=True, help="Without a tokenizer.")
@click.option("--pad-id", type=int, default=50256, show_default=True, help="Without a tokenizer.")
@click.option("-S", "--streaming", is_flag=True, help="Ids as they are generated.")
@click.option("--request-output-len", type=int, default=16, show_default=True)
@click.option("-b", "--beam-width", type=int, default=1, show_default=True)
@click.option("-n", "--num-return-sequences", type=int)
@click.option("--temperature", type=float, default=1.0, show_default=True)
@click.option("--top-k", "runtime_top_k", type=int, default=1, show_default=True)
@click.option("--top-p", "runtime_top_p", type=float, default=0.0, show_default=True)
@tensor_options(ENGINE, _OPTIONAL)
@click.option("-c", "--check-output", is_flag=True, help="Compare with --output-tokens-csv.")
@click.option("--correctness-threshold", type=click.FloatRange(0, 1), default=1.0)
@click.option(
    "--stop-after-ms",
    type=click.IntRange(min=0),
    default=0,
    help="Stop the running request after this time, by a stop request; 0 is never.",
)
@click.option(
    "--stop-via-request-cancel",
    "--request-cancellation",
    "cancels",
    is_flag=True,
    help="Stop by cancelling the request instead.",
)
@click.option("--request-id", help="Made up when absent.")
@click.option(
    "--requested-outputs", multiple=True, help="Repeatable; must have output_ids. Default: all."
)
@click.option(
    "--prompt-embedding-table-path", type=_INPUT_FILE, help="npy file, one table per task."
)
@click.option("--prompt-task-id", type=int, default=0, show_default=True)
@click.option("--prompt-table-extra-id", "--prompt_table_extra_id", type=int)
@click.option("--vocab-size", "--vocab_size", type=int, help="With --prompt-table-extra-id.")
@click.option("--dtype", type=click.Choice(["float16"]), default="float16", hidden=True)
@click.option("--lora-path", type=_FOLDER, help="Has model.lora_weights.npy, model.lora_config.npy")
@click.option("--lookahead-config", "--lookahead_config", metavar="[W,N,G]")
@other_inputs_option
@click.option("--model-name", default=ENGINE.name, show_default=True)
@click.option(
    "-t",
    "--stream-timeout",
    type=click.FloatRange(min=0, min_open=True),
    help="Deadline of the whole request in seconds.",
)
@click.option("-C", "--grpc-compression-algorithm", type=click.Choice(["gzip", "deflate"]))
@connection_options("-p")
def main(**options: Any) -> None:
    """Send token ids (or text, with a tokenizer) to the engine model and print the ids.

    \b
    Examples:
      client/inflight_batcher_llm_client.py --tokenizer-dir ./tokenizer \\
          --text "Once upon" --streaming
      client/inflight_batcher_llm_client.py --input-tokens-csv in.csv \\
          --output-tokens-csv out.csv -c
      client/inflight_batcher_llm_client.py --input-tokens-csv in.csv -S \\
          --stop-after-ms 200 --request-output-len 500
    """
    if options["check_output"] and not options["output_tokens_csv"]:
        raise click.UsageError("--check-output needs --output-tokens-csv.")
    if options["requested_outputs"] and "output_ids" not in options["requested_outputs"]:
        raise click.UsageError("--requested-outputs must have output_ids.")
    if options["input_tokens_csv"] is None and options["tokenizer_dir"] is None:
        raise click.UsageError("Give --input-tokens-csv, or --tokenizer-dir to encode --text.")
    run(lambda: asyncio.run(_ask(options)))


async def _ask(options: dict[str, Any]) -> Exit:
    tokenizer: Tokenizer | None = None
    if options["input_tokens_csv"]:
        prompt = _first_row(options["input_tokens_csv"])
    else:
        tokenizer = load_tokenizer(options["tokenizer_dir"])
        prompt = list(tokenizer.encode(options["text"], True))
    fields = _fields(options, prompt, tokenizer)
    click.echo(f"Input sequence: {prompt[:_PRINTED_IDS]}")
    if options["verbose"]:
        click.echo("\n".join(f"{name}: {value}" for name, value in fields.items()), err=True)
    answer = TokenAnswer(
        prompt,
        streaming=options["streaming"],
        beam_width=options["beam_width"],
        excluded=bool(options["exclude_input_in_output"]),
    )
    outputs = options["requested_outputs"]
    if outputs:  # ids are padded to this length
        outputs = tuple(dict.fromkeys((*outputs, "sequence_length")))
    model = replace(ENGINE, name=options["model_name"])
    async with (
        open_client(options["url"], options, options["grpc_compression_algorithm"]) as client,
        client.stream(
            model,
            deadline_s=options["stream_timeout"],
            request_id=options["request_id"],
            outputs=outputs,
            **fields,
        ) as stream,
    ):
        with interruptible(stream) as interrupted:
            await _receive(client, stream, model, options, answer)
    _show(answer, tokenizer, prompt)
    if stream.cancelled and interrupted.is_set():
        return Exit.INTERRUPTED
    return _verdict(options, answer)


async def _receive(
    client: Client, stream: Stream, model: Model, options: dict[str, Any], answer: TokenAnswer
) -> None:
    """Show new ids as they come; stop the request after ``--stop-after-ms`` if it still runs."""
    stops: list[asyncio.Task[None]] = []

    async def send_stop() -> None:
        try:
            await client.stop(stream.request_id, model)
            click.echo("Got cancellation response from server")
        except TrtllmBlsError as error:  # the running request goes on, and decides how this ends
            complain(error)

    def stop() -> None:
        if options["cancels"]:
            stream.cancel()
        else:
            stops.append(asyncio.create_task(send_stop()))

    timer: asyncio.TimerHandle | None = None
    if options["stop_after_ms"]:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(options["stop_after_ms"] / 1000, stop)
    try:
        async for event in stream:
            new_ids = answer.add(event)
            if options["streaming"]:
                for ids in filter(None, new_ids.values()):
                    click.echo(str(ids))
            elif new_ids:
                click.echo("Got completed request")
    finally:
        if timer is not None:
            timer.cancel()
        await asyncio.gather(*stops)
    if stream.cancelled:
        click.echo("Request is cancelled")


def _fields(
    options: dict[str, Any], prompt: list[int], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return the request by wire name."""
    end_id = options["end_id"]
    pad_id = options["pad_id"]
    if tokenizer is not None:
        end_id = -1
        if tokenizer.eos_id is not None:
            end_id = tokenizer.eos_id
        pad_id = end_id
        if tokenizer.pad_id is not None:
            pad_id = tokenizer.pad_id
    fields: dict[str, Any] = {
        "input_ids": prompt,
        "input_lengths": len(prompt),
        "end_id": end_id,
        "pad_id": pad_id,
    }
    for name in (
        *("request_output_len", "beam_width", "temperature", "streaming"),
        *("runtime_top_k", "runtime_top_p", "num_return_sequences", *_OPTIONAL),
    ):
        if options[name] is not None:
            fields[name] = options[name]
    if options["draft_tokens_csv"]:
        fields["draft_input_ids"] = _first_row(options["draft_tokens_csv"])
    if options["prompt_embedding_table_path"] is not None:
        tables = _numpy_file(options["prompt_embedding_table_path"], np.float16)
        if tables.ndim != 3:
            raise SettingsError(
                f"--prompt-embedding-table-path: {tables.shape} is no [task, row, size]"
            )
        if not 0 <= options["prompt_task_id"] < len(tables):
            raise SettingsError(f"--prompt-task-id: the file has tasks 0 to {len(tables) - 1}")
        table = tables[options["prompt_task_id"]]
        fields |= {"prompt_embedding_table": table, "prompt_vocab_size": len(table)}
        extra_id = options["prompt_table_extra_id"]
        vocab_size = options["vocab_size"]
        if extra_id is not None:
            if vocab_size is None:
                raise SettingsError("--prompt-table-extra-id: give --vocab-size too")
            # Ids beyond the vocabulary are rows of the table.
            extra_ids = [extra_id if token >= vocab_size else 0 for token in prompt]
            fields["prompt_table_extra_ids"] = extra_ids
    if folder := options["lora_path"]:
        fields["lora_weights"] = _numpy_file(folder / "model.lora_weights.npy", np.float16)
        fields["lora_config"] = _numpy_file(folder / "model.lora_config.npy", np.int32)
    if options["lookahead_config"]:
        try:
            fields |= zip(_LOOKAHEAD, json.loads(options["lookahead_config"]), strict=True)
        except (ValueError, TypeError) as error:
            problem = f"{options['lookahead_config']!r} is not [W,N,G]"
            raise SettingsError(f"--lookahead-config: {problem}") from error
    return fields | assignments("--set", options["other_inputs"])


def _first_row(path: Path) -> list[int]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            return [int(value) for value in next(csv.reader(lines), [])]
    except ValueError as error:
        raise SettingsError(
            f"{path}: the first row is not a list of token ids ({error})"
        ) from error


def _numpy_file(path: Path, dtype: type) -> NDArray[Any]:
    try:
        return np.asarray(np.load(path)).astype(dtype)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: cannot be read as a numpy array") from error


def _show(answer: TokenAnswer, tokenizer: Tokenizer | None, prompt: list[int]) -> None:
    indices = {index for index, _ in answer.sequences}
    if tokenizer is not None:
        click.echo(f"Input: {tokenizer.decode(prompt)}")
        for (index, beam), ids in answer.generated.items():
            label = f"beam {beam}"
            if len(indices) > 1:
                label = f"sequence {index} beam {beam}"
            click.echo(f"Output {label}: {tokenizer.decode(ids)}")
    for ids in answer.sequences.values():
        click.echo(f"Output sequence: {ids}")
    for name, values in answer.outputs.items():
        if name in ("output_ids", "sequence_length"):
            continue
        # Logits of a whole vocabulary are unreadable; their shape and numpy's summary are not.
        text = str(values)
        if values.size <= 1:
            text = str(values.item())
        click.echo(f"{name} {list(values.shape)}: {text}")


def _verdict(options: dict[str, Any], answer: TokenAnswer) -> Exit:
    missing = [name for name in options["requested_outputs"] if name not in answer.outputs]
    if missing:
        raise EngineError(f"the answer lacks requested outputs: {', '.join(missing)}")
    length = max(map(len, answer.generated.values()), default=0)
    if options["stop_after_ms"] and length >= options["request_output_len"]:
        raise EngineError("the request ran to its full length although it was to be stopped")
    if options["check_output"]:
        expected = _first_row(options["output_tokens_csv"])
        actual = next(iter(answer.sequences.values()), [])
        if not agrees(actual, expected, options["correctness_threshold"]):
            click.echo("FAIL!")
            return Exit.FAILED
        click.echo("PASS!")
    return Exit.FINISHED


SequenceKey = tuple[int, int]  # sequence index, beam


class TokenAnswer:
    """The ids of a prompt's answer so far, by sequence and beam.

    The content of a response depends on the request: streaming with one beam brings new ids;
    streaming with several brings each beam anew, because beams may be rewritten; not streaming
    brings everything, the prompt included unless it was ``excluded``. ``outputs`` are all tensors
    that came: logits of streamed steps joined, any other tensor as last sent.
    """

    def __init__(
        self, prompt: Sequence[int], *, streaming: bool, beam_width: int, excluded: bool
    ) -> None:
        self._prompt = list(prompt)
        self._brings_prompt = not streaming and not excluded
        self._appends = streaming and beam_width == 1
        self._prompt_in_output: list[int] = []
        if not excluded:
            self._prompt_in_output = self._prompt
        self._generated: dict[SequenceKey, list[int]] = {}
        self.outputs: dict[str, NDArray[Any]] = {}

    def add(self, event: Event) -> Mapping[SequenceKey, list[int]]:
        """Take a response in; return the ids that it brought, by sequence and beam."""
        for name, values in event.outputs.items():
            if name == "generation_logits" and name in self.outputs:
                values = np.concatenate([self.outputs[name], values], axis=1)
            self.outputs[name] = values
        if event.num_input_tokens is not None:
            self.outputs["num_input_tokens"] = np.array(event.num_input_tokens)
        if event.num_output_tokens is not None:
            self.outputs["num_output_tokens"] = np.array(event.num_output_tokens)
        if "output_ids" not in event.outputs:
            return {}
        beams = event.outputs["output_ids"][0].tolist()
        lengths = event.outputs["sequence_length"].reshape(-1).tolist()
        new_ids: dict[SequenceKey, list[int]] = {}
        for beam, (padded, length) in enumerate(zip(beams, lengths, strict=True)):
            key = (event.sequence_index, beam)
            ids = padded[:length]
            if self._brings_prompt and ids[: len(self._prompt)] == self._prompt:
                ids = ids[len(self._prompt) :]
            new_ids[key] = ids
            if self._appends:
                self._generated[key] = self._generated.get(key, []) + ids
            else:
                self._generated[key] = ids
        return new_ids

    @property
    def generated(self) -> Mapping[SequenceKey, list[int]]:
        """The new ids of every sequence and beam, in order."""
        return dict(sorted(self._generated.items()))

    @property
    def sequences(self) -> Mapping[SequenceKey, list[int]]:
        """The new ids after those of the prompt, unless it was excluded."""
        return {key: self._prompt_in_output + ids for key, ids in self.generated.items()}


def agrees(actual: Sequence[int], expected: Sequence[int], threshold: float) -> bool:
    """Return True if ids match: at 1.0 all, else a share of positions above ``threshold``."""
    if threshold >= 1:
        return list(actual) == list(expected)
    matches: int = sum(map(operator.eq, actual, expected))
    return matches / max(len(actual), len(expected), 1) > threshold
