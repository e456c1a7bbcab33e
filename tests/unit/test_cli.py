"""The command line: defaults from the settings, clear errors, help with examples."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from tests.helpers.packages import needs
from tests.helpers.ports import ANY_PORTS
from tests.helpers.waiting import until
from trtllm_bls import __version__
from trtllm_bls.cli import main, show_error
from trtllm_bls.operate.logs import parse
from trtllm_bls.operate.serve import Terminal
from trtllm_bls.operate.tritonserver import ServerFailed
from trtllm_bls.settings.command_options import ServeSettings, deprecated

COMMANDS = main.list_commands(click.Context(main))


def command(name: str) -> click.Command:
    found = main.get_command(click.Context(main), name)
    assert found
    return found


def invoke(name: str, *words: str) -> Result:
    ports = ANY_PORTS if name == "serve" else []  # of an option given twice the last counts
    return CliRunner().invoke(main, [name, *ports, *words])


def run(*words: str) -> tuple[int, str]:
    result = invoke(*words)
    return result.exit_code, result.output


# --- options --------------------------------------------------------------------------------


def test_serve_offers_every_setting_with_its_default() -> None:
    """The parser and the dataclass cannot drift apart."""
    parsed = command("serve").make_context("serve", []).params
    assert parsed.pop("verbose") is False
    assert set(parsed) == {field.name for field in fields(ServeSettings)}
    assert ServeSettings(**parsed) == ServeSettings()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_that_parse(name: str) -> None:
    """An example in the help is a promise."""
    parent = click.Context(main, info_name="trtllm-bls")
    shown = command(name).get_help(click.Context(command(name), parent, info_name=name))
    examples = [
        shlex.split(line)[2:]
        for line in shown.replace("\\\n", "").splitlines()
        if line.strip().startswith("trtllm-bls ")
    ]
    assert examples
    for words in examples:
        command(name).make_context(name, words)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_deprecated_command_says_so(name: str) -> None:
    """As docs/stability.md promises: in its help, in the list of commands, and as it runs."""
    is_deprecated = name in ("conformance", "dynamo")
    listed = command(name)
    assert ("(deprecated)" in (listed.short_help or "")) == is_deprecated
    assert bool(re.search(r"^ *Deprecated: ", listed.help or "", re.M)) == is_deprecated


def test_a_deprecated_command_warns_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    """With its end and what to use; then it works as before."""

    @click.command()
    @deprecated("use another")
    def former() -> None:
        click.echo("its output")

    former.main([], prog_name="former", standalone_mode=False)
    printed = capsys.readouterr()
    assert printed.out == "its output\n"
    assert printed.err == "warning: former is deprecated and goes with 0.7.0; use another\n"


@pytest.mark.parametrize("name", ["chat", "doctor", "generate", "health"])
def test_commands_that_connect_have_the_same_tls_options(name: str, tmp_path: Path) -> None:
    """The spellings of TensorRT-LLM's own clients are taken too, but help does not show them."""
    file = tmp_path / "file.pem"
    file.touch()
    for words in (
        ["--tls", "--tls-ca", str(file), "--tls-cert", str(file), "--tls-key", str(file)],
        ["-s", "-r", str(file), "-x", str(file), "--private-key", str(file)],
        ["--ssl", "--root-certificates", str(file), "--certificate-chain", str(file)],
    ):
        given = command(name).make_context(name, [*words]).params
        assert (given["tls"], given["tls_ca"], given["tls_cert"]) == (True, file, file)
        assert given["tls_key"] == (None if "--ssl" in words else file)
    shown = run(name, "--help")[1]
    assert "--tls-server-name" in shown
    assert "--ssl" not in shown and "--root-certificates" not in shown


@pytest.mark.parametrize("name", ["openai", "serve"])
def test_commands_that_serve_have_the_same_tls_options(name: str) -> None:
    """The spellings of uvicorn and vLLM are taken too, but help does not show them."""
    tls = {
        "tls_cert": "--ssl-certfile",
        "tls_key": "--ssl-keyfile",
        "tls_client_ca": "--ssl-ca-certs",
    }
    for key, alias in tls.items():
        given = command(name).make_context(name, [alias, "file"]).params
        assert {each for each in tls if given[each] is not None} == {key}
    assert "--ssl" not in run(name, "--help")[1]


