"""Both command-line clients as processes: what they print, and what they tell their caller.

Each runs against a server of its own; the tests then read what came of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from tests.helpers.command_scenes import DEMO, ROOT, Outcome, play, scenes
from tests.helpers.fake_grpc_server import FakeGrpcServer, tokens
from tests.helpers.waiting import run_async


class Outcomes(dict[str, Outcome]):
    """By a scene's name; a scene is played when somebody first asks what came of it."""

    def __init__(self, files: Path) -> None:
        super().__init__()
        self._scenes = scenes(files)

    def __missing__(self, name: str) -> Outcome:
        outcome = run_async(play(self._scenes[name]))
        assert "Traceback" not in outcome.err, outcome.err  # expected failures are told in words
        self[name] = outcome
        return outcome


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(tmp_path_factory.mktemp("ids"))


@pytest.mark.parametrize(
    ("name", "code", "out", "words"),
    [
        ("text", 0, "Hello\n", "ended: length\ntokens: 2 of 2 asked for, 1 in the prompt\n"),
        ("error in mid-stream", 1, "Hel\n", "error: broken\n"),
        ("deadline", 4, "Hel\n", "ended: deadline\ntokens: at least 1 of 128 asked for\n"),
        (
            *("stopped at once", 0, ""),
            "ended: stopped after 0 ms\ntokens: at least 0 of 128 asked for\n",
        ),
    ],
)
def test_text_goes_to_stdout_alone_and_the_rest_to_stderr(
    outcomes: Outcomes, name: str, code: int, out: str, words: str
) -> None:
    """What is piped on is the text that came, whatever cut it short; counts and the reason are for
    the reader. To stop, even at once, is no failure."""
    outcome = outcomes[name]
    assert (outcome.code, outcome.out, words in outcome.err) == (code, out, True), outcome.err
    assert outcome.err.endswith("error: broken\n") == (name == "error in mid-stream")


def test_only_what_was_said_is_sent(outcomes: Outcomes) -> None:
    """No sampling value is made up; counts are asked for, for the summary."""
    assert outcomes["text"].inputs == [
        {
            "text_input": [["Hi"]],
            "max_tokens": [[2]],
            "stream": [[True]],
            "return_num_input_tokens": [[True]],
            "return_num_output_tokens": [[True]],
        }
    ]


def test_json_is_one_object_per_event_and_a_summary(outcomes: Outcomes) -> None:
    """The prompt may come from a pipe, its line end included."""
    outcome = outcomes["json from stdin"]
    lines = [json.loads(line) for line in outcome.out.splitlines()]
    assert [line["type"] for line in lines] == ["event", "event", "event", "summary"]
    assert [line.get("text") for line in lines] == ["Hel", "lo", "", None]
    assert (lines[-1]["ended"], lines[-1]["num_output_tokens"]) == ("length", 2)
    assert 0 < lines[0]["at_ms"] == pytest.approx(lines[-1]["ttft_ms"], abs=0.01)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.inputs[0]["text_input"] == [["Hi\n"]]
    assert outcome.inputs[0]["top_k"] == [[3]]


def test_chat_sends_messages_and_stop_words_stay_whole(outcomes: Outcomes) -> None:
    """Commas and newlines inside a stop word are part of it."""
    (inputs,) = outcomes["chat"].inputs
    assert "text_input" not in inputs
    assert json.loads(inputs["messages"][0][0]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert inputs["stop_words"] == [["a,b", "\n"]]


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("nobody there", 3, "error: 127.0.0.1:1: "),
        ("deadline", 4, "error: no complete answer within 60 s"),
        ("unknown model", 1, "error: Request for unknown model: 'x' is not found"),
    ],
)
def test_every_kind_of_failure_has_its_exit_code(
    outcomes: Outcomes, name: str, code: int, words: str
) -> None:
    """A script can tell what went wrong without reading the words."""
    assert (outcomes[name].code, words in outcomes[name].err) == (code, True)


def test_a_server_that_is_not_there_is_all_that_is_told(outcomes: Outcomes) -> None:
    """No figures of an answer that never began, and what to do."""
    for name in ("nobody there", "ids, nobody there"):
        (line,) = outcomes[name].err.splitlines()
        assert line.endswith("; nothing listens there: `trtllm-bls serve` starts a server")


def test_a_full_server_is_asked_again_if_wished(outcomes: Outcomes) -> None:
    """As often as ``--retries`` says."""
    outcome = outcomes["retries"]
    assert (outcome.code, outcome.out, len(outcome.inputs)) == (0, "Hello\n", 2)


