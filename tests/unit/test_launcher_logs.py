"""The server's log: what a user sees of it and what the launcher learns from it."""

from __future__ import annotations

import pytest

from trtllm_bls.operate.logs import LogBook, LogLine, parse

LOADED = """I1121 01:56:47.026953 6110 model_lifecycle.cc:839] "successfully loaded 'echo'\""""
FAILED = (
    "E1121 01:56:47.194219 6110 model_lifecycle.cc:642] \"failed to load 'bls' version 1: "
    "Internal: SettingsError: model bls: parameter tokenizer_dir = '/x': no such directory"
    "\\n\\nAt:\\n  /repo/bls/1/model.py(9): initialize\\n  "
    '<frozen importlib._bootstrap>(241): load\\n"'
)
DIED = (
    "E1121 02:21:27.642515 2 model_lifecycle.cc:642] \"failed to load 'bls' version 1: Internal: "
    "Stub process 'bls_0_0' is not healthy.\""
)
NO_FILE = (
    "I1121 02:21:14.581121 24390 pb_stub.cc:2105]  Failed to preinitialize Python stub: "
    "Python model file not found in '/repo/bls/1/model.py'"
)
NO_CONFIG = (
    'E1121 02:15:37.888204 1 model_repository_manager.cc:1460] "Poll failed for model directory '
    "'bls': failed to read text proto from /repo/bls/config.pbtxt\""
)
NO_VERSION = (
    "E1121 02:15:37.889160 1 model_repository_manager.cc:724] \"failed to load model 'bls': at "
    'least one version must be available"'
)
NO_GPU = (
    'W1121 01:56:45.166631 6110 pinned_memory_manager.cc:273] "Unable to allocate pinned system '
    'memory: CUDA driver version is insufficient for CUDA runtime version"'
)


def book(*lines: str) -> LogBook:
    written = LogBook()
    for line in lines:
        written.add(line)
    return written


def test_a_line_is_made_readable() -> None:
    """Quotes, escapes, dates and file names go; time, severity and real line breaks stay."""
    assert (
        parse('E1121 01:56:47.1 61 x.cc:6] "two\\nlines"').readable == "01:56:47 error: two\nlines"
    )
    assert parse('I1121 01:56:47.1 61 model.py:6] "hi"').readable == "01:56:47 hi"
    assert parse("printed by a model").readable == "printed by a model"


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("printed by a model", True),
        ('I1121 01:56:47.0 61 model.py:6] "logged by a model"', True),
        ('W1121 01:56:47.0 61 x.cc:6] "careful"', True),
        ("E1121 02:10:05.714977373    8848 chttp2_server.cc:1060]   not quoted", True),
        (LOADED, False),
        (FAILED, False),
        ('E1121 01:56:47.0 6 x.cc:6] "ERROR: Failed to create instance: SetupError: x"', False),
        (NO_GPU, False),
        ("Error: Failed to initialize NVML", False),
        ("| model | READY |", False),
        ("+-------+-------+", False),
        ("", False),
        ("At:", False),
        ("  <frozen importlib._bootstrap>(241): _call_with_frames_removed", False),
        ("Signal (11) received.", False),
        (" 0# 0x000055C3B53D1D4D in tritonserver", False),
        ("12# triton::core::Model::~Model() in /opt/tritonserver/lib/libtritonserver.so", False),
        ("1# of 3 parts is done", True),
    ],
)
def test_only_noteworthy_lines_are_shown(raw: str, shown: bool) -> None:
    """Words of models, warnings and errors, but not what every machine without a GPU says."""
    assert parse(raw).noteworthy is shown


def test_loaded_models_are_noticed() -> None:
    """Progress comes from the log, since the server does not listen before all is loaded."""
    assert book(LOADED, NO_GPU).loaded == ["echo"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (FAILED, "model bls: parameter tokenizer_dir = '/x': no such directory"),
        (DIED, "its Python process died while loading"),
        (
            NO_FILE,
            "Python model file not found in '/repo/bls/1/model.py'; copy the program there, or "
            "correct default_model_filename",
        ),
        (
            NO_CONFIG,
            "failed to read text proto from /repo/bls/config.pbtxt; mend its form, which is that "
            "of Protobuf's texts",
        ),
        (
            NO_VERSION,
            "at least one version must be available; make a directory named 1, or mend "
            "version_policy",
        ),
    ],
)
def test_a_failed_model_is_one_line(line: str, reason: str) -> None:
    """However the server puts it, the summary names the model and the reason, no status word, and
    the mend of what is in the table of mends."""
    assert book(LOADED, line).failure_summary() == f"model bls did not load: {reason}"


