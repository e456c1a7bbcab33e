"""Command lines that never reach a server: told in words, exit code 2."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
from pathlib import Path
from types import ModuleType

import click
import numpy as np
import pytest
from click.testing import CliRunner

from trtllm_bls.client.terminal import assignments, interruptible

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "client" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outcome(program: str, *arguments: str, stdin: str | bytes = "") -> tuple[int, str]:
    result = CliRunner().invoke(load(program).main, arguments, input=stdin)
    return result.exit_code, result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("Hi", "--prompt", "Hi"), "Give the prompt once"),
        (("Hi", "--file", __file__), "Give the prompt once"),
        (("Hi", "--file", "/nowhere"), "does not exist"),
        (("Hi", "--top-k", "many"), "'many' is not a valid int"),
        (("Hi", "-t", "0"), "0.0 is not in the range"),
        (("Hi", "--stop-after-ms", "-1"), "-1 is not in the range"),
        (("Hi", "--set", "top_k"), "'top_k' is not NAME=VALUE"),
        (("Hi", "-u", "http://127.0.0.1:8001"), "error: url: 'http://127.0.0.1:8001' has a scheme"),
    ],
)
def test_a_wrong_text_command_is_explained(arguments: tuple[str, ...], words: str) -> None:
    """Before anything is sent."""
    code, err = outcome("streaming_client", *arguments)
    assert (code, words in err) == (2, True), err


def test_an_input_that_cannot_be_sent_is_a_refused_request() -> None:
    """It fails as the server would have failed it, with the likely name."""
    for given, words in (
        ("tempratur=1", "did you mean temperature?"),
        (r'bad_words="\ud800"', r"bad_words: '\ud800' at character 0 is half of a character"),
    ):
        code, err = outcome("streaming_client", "Hi", "--set", given)
        assert (code, words in err) == (1, True), err


def test_a_prompt_must_be_utf_8() -> None:
    """Bytes of another encoding are refused rather than replaced."""
    code, err = outcome("streaming_client", stdin=b"\xff")
    assert (code, "not UTF-8" in err) == (2, True)


def test_a_wrong_token_command_is_explained(tmp_path: Path) -> None:
    """Files are looked into before a connection is made."""
    words, ids, latin_1 = (tmp_path / name for name in ("words.csv", "ids.csv", "latin-1.csv"))
    words.write_text("one,two\n")
    ids.write_text("1,2\n")
    latin_1.write_bytes(b"1,\xff")
    tables = {"flat": np.ones(3), "number": np.float32(1), "words": np.array([["a"]])}
    for name, array in tables.items():
        np.save(tmp_path / f"{name}.npy", array)
    given = ("--input-tokens-csv", str(ids))
    for arguments, expected in (
        ((), "Give --input-tokens-csv, or --tokenizer-dir"),
        ((*given, "-c"), "--check-output needs --output-tokens-csv"),
        ((*given, "--requested-outputs", "sequence_length"), "must have output_ids"),
        (("--input-tokens-csv", str(words)), "the first row is not a list of token ids"),
        (("--input-tokens-csv", str(latin_1)), "the first row is not a list of token ids"),
        ((*given, "--lookahead-config", "[1,2]"), "'[1,2]' is not [W,N,G]"),
        ((*given, "--lora-path", str(tmp_path)), "cannot be read as a numpy array"),
        *(
            ((*given, "--prompt-embedding-table-path", str(tmp_path / f"{name}.npy")), said)
            for name, said in (
                ("flat", "(3,) is no [task, row, size]"),
                ("number", "() is no [task, row, size]"),
                ("words", "cannot be read as a numpy array"),
            )
        ),
    ):
        code, err = outcome("inflight_batcher_llm_client", *arguments)
        assert (code, expected in err) == (2, True), err


def test_other_inputs_are_json_or_else_strings() -> None:
    """So that numbers, lists and flags need no quoting, and plain words none either."""
    found = assignments("--set", ["a=1", "b=[1, 2]", "c=true", "d=plain = text", 'e="1"', "f="])
    assert found == {"a": 1, "b": [1, 2], "c": True, "d": "plain = text", "e": "1", "f": ""}
    with pytest.raises(click.BadParameter):
        assignments("--set", ["a"])


async def test_the_second_ctrl_c_ends_the_process_at_once() -> None:
    """The first one cancels the request, for which a server may take its time."""
    task = asyncio.create_task(asyncio.sleep(60))
    with interruptible(task) as interrupted:
        signal.raise_signal(signal.SIGINT)
        await asyncio.wait({task})
        assert (interrupted.is_set(), task.cancelled()) == (True, True)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_token_client_takes_the_tls_flags_of_tensorrt_llms_own(tmp_path: Path) -> None:
    """Among them ``-p``, which is the prompt of the text client."""
    file = tmp_path / "file.pem"
    file.touch()
    main = load("inflight_batcher_llm_client").main
    words = ["--text", "Hi", "-s", "-r", str(file), "-x", str(file), "-p", str(file)]
    given = main.make_context("client", words).params
    assert all(given[name] == file for name in ("tls_ca", "tls_cert", "tls_key"))
    assert given["tls"] is True
