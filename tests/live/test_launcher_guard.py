"""The guard around a server: whoever dies first, nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.helpers.waiting import in_time, until
from trtllm_bls.operate import guard
from trtllm_bls.operate.preparation import Scratch
from trtllm_bls.operate.supervisor import describe_exit
from trtllm_bls.operate.tritonserver import GuardedProcess
from trtllm_bls.orchestrator.status import ProcessStatus, StatusDirectory


def guarded(
    tmp_path: Path, script: str, grace: float = 30, drain: float = 30
) -> subprocess.Popen[str]:
    """A guard around ``script``, which has said "up"."""
    process = waiting_guard(tmp_path, grace, drain)
    status = str(tmp_path / "work" / "status")
    order = {"command": ["sh", "-c", script], "environment": dict(os.environ), "status": status}
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()
    in_time([process.stdout], "the guard's first line")
    assert process.stdout.readline() == "up\n"
    return process


def waiting_guard(tmp_path: Path, grace: float = 30, drain: float = 30) -> subprocess.Popen[str]:
    """A guard that has not been told what to run yet, and files of its launcher."""
    (tmp_path / "work").mkdir()
    (tmp_path / "shm_1").touch()
    order = {
        "workdir": str(tmp_path / "work"),
        "shared_memory": str(tmp_path / "shm_"),
        "mark": f"MARK={tmp_path}",
        "drain": drain,
        "grace": grace,
    }
    return subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, json.dumps(order)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end_of(process: subprocess.Popen[str], said: str | None = None) -> tuple[int, str]:
    """Exit code and remaining output after writing ``said`` and closing the control pipe."""
    try:
        output, _ = process.communicate(said, timeout=20)
    finally:
        process.kill()
    return process.returncode, output


DRAINS = "trap 'echo drained; exit 0' TERM; echo up; while :; do sleep 0.01; done"
HANGS = "trap '' TERM; echo up; while :; do sleep 0.01; done"


def test_a_dead_launcher_stops_the_server(tmp_path: Path) -> None:
    """The control pipe's end, however it came about, is an orderly stop; no file remains."""
    assert end_of(guarded(tmp_path, DRAINS)) == (0, "drained\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("said", [None, "k", '{"command": ["sh", "-c", "exit'])
def test_a_launcher_that_dies_while_it_prepares_leaves_no_file(
    tmp_path: Path, said: str | None
) -> None:
    """Whatever it had begun to say; also if the guard is told to stop at the same moment."""
    process = waiting_guard(tmp_path)
    until(lambda: handles_sigterm(process.pid))
    process.send_signal(signal.SIGTERM)
    assert end_of(process, said) == (0, "")
    assert list(tmp_path.iterdir()) == []


def handles_sigterm(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (caught,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def test_requests_are_cut_a_second_before_the_server_breaks_connections(tmp_path: Path) -> None:
    """So that they end with an error that says why, rather than with a broken connection."""
    process = guarded(tmp_path, DRAINS, drain=5)
    files = StatusDirectory(tmp_path / "work" / "status")
    files.path.mkdir()
    files.forget_drain()
    now = time.monotonic()
    files.write(ProcessStatus(os.getpid(), now, now, 0, 1))  # has not handed over
    before = time.monotonic()
    process.send_signal(signal.SIGTERM)
    deadline = until(files.drain_deadline)
    assert before + 4 <= deadline <= time.monotonic() + 4
    end_of(process)
    assert time.monotonic() - before >= 2.5  # half of the time to drain, for the hand-over


def test_a_server_whose_requests_are_handed_over_is_told_to_stop_at_once(tmp_path: Path) -> None:
    """Half of the time to drain is only for those that still speculate."""
    process = guarded(tmp_path, DRAINS, drain=1_000_000)
    assert end_of(process)[0] == 0


def test_processes_of_a_dead_launcher_end_with_the_server(tmp_path: Path) -> None:
    """Those that it marked, however they were started; those that hang are killed after a while."""
    environment = {**os.environ, "MARK": str(tmp_path)}
    script = "trap '' TERM; echo up; while :; do sleep 0.01; done"
    pipe = subprocess.PIPE
    with subprocess.Popen(["sh", "-c", script], env=environment, stdout=pipe) as other:
        try:
            assert other.stdout
            in_time([other.stdout], "the other's first line")
            assert other.stdout.readline() == b"up\n"
            process = guarded(tmp_path, DRAINS, drain=0.5)
            begun = time.monotonic()
            assert end_of(process) == (0, "drained\n")
            assert time.monotonic() - begun >= 0.5
            assert other.poll() == -signal.SIGKILL
        finally:
            other.kill()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_guard_takes_the_server_along(tmp_path: Path) -> None:
    """The guard cannot end it any more, so the kernel does."""
    process = guarded(tmp_path, HANGS)
    (server,) = psutil.Process(process.pid).children()
    process.kill()
    assert end_of(process)[0] == -signal.SIGKILL
    try:
        server.wait(20)
    finally:
        with suppress(psutil.NoSuchProcess):
            server.kill()


def test_a_signal_to_the_guard_is_passed_on(tmp_path: Path) -> None:
    """Service managers signal every process of a service; the guard must not leave early."""
    process = guarded(tmp_path, DRAINS)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert end_of(process) == (0, "drained\n")


def test_a_server_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    """After the grace period, or at once when told to."""
    assert end_of(guarded(tmp_path, HANGS, grace=0.05))[0] == 128 + signal.SIGKILL


def test_a_kill_does_not_wait(tmp_path: Path) -> None:
    """The second signal of a user. A launcher that lives removes its own files."""
    process = guarded(tmp_path, HANGS)
    assert process.stdin
    process.stdin.write("k")
    process.stdin.flush()
    assert process.wait(20) == 128 + signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["work"]
    end_of(process)


def test_what_the_server_leaves_behind_is_killed(tmp_path: Path) -> None:
    """A stub that hangs does not notice the death of its server, whatever its session."""
    script = "setsid sleep 1000 >/dev/null & echo $! > pid; echo up; wait"
    process = guarded(tmp_path, f"cd {tmp_path}; {script}")
    orphan = psutil.Process(int((tmp_path / "pid").read_text()))
    psutil.Process(process.pid).children()[0].kill()
    assert process.wait(20) == 128 + signal.SIGKILL
    assert not orphan.is_running()
    end_of(process)


def test_a_launcher_that_reads_nothing_holds_up_no_server_that_logs(tmp_path: Path) -> None:
    """It may be stopped (SIGSTOP). It reads all of it later; this test has buffered a part."""
    script = "echo up; head -c 3000000 /dev/zero | tr '\\0' 'x' | fold -w 99; touch done; sleep 60"
    process = guarded(tmp_path, f"cd {tmp_path}; {script}")
    until((tmp_path / "done").exists)
    code, output = end_of(process, "k")
    assert code == 128 + signal.SIGKILL
    assert output.count("x") > 2_900_000 and "dropped" not in output


def test_a_temporary_directory_of_another_server_stays(tmp_path: Path) -> None:
    """Triton's Python backend names them all alike, and a server whose directory has gone aborts at
    its end."""
    process = guarded(tmp_path, DRAINS)
    other = Path(tempfile.mkdtemp(prefix="python_env_", dir="/tmp"))
    try:
        assert end_of(process) == (0, "drained\n")
        assert other.is_dir()
    finally:
        other.rmdir()


def test_the_name_of_another_process_may_be_anything(tmp_path: Path) -> None:
    """Linux cuts names after 15 bytes, in the middle of a character where that is."""
    named = os.fsencode(tmp_path) + b"/" + "Prozessgröße".encode()[:10]
    os.symlink("/bin/sh", named)
    (tmp_path / "served").mkdir()
    with subprocess.Popen([named, "-c", "read line"], stdin=subprocess.PIPE) as other:
        with pytest.raises(UnicodeDecodeError):
            Path(f"/proc/{other.pid}/stat").read_text(encoding="utf-8")
        assert end_of(guarded(tmp_path / "served", DRAINS)) == (0, "drained\n")
    assert list((tmp_path / "served").iterdir()) == []


def test_the_servers_own_end_is_the_guards(tmp_path: Path) -> None:
    """Exit codes pass through, and nobody has to ask. What else the launcher has started may still
    use the directory, which is left to it."""
    process = guarded(tmp_path, "echo up; exit 7")
    assert process.wait(20) == 7
    assert list(tmp_path.iterdir()) == [tmp_path / "work"]
    end_of(process)


# --- the guarded process --------------------------------------------------------------------


def test_every_line_is_handed_on_before_the_end_is_told() -> None:
    """The reason of a death is in the last line, also if it is not text or has no newline."""
    lines: list[str] = []
    process = GuardedProcess(scratch := Scratch(), 1, lines.append)
    scratch.make()
    process.run(["sh", "-c", r"seq 5000; printf 'b\377d' >&2; exit 3"], os.environ)
    assert process.wait(20) == 3
    assert lines == [*map(str, range(1, 5001)), "b\N{REPLACEMENT CHARACTER}d"]
    process.stop()  # too late, harmless
    process.close()
    assert not scratch.workdir.exists()


def test_the_working_directory_has_a_plain_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton is told of it through a shell, so a TMPDIR with a blank is not used."""
    for name, used in (("plain", True), ("with blank", False)):
        directory = tmp_path / name
        directory.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(directory))
        scratch = Scratch()
        scratch.make()
        assert (scratch.workdir.parent == directory) is used
        assert " " not in str(scratch.workdir)
        scratch.remove()


def test_a_listener_that_fails_does_not_block_the_server() -> None:
    """The terminal may be gone or the log's disk full; the server must be able to go on."""

    def broken(line: str) -> None:
        raise BrokenPipeError

    process = GuardedProcess(Scratch(), 1, broken)
    process.run(["sh", "-c", "echo one; head -c 200000 /dev/zero"], os.environ)
    assert process.wait(20) == 0
    process.close()


@pytest.mark.parametrize(
    ("code", "words"),
    [(1, "exit code 1"), (255, "exit code 255"), (139, "SIGSEGV"), (-9, "SIGKILL, perhaps out")],
)
def test_an_exit_code_is_put_in_words(code: int, words: str) -> None:
    """Signals by name; a kill that nobody asked for is usually the kernel's."""
    assert describe_exit(code).startswith(words)
