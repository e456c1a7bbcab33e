"""The server that ``tests/live`` and ``tests/conformance`` share, started once per session.

The package is imported only where the server is started: the conformance suite also runs where
there is nothing but a client.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import gc
import importlib
import inspect
import logging
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers import children, directories

with suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "ours",
        # How fast cases are made says how busy the machine is, and nothing about the code.
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        # `make test` has the same cases each time; `make test-all` looks for new ones.
        derandomize="TRTLLM_BLS_FULL" not in os.environ,
    )
    settings.load_profile("ours")

if TYPE_CHECKING:
    from trtllm_bls.operate.tritonserver import TritonServer

# A coroutine that waits longer fails where it waits. pytest-timeout, which ends a test so many
# seconds later, shows the event loop alone.
ASYNC_TEST_S = 240
_LATER_S = 60
_MAX_ID = 60  # characters of a parameter in a test's name
_TIME_OF_LONG_ONES = 0.5  # the part of a run that servers and browsers of several tests take
# Every process that a test starts inherits it, whatever becomes of the processes between them.
MARK = f"TRTLLM_BLS_TEST_RUN={uuid.uuid4()}"

# Tests talk to this machine alone, but for those that install programs. Each HTTP client reads the
# authorities that it trusts when it is made; the usual bundle has 140 and takes 19 ms of CPU.
AUTHORITY = Path(__file__).parent / "helpers" / "authority.pem"
DEFAULT_PORTS = (8000, 8001, 8002, 8003, 9000)  # of `serve` and `openai`

LIVE = frozenset(Path(__file__).parent / name for name in ("live", "conformance", "reliability"))
# Files without a live server whose tests each start a program of their own, and wait for it more
# than they compute. Their tests are handed out one by one, beside other files.
LONE = frozenset(
    Path(__file__).parent / name
    for name in (
        "unit/test_launcher_server.py",
        "unit/test_http_process.py",
        "client/test_probe.py",
    )
)
# Fixtures of the session, or of a folder, that start a server: tests that share one run in the same
# worker.
SHARED_SERVERS = ("server", "echo", "parts", "deployment", "pipelines")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse what would spread the tests of one server silently."""
    if config.getoption("dist", "no") == "loadgroup" and pytest.version_tuple >= (9, 2):
        raise pytest.UsageError("pytest-xdist 3.8 needs pytest<9.2 for --dist loadgroup")
    config.pluginmanager.register(ChildrenOfFixtures())
    if _computes(config):
        gc.disable()  # up to the first test: what is imported and collected stays
        with suppress(ImportError):
            # Before any tokenizer, which would hide it from transformers for good.
            import torch  # noqa: F401
        _let_loggers_propagate()
    with suppress(ImportError):
        _compare_each_table_once()
        _try_each_template_once()
    if not any(name.startswith("TRTLLM_BLS_INSTALL_") for name in os.environ):
        os.environ["SSL_CERT_FILE"] = str(AUTHORITY)
    sys.addaudithook(_refuse_default_ports)
    # Before any channel: tests load tokenizers, which fork, beside servers and clients.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    name, _, value = MARK.partition("=")
    os.environ[name] = value


def _let_loggers_propagate() -> None:
    """Let torch's forty loggers hand their records on to the root logger's handlers.

    To a logger that does not, pytest adds handlers of its own, and takes them away again, six times
    for each test.
    """
    for logger in logging.Logger.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


def _compare_each_table_once() -> None:
    """Let tokenizers of one table share their fast encoder, for the life of this process.

    Tests load the same few tables hundreds of times. Most of a load makes the fast encoder and
    compares it with the library's.
    """
    from trtllm_bls.text.tokenizer import FastEncoder, Tokenizer

    make = Tokenizer._fast_encoder
    encoders: dict[str, FastEncoder] = {}

    def shared(tokenizer: Tokenizer) -> FastEncoder | None:
        if tokenizer._backend is None or sys.modules.get("fastokens") is None:
            return make(tokenizer)
        table = tokenizer._backend.to_str()
        if table not in encoders:
            encoder = make(tokenizer)
            if encoder is None:
                return None
            encoders[table] = encoder
        return encoders[table]

    Tokenizer._fast_encoder = shared  # type: ignore[method-assign]


