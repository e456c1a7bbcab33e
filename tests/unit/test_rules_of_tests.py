"""Rules for the tests themselves, so that they pass on every machine and beside each other."""

from __future__ import annotations

import ast
import re
import socket
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.ports import PortPool

TESTS = Path(__file__).parents[1]
OWN_NAME = Path(__file__).name


@cache
def sources() -> dict[str, str]:
    """Return the text of every file of the tests but this one, by its path below ``tests``."""
    return {
        str(file.relative_to(TESTS)): file.read_text(encoding="utf-8")
        for file in sorted(TESTS.rglob("*.py"))
        if file.name != OWN_NAME
    }


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each of these files."""
    return {file: ast.parse(text) for file, text in sources().items()}


def calls(tree: ast.AST, callee: re.Pattern[str]) -> Iterator[ast.Call]:
    """Yield the calls of what ``callee`` matches whole."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and callee.fullmatch(ast.unparse(node.func)):
            yield node


# A name that stands for two addresses: a server listens on one of them, and another program may own
# the same port of the other. These files need the name itself.
NAMED_LOCALHOST = {
    "unit/test_cli.py": "a word of a command that connects to nobody",
    "client/test_grpc_transport.py": "connects to a port that it holds on both addresses",
    "client/test_requests_sent.py": "a docstring about proxies",
    "client/test_triton_engine.py": "looks up who listens on a port, and connects to nobody",
    "live/test_pages.py": "replaces the name where a page has it",
    "live/test_security.py": "the name in a certificate, which must differ from the address",
    "models/test_doctor.py": "values of no_proxy",
    "openai/test_http_guard.py": "values of the header Host",
    "openai/test_refusals.py": "names that no URL of an image may have",
    "unit/test_health.py": "a value of the header Host",
    "unit/test_launcher_machine.py": "an address that serve may listen at",
}


def test_no_server_of_a_test_is_reached_by_the_name_localhost() -> None:
    """Tests use 127.0.0.1, where their servers listen."""
    named = set()
    for file, text in sources().items():
        if "localhost" in re.sub("(?i)host: localhost", "", text):  # but for a header's usual value
            named.add(file)
    assert named == NAMED_LOCALHOST.keys()


def test_no_test_listens_on_a_fixed_port() -> None:
    """Another test run or another program may have it."""
    fixed = re.compile(
        r"(?:create_server\(\(|start_server\(.*|Server\(\(|\bbind\(\()\"[\w.:]*\", *[1-9]"
        r"|_(?:in)?secure_port\(f?\"[^\"]*:[1-9]"
    )
    found = [file for file, text in sources().items() if fixed.search(text)]
    assert found == []


def test_two_pools_of_ports_share_none() -> None:
    """A pool is one process's; a port that somebody listens on is left out."""
    pools = [PortPool(), PortPool()]
    taken = [pool.take(120) for pool in pools]
    assert len({port for ports in taken for port in ports}) == 240
    with socket.create_server(("127.0.0.1", taken[0][-1] + 1)) as foreign:
        assert foreign.getsockname()[1] not in pools[0].take(30)
    for pool in pools:
        pool.close()


def test_a_pool_without_ports_says_so() -> None:
    """It does not search for ever."""
    pool = PortPool(15_000, 15_100)
    with pytest.raises(RuntimeError, match="no free block of ports"):
        pool.take(200)
    pool.close()


# --- processes --------------------------------------------------------------------------------

ENDED_BY_NUMBER = {
    "tests/helpers/processes.py": "the group of a child that nobody has waited for",
    "tests/openai/test_leaving.py": "its own process",
    "trtllm_bls/operate/guard.py": "right after a look at what the process is",
}


def test_no_process_is_ended_by_its_number_alone() -> None:
    """Ids wrap around within one run of the tests, and another process may have the number."""
    root = TESTS.parent
    files = [*(root / "trtllm_bls").rglob("*.py"), *TESTS.rglob("*.py")]
    by_number = re.compile(r"\bos\.kill(?:pg)?\(")
    found = set()
    for file in files:
        if file.name != OWN_NAME and by_number.search(file.read_text(encoding="utf-8")):
            found.add(str(file.relative_to(root)))
    assert found == ENDED_BY_NUMBER.keys()


