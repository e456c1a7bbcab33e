"""The played TrtllmService at its wire: its messages are those that the real one would send."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest

from doubles.scripted import Fault, ScriptedEngine
from doubles.scripted_tokens import reciting
from doubles.trtllm_service import ScriptedService
from tests.helpers.fake_engine_server import run
from tests.helpers.scripted_services import EOS, playing
from tests.helpers.waiting import eventually
from trtllm_bls.engines.trtllm_service import service_messages as messages
from trtllm_bls.wire.grpc_client import GrpcChannel, GrpcError

A, B, C = 11, 12, 13
GREEDY = {"top_k": 1}


def asked(**fields: Any) -> Any:
    """A request as a client that speaks the protocol alone would write it."""
    given = {"request_id": "1", "max_tokens": 9, "streaming": True, "sampling_config": GREEDY}
    message = messages.GenerateRequest(**given | fields)
    message.tokenized.input_token_ids.extend([5, 6])
    return message


def told(message: Any, **behaviour: Any) -> list[Any]:
    """Chunks as lists of ids, completes as tuples of ids, reason and stop; an error as its status.

    The answer is A, B, C and the end id.
    """

    async def scenario() -> list[Any]:
        async with playing(reciting((A, B, C), 2, then=EOS), **behaviour) as (_, url):
            connection = GrpcChannel(url)
            raw: list[bytes] = []
            ended: asyncio.Future[GrpcError | None] = asyncio.get_running_loop().create_future()
            call = connection.open(messages.SERVICE + "Generate", raw.extend, ended.set_result)
            call.send(message.SerializeToString())
            call.half_close()
            error = await ended
            await connection.close()
            events = [_event(messages.GenerateResponse.FromString(each)) for each in raw]
            return [*events, error.status] if error else events

    return run(scenario())  # type: ignore[no-any-return]


def _event(response: Any) -> Any:
    assert response.request_id == "1"
    if response.WhichOneof("response") == "chunk":
        return list(response.chunk.token_ids)
    complete = response.complete
    kind = complete.WhichOneof("matched_stop")
    stop = getattr(complete, kind) if kind else None
    return (tuple(complete.output_token_ids), complete.finish_reason, stop)


def test_complete_repeats_everything() -> None:
    assert told(asked(max_tokens=2)) == [[A], [B], ((A, B), "length", None)]
    assert told(asked(max_tokens=2, streaming=False)) == [((A, B), "length", None)]


def test_the_end_id_is_a_token_of_the_answer() -> None:
    expected = [[A], [B], [C], [EOS], ((A, B, C, EOS), "stop", None)]
    assert told(asked()) == expected
    more = told(asked(ignore_eos=True, max_tokens=5))
    assert more[-1] == ((A, B, C, EOS, EOS), "length", None)


def test_a_stop_id_is_cut_off_unless_it_is_to_stay() -> None:
    cut = asked(stop_token_ids=[B])
    assert told(cut) == [[A], ((A,), "stop", B)]
    kept = asked(stop_token_ids=[B], include_stop_token_in_output=True)
    assert told(kept) == [[A], [B], ((A, B), "stop", B)]
    ignored = asked(stop_token_ids=[B], ignore_eos=True, max_tokens=3)
    assert told(ignored)[-1] == ((A, B, C), "length", None)


def test_of_a_longer_stop_the_first_tokens_have_left() -> None:
    message = asked(stop=["bc"])
    ids = {"bc": (B, C)}
    assert told(message, stop_ids=ids.get) == [[A], [B], ((A,), "stop", "bc")]


def test_a_stop_at_the_last_token_is_a_length() -> None:
    message = asked(stop_token_ids=[B], max_tokens=2, include_stop_token_in_output=True)
    assert told(message)[-1] == ((A, B), "length", None)


def test_sequences_alternate_and_are_completed_together() -> None:
    drawn = {"num_return_sequences": 2, "top_p": 0.5, "seed": 1}
    events = told(asked(sampling_config=drawn, max_tokens=2))
    assert events == [[A], [A], [B], [B], ((A, B), "length", None), ((A, B), "length", None)]
    one_told = told(asked(sampling_config=drawn, max_tokens=2), num_reasons=1)
    assert [event[1] for event in one_told[-2:]] == ["length", ""]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"sampling_config": {"top_k": 1, "num_return_sequences": 2}}, "INVALID_ARGUMENT"),
        ({"sampling_config": {"top_p": 1.5}}, "INVALID_ARGUMENT"),
        ({"sampling_config": {"temperature": -1.0}}, "INVALID_ARGUMENT"),
        ({"embedding_bias": [1.0]}, "INVALID_ARGUMENT"),
        ({"max_tokens": 0}, "INTERNAL"),
        ({"lora_config": {"task_id": 3}}, "INTERNAL"),
    ],
)
def test_what_is_wrong_is_a_status_and_nothing_else(fields: dict[str, Any], status: str) -> None:
    assert told(asked(**fields)) == [status]


def test_several_ids_may_come_in_a_chunk() -> None:
    events = told(asked(), ids_per_chunk=3)
    assert events == [[A, B, C], [EOS], ((A, B, C, EOS), "stop", None)]


async def test_an_aborted_answer_ends_in_order() -> None:
    """With what there is, "cancelled", and status OK; an id that is unknown is no error."""
    endless = reciting(range(10, 999), 2)
    async with playing(endless) as (service, url):
        service.engine.fault = Fault(error=None, after_tokens=2)  # it stands still until then
        connection = GrpcChannel(url)
        raw: list[bytes] = []
        ended: asyncio.Future[GrpcError | None] = asyncio.get_running_loop().create_future()
        call = connection.open(messages.SERVICE + "Generate", raw.extend, ended.set_result)
        call.send(asked(max_tokens=800).SerializeToString())
        call.half_close()
        await eventually(lambda: raw)
        for request_id, success in (("1", True), ("none", False)):
            abort = messages.AbortRequest(request_id=request_id).SerializeToString()
            answer = await connection.unary(messages.SERVICE + "Abort", abort)
            assert messages.AbortResponse.FromString(answer).success is success
        assert await ended is None
        ids, reason, _ = _event(messages.GenerateResponse.FromString(raw[-1]))
        assert ids == tuple(range(10, 10 + len(ids)))
        assert (reason, service.live) == ("cancelled", 0)
        await connection.close()


async def test_an_answer_that_is_aborted_before_its_first_step_is_not_alive() -> None:
    """The two arrive together: the task that makes the answer is cancelled before it has run."""
    service = ScriptedService(ScriptedEngine(reciting((A, B, C), 2, then=EOS)))
    context = Mock(invocation_metadata=tuple)
    answer = asyncio.ensure_future(anext(service._generate(asked(), context)))
    abort = asyncio.ensure_future(service._abort(messages.AbortRequest(request_id="1"), context))
    assert (await abort).success
    assert _event(await asyncio.wait_for(answer, 60)) == ((), "cancelled", None)
    assert service.live == 0