def test_help_lists_every_command() -> None:
    """Also those that live elsewhere."""
    code, output = run("--help")
    assert code == 0
    for name in COMMANDS:
        assert f"\n  {name} " in output


@pytest.mark.parametrize("words", ["--version", "version"])
def test_version(words: str) -> None:
    """The option and the command print the package's own number."""
    code, output = run(words)
    assert code == 0
    version = rf"{re.escape(__version__)}( \(commit [0-9a-f]{{12}}\))?"
    line = rf"trtllm-bls, version {version}\n"
    assert re.fullmatch(line, output)


def test_the_package_runs_as_a_module() -> None:
    """`python -m trtllm_bls` is the command line where the script is not on the path."""
    command = [sys.executable, "-m", "trtllm_bls", "help"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert shown.stdout.startswith("Usage: trtllm-bls [OPTIONS] COMMAND [ARGS]...")


def test_the_list_of_commands_imports_none_of_them() -> None:
    """`trtllm-bls --help` answers at once."""
    probe = (
        "import sys; from trtllm_bls.cli import main; main(['--help'], standalone_mode=False);"
        "assert not [name for name in sys.modules if name.startswith('trtllm_bls.operate')]"
    )
    subprocess.run([sys.executable, "-c", probe], capture_output=True, timeout=240, check=True)


def test_help_fits_a_terminal_of_80_columns() -> None:
    """No line of the list is cut or wrapped."""
    _, output = run("--help")
    assert max(len(line) for line in output.splitlines()) <= 80
    assert "..." not in output.partition("Try it:")[2]


def test_help_of_each_command_fits_a_terminal_of_80_columns() -> None:
    """Its examples can be copied, and no list of values is wider than the screen."""
    for name in COMMANDS:
        _, output = run("help", name)
        assert max(len(line) for line in output.splitlines()) <= 80, name


def test_help_of_a_command_is_that_of_its_option() -> None:
    """`trtllm-bls help serve` and `trtllm-bls serve --help` print the same."""
    for name in COMMANDS:
        assert run("help", name) == run(name, "--help")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["sevre"], "did you mean 'serve'?"),
        (["help", "sevre"], "did you mean 'serve'?"),
        (["xyzzy"], "see `trtllm-bls help`"),
        (["serve", "--port", "9000"], "--openai-port is OpenAI's API"),
        (["serve", "meta-llama/Llama-3.1-8B"], "--model meta-llama/Llama-3.1-8B"),
        (["generate", "hello", "world"], "put it in quotes: 'hello world'"),
        (["generate", "--url", "localhost", "hello"], "localhost:8001"),
        (["chat", "--url", "::1"], "[::1]:8001"),
        (["doctor", "--url", "gpu-host"], "gpu-host:8001"),
        (["health", "--url", "gpu-host"], "gpu-host:8001"),
        (["prove", "--url", "gpu-host"], "gpu-host:8001"),
    ],
)
def test_a_mistyped_command_gets_the_right_one(words: list[str], hint: str) -> None:
    """The line that refuses it says what to type."""
    code, output = run(*words)
    assert code == 2
    assert hint in output


@needs("pytriton")
def test_a_name_on_hugging_face_gets_the_command_that_downloads_it() -> None:
    """`serve` reads a directory; other servers download."""
    code, output = run("serve", "--model", "meta-llama/Llama-3.2-1B")
    assert code == 1
    assert "`hf download meta-llama/Llama-3.2-1B --local-dir ./Llama-3.2-1B`" in output
    assert "hf download" not in run("serve", "--model", "./models/llama")[1]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str) -> None:
    """The shell asks the program through the variable that the script sets."""
    code, script = run("completion", shell)
    assert code == 0
    assert "_TRTLLM_BLS_COMPLETE" in script


