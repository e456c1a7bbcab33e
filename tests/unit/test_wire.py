"""Messages to arrays and back: what one side packs, the other unpacks."""

from __future__ import annotations

from array import array as packed_array
from typing import Any

import numpy as np
import pytest

from tests.helpers.wire_tensors import (
    ASK,
    column,
    engine,
    sent,
    text,
    text_inputs,
    words,
)
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.triton.tensors import engine_requests, is_stop, read_rows, text_requests
from trtllm_bls.types import (
    EngineRequest,
    Sampling,
    TextRequest,
)
from trtllm_bls.wire.contract import BLS
from trtllm_bls.wire.words import pack_words


def test_a_packed_prompt_is_sent_as_it_is() -> None:
    """Its bytes are those of the same ids in a tuple, and they are not copied."""
    ids = packed_array("i", range(1000))
    packed = sent(EngineRequest(request_id="r", input_ids=ids, max_tokens=1))
    plain = sent(EngineRequest(request_id="r", input_ids=tuple(ids), max_tokens=1))
    assert packed.keys() == plain.keys()
    assert all(np.array_equal(packed[name], plain[name]) for name in plain)
    assert packed["input_ids"].dtype == np.int32
    assert np.shares_memory(packed["input_ids"], np.frombuffer(ids, dtype=np.int32))


# --- fields ---------------------------------------------------------------------------------


def test_either_spelling_is_taken() -> None:
    """min_length is min_tokens, random_seed is seed, on both levels."""
    for name in ("min_length", "min_tokens"):
        assert text(**{name: column(3)}).sampling.min_tokens == 3
        assert engine(**{name: np.array([3], np.int32)}).sampling.min_tokens == 3
    big = 2**64 - 1
    for name in ("random_seed", "seed"):
        assert text(**{name: column(big, dtype=np.uint64)}).sampling.seed == big


def test_both_spellings_may_agree_but_not_contradict() -> None:
    """Which one counts would be a guess."""
    assert text(seed=column(3), random_seed=column(3)).sampling.seed == 3
    with pytest.raises(InvalidRequest, match="random_seed: 4 contradicts seed = 3"):
        text(seed=column(3), random_seed=column(4))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("top_p", 1.5),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", float("inf")),
        ("top_k", -1),
        ("beam_width", 0),
        ("num_return_sequences", 0),
        ("num_return_sequences", 2**31 - 1),
        ("runtime_top_p_decay", 0.0),
        ("num_draft_tokens", -1),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    """NaN, infinity and numbers an engine would choke on; what would fill memory included."""
    tensor = BLS.input_named[name]
    must = tensor.bounds if np.isfinite(value) else "finite"
    with pytest.raises(InvalidRequest, match=f"^{name}: .* is not allowed; it must be {must}$"):
        text(**{name: column(value, dtype=tensor.numpy_type)})


def test_what_was_not_sent_stays_unsaid() -> None:
    """Absent options are None, never a default of ours; top_p <= 0 is the wire's "not set"."""
    assert text() == TextRequest(request_id="r", text="hi", max_tokens=5)
    assert text(top_p=column(0, dtype=np.float32)).sampling == Sampling()
    assert engine() == ASK.__class__(**{**vars(ASK), "streaming": False})


@pytest.mark.parametrize("scalar", [np.array([9], np.int32), column(9)])
def test_reshaped_scalars_are_read_in_both_shapes(scalar: Any) -> None:
    """A Python model receives [B] where clients send [B, 1]."""
    assert engine(end_id=scalar).end_id == 9


def test_text_that_is_not_utf8_is_refused() -> None:
    """Triton checks nothing of this; the first bad byte is named."""
    with pytest.raises(InvalidRequest, match="text_input: not valid UTF-8 at byte 2"):
        text(text_input=words(b"ab\xff"))
    with pytest.raises(InvalidRequest, match="stop_words"):
        text(stop_words=words("fine", b"\xc3"))
    assert text(text_input=words("a\0b")).text == "a\0b"


def test_one_value_means_one() -> None:
    """Two values where one belongs are refused, not cut."""
    with pytest.raises(InvalidRequest, match="temperature: expected one value"):
        text(temperature=np.zeros((1, 2), np.float32))


def test_rows_must_agree_on_their_number_and_there_must_be_one() -> None:
    """A batch of nothing has no answer."""
    with pytest.raises(InvalidRequest, match="batch size"):
        read_rows(BLS, text_inputs(temperature=np.zeros((2, 1), np.float32)))
    for empty in ({}, {"text_input": np.zeros((0, 1), np.object_)}):
        with pytest.raises(InvalidRequest):
            text_requests(empty, "r")