# A program of a test is a ``Child``, whose output is read and shown, and whose waits have limits.
# These few start one themselves, each as often as the number says.
RAW_CHILDREN = {
    "client/test_probe.py": (5, "sleeps, which write nothing"),
    "client/test_commands.py": (1, "writes nothing, and is killed"),
    "helpers/children.py": (1, "`Child` itself"),
    "helpers/command_scenes.py": (1, "read by communicate, which has a limit, and killed"),
    "helpers/fake_tritonserver.py": (1, "code of a fake server, which its own parent watches"),
    "live/test_clients.py": (1, "read by communicate, which has a limit"),
    "live/test_launcher_guard.py": (3, "the control pipe is the claim; communicate has a limit"),
    "models/test_fast_encoder.py": (1, "in a program, a fork that ends at once"),
    "models/test_upgrade.py": (1, "a fork, for `exit_code`"),
    "openai/test_chat_command.py": (1, "talks with a terminal, by pexpect, which has a limit"),
    "text/test_draining.py": (2, "`true`, whose process id is the claim"),
    "unit/test_health.py": (2, "code of another process, which starts stubs"),
    "unit/test_launcher_server.py": (1, "a pipe that nobody reads is the claim"),
    "unit/test_output.py": (1, "a fork, for `exit_code`"),
    "unit/test_watched_servers.py": (2, "children that outlive a test are the claim"),
}


def test_a_program_of_a_test_is_a_child_that_says_how_it_ended() -> None:
    """A raw ``Popen`` may fill its pipe, be waited for without end, and outlive its test."""
    start = re.compile(r"\b(?:Popen|create_subprocess_\w+|posix_spawn|os\.fork)\(")
    counts = {}
    for file, text in sources().items():
        if count := len(start.findall(text)):
            counts[file] = count
    assert counts == {file: count for file, (count, _) in RAW_CHILDREN.items()}


def shared_and_unwatched() -> Iterator[str]:
    """Yield the fixtures that start a tritonserver for several tests without ``watched``."""
    for file, tree in trees().items():
        if "TritonServer(" not in sources()[file]:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                decorators = " ".join(map(ast.unparse, node.decorator_list))
                is_shared = re.search("scope='(?:module|package|session)'", decorators)
                if is_shared and re.search(r"\bTritonServer\(", ast.unparse(node)):
                    yield f"{file}::{node.name}"


def test_a_server_that_tests_share_is_watched() -> None:
    """Otherwise each test after its end fails with a refused connection, and none says why."""
    assert [*shared_and_unwatched()] == []


def test_no_test_waits_for_a_thread_without_a_word() -> None:
    """``waiting.join`` says what it waited for in vain; a plain join goes on in silence."""
    found = []
    for file, tree in trees().items():
        for call in calls(tree, re.compile(r"[\w.]+\.join")):
            (*limit,) = *call.args, *(keyword.value for keyword in call.keywords)
            if not limit or isinstance(limit[0], (ast.Constant, ast.BinOp)):
                found.append(f"{file}:{call.lineno} {ast.unparse(call)}")
    assert found == []


# A program that runs to its end, a page that is read, a connection that is made. To leave a stream
# of Triton's client waits for its end.
PARTNERS = re.compile(
    r"subprocess\.(?:run|call|check_call|check_output)|.*\burlopen|socket\.create_connection"
    r"|httpx\.(?:get|post|put|delete|request|stream|Client|AsyncClient)|.*\bHTTPS?Connection"
    r"|.*\bstart_stream"
)


def test_no_program_or_connection_of_a_test_is_waited_for_without_a_limit() -> None:
    """A failure says what the test waited for."""
    endless = []
    for file, tree in trees().items():
        for call in calls(tree, PARTNERS):
            names = {keyword.arg for keyword in call.keywords}
            if names.isdisjoint({"timeout", "stream_timeout", None}):
                endless.append(f"{file}:{call.lineno}")
    assert endless == []


def test_a_reader_of_a_socket_ends_with_it() -> None:
    """What is added to without a look is empty for ever once the other side has closed."""
    blind = re.compile(r"\+= [\w.]+\.recv\(")
    assert [file for file, text in sources().items() if blind.search(text)] == []


def test_a_forked_process_is_waited_for_with_a_limit() -> None:
    """A lock that another thread had at the fork is never free in it: ``waiting.exit_code``."""
    endless = re.compile(r"\bos\.waitpid\(")
    found = {file for file, text in sources().items() if endless.search(text)}
    # `exit_code` itself; `true`; and a program, which has a limit as a whole.
    assert found == {"helpers/waiting.py", "text/test_draining.py", "models/test_fast_encoder.py"}