def test_an_http_port_is_told_by_name(outcomes: Outcomes) -> None:
    """It answers gRPC with a closed connection, which says nothing to who mixed up two ports."""
    outcome = outcomes["http port"]
    assert outcome.code == 3
    (line,) = outcome.err.splitlines()
    assert "; this is an HTTP port: give --url the gRPC port, which is --grpc-port of serve" in line


def test_ctrl_c_cancels_on_the_server(outcomes: Outcomes) -> None:
    """The summary still comes, and the exit code is the shell's for an interrupt."""
    outcome = outcomes["interrupted"]
    assert (outcome.code, outcome.cancels) == (130, 1)
    assert json.loads(outcome.out.splitlines()[-1])["ended"] == "interrupted"


def test_streamed_ids_are_joined_after_the_prompt(outcomes: Outcomes) -> None:
    """One list per response that brings ids; an empty one shows nothing. An answer of the length
    that was asked for is none that ran on."""
    outcome = outcomes["tokens"]
    assert outcome.code == 0
    assert outcome.out.splitlines() == [
        "Input sequence: [1, 2, 3]",
        "[5]",
        "[6]",
        "Output sequence: [1, 2, 3, 5, 6]",
        "PASS!",
    ]


def test_unexpected_ids_fail_the_check(outcomes: Outcomes) -> None:
    """``--check-output`` compares whole sequences."""
    outcome = outcomes["other tokens"]
    assert (outcome.code, outcome.out.splitlines()[-1]) == (1, "FAIL!")


def test_the_token_client_always_sends_these(outcomes: Outcomes) -> None:
    """The ten inputs users of the engine model expect, and none that was not asked for; with the
    ids their number, also where only the ids are asked for."""
    outcome = outcomes["whole"]
    assert outcome.inputs == [
        {
            "input_ids": [[1, 2, 3]],
            "input_lengths": [[3]],
            "request_output_len": [[16]],
            "beam_width": [[1]],
            "temperature": [[1.0]],
            "streaming": [[False]],
            "end_id": [[-1]],
            "pad_id": [[50256]],
            "runtime_top_k": [[1]],
            "runtime_top_p": [[0.0]],
        }
    ]
    assert outcome.outputs == [["output_ids", "sequence_length"]]
    assert outcome.out.splitlines()[1:] == [
        "Got completed request",
        "Output sequence: [1, 2, 3, 5]",
    ]


def test_a_tokenizer_says_which_ids_end_and_pad(outcomes: Outcomes) -> None:
    """Instead of the options."""
    (inputs,) = outcomes["tokenizer"].inputs
    tokens = json.loads((DEMO / "target" / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in tokens}
    assert inputs["end_id"] == [[ids["<|end|>"]]]
    assert inputs["pad_id"] == [[ids["<|pad|>"]]]
    assert len(inputs["input_ids"][0]) == inputs["input_lengths"][0][0]


def test_all_other_inputs_come_from_flags_and_files(outcomes: Outcomes) -> None:
    """Adapters and tables from numpy files, look-ahead and drafts; results by sequence."""
    outcome = outcomes["everything"]
    (inputs,) = outcome.inputs
    assert {name: inputs[name] for name in inputs if "lora" in name or "look" in name} == {
        "lora_weights": [[[1.0, 1.0]]],
        "lora_config": [[[1, 0, 8]]],
        "lora_task_id": [[7]],
        "lookahead_window_size": [[4]],
        "lookahead_ngram_size": [[3]],
        "lookahead_verification_set_size": [[2]],
    }
    assert inputs["prompt_embedding_table"] == [[[4.0, 5.0], [6.0, 7.0]]]
    assert inputs["prompt_vocab_size"] == [[2]]
    assert inputs["prompt_table_extra_ids"] == [[0, 0, 9]]
    assert inputs["draft_input_ids"] == [[1, 2, 3]]
    assert (inputs["num_return_sequences"], inputs["runtime_top_k"]) == ([[2]], [[5]])
    assert (inputs["return_log_probs"], inputs["min_tokens"]) == ([[True]], [[1]])
    assert inputs["exclude_input_in_output"] == [[True]]
    assert (outcome.code, outcome.out.splitlines()[-3:]) == (
        0,
        ["Output sequence: [5]", "Output sequence: [6]", "cum_log_probs [1, 1]: -1.5"],
    )


def test_a_request_that_should_have_stopped_and_did_not_fails(outcomes: Outcomes) -> None:
    """Under a stop flag, the full length is a failure."""
    outcome = outcomes["ran on"]
    assert (outcome.code, "ran to its full length" in outcome.err) == (1, True)


def test_a_stop_request_ends_the_request_with_what_it_has(outcomes: Outcomes) -> None:
    """The engine is asked by request id; nothing is cancelled."""
    outcome = outcomes["stop request"]
    assert (outcome.code, outcome.cancels) == (0, 0)
    assert "Got cancellation response from server" in outcome.out.splitlines()
    assert outcome.out.splitlines()[-1] == "Output sequence: [1, 2, 3, 5, 6]"


def test_a_request_can_be_cancelled_instead(outcomes: Outcomes) -> None:
    """With the flag no stop request is sent."""
    outcome = outcomes["cancellation"]
    assert (outcome.code, outcome.out.splitlines()[-1]) == (0, "Request is cancelled")
    assert not any("stop" in inputs for inputs in outcome.inputs)


def test_characters_the_terminal_lacks_are_escaped(outcomes: Outcomes) -> None:
    """Nothing of the answer is lost, and JSON stays JSON."""
    escaped = r"\u0928\u092e\u0938\u094d\u0924\u0947 \U0001f600"
    assert (outcomes["latin-1"].code, outcomes["latin-1"].out) == (0, escaped + "\n")
    lines = outcomes["latin-1 json"].out.splitlines()
    assert json.loads(lines[0])["text"] == "नमस्ते 😀"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no stdin", "No prompt: give it as argument, with --file or on standard input."),
        ("unreadable stdin", "The prompt cannot be read: Bad file descriptor."),
    ],
)
def test_what_cannot_be_read_is_wrong_usage(outcomes: Outcomes, name: str, words: str) -> None:
    """Nothing is sent; the line says which argument or input it is."""
    outcome = outcomes[name]
    assert (outcome.code, words in outcome.err, outcome.inputs) == (2, True, []), outcome.err


