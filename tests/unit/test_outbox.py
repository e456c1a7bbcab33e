"""What a call sends and when, without threads: the table of states in ``Outbox``."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_bls.errors import EngineError
from trtllm_bls.triton.request_server import _UNSENDABLE, Delay, Outbox, Send, Sending

A: dict[str, Any] = {"text": "a"}
B: dict[str, Any] = {"text": "b"}
ERROR = EngineError("lost")


def test_responses_leave_one_at_a_time_in_their_order() -> None:
    """The first is marked as such, and the last as final."""
    outbox = Outbox()
    assert outbox.put(A, 0) == Send(A, final=False, is_first=True)
    assert outbox.put(B, 0) is None and outbox.put(A, 1) is None
    assert outbox.sent(True) == Send(B, final=False, is_first=False)
    assert outbox.sent(True) == Send(A, final=True, is_first=False)
    assert outbox.sent(True) is None
    assert outbox.state is Sending.IDLE


def test_a_call_of_several_sequences_ends_with_the_last_of_them() -> None:
    outbox = Outbox(sequences=2)
    assert outbox.put(A, 1) == Send(A, final=False, is_first=True)
    assert outbox.sent(True) is None
    assert outbox.put(B, 1) == Send(B, final=True, is_first=False)


def test_an_end_that_is_not_accepted_is_tried_again_ever_later() -> None:
    """What was kept is dropped: nobody takes it."""
    outbox = Outbox()
    outbox.put(A, 0)
    outbox.put(B, 1)
    delays = []
    for _ in range(8):
        delay = outbox.sent(False)
        assert isinstance(delay, Delay) and delay.seconds is not None
        assert outbox.state is Sending.DELAYED
        delays.append(delay.seconds)
        assert outbox.due() == Send(_UNSENDABLE, final=True, is_first=False)
    assert delays == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert outbox.sent(True) is None


@pytest.mark.parametrize("before", [0, 2])
def test_an_error_as_status_waits_once(before: int) -> None:
    """Whatever is sent before it does not."""
    outbox = Outbox(error_as_status=True)
    for _ in range(before):
        assert isinstance(outbox.put(A, 0), Send)
        assert outbox.sent(True) is None
    assert outbox.put(ERROR, 1) == Delay(None)
    assert outbox.state is Sending.DELAYED
    assert outbox.due() == Send(ERROR, final=True, is_first=not before)
    assert outbox.sent(True) is None


def test_an_error_as_status_that_is_kept_waits_when_its_turn_comes() -> None:
    outbox = Outbox(error_as_status=True)
    assert isinstance(outbox.put(A, 0), Send)
    assert outbox.put(ERROR, 1) is None
    assert outbox.sent(True) == Delay(None)
    assert outbox.due() == Send(ERROR, final=True, is_first=False)


@given(st.lists(st.sampled_from(["put", "end", "error", "sent", "not sent", "due"])), st.booleans())
def test_every_call_is_sent_one_end_and_nothing_after_it(events: list[str], waits: bool) -> None:
    """Whatever order things happen in, as far as the state allows them."""
    outbox, actions = Outbox(error_as_status=waits), list[Any]()
    put = 0

    def act(event: str) -> None:
        nonlocal put
        if event in ("put", "end", "error"):
            if outbox.sequences:
                put += 1
                response = ERROR if event == "error" else {"number": put}
                actions.append(outbox.put(response, int(event != "put")))
        elif event == "due":
            if outbox.state is Sending.DELAYED:
                actions.append(outbox.due())
        elif outbox.state is Sending.UNDER_WAY:
            actions.append(outbox.sent(event == "sent"))

    for event in [*events, "end"]:
        act(event)
    while outbox.state is not Sending.IDLE:
        act("sent" if outbox.state is Sending.UNDER_WAY else "due")
    sends = [action for action in actions if isinstance(action, Send)]
    numbers = [each.response["number"] for each in sends if isinstance(each.response, dict)]
    assert numbers == sorted(numbers)
    assert [each.is_first for each in sends] == [True] + [False] * (len(sends) - 1)
    finals = [each.final for each in sends]
    assert finals[-1]
    assert all(each.response is _UNSENDABLE for each in sends[finals.index(True) + 1 :])
