"""The launcher looks at the machine: what it finds, and the one line it says when it does not."""

from __future__ import annotations

import os
import resource
import socket
import sys
from pathlib import Path

import pytest

from trtllm_bls.errors import SettingsError, SetupError
from trtllm_bls.operate import checks
from trtllm_bls.operate.checks import Installation, find_server
from trtllm_bls.operate.ports import choose, reachable
from trtllm_bls.settings.command_options import (
    AMPLE_OPEN_FILES,
    Override,
    ServeSettings,
    usable_cores,
)


def installation(root: Path, version: str | None = None) -> Installation:
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "tritonserver").touch()
    (root / "backends" / "python").mkdir(parents=True)
    if version:
        (root / "TRITON_VERSION").write_text(version)
    return Installation(root)


# --- finding --------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [".", "bin/tritonserver"])
def test_a_named_server_wins(tmp_path: Path, named: str) -> None:
    """--server takes the installation or its binary, and nothing else is looked at."""
    mine = installation(tmp_path / "mine")
    container = installation(tmp_path / "container")
    assert find_server(tmp_path / "mine" / named, container.root) == mine


def test_the_container_comes_before_the_wheel(tmp_path: Path) -> None:
    """Without --server the container's own tritonserver is taken."""
    container = installation(tmp_path)
    assert find_server(None, tmp_path) == container


def test_a_wrong_server_option_does_not_fall_back(tmp_path: Path) -> None:
    """A named server that is not there is an error, not a search."""
    with pytest.raises(SetupError, match=r"--server .*nowhere: no tritonserver there; name its"):
        find_server(tmp_path / "nowhere", installation(tmp_path / "container").root)


def test_the_stub_is_of_this_python(tmp_path: Path) -> None:
    """The wheel keeps one stub per Python version; a container has a single one."""
    server = installation(tmp_path)
    assert server.stub("3.12") == tmp_path / "backends/python/triton_python_backend_stub"
    (tmp_path / "python_backend_stubs").mkdir()
    wanted = tmp_path / "python_backend_stubs/3.12/triton_python_backend_stub"
    assert server.stub("3.12") == wanted


# --- the interpreter ------------------------------------------------------------------------


def test_a_missing_libpython_names_the_mend(tmp_path: Path) -> None:
    """An interpreter that was built static cannot be embedded."""
    with pytest.raises(SetupError, match=f"apt install libpython{checks.PYTHON}") as caught:
        checks.libpython([tmp_path])
    assert "--enable-shared" in str(caught.value) and sys.executable in str(caught.value)


def test_the_first_directory_with_a_libpython_wins(tmp_path: Path) -> None:
    """The configured library directory comes before the prefix."""
    for name in ("b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / checks.LIBPYTHON).touch()
    found = checks.libpython([tmp_path / "a", tmp_path / "b", tmp_path / "c"])
    assert found == tmp_path / "b" / checks.LIBPYTHON


# --- checks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numpy", "server_version", "fine"),
    [
        ("1.26.4", None, True),
        ("2.1.0", None, False),  # the wheel does not tell its version; it is 2.51
        ("2.1.0", "2.51.0", False),
        ("2.1.0", "2.53.0", True),
        ("2.1.0", "2.60.0-dev", True),
    ],
)
def test_numpy_2_is_refused_for_old_stubs(
    tmp_path: Path, numpy: str, server_version: str | None, fine: bool
) -> None:
    """numpy 2 kills the stubs of servers before 2.53 at their first string input."""
    server = installation(tmp_path, server_version)
    if fine:
        checks.check_numpy(server, numpy)
        return
    with pytest.raises(SetupError, match=r"numpy 2\.1\.0 .*pip install 'numpy<2'"):
        checks.check_numpy(server, numpy)


def test_without_numpy_models_cannot_start(tmp_path: Path) -> None:
    """The embedded Python sees the environment alone, neither PYTHONPATH nor user packages."""
    assert checks.embedded_numpy() is not None
    with pytest.raises(SetupError, match=r"has no numpy, .* into a virtual environment"):
        checks.check_numpy(installation(tmp_path), None)


def test_an_environment_beyond_ascii_is_named() -> None:
    """Models in it would die while loading, without a word that helps; blanks do no harm."""
    checks.check_environment(sys.prefix, Path("/home/a user/venv"))
    with pytest.raises(SetupError, match=r"^/home/jürgen/venv: .* plain ASCII$"):
        checks.check_environment(sys.prefix, Path("/home/jürgen/venv"))


def test_too_little_shared_memory_says_how_to_get_more(tmp_path: Path) -> None:
    """The line names the place, what is needed and the container's option."""
    with pytest.raises(SetupError, match=r"MiB free, at least .* --shm-size=1g"):
        checks.check_shared_memory(tmp_path, minimum=2**60)
    with pytest.raises(SetupError, match="has 0 MiB free"):
        checks.check_shared_memory(tmp_path / "nowhere")


def test_little_shared_memory_is_a_warning(tmp_path: Path) -> None:
    """A container's default starts a server, and is filled by the first large answers."""
    assert checks.check_shared_memory(tmp_path, minimum=1, ample=1) is None
    warning = checks.check_shared_memory(tmp_path, minimum=1, ample=2**60)
    assert warning is not None
    assert "MiB free: requests with logits" in warning
    assert "--shm-size=1g" in warning