def _try_each_template_once() -> None:
    """Let a chat template that was tried out be loaded again without a trial in this process.

    A trial forks, which is dear in a process as large as one of tests. Templates with a problem
    are tried out each time.
    """
    from trtllm_bls.text import tokenizer

    problem_of = tokenizer.problem_of
    sound: set[str] = set()

    def once(render: Callable[[], object]) -> str | None:
        template = str(render.__self__.hf.chat_template)  # type: ignore[attr-defined]
        if template in sound:
            return None
        problem = problem_of(render)
        if problem is None:
            sound.add(template)
        return problem

    tokenizer.problem_of = once


def _refuse_default_ports(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: other programs of the machine use these ports, and other tests."""
    if event == "socket.bind":
        address = arguments[1]
        if isinstance(address, tuple) and address[1] in DEFAULT_PORTS:
            raise RuntimeError(f"a test binds port {address[1]}; `ports.ANY_PORTS` are others")


def _computes(config: pytest.Config) -> bool:
    """Return whether tests of this process may run a model in it; torch takes seconds to import."""
    hands_out = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    folders = {Path(argument.partition("::")[0]).resolve() for argument in config.args}
    return not hands_out and not all(folder in LIVE for folder in folders)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark what needs a server ``live``, and put all tests in the order in which they start."""
    for item in items:
        if inspect.iscoroutinefunction(getattr(item, "obj", None)):
            own = item.get_closest_marker("timeout")
            seconds = own.args[0] - _LATER_S if own else ASYNC_TEST_S
            item.obj = _with_a_limit(item.obj, seconds)  # type: ignore[attr-defined]
        if isinstance(item, pytest.Function) and _is_live(item):
            item.add_marker(pytest.mark.live)
            if group := _shared_server(item):
                item.add_marker(pytest.mark.xdist_group(group))
    yield
    items[:] = _in_turn(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a whole file to one process for ``--dist loadgroup``, as files share servers and
    tokenizers. Live tests share a server by group, and those with one of their own run one by one.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class Scheduling(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = nodeid.partition("::")[0]
            path = config.rootpath / name
            is_split = path in LONE or not LIVE.isdisjoint(path.parents)
            return super()._split_scope(nodeid) if is_split else name

    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    """Take what is there before the first test out of all later garbage collections.

    Modules and thousands of tests are a million objects that stay. At its end Python would look
    through all objects several times.
    """
    gc.freeze()
    gc.enable()
    atexit.register(gc.freeze)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Shorten the ids of long texts, which nobody could give to ``-k``."""
    if isinstance(val, (str, bytes)) and len(val) > _MAX_ID:
        return ascii(val[:_MAX_ID]) + "..."
    return None


def _in_turn(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests in the order in which they start.

    Those that share a server last longest as a group, so they come first, then the files that
    drive a browser. A test with a server of its own mostly waits: these are spread among all that
    compute, so that neither a core nor a process is idle.
    """
    groups: dict[str, list[pytest.Item]] = {}
    browser: dict[str, list[pytest.Item]] = {}
    alone, rest = [], []
    for item in items:
        if group := item.get_closest_marker("xdist_group"):
            groups.setdefault(str(group.args[0]), []).append(item)
        elif _is_live(item) or item.path in LONE:
            alone.append(item)
        elif "browser" in getattr(item, "fixturenames", ()):
            browser.setdefault(item.path.stem, []).append(item)
        else:
            rest.append(item)
    # The place of a test is the part of the run's time after which it starts, roughly.
    places: list[tuple[float, list[pytest.Item]]] = []
    long_ones = [*groups.values(), *browser.values()]
    for index, tests in enumerate(long_ones):
        places.append((_TIME_OF_LONG_ONES * index / len(long_ones), tests))
    for index, test in enumerate(rest):
        place = _TIME_OF_LONG_ONES + (1 - _TIME_OF_LONG_ONES) * index / len(rest)
        places.append((place, [test]))
    # Those of one file wait in the same way, so every fifth is the next one.
    alone = [test for first in range(5) for test in alone[first::5]]
    for index, test in enumerate(alone):
        # None is among the last, so that no process waits for it at the end.
        places.append((0.85 * index / len(alone), [test]))
    places.sort(key=lambda each: each[0])
    return [test for _, tests in places for test in tests]


def _is_live(item: pytest.Item) -> bool:
    return not LIVE.isdisjoint(item.path.parents)


def _shared_server(item: pytest.Function) -> str:
    """The name of the server that this test shares with others, or nothing if it shares none."""
    found = {name: made[-1] for name, made in item._fixtureinfo.name2fixturedefs.items()}
    parameters = getattr(item, "callspec", None)
    which = (parameters.params if parameters else {}).get
    for name in SHARED_SERVERS:
        if name in found and found[name].scope in ("session", "package"):
            kind = which("transport") or which("engine_kind") or ""
            return "server" if kind == "embedded" else f"{name} {kind}".strip()
    own = any(made.scope == "module" for made in found.values())
    return item.path.stem if own else ""


def _with_a_limit(test: Any, seconds: float) -> Any:
    @functools.wraps(test)
    async def limited(**fixtures: Any) -> None:
        await asyncio.wait_for(test(**fixtures), seconds)

    return limited


# --- servers that end, and children that stay ------------------------------------------------

_CHILDREN_BEFORE = pytest.StashKey[set[int]]()


def _check_servers(item: pytest.Item, failed: bool = False) -> None:
    if watched := _servers():
        watched.check(item.nodeid, _fixtures(item), failed)


def _servers() -> Any:
    """Return the module that watches servers once a server may have been opened. It needs the
    package, which the conformance suite does without."""
    if "trtllm_bls.operate.tritonserver" not in sys.modules:
        return None
    return importlib.import_module("tests.helpers.watched")


def _fixtures(item: pytest.Item) -> frozenset[str]:
    return frozenset(getattr(item, "fixturenames", ()))


class ChildrenOfFixtures:
    """A plugin of its own: pytest sets up session fixtures without the hooks of this file."""

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        """Know the child processes of fixtures that several tests share."""
        if fixturedef.scope == "function":
            return (yield)
        with children.kept():
            return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Say it if a server that this test needs has ended since the last test."""
    children.forget_ended_children()
    _check_servers(item)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Say it if a server ended during the test, whatever the test itself made of that."""
    try:
        result = yield
    except BaseException:
        _check_servers(item, failed=True)
        raise
    _check_servers(item)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Start from the children that are there."""
    item.stash[_CHILDREN_BEFORE] = children.pids_of_children()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail a test whose child processes outlive it, and end them."""
    try:
        result = yield
    finally:
        left = children.end_leftovers(item.stash[_CHILDREN_BEFORE])
    assert not left, f"these processes outlived the test and are killed now: {left}"
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Show with a failed test what its programs wrote."""
    report: Any = yield
    if report.failed:
        report.sections += children.reports()
        error = call.excinfo.value if call.excinfo else None
        if isinstance(error, (subprocess.CalledProcessError, subprocess.TimeoutExpired)):
            report.sections += [("its output", str(error.output)), ("errors", str(error.stderr))]
        if watched := _servers():
            report.sections += watched.logs(_fixtures(item))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remove what tests shared, and fail the run if a process of a test is left."""
    directories.remove_shared_directories()
    warnings = [f"warning: {remark}" for remark in children.remarks]
    errors = []
    for command in children.end_marked(MARK):
        errors.append(f"error: this process outlived the tests and is killed now: {command}")
    if hasattr(session.config, "workeroutput"):
        # What a worker prints is not shown, and its exit status is not the run's.
        session.config.workeroutput[_LAST_WORDS] = [*warnings, *errors]
        return
    words = [*_words_of_workers, *warnings, *errors]
    for line in words:
        print(line)
    if any(line.startswith("error: ") for line in words):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


_LAST_WORDS = "last_words"
_words_of_workers: list[str] = []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keep what a worker of pytest-xdist says at its end."""
    _words_of_workers.extend(getattr(node, "workeroutput", {}).get(_LAST_WORDS, ()))


@pytest.fixture(autouse=True)
def _fresh_logger() -> None:
    """A model that was loaded in this process sends the package's log to its own Triton: what the
    next test does not find in the log would prove nothing."""
    logger = logging.getLogger("trtllm_bls")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def server() -> Iterator[TritonServer]:
    """What a user gets: the demo model and its draft model on the embedded engine."""
    from tests.helpers.server_settings import DEMO, free_ports
    from tests.helpers.watched import watched
    from trtllm_bls.settings.command_options import Override

    told = Override("tensorrt_llm", "expose_kv_cache_metrics", "true")  # for the conformance suite
    # One thread: several that wait for each other are ten times slower where cores are contended.
    settings = free_ports(
        model=DEMO / "target",
        draft_model=DEMO / "draft",
        threads=1,
        # Tests cancel calls; Triton 24.10 may keep one for ever that ends just then.
        exit_timeout=5,
        overrides=(told,),
    )
    with watched(settings, "server", "deployment") as running:
        yield running
