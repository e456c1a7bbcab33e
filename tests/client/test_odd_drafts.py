"""A draft engine may answer anything over the wire: the caller gets the target's plain answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from tests.helpers.fake_engine_server import HANG_UP, Fail, reaching
from tests.helpers.fake_grpc_server import Say, tokens
from tests.helpers.scripted_pairs import VOCAB, SpeculatingEngine, hashed_pair, read, told
from tests.helpers.scripted_pairs import engine_request as ask
from trtllm_bls.speculative.learned import SpeculationShared
from trtllm_bls.types import Sampling

LOGITS = np.zeros((1, 2, VOCAB), np.float32)
WHOLE = tokens(1, 2, final=True, generation_logits=LOGITS)
IDS, LENGTH, ROWS = range(3)  # places of the outputs in the message


def of_type(place: int, datatype: str) -> Callable[[Any], object]:
    def damage(response: Any) -> None:
        response.outputs[place].datatype = datatype

    return damage


def of_shape(place: int, *shape: int) -> Callable[[Any], object]:
    def damage(response: Any) -> None:
        response.outputs[place].shape[:] = shape

    return damage


def without_raw(response: Any) -> None:
    del response.raw_output_contents[-1]


def without_outputs(response: Any) -> None:
    del response.outputs[:], response.raw_output_contents[:]


def cut_short(response: Any) -> None:
    response.raw_output_contents[IDS] = response.raw_output_contents[IDS][:-1]


def endless(response: Any) -> None:
    response.raw_output_contents[LENGTH] = b"\xff\xff\xff\x7f"


REPLIES: dict[str, Any] = {
    "ids of an unknown type": replace(WHOLE, damage=of_type(IDS, "FP8")),
    "ids that are no numbers": replace(WHOLE, damage=of_type(IDS, "BYTES")),
    "logits of an unknown type": replace(WHOLE, damage=of_type(ROWS, "INT4")),
    "a missing raw tensor": replace(WHOLE, damage=without_raw),
    "no tensors": replace(WHOLE, damage=without_outputs),
    "half an id": replace(WHOLE, damage=cut_short),
    "ids of the wrong rank": replace(WHOLE, damage=of_shape(IDS, 2)),
    "logits of the wrong rank": replace(WHOLE, damage=of_shape(ROWS, 2 * VOCAB)),
    "an impossible shape": replace(WHOLE, damage=of_shape(ROWS, 7, 7)),
    "an impossible length": replace(WHOLE, damage=endless),
    "another request's id": replace(WHOLE, id="of somebody else"),
    "logits of another vocabulary": tokens(
        1, 2, final=True, generation_logits=np.zeros((1, 2, 3), np.float32)
    ),
    "logits that are no numbers": tokens(1, 2, final=True, generation_logits=LOGITS * np.nan),
    "ids that nobody knows": tokens(-7, 10**6, final=True, generation_logits=LOGITS),
    "no length": Say({"output_ids": np.array([[1]], np.int32)}, final=True),
    "an error": Fail("Traceback: the draft engine is out of memory"),
    "the end of the call": HANG_UP,
    "a status": grpc.StatusCode.INTERNAL,
}


@pytest.mark.parametrize("by_logits", [False, True])
@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES)
async def test_an_odd_reply_of_a_draft_engine_means_plain_decoding(
    reply: Any, by_logits: bool
) -> None:
    """Unreadable, out of place or broken: the text is that of the target alone."""
    plain = hashed_pair(words=VOCAB)
    request = ask(max_tokens=10, sampling=Sampling(top_p=0.9, top_k=5, seed=3))
    expected = told(await read(plain.target, request))
    target = hashed_pair(words=VOCAB).target
    async with reaching(reply) as (draft, server):
        await draft.capacity()
        engine = SpeculatingEngine(
            target,
            draft,
            SpeculationShared(),
            num_draft_tokens=2,
            use_draft_logits=by_logits,
        )
        assert told(await read(engine, request)) == expected
        assert server.asked
        assert target.live == 0