def events_without_a_look() -> Iterator[str]:
    """Yield the waits for an event in another thread whose outcome nobody looks at.

    The argument of ``Ask.wait``, which fails by itself, is a count.
    """
    ignored = re.compile(r"to_thread\((?!ask\.)[\w.]+\.wait, ")
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and ignored.search(ast.unparse(node)):
                yield f"{file}:{node.lineno}"


def test_a_wait_for_an_event_that_does_not_come_fails() -> None:
    """``Event.wait`` returns, and a test would go on."""
    assert [*events_without_a_look()] == []


# Programs, and loops with limits of their own.
OWN_LOOPS = {
    "helpers/fake_engine_server.py": "has a limit of its own",
    "helpers/virtual_time.py": "a clock on which no wait takes time",
    "helpers/waiting.py": "`run_async` itself",
    "live/full_shared_memory.py": "a program, a `Child` of its test",
    "reliability/chaos.py": "a program",
    "reliability/engine_floods.py": "a program",
    "reliability/slow_readers.py": "a program",
    "reliability/soak.py": "a program",
    "openai/test_http_guard.py": "sleeps for 0 s",
    "text/test_endings.py": "wait_for, on a loop whose timers fire early",
    "unit/test_pipeline.py": "a clock on which no wait takes time",
}


def test_no_coroutine_of_a_test_is_waited_for_without_a_limit() -> None:
    """The end of an event loop by pytest-timeout shows the loop, not the coroutine that waits."""
    own = re.compile(r"asyncio\.(?:run|Runner)|.*\.run_until_complete")
    found = set()
    for file, tree in trees().items():
        if not file.startswith("clients/") and [*calls(tree, own)]:
            found.add(file)
    assert found == OWN_LOOPS.keys()


def deaf_generators() -> Iterator[str]:
    """Yield the async generators that learn of an end while they wait, but not at a ``yield``."""
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.AsyncFunctionDef):
                continue
            inside = [*ast.walk(node)]
            if not any(isinstance(part, ast.Yield) for part in inside):
                continue
            for part in inside:
                if isinstance(part, ast.ExceptHandler) and part.type is not None:
                    caught = ast.unparse(part.type)
                    if "CancelledError" in caught and "GeneratorExit" not in caught:
                        yield f"{file}::{node.name}"


def test_a_handler_of_a_stream_learns_of_an_end_wherever_it_is() -> None:
    """A call that ends while grpcio sends a response ends its handler with ``GeneratorExit``."""
    assert [*deaf_generators()] == []


# --- skips ------------------------------------------------------------------------------------

SKIPS = re.compile(r"pytest\.(?:mark\.)?(?:skip|skipif|importorskip)")
HINT = re.compile(r"\bruns? (?:it|this)\b")
# The answer of the engine that is tested is the reason.
WITHOUT_A_HINT = ["conformance/engine_client.py", "conformance/engine_client.py"]


def test_a_skipped_test_says_how_it_runs() -> None:
    """In one line: install this, set that, or be somebody."""
    silent = []
    for file, tree in trees().items():
        texts = {}  # of names, since a reason may be one
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                texts[ast.unparse(node.targets[0])] = ast.unparse(node.value)
        for call in calls(tree, SKIPS):
            reason = ast.unparse(call)
            for argument in (*call.args, *[keyword.value for keyword in call.keywords]):
                reason += texts.get(ast.unparse(argument), "")
            if not HINT.search(reason):
                silent.append(file)
    assert silent == WITHOUT_A_HINT


# --- comparisons of time and memory ----------------------------------------------------------

CLOCKS = re.compile(
    r"\b(?:time\.(?:time|monotonic|perf_counter|process_time|thread_time)(?:_ns)?\(|loop\.time\(|"
    r"getrusage|tracemalloc\.|memory_info\(|cpu_times\(|cpu_percent\(|TaskDuration|growth\()|"
    r"\[\"cpu\"\]"
)


def measured(function: ast.AST) -> Iterator[str]:
    """Yield the assertions that compare a clock or a size with something.

    A name that is bound to such a value, or a list that one is appended to, counts as one.
    """
    names: set[str] = set()

    def is_measured(node: ast.AST) -> bool:
        loaded = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        return (
            bool(loaded & names) or CLOCKS.search(ast.unparse(node).replace("'", '"')) is not None
        )

    nodes = [*ast.walk(function)]
    for _ in range(2):  # a name may be used above its binding, in a loop
        for node in nodes:
            if isinstance(node, ast.Assign) and is_measured(node.value):
                targets = [name for target in node.targets for name in ast.walk(target)]
                names.update(target.id for target in targets if isinstance(target, ast.Name))
            elif isinstance(node, ast.FunctionDef) and node is not function:
                returns = [part for part in ast.walk(node) if isinstance(part, ast.Return)]
                if any(part.value and is_measured(part.value) for part in returns):
                    names.add(node.name)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                is_append = node.func.attr == "append" and isinstance(owner, ast.Name)
                if is_append and is_measured(node.args[0]):
                    names.add(owner.id)
    for node in nodes:
        if isinstance(node, ast.Assert) and is_measured(node.test):
            yield ast.unparse(node.test)


