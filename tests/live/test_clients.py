"""Both command-line clients, as a user starts them, against the real server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.server_requests import ask
from tests.helpers.waiting import in_pieces, in_time, until
from trtllm_bls.errors import InvalidRequest

if TYPE_CHECKING:
    from trtllm_bls.operate.tritonserver import TritonServer

ROOT = Path(__file__).parents[2]
PROMPT = "Once upon a time there was"
# Nearly all that the model has room for. A client that gets the processor only after the end asks
# again.
NUM_LONG = 2000
LONG = ("-o", str(NUM_LONG), "--end-id", "-1")


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "client" / program), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    try:
        out, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"waited 120 s for a client's end: {process.communicate()}") from None
    assert "Traceback" not in err
    return process.returncode, out, err


def text_client(server: TritonServer, *arguments: str) -> tuple[int, str, str]:
    return finish(start("streaming_client.py", "-u", server.grpc_url, *arguments))


def lines_of(server: TritonServer, *arguments: str) -> list[dict[str, Any]]:
    """The JSON lines of a successful run."""
    code, out, err = text_client(server, "--json", *arguments)
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


def token_client(server: TritonServer, *arguments: str) -> tuple[int, list[str], str]:
    tokenizer = str(server.settings.model)
    common = ("-u", server.grpc_url, "--tokenizer-dir", tokenizer, "--text", PROMPT)
    code, out, err = finish(start("inflight_batcher_llm_client.py", *common, *arguments))
    return code, out.splitlines(), err


def ids_after(lines: list[str], label: str) -> list[int]:
    (line,) = [line for line in lines if line.startswith(label)]
    ids: list[int] = json.loads(line.removeprefix(label))
    return ids


# --- streaming_client.py ----------------------------------------------------------------------


def test_streamed_text_is_the_whole_text(server: TritonServer) -> None:
    """The pieces add up to what comes in one piece; both say why they ended, and count alike."""
    whole = lines_of(server, PROMPT, "-o", "24", "--no-stream")
    expected = [line["text"] for line in whole if line["type"] == "event"]

    def pieces() -> list[str]:
        streamed = lines_of(server, PROMPT, "-o", "24")
        texts = [line["text"] for line in streamed if line["type"] == "event"]
        assert "".join(texts) == "".join(expected) != ""
        facts = ("ended", "num_input_tokens", "num_output_tokens")
        assert [streamed[-1][fact] for fact in facts] == [whole[-1][fact] for fact in facts]
        assert 0 < streamed[-1]["num_output_tokens"] <= 24
        return texts

    in_pieces(pieces, len(expected))


def test_the_ensemble_gives_the_same_text(server: TritonServer) -> None:
    """One client, either model, plain text on stdout."""
    texts = [
        text_client(server, PROMPT, "-o", "24", "--model-name", model)
        for model in ("ensemble", "tensorrt_llm_bls")
    ]
    assert texts[0][0] == texts[1][0] == 0
    assert texts[0][1] == texts[1][1] != "\n"


def test_a_stop_word_ends_the_text_before_it(server: TritonServer) -> None:
    """A word from the middle of the answer, given as a stop, cuts the answer there."""
    _, text, _ = text_client(server, PROMPT, "-o", "24", "-q")
    middle = text[len(text) // 2 : len(text) // 2 + 3]
    code, cut, err = text_client(server, PROMPT, "-o", "24", "--stop-words", middle)
    assert (code, cut.removesuffix("\n")) == (0, text[: text.index(middle)])
    assert "ended: stop at " in err


def test_the_prompt_can_be_echoed(server: TritonServer) -> None:
    """``--echo`` puts the prompt before the same answer."""
    _, plain, _ = text_client(server, PROMPT, "-o", "8", "-q")
    _, echoed, _ = text_client(server, PROMPT, "-o", "8", "-q", "--echo")
    assert echoed == PROMPT + plain


def test_several_answers_to_one_prompt(server: TritonServer) -> None:
    """Each sequence has its own ending, and each is shown."""
    sampled = ("--num-return-sequences", "2", "--temperature", "1", "--seed", "5")
    lines = lines_of(server, PROMPT, "-o", "6", *sampled)
    ended = {line["sequence_index"] for line in lines[:-1] if line["finish_reason"]}
    assert ended == {0, 1}


def test_stopping_after_a_while_brings_fewer_tokens(server: TritonServer) -> None:
    """``--stop-after-ms`` is no failure, and the server serves on."""

    def is_stopped() -> bool:
        code, _, err = text_client(server, PROMPT, *LONG, "--stop-after-ms", "150")
        found = "ended: stopped after 150 ms" in err
        assert (code, found or "ended: length" in err) == (0, True)
        return found

    until(is_stopped)
    assert text_client(server, PROMPT, "-o", "2")[0] == 0


def test_stopping_at_once_is_allowed(server: TritonServer) -> None:
    """Nothing comes, nothing fails."""
    assert text_client(server, PROMPT, *LONG, "--stop-after-ms", "0", "-q") == (0, "", "")


def test_ctrl_c_leaves_with_130(server: TritonServer) -> None:
    """The summary is still printed, and the server serves on."""

    def is_interrupted() -> bool:
        process = start("streaming_client.py", "-u", server.grpc_url, PROMPT, *LONG, "--json")
        assert process.stdout is not None
        in_time([process.stdout], "the client's first line")
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        code, out, _ = finish(process)
        end = code, json.loads(out.splitlines()[-1])["ended"]
        assert end in ((130, "interrupted"), (0, "length"))
        return end == (130, "interrupted")

    until(is_interrupted)
    assert text_client(server, PROMPT, "-o", "2")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--model-name", "nothing_here"), 1, "unknown model"),
        (("-o", "0"), 1, "error: max_tokens: "),
        (("--top-p", "2"), 1, "error: top_p: "),
        ((*LONG, "-t", "0.2"), 4, "error: no complete answer within 0.2 s"),
        (("-u", "127.0.0.1:1"), 3, "error: 127.0.0.1:1: "),
        (("--system", "x", "--set", "text_input=y"), 1, "error: "),
    ],
)
def test_failures_are_told_in_words_and_codes(
    server: TritonServer, arguments: tuple[str, ...], code: int, words: str
) -> None:
    """Connection, model, request, deadline: each has its exit code and one clear line."""
    found, _, err = text_client(server, PROMPT, *arguments)
    assert (found, words in err) == (code, True), err


def test_a_model_that_is_not_decoupled_answers_on_a_stream(server: TritonServer) -> None:
    """One response, whole, with an end: a caller need not know which kind a model is."""
    result = ask(server.grpc_url, "preprocessing", QUERY=PROMPT, REQUEST_OUTPUT_LEN=4)
    (event,) = result.events
    assert event.final and event.outputs["INPUT_ID"].shape[0] == 1
    with pytest.raises(InvalidRequest, match="text_input"):
        ask(server.grpc_url, "preprocessing", REQUEST_OUTPUT_LEN=4)


# --- inflight_batcher_llm_client.py -----------------------------------------------------------

LONG_IDS = ("--request-output-len", str(NUM_LONG), "--set", "end_id=-1")
WHOLE = "the request ran to its full length although it was to be stopped"


def stopped_lines(server: TritonServer, *arguments: str) -> list[str]:
    """Return what the client prints of a long request that it stops after a while."""

    def attempt() -> list[str]:
        code, lines, err = token_client(
            server, "-S", *LONG_IDS, "--stop-after-ms", "150", *arguments
        )
        if WHOLE in err:
            return []
        assert code == 0, err
        return lines

    return until(attempt)


def test_streamed_ids_are_the_whole_ids(server: TritonServer, tmp_path: Path) -> None:
    """Prompt and answer, joined from pieces or in one piece, pass the check against each other."""
    code, whole, err = token_client(server, "--no-exclude-input-in-output")
    assert code == 0, err
    assert "Got completed request" in whole
    ids = ids_after(whole, "Output sequence: ")
    expected = tmp_path / "expected.csv"
    expected.write_text(",".join(map(str, ids)))
    code, streamed, err = token_client(server, "-S", "-c", "--output-tokens-csv", str(expected))
    assert (code, streamed[-1]) == (0, "PASS!"), err
    prompt = ids_after(streamed, "Input sequence: ")
    assert ids[: len(prompt)] == prompt
    pieces = [json.loads(line) for line in streamed if line.startswith("[")]
    assert [token for piece in pieces for token in piece] == ids[len(prompt) :]


def test_a_stop_request_ends_the_request_early(server: TritonServer) -> None:
    """The engine answers the stop, and the running request with what it has."""
    lines = stopped_lines(server)
    assert "Got cancellation response from server" in lines
    assert len(ids_after(lines, "Output sequence: ")) < NUM_LONG


def test_a_cancelled_request_ends_early(server: TritonServer) -> None:
    """``--request-cancellation`` cancels instead of asking."""
    lines = stopped_lines(server, "--request-cancellation")
    assert "Request is cancelled" in lines


def test_log_probs_come_when_asked_for(server: TritonServer) -> None:
    """One per generated id."""
    code, lines, err = token_client(server, "--return-log-probs", "--return-num-output-tokens")
    assert code == 0, err
    assert any(line.startswith("output_log_probs [1, 1, ") for line in lines)
    assert any(line.startswith("num_output_tokens ") for line in lines)


def test_an_unknown_engine_is_one_line(server: TritonServer) -> None:
    """The server's own words, exit code 1."""
    code, _, err = token_client(server, "--model-name", "nothing_here")
    assert (code, "unknown model" in err, err.count("\n")) == (1, True, 1)
