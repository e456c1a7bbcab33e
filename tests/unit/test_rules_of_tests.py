"""Rules for the tests themselves, so that they pass on every machine and beside each other."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from tests.helpers.ports import PortPool

TESTS = Path(__file__).parents[1]
OWN_NAME = Path(__file__).name


def sources() -> dict[str, str]:
    """Return the text of every file of the tests but this one, by its path below ``tests``."""
    return {
        str(file.relative_to(TESTS)): file.read_text(encoding="utf-8")
        for file in sorted(TESTS.rglob("*.py"))
        if file.name != OWN_NAME
    }


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
    named = {file for file, text in sources().items() if "localhost" in text}
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