@pytest.mark.parametrize(
    ("weights", "problem"),
    [([1.0], "1 weights for 2"), ([1.0, float("nan")], "not finite"), (None, "0 weights for 2")],
)
def test_bias_words_and_weights_come_in_pairs(weights: Any, problem: str) -> None:
    """Neither a missing weight nor one that is no number."""
    more = {} if weights is None else {"embedding_bias_weights": np.array([weights], np.float32)}
    with pytest.raises(InvalidRequest, match=problem):
        text(embedding_bias_words=words("a", "b"), **more)


def test_empty_words_are_no_words() -> None:
    """An empty string is how clients spell "none"."""
    assert text(stop_words=words("", "x"), bad_words=words("")).stop_words == ("x",)
    weights = np.array([[1, 2]], np.float32)
    request = text(embedding_bias_words=words("", "b"), embedding_bias_weights=weights)
    assert request.embedding_bias == (("b", 2.0),)


def test_each_row_of_a_batch_is_a_request() -> None:
    """Values go to their row; ids are cut to their length; the first row says if all stream."""
    one, two = text_requests(
        {
            "text_input": np.array([[b"a"], [b"b"]], np.object_),
            "max_tokens": column(1, 2),
            "temperature": column(0.5, 0.25, dtype=np.float32),
        },
        "r",
    )
    assert (one.text, one.max_tokens, one.sampling.temperature) == ("a", 1, 0.5)
    assert (two.text, two.max_tokens, two.sampling.temperature) == ("b", 2, 0.25)
    rows = engine_requests(
        {
            "input_ids": np.array([[1, 2, 3], [4, 0, 0]], np.int32),
            "input_lengths": np.array([3, 1], np.int32),
            "request_output_len": column(1, 2),
            "streaming": column(True, False, dtype=np.bool_),
            "stop_words_list": np.stack([pack_words([(5,)]), pack_words([], 1)]),
        },
        "r",
        None,
    )
    assert [request.input_ids for request, _ in rows] == [(1, 2, 3), (4,)]
    assert [request.streaming for request, _ in rows] == [True, True]
    assert [request.stop_sequences for request, _ in rows] == [((5,),), ()]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"request_output_len": column(0)}, "request_output_len"),
        ({"input_lengths": column(3)}, "input_lengths"),
        ({"input_lengths": column(0)}, "input_lengths"),
        ({"input_ids": np.zeros((1, 0), np.int32)}, "input_lengths"),
        ({"embedding_bias": np.array([[np.nan]], np.float32)}, "embedding_bias"),
        ({"draft_logits": np.zeros((1, 2, 9), np.float32)}, "draft_logits"),
        ({"draft_acceptance_threshold": column(1.5, dtype=np.float32)}, "acceptance_threshold"),
        ({"temperature": column(np.inf, dtype=np.float32)}, "temperature"),
    ],
)
def test_an_engine_request_that_cannot_be_meant_is_refused(more: Any, problem: str) -> None:
    """By the name of the tensor."""
    with pytest.raises(InvalidRequest, match=problem):
        engine(**more)


@pytest.mark.parametrize("length", [1, 8, 10])
def test_a_bias_that_does_not_fit_the_vocabulary_is_refused(length: int) -> None:
    """With both lengths; an empty one is as good as absent."""
    inputs = {"input_ids": np.array([[7]], np.int32), "request_output_len": column(4)}
    biased = {**inputs, "embedding_bias": np.ones((1, length), np.float32)}
    with pytest.raises(InvalidRequest, match=f"^embedding_bias: holds {length} .* has 9 tokens"):
        engine_requests(biased, "r", 9)
    ((request, _),) = engine_requests(
        {**inputs, "embedding_bias": np.zeros((1, 0), np.float32)}, "r", 9
    )
    assert request.embedding_bias == ()
    fitting = {**inputs, "embedding_bias": np.ones((1, 9), np.float32)}
    ((request, _),) = engine_requests(fitting, "r", 9)
    assert len(request.embedding_bias) == 9


@pytest.mark.parametrize("missing", ["input_ids", "request_output_len"])
def test_a_missing_input_is_named_as_the_wire_names_it(missing: str) -> None:
    """Not by our own field name."""
    inputs = {"input_ids": np.array([[7]], np.int32), "request_output_len": column(4)}
    del inputs[missing]
    with pytest.raises(InvalidRequest, match=f"^{missing}: is missing"):
        engine_requests(inputs, "r", None)


def test_a_stop_request_is_told_by_its_flag() -> None:
    """Only true counts, in either shape."""
    assert is_stop({"stop": column(True, dtype=np.bool_)})
    assert is_stop({"stop": np.array([True])})
    assert not is_stop({"stop": np.array([[False]])}) and not is_stop({})