def test_bash_completes_the_commands() -> None:
    """The printed script, sourced by bash, offers the commands that begin so."""
    line = (
        "source <(trtllm-bls completion bash); COMP_WORDS=(trtllm-bls se); COMP_CWORD=1;"
        '_trtllm_bls_completion trtllm-bls; echo "${COMPREPLY[@]}"'
    )
    paths = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shown = subprocess.run(
        ["bash", "-c", line],
        env={**os.environ, "PATH": paths},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert shown.stdout.split() == ["serve"]


def test_a_malformed_override_shows_the_form() -> None:
    """Before anything is looked at."""
    code, output = run("serve", "--set", "model.parameter")
    assert code == 1
    assert "write it as MODEL.PARAMETER=VALUE" in output


@pytest.mark.parametrize("count", ["many", "-2", "1.5"])
def test_instances_are_a_number_or_auto(count: str) -> None:
    """Anything else names both."""
    code, output = run("serve", "--bls-instances", count)
    assert code == 2
    assert "Invalid value for '--bls-instances'" in output


def test_instances_are_read() -> None:
    """As a number, or as the word."""
    for word, value in (("3", 3), ("auto", "auto")):
        parsed = command("serve").make_context("serve", ["--bls-instances", word]).params
        assert parsed["bls_instances"] == value


def test_our_errors_are_one_line_without_a_traceback(tmp_path: Path) -> None:
    """What to do, on standard error, with exit code 1."""
    result = invoke("serve", "--server", str(tmp_path))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: --server {tmp_path}: no tritonserver there")
    assert result.stderr.count("\n") == 1


def test_a_file_that_is_not_there_is_refused() -> None:
    """Errors of the settings themselves read the same."""
    line = "error: --api-keys-file /none: no such file\n"
    assert run("serve", "--api-keys-file", "/none") == (1, line)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("serve", "--http-port", "65536"),
        ("serve", "--max-streams", "0"),
        ("serve", "--bls-instances", "0"),
        ("serve", "--exit-timeout", "-1"),
        ("openai", "--exit-timeout", "-1"),
        ("openai", "--max-body-bytes", "0"),
    ],
)
def test_impossible_numbers_name_their_option(name: str, option: str, value: str) -> None:
    """A number that no server could use."""
    code, output = run(name, option, value)
    assert (code, f"Invalid value for '{option}'" in output) == (2, True)


def test_an_answer_without_tokens_is_refused_before_the_demo_starts() -> None:
    """Loading the models takes seconds."""
    code, output = run("demo", "--max-tokens", "0")
    assert (code, "0 is not in the range x>=1" in output) == (2, True)


@pytest.mark.parametrize("command", ["serve", "demo", "openai"])
def test_help_of_a_command_imports_nothing_that_serves(command: str) -> None:
    """It is answered in a fifth of a second of CPU; what serves is imported when it serves."""
    heavy = ("transformers", "grpc", "tritonclient", "numpy", "rich.console", "uvicorn", "httpx")
    probe = (
        "import sys; from trtllm_bls.cli import main\n"
        f"main(['{command}', '--help'], 'trtllm-bls', standalone_mode=False)\n"
        f"print(*[name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=240, check=True
    )
    assert shown.stdout.startswith(f"Usage: trtllm-bls {command} ")
    assert shown.stderr == "\n"


def test_the_command_line_loads_nothing_heavy() -> None:
    """Help must be instant, and nothing but the engine's process may pay for torch."""
    heavy = "{'torch', 'transformers', 'grpc', 'tritonclient', 'numpy'}"
    probe = f"import sys, trtllm_bls.cli; print(sorted({heavy} & set(sys.modules)))"
    shown = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=120
    )
    assert shown.stdout == "[]\n"


def test_the_embedded_engine_without_torch_names_the_extra() -> None:
    """The server's extra does not bring it, and Triton alone would show forty lines of trace."""
    probe = "import sys; sys.modules['torch'] = None; import trtllm_bls.engines.embedded"
    told = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False, timeout=120
    )
    assert told.stderr.splitlines()[-1].endswith(
        "SetupError: the embedded engine needs torch: run `pip install 'trtllm-bls[embedded]'`"
    )


# --- what is shown --------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@contextmanager
def terminal(log: Path, verbose: bool = False) -> Iterator[tuple[Terminal, io.StringIO]]:
    """A terminal that also writes into ``log``, all of it when the block ends."""
    shown = io.StringIO()
    speaks = Terminal(Console(file=shown), verbose=verbose)
    with log.open("ab") as file, speaks.keeping(file.fileno()):
        yield speaks, shown