def test_each_stream_needs_two_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hard limit that allows fewer is refused with the number; a soft one is raised to it."""
    limits: list[tuple[int, int]] = [(100, 256 + 2 * 1000)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.append(both))
    checks.check_open_files(1000)
    assert limits[-1] == (2256, 2256)
    with pytest.raises(SetupError, match=r"2258 are needed: .*nofile=2258.*1001"):
        checks.check_open_files(1001)
    limits.append((100, resource.RLIM_INFINITY))
    checks.check_open_files(10**6)
    assert limits[-1] == (AMPLE_OPEN_FILES, resource.RLIM_INFINITY)


def test_only_linux_has_a_server() -> None:
    """Other systems are told to use a container."""
    checks.check_platform("Linux")
    with pytest.raises(SetupError, match="this is Darwin: use a Linux machine or a container"):
        checks.check_platform("Darwin")


def test_a_missing_library_is_named() -> None:
    """What the loader does not find is named before anything starts."""
    checks.check_libraries(Path("stub"), {"libc.so.6": "/lib/libc.so.6"})
    with pytest.raises(SetupError, match=r"stub cannot start, .* missing: libcudart\.so\.12;"):
        checks.check_libraries(Path("stub"), {"libcudart.so.12": "not found"})


def test_a_stub_of_another_python_names_the_python_to_use() -> None:
    """A container's models run on its own Python, so we have to run on the same."""
    with pytest.raises(SetupError, match=r"start trtllm-bls with python3\.8"):
        checks.check_libraries(Path("stub"), {"libpython3.8.so.1.0": "not found"})


def test_the_loader_is_asked_without_running_the_program() -> None:
    """The program's libraries are listed with their places."""
    libraries = checks.loaded_libraries(Path("/bin/sh"), {})
    assert any(name.startswith("libc.") and "/" in place for name, place in libraries.items())


def test_a_server_without_our_stub_lists_those_it_has(tmp_path: Path) -> None:
    """The wheel's versions are listed in order."""
    server = installation(tmp_path)
    for version in ("3.11", "3.8", "3.10"):
        (tmp_path / "python_backend_stubs" / version).mkdir(parents=True)
    with pytest.raises(SetupError, match=r"its container: 3\.8 or 3\.10 or 3\.11"):
        checks.check_server(server, {})


# --- ports ----------------------------------------------------------------------------------


def test_free_ports_are_all_different() -> None:
    """Every 0 becomes a port of its own."""
    ports = choose(ServeSettings(http_port=0, grpc_port=0, metrics_port=0))
    assert len({ports.http, ports.grpc, ports.metrics, 0}) == 4


def test_a_busy_port_names_the_option() -> None:
    """Nothing is started; the line names the port and how to choose another."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=rf"port {port} on 127\.0\.0\.1: .*--grpc-port"):
            choose(ServeSettings(http_port=0, grpc_port=port, metrics_port=0))


def test_one_port_cannot_serve_twice() -> None:
    """The same number for two services is as good as busy."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    with pytest.raises(SetupError, match=rf"--grpc-port {port}: --http-port has it"):
        choose(ServeSettings(http_port=port, grpc_port=port, metrics_port=0))


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("::", "[::1]"),
        ("fe80::1", "[fe80::1]"),
    ],
)
def test_an_address_for_listening_becomes_one_for_connecting(host: str, reached: str) -> None:
    """Everywhere is not an address one can connect to."""
    assert reachable(host) == reached


# --- settings -------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "server.example"])
def test_other_machines_need_an_explicit_word(host: str) -> None:
    """The server asks for no password, so nobody opens it to a network by mistake."""
    with pytest.raises(SettingsError, match=rf"^--host {host}: .* add --expose"):
        ServeSettings(host=host)
    assert ServeSettings(host=host, expose=True).host == host


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_this_machine_needs_no_word(host: str) -> None:
    """Loopback addresses in all their spellings."""
    assert ServeSettings(host=host).host == host


@pytest.mark.parametrize("value", ["", "2", "a=b", "../x y", "two\nlines"])
def test_an_override_is_read_up_to_its_first_equals_sign(value: str) -> None:
    """The value may hold anything, also nothing."""
    assert Override.parse(f"bls.stop_words={value}") == Override("bls", "stop_words", value)


@pytest.mark.parametrize("text", ["", "bls", "bls.x", "bls=1", ".x=1", "bls.=1"])
def test_an_incomplete_override_shows_the_form(text: str) -> None:
    """Every other form is refused."""
    with pytest.raises(SettingsError, match=r"write it as MODEL\.PARAMETER=VALUE"):
        Override.parse(text)


@pytest.mark.parametrize(
    ("told", "cores"),
    [
        *(("max 100000\n", 16), ("400000 100000\n", 4), ("150000 100000\n", 2)),
        *(("1 100000\n", 1), ("9900000 100000\n", 16), ("no such form", 16)),
    ],
)
def test_a_quota_of_cpu_time_counts_as_cores(
    told: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the container, whose processes see all cores of the machine; whole ones, at least one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert usable_cores(tmp_path / "none") == 16
    (tmp_path / "cpu.max").write_text(told)
    assert usable_cores(tmp_path / "cpu.max") == cores
