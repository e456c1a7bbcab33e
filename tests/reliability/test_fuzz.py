"""A short run of the fuzzer; ``make fuzz`` is the long one."""

from __future__ import annotations

import pytest

from tests.reliability.fuzz import MAX_MB, Fuzzer, serving


@pytest.mark.parametrize("cases", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_no_request_harms_the_server_or_its_other_users(cases: int) -> None:
    """A clear end to each, the next request works, no process changes, all within bounds."""
    with serving() as server:
        fuzzer = Fuzzer(server)
        fuzzer.run(cases, first_seed=5)
    assert fuzzer.findings == []
    assert fuzzer.steady.waits  # it has read beside them, and no answer of its was wrong
    assert max(fuzzer.memory[-1][1].values()) < MAX_MB
