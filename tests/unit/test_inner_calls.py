"""Pipelines that call pipelines: time and depth go with the call, and none waits for itself."""

from __future__ import annotations

import asyncio

import pytest
from tritonclient.grpc import model_config_pb2

from tests.helpers.virtual_time import run_skipping_waits
from tests.helpers.waiting import until
from trtllm_bls.errors import (
    CallChainTooLong,
    CycleWithoutPlace,
    DeadlineExceeded,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    Overloaded,
    ShuttingDown,
    TrtllmBlsError,
    from_wire,
    to_wire,
)
from trtllm_bls.pipeline import Request, Response, StreamingModel, Tensor
from trtllm_bls.pipeline.other_models import DeclaredModel, OtherStream, failure_of
from trtllm_bls.pipeline.testing import Caller, serving
from trtllm_bls.wire.grpc_client import GrpcError


class Waits(StreamingModel):
    """Says a word and waits for another model, or for nothing that ever comes."""

    inputs = (Tensor("calls", "STRING"),)
    outputs = (Tensor("said", "STRING"),)

    async def answer(self, request: Request, response: Response) -> None:
        await response.send({"said": " ".join(request.callers) or "client"})
        if "calls" in request:
            await request.infer(request.text("calls"), {})
        await asyncio.Event().wait()


async def nothing(inputs: object) -> object:
    return await asyncio.Event().wait()


def test_a_request_ends_with_the_time_of_those_that_wait_for_it() -> None:
    """Its own limit is far; the time is a part of its caller's."""
    with serving(Waits, request_timeout_seconds=600) as model:
        ask = model.ask(caller=Caller(models=("router", "agent"), seconds=0.05)).wait()
    assert ask.said("said") == [[b"router agent"]]
    assert ask.error is not None
    told = "INTERNAL: the time of the request that router → agent answers is over [timeout=1]"
    assert ask.error.message() == told


def test_its_own_limit_holds_where_it_is_shorter() -> None:
    with serving(Waits, request_timeout_seconds=0.05) as model:
        ask = model.ask(caller=Caller(models=("router",), seconds=600)).wait()
    assert ask.error is not None
    assert ask.error.message() == "INTERNAL: the time limit of 0.05 s is over [timeout=1]"


def test_the_time_that_is_left_goes_with_every_call() -> None:
    with serving(Waits, models={"slow": nothing}, request_timeout_seconds=600) as model:
        ask = model.ask(calls="slow", caller=Caller(models=("router",), seconds=30))
        until(lambda: model.calls)
        ask.leave()
        ask.wait()
        (call,) = model.calls
    assert call.context.models == ("router", "model")
    assert call.context.seconds is not None and call.context.seconds <= 30


def test_a_ninth_inner_call_is_refused_with_the_names() -> None:
    names = ("a", "b") * 4
    with serving(Waits) as model:
        eighth = model.ask(caller=Caller(models=names)).wait(responses=1)
        ninth = model.ask(caller=Caller(models=(*names, "c"))).wait()
        eighth.leave()
        eighth.wait()
    assert ninth.error is not None
    told = "a → b → a → b → a → b → a → b → c → model: 9 calls inside one another; at most 8 may be"
    assert ninth.error.message() == f"INTERNAL: {told} [call_chain=1]"


def test_a_cycle_without_a_place_is_refused_at_once() -> None:
    """A client's request waits; so does one of another pipeline, which nobody here waits for."""
    with serving(Waits, max_running_requests=1, models={"other": nothing}) as model:
        first = model.ask(calls="other").wait(responses=1)
        client = model.ask()
        strange = model.ask(caller=Caller(models=("strange",)))
        until(lambda: model.model.deployment.admission.queued == 2)
        for models in (("model",), ("model", "agent"), ("other",)):
            refused = model.ask(caller=Caller(models=models)).wait()
            assert refused.error is not None
            told = "all 1 places of model (max_running_requests) are taken by"
            chain = " → ".join((*models, "model"))
            assert refused.error.message().startswith(f"UNAVAILABLE: {chain}: {told}")
        for ask in (first, client, strange):
            ask.leave()
            ask.wait()


def test_a_cycle_with_a_place_runs() -> None:
    with serving(Waits, max_running_requests=2) as model:
        outer = model.ask().wait(responses=1)
        inner = model.ask(caller=Caller(models=("model",))).wait(responses=1)
        assert inner.said("said") == [[b"model"]]
        for ask in (outer, inner):
            ask.leave()
            ask.wait()


def test_a_server_that_drains_answers_the_calls_of_requests_that_run() -> None:
    """They may end until the deadline, which they could not if their calls were refused."""
    with serving(Waits) as model:
        model.model._server.refusal = ShuttingDown()
        refused = model.ask().wait()
        inner = model.ask(caller=Caller(models=("router",))).wait(responses=1)
        inner.leave()
        inner.wait()
    assert refused.error is not None and "shutting down" in refused.error.message()
    assert inner.said("said") == [[b"router"]]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (DeadlineExceeded("the time is over"), EngineTimeout),
        (EngineTimeout("the time is over"), EngineTimeout),
        (CallChainTooLong.of(("a", "b"), 1), CallChainTooLong),
        (CycleWithoutPlace.of(("a", "a"), 4), CycleWithoutPlace),
        (Overloaded("full"), EngineUnavailable),
        (EngineUnavailable("gone"), EngineUnavailable),
        (EngineError("no"), EngineError),
    ],
)
def test_another_models_error_keeps_its_kind(
    error: TrtllmBlsError, kind: type[EngineError]
) -> None:
    """Through any number of pipelines; those of a chain name its models once."""
    told: Exception = error
    for _ in range(3):
        assert isinstance(told, TrtllmBlsError)
        told = failure_of("agent", GrpcError("INTERNAL", to_wire(told)))
        assert type(told) is kind
    if isinstance(error, (CallChainTooLong, CycleWithoutPlace)):
        assert str(told) == str(error)
    assert isinstance(told, TrtllmBlsError)
    assert type(from_wire(to_wire(told))) in (kind, Overloaded)


@pytest.mark.parametrize(("batch", "has_rows"), [(0, False), (1, True), (8, True)])
def test_a_model_with_a_batch_size_takes_rows(batch: int, has_rows: bool) -> None:
    """Also where a batch has one request."""
    config = model_config_pb2.ModelConfig(name="other", max_batch_size=batch)
    assert DeclaredModel.of(config).rows == has_rows


def test_a_read_that_was_left_keeps_no_time_limit_of_its_own() -> None:
    """The next read goes on with the call and its limit, and no limit acts after the end."""

    async def reads() -> None:
        ended = asyncio.Event()

        async def as_declared(attempt: object) -> object:
            await ended.wait()
            raise StopAsyncIteration

        stream = OtherStream("other", as_declared, lambda declaration: None, timeout_s=10)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(stream), 1)
        ended.set()
        for _ in range(3):
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            await asyncio.sleep(20)

    run_skipping_waits(reads())
