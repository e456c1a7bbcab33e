"""Requests that end before their end: by a stop request, or because their caller has gone.

Nothing here looks at a clock. What proves an early end is the order of things: the request that
was to be long has fewer tokens than it asked for, or others were served before it could end. Where
this machine was so slow that all of them had come, it tries again.
"""

from __future__ import annotations

import grpc
import pytest

from tests.conformance.deployment import Deployment
from tests.conformance.engine_client import Answer, Engine, Response, Stream
from tests.conformance.prompts import LENGTH, Story, scattered
from tests.conformance.test_tokens import BOTH
from tests.helpers.waiting import until

TRIES_S = 120  # in which the engine's work is seen before its end, though long requests take long


def long_request(deployment: Deployment) -> int:
    """As many tokens as fit behind a story's prompt, within reason; 1000 where nobody knows."""
    return min(deployment.max_sequence - 64, 2000) if deployment.max_sequence else 1000


def stop(engine: Engine, request_id: str) -> Answer:
    """A stop request: the required inputs are there, and mean nothing."""
    dummies = {"input_ids": [0], "input_lengths": 0, "request_output_len": 0, "stop": True}
    return engine.send(engine.batch([dummies]), request_id=request_id).answer()


def succeeded(answer: Answer) -> bool:
    """How a stop request is answered: one final response, no outputs, no error."""
    (response,) = answer.responses
    return response == Response({}, final=True, error="")


def begun(stream: Stream) -> Response:
    """Its first response."""
    return next(iter(stream))


def test_a_stopped_stream_ends_in_order(
    engine: Engine, deployment: Deployment, story: Story
) -> None:
    """Its last response is final and no error; what was generated has arrived."""
    most = long_request(deployment)

    def attempt() -> Answer | None:
        stream = engine.start(story.prompt, most, streaming=True, request_id="conformance-a")
        first = begun(stream)
        assert succeeded(stop(engine, "conformance-a"))
        answer = Answer([first, *stream.answer().responses])
        assert answer.last.final
        assert answer.ids[:LENGTH] == story.tokens[: len(answer.ids)]
        return answer if len(answer.ids) < most else None

    until(attempt, TRIES_S)


def test_a_stopped_whole_answer_holds_what_there_is(
    engine: Engine, deployment: Deployment, story: Story
) -> None:
    """One response; another request, sent later and already answered, shows that it has begun."""
    most = long_request(deployment)

    def attempt() -> Answer | None:
        whole = engine.start(story.prompt, most, request_id="conformance-b")
        behind = engine.start(story.prompt, 3, streaming=True)
        assert len(behind.answer().ids) == 3
        assert succeeded(stop(engine, "conformance-b"))
        answer = whole.answer()
        assert len(answer.responses) == 1
        assert answer.ids[:LENGTH] == story.tokens[: len(answer.ids)]
        return answer if len(answer.ids) < most else None

    until(attempt, TRIES_S)


def test_stopping_who_is_not_there_succeeds(engine: Engine, story: Story) -> None:
    """An unknown id, and one whose request has ended."""
    assert engine.ask(story.prompt, 2, request_id="conformance-c").ids == story.tokens[:2]
    for request_id in ("conformance-never", "conformance-c"):
        assert succeeded(stop(engine, request_id))


def test_a_stop_without_an_id_is_an_error(engine: Engine) -> None:
    """It says nothing of whom to stop."""
    assert stop(engine, "").error


def test_a_stop_ends_all_rows(engine: Engine, deployment: Deployment, stories: list[Story]) -> None:
    """And each row still has its last response; the very last is final."""
    engine.needs("batch_index")
    most = long_request(deployment)
    prompt = scattered(deployment.vocab_size, 70)
    row = {"input_ids": prompt, "input_lengths": len(prompt), "streaming": True}
    rows = [row | {"request_output_len": most}] * 2

    def attempt() -> Answer | None:
        stream = engine.send(engine.batch(rows), request_id="conformance-d")
        first = begun(stream)
        assert succeeded(stop(engine, "conformance-d"))
        rest = stream.answer()
        answer = Answer([first, *rest.responses])
        assert [response.final for response in answer.responses].count(True) == 1
        assert answer.last.final
        longest = max(len(answer.of("batch_index", index).ids) for index in range(2))
        return answer if longest < most else None

    until(attempt, TRIES_S)


def test_of_two_with_one_id_the_newer_is_stopped(
    engine: Engine, deployment: Deployment, stories: list[Story]
) -> None:
    """The older runs on; from 0.10 on ids need not be unique.

    Both have a token of each step, so one that ended with the newer would have hardly more.
    """
    most = long_request(deployment)

    def attempt() -> Answer | None:
        older, newer = (
            engine.start(story.prompt, most, streaming=True, request_id="conformance-e")
            for story in stories[:2]
        )
        seen = len(begun(older).ids)
        first = begun(newer)
        assert succeeded(stop(engine, "conformance-e"))
        answer = Answer([first, *newer.answer().responses])
        wanted = len(answer.ids) + 2 * LENGTH
        if wanted >= most:
            older.cancel()
            return None
        for response in older:
            seen += len(response.ids)
            assert not response.final or seen == most
            if seen >= wanted:
                break
        older.cancel()
        return answer

    until(attempt, TRIES_S)


@BOTH
def test_a_cancelled_call_ends_as_cancelled(
    engine: Engine, deployment: Deployment, story: Story, streaming: bool
) -> None:
    """The caller sees gRPC's CANCELLED, and the server goes on."""
    stream = engine.start(story.prompt, long_request(deployment), streaming=streaming)
    if streaming:
        begun(stream)
    stream.cancel()
    with pytest.raises(grpc.RpcError) as failure:
        stream.answer()
    assert failure.value.code() is grpc.StatusCode.CANCELLED
    assert engine.ask(story.prompt, 2).ids == story.tokens[:2]


def test_cancelled_requests_free_their_place(
    engine: Engine, deployment: Deployment, story: Story
) -> None:
    """A full engine and a queue as long again, all but one cancelled: newcomers are served.

    The one that stays was there first and is as long as the others. It is still running when
    the newcomers have their answers, so they did not wait for any of the others to end.
    """
    most = long_request(deployment)
    places = deployment.slots - 1

    def attempt() -> Answer | None:
        witness = engine.start(story.prompt, most, streaming=True, request_id="conformance-f")
        first = begun(witness)
        crowd = [engine.start(story.prompt, most, streaming=True) for _ in range(places)]
        for stream in crowd:  # each has its place: requests may overtake each other on their way
            begun(stream)
        crowd += [engine.start(story.prompt, most, streaming=True) for _ in range(places)]
        for stream in crowd:
            stream.cancel()
        newcomers = [engine.start(story.prompt, 4) for _ in range(places)]
        assert [stream.answer().ids for stream in newcomers] == [story.tokens[:4]] * places
        assert succeeded(stop(engine, "conformance-f"))
        answer = Answer([first, *witness.answer().responses])
        return answer if len(answer.ids) < most else None  # else it had ended before the stop

    until(attempt, TRIES_S)