@pytest.mark.parametrize(
    ("name", "field"), [("latin-1 argument", "text_input"), ("latin-1 stop word", "stop_words")]
)
def test_an_argument_that_is_not_utf_8_is_refused(
    outcomes: Outcomes, name: str, field: str
) -> None:
    """By the name of its input; nothing is sent."""
    outcome = outcomes[name]
    assert (outcome.code, outcome.inputs) == (1, [])
    assert outcome.err.startswith(rf"error: {field}: '\udce9' at character 3 ")


@pytest.mark.parametrize(
    ("name", "cancels"), [("disk full", 1), ("disk full, json", 1), ("disk full, ids", 0)]
)
def test_output_that_cannot_be_written_ends_the_request(
    outcomes: Outcomes, name: str, cancels: int
) -> None:
    """The server is told to stop, and the user why; the ids of the prompt are shown first."""
    outcome = outcomes[name]
    assert outcome.err == "error: cannot write the output: No space left on device\n"
    assert (outcome.code, outcome.cancels, len(outcome.inputs)) == (1, cancels, cancels)


def test_a_byte_order_mark_is_not_part_of_the_prompt(outcomes: Outcomes) -> None:
    """Editors and shells of some systems put one at the start of every file."""
    for name in ("byte order mark", "byte order mark, file"):
        assert outcomes[name].inputs[0]["text_input"] == [["Hi"]]
    assert outcomes["byte order mark, ids"].inputs[0]["input_ids"] == [[1, 2, 3]]


async def test_a_compressed_request_is_small(tmp_path: Path) -> None:
    """On the wire, where upstream's client made it so."""
    file = tmp_path / "ids.csv"
    file.write_text("7," * 20_000 + "7")
    sent: dict[str, int] = {}
    async with FakeGrpcServer([tokens(5, final=True)]) as server:
        host, _, port = server.url.partition(":")
        for compression in ("gzip", "none"):
            sent[compression] = 0

            async def pass_on(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counted: str
            ) -> None:
                while data := await reader.read(2**16):
                    sent[counted] = sent.get(counted, 0) + len(data)
                    writer.write(data)
                writer.close()

            async def serve(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str = compression
            ) -> None:
                back, forth = await asyncio.open_connection(host, int(port))
                await asyncio.gather(pass_on(reader, forth, name), pass_on(back, writer, "back"))

            between = await asyncio.start_server(serve, "127.0.0.1", 0)
            url = f"127.0.0.1:{between.sockets[0].getsockname()[1]}"
            words = ["--input-tokens-csv", file, "-u", url]
            words += ["-C", compression] if compression != "none" else []
            program = ROOT / "client" / "inflight_batcher_llm_client.py"
            client = await asyncio.create_subprocess_exec(
                *(sys.executable, program, *words),
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=asyncio.subprocess.DEVNULL,
            )
            try:
                assert await asyncio.wait_for(client.wait(), 120) == 0
            finally:
                if client.returncode is None:
                    client.kill()
                    await client.wait()
            between.close()
    assert sent["gzip"] < 10_000 < 80_000 < sent["none"]