def test_progress_is_plain_where_there_is_no_terminal(log: Path) -> None:
    """A log file or CI gets one line per model."""
    with terminal(log) as (speaks, shown), speaks.progress():
        speaks.starting(("bls", "engine"))
        speaks.model_ready("engine", 1)
    assert shown.getvalue().startswith("loading 2 models: bls, engine\n  ready 1/2  engine  (")


def test_the_log_is_relayed_readably(log: Path) -> None:
    """Only what is noteworthy is shown; the log file gets every line as it was."""
    lines = ['W1121 01:56:47.1 61 x.cc:6] "[bold] careful"', 'I1121 01:56:47.1 61 x.cc:6] "fine"']
    with terminal(log) as (speaks, shown):
        for line in lines:
            speaks.log(parse(line))
    assert shown.getvalue() == "01:56:47 warning: [bold] careful\n"
    assert log.read_text().splitlines() == lines


def test_a_full_disk_does_not_stop_the_terminals_log(log: Path) -> None:
    """Said once, however many lines are lost; the file goes on when there is room again."""
    shown = io.StringIO()
    speaks = Terminal(Console(file=shown))
    with ExitStack() as stack:
        full = stack.enter_context(open("/dev/full", "wb"))
        roomy = stack.enter_context(log.open("wb"))
        stack.enter_context(speaks.keeping(full.fileno()))
        for line in ("one", "two"):
            speaks.log(parse(line))
        # The warning about the file is in the log, too.
        until(lambda: speaks.dropped_lines()["log_file"] == 3)
        os.dup2(roomy.fileno(), full.fileno())
        speaks.log(parse("three"))
    printed = shown.getvalue().splitlines()
    warnings = [line[8:] for line in printed if "log file" in line]
    assert warnings == [
        " warning: the log file cannot be written and misses lines: No space left on device"
    ]
    assert [line for line in printed if "log file" not in line] == ["one", "two", "three"]
    assert log.read_text() == "three\n"


def test_a_failure_shows_the_servers_last_words_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that were not shown as they came, and then the line that says what happened."""
    shown = io.StringIO()
    speaks = Terminal(Console(file=shown))
    speaks.log(parse("printed by a model"))
    failed = ServerFailed("it ended", ("two\nlines", "printed by a model", "[red]end"))
    with pytest.raises(ServerFailed) as caught, speaks.lines_of_failure():
        raise failed
    show_error(caught.value)
    assert shown.getvalue() == "printed by a model\n  | two\n  | lines\n  | [red]end\n"
    assert capsys.readouterr().err == "error: it ended\n"


def test_a_line_of_the_log_does_not_interrupt_answers(log: Path) -> None:
    """The demo's answers share the terminal with the log: only problems are shown by then."""
    with terminal(log) as (speaks, shown):
        speaks.problems_only = True
        speaks.log(parse('I1121 01:56:47.1 61 model.py:6] "chosen"'))
        speaks.log(parse('W1121 01:56:47.1 61 model.py:6] "careful"'))
    assert shown.getvalue() == "01:56:47 warning: careful\n"
    assert log.read_text().count("\n") == 2


def test_lines_of_our_own_have_a_time_and_are_in_the_log_file(log: Path) -> None:
    """Beside those of the server, in their form."""
    with terminal(log) as (speaks, shown):
        speaks.warning("/dev/shm has 64 MiB free")
        speaks.say("the server is dead; starting again in 1 s", "error")
    assert [line[8:] for line in shown.getvalue().splitlines()] == [
        " warning: /dev/shm has 64 MiB free",
        " the server is dead; starting again in 1 s",
    ]
    kept = [parse(line) for line in log.read_text().splitlines()]
    assert [line.severity for line in kept] == ["warning", "error"]
    assert [line.readable[:8] for line in kept] == [
        line[:8] for line in shown.getvalue().splitlines()
    ]


def test_no_handler_of_grpc_runs_when_a_command_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands load tokenizers, whose trial of the chat template forks."""
    monkeypatch.delenv("GRPC_ENABLE_FORK_SUPPORT", raising=False)
    assert CliRunner().invoke(main, ["version"]).exit_code == 0
    assert os.environ["GRPC_ENABLE_FORK_SUPPORT"] == "0"
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "1")
    assert CliRunner().invoke(main, ["version"]).exit_code == 0
    assert os.environ["GRPC_ENABLE_FORK_SUPPORT"] == "1"