def timed_assertions() -> dict[str, list[str]]:
    """Return the assertions that compare clocks or sizes, by file and function."""
    found: dict[str, list[str]] = {}
    for file, tree in trees().items():
        if not CLOCKS.search(sources()[file]):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if assertions := [*measured(node)]:
                found[f"{file}::{node.name}"] = assertions
    return found


# What may be compared all the same. A lower bound of a wait holds on every machine, since a busy
# one only waits longer.
SOUND = {
    "client/test_streams.py::test_a_call_that_ended_unsent_is_late_if_its_deadline_is_over": (
        "a deadline that is over, nearly over or a minute away"
    ),
    "helpers/waiting.py::eventually": "the limit of a wait",
    "live/test_launcher_guard.py::test_processes_of_a_dead_launcher_end_with_the_server": (
        "a lower bound of a wait"
    ),
    "live/test_launcher_guard.py"
    "::test_requests_are_cut_a_second_before_the_server_breaks_connections": (
        "a deadline between two readings of the clock, and a lower bound of a wait"
    ),
    "openai/test_answers.py::test_a_chat_is_answered_in_one_piece": (
        "a time stamp between two readings of the clock"
    ),
    "openai/test_http_guard.py::test_an_unfinished_request_holds_no_more_than_the_limit": (
        "bytes that Python allocated, which are the same on every machine"
    ),
    "openai/test_same_answer.py::test_texts_of_many_turns_are_copied_once": (
        "bytes that Python allocated, which are the same on every machine"
    ),
    "properties/test_speculative_faults.py::test_a_silent_draft_is_waited_for_once": (
        "virtual time, which only the test moves"
    ),
    "properties/test_speculative_pace.py::test_speculation_that_does_not_pay_costs_little": (
        "virtual time, which only the test moves"
    ),
    "reliability/bystanders.py::attack": "a program for people, which no test runs",
    "text/test_draining.py::attempt": "a lower bound of a wait",
    "text/test_draining.py::test_the_command_waits_until_nothing_runs": "a lower bound of a wait",
    "unit/test_clients_run.py::test_what_has_no_time_left_is_told_and_fails_nothing": (
        "passes the clock on"
    ),
    "unit/test_launcher_server.py::test_models_that_do_not_hand_over_have_half_of_the_time": (
        "a lower bound of a wait"
    ),
    "unit/test_python_backend.py"
    "::test_an_error_as_a_status_leaves_once_tritons_thread_has_returned": (
        "a lower bound of a wait"
    ),
} | {
    f"unit/test_linear_{name}": (
        "the CPU time of this process, the least of four tries: linear work grows 16 to 21 times, "
        "the bound is 60 times, quadratic work grows 256 times"
    )
    for name in (
        "patterns.py::test_no_regular_expression_reads_a_text_more_than_once",
        "costs.py::test_no_text_of_a_model_is_read_more_than_once",
        "costs.py::test_python_literals_with_equal_hashes",
        "costs.py::test_what_is_fed_grows_with_its_size",
    )
}


def test_no_assertion_compares_a_time_that_a_busy_machine_lengthens() -> None:
    """A measurement is a program in ``benchmarks/``. A test counts, or names its reason here."""
    assert timed_assertions().keys() == SOUND.keys()


def test_a_timed_assertion_is_found_through_names_lists_and_functions() -> None:
    """Otherwise the rule above would hold by not looking."""
    timed = """
def test_a():
    began = time.monotonic()
    times.append(time.monotonic() - began)
    def spent():
        return psutil.Process().cpu_times()
    cost = spent()
    assert max(times) < 2
    assert cost < 3
    assert resource.getrusage(0).ru_maxrss < 4
    assert counted == 5
"""
    assert [*measured(ast.parse(timed))] == [
        "max(times) < 2",
        "cost < 3",
        "resource.getrusage(0).ru_maxrss < 4",
    ]