def test_a_fault_of_a_file_has_its_place() -> None:
    """Protobuf's parser prints it in a line of its own, before the server names the file."""
    place = (
        "[libprotobuf ERROR /tmp/build/text_format.cc:337] Error parsing text-format "
        'inference.ModelConfig: 7:14: Message type "inference.ModelConfig" has no field named "x".'
    )
    other = NO_CONFIG.replace("'bls'", "'other'").replace("/bls/", "/other/")
    assert not parse(place).noteworthy
    reasons = book(place, NO_CONFIG, place.replace("7:14", "8:1"), other).reasons()
    assert reasons["bls"].endswith('config.pbtxt: 7:14: Message type "inference.ModelConfig" has '
        'no field named "x"')  # fmt: skip
    assert "other/config.pbtxt: 8:1: " in reasons["other"]


@pytest.mark.parametrize(
    "reason",
    [
        "ensemble own allows maximum batch size 16, but it contains model good",
        "in ensemble own, ensemble tensor A: inconsistent shape: [-1,4] is inferred",
        "ensemble 'own' depends on 'good' whose required version 7 is not loaded",
        "ensemble own contains models that are not available or ambiguous: nope",
        "circular dependency between ensembles: own -> ... -> own -> own",
    ],
)
def test_an_ensemble_that_is_refused_is_a_failed_model(reason: str) -> None:
    """The server names it in the sentence alone."""
    line = 'E1128 02:05:39.7 2 model_repository_manager.cc:703] "Invalid argument: ' + reason + '"'
    assert book(line).reasons() == {"own": reason}
    assert not parse(line).noteworthy


def test_what_the_server_repeats_is_said_once() -> None:
    """It says the fault of a warm-up for each sample."""
    words = "failed to load 'bls' version 1: Internal: too large; too large; "
    line = f'E1128 02:05:39.7 2 model_lifecycle.cc:642] "{words}"'
    assert book(line).reasons() == {"bls": "too large"}


def test_the_details_of_a_failure_are_what_was_printed_and_where() -> None:
    """Frames of the interpreter's import machinery tell a user nothing."""
    unforeseen = FAILED.replace("SettingsError", "KeyError")
    details = book("loading tokenizer", NO_GPU, unforeseen).failure_details()
    assert details == ("loading tokenizer", "bls: /repo/bls/1/model.py(9): initialize")


def test_an_error_of_ours_needs_no_details() -> None:
    """Its line names the place and the mend."""
    assert book("loading tokenizer", FAILED).failure_details() == ()


def test_models_that_fail_alike_are_one_reason() -> None:
    """Three models read one tokenizer."""
    told = book(FAILED, FAILED.replace("load 'bls'", "load 'pre'")).failure_summary()
    assert told.startswith("models bls, pre did not load: model bls: parameter")
    assert told.count("did not load") == 1


def test_the_first_reason_counts() -> None:
    """The server repeats failures in other words."""
    assert "died" in book(DIED, FAILED).failure_summary()


def test_a_port_taken_meanwhile_is_noticed() -> None:
    """Then, and only then, starting again with other ports may help."""
    line = (
        'E1121 02:10:08.341953 8960 main.cc:257] "failed to start HTTP service: Unavailable - '
        "Socket '127.0.0.1:18000' already in use \""
    )
    assert book(line).port_taken == "HTTP"
    assert book(FAILED).port_taken is None


def test_lines_that_come_while_the_last_ones_are_read_do_no_harm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread reads the log."""
    made = book("one", "two")
    noteworthy = LogLine.noteworthy.fget  # type: ignore[attr-defined]

    def meanwhile(line: LogLine) -> bool:
        made.add("three")
        return bool(noteworthy(line))

    monkeypatch.setattr(LogLine, "noteworthy", property(meanwhile))
    assert made.tail() == ("one", "two")


def test_the_tail_prefers_what_matters() -> None:
    """The last noteworthy lines; if there are none, whatever came last."""
    assert book("one", "two", LOADED).tail(1) == ("two",)
    assert book(LOADED).tail() == ("01:56:47 successfully loaded 'echo'",)


def test_a_stopping_server_tells_which_models_are_unloaded() -> None:
    """As its log does, model by model."""
    line = "I1122 03:01:05.9 8 model_lifecycle.cc:624] \"successfully unloaded 'echo' version 1\""
    assert (book(LOADED).unloaded, book(LOADED, line).unloaded) == (set(), {"echo"})


def test_a_stopping_server_tells_when_requests_have_ended() -> None:
    """What it says of models afterwards is no longer about requests."""
    line = (
        'I1121 14:53:17.1 3508 server.cc:321] "Timeout 8: Found {} model versions that have '
        'in-flight inferences"'
    )
    assert not book(LOADED).drained
    assert not book(line.format(1)).drained
    assert book(line.format(1), line.format(0), LOADED).drained
