"""The gRPC engine and models of other releases, which declare other tensors and parameters."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.fake_engine_server import (
    ASK,
    Say,
    inputs,
    reaching,
    read,
    run,
)
from trtllm_bls.configure.pbtxt import model_config
from trtllm_bls.errors import (
    InvalidRequest,
)
from trtllm_bls.types import Sampling
from trtllm_bls.wire.contract import ENGINE

# --- dialects -------------------------------------------------------------------------------


def older(*without: str, **parameters: str) -> Any:
    """A configuration of an older engine: old spellings, and inputs that it lacks."""
    config = model_config(ENGINE, parameters)
    kept = [t for t in config.input if t.name not in {*without, "seed", "min_tokens"}]
    del config.input[:]
    config.input.extend(kept)
    return config


async def test_an_older_engine_is_spoken_to_in_its_own_words() -> None:
    """random_seed and min_length, where seed and min_tokens are not known."""
    async with reaching(Say((3,), final=True), config=older()) as (engine, triton):
        await read(engine, replace(ASK, sampling=Sampling(seed=5, min_tokens=2)))
        sent = inputs(triton.asked[0])
        assert (sent["random_seed"], sent["min_length"]) == ([[5]], [[2]])
        assert not sent.keys() & {"seed", "min_tokens"}


async def test_an_option_the_engine_lacks_is_refused_before_it_is_asked() -> None:
    """And named."""
    config = older("runtime_top_p_decay")
    async with reaching(Say((3,), final=True), config=config) as (engine, triton):
        with pytest.raises(InvalidRequest, match="runtime_top_p_decay"):
            await read(engine, replace(ASK, sampling=Sampling(top_p_decay=0.5)))
        assert triton.asked == []


@pytest.mark.parametrize(
    ("parameter", "said"), [("false", (7, 8, 3)), ("", (7, 8, 3)), ("true", (3,)), ("True", (3,))]
)
async def test_a_prompt_that_cannot_be_excluded_is_taken_off(parameter: str, said: Any) -> None:
    """Whether it is there, only the model's parameter tells."""
    config = older("exclude_input_in_output", exclude_input_in_output=parameter)
    async with reaching(Say(said, final=True), config=config) as (engine, triton):
        (chunk,) = await read(engine, replace(ASK, streaming=False))
        assert chunk.token_ids == (3,)
        assert "exclude_input_in_output" not in inputs(triton.asked[0])


def test_what_the_model_excludes_anyway_is_not_asked_for() -> None:
    """One tensor fewer on every request; without the parameter it is asked for."""

    async def scenario(parameter: str) -> bool:
        config = model_config(ENGINE, {"exclude_input_in_output": parameter})
        async with reaching(Say((3,), final=True), config=config) as (engine, triton):
            (chunk,) = await read(engine, replace(ASK, streaming=False))
            assert chunk.token_ids == (3,)
            return "exclude_input_in_output" in inputs(triton.asked[0])

    assert [run(scenario(parameter)) for parameter in ("true", "false", "")] == [False, True, True]


async def test_limits_are_the_models_parameters() -> None:
    """Asked for once, also by requests that come at once; what is no number is not known."""
    config = model_config(ENGINE, {"max_sequence_tokens": "64", "max_draft_len": "${x}"})
    async with reaching(config=config) as (engine, triton):
        together = [engine.capacity() for _ in range(8)]  # before anything is known
        for limits in await asyncio.gather(*together):
            assert (limits.max_sequence_tokens, limits.max_draft_tokens) == (64, None)
        await engine.capacity()
        assert triton.config_asked == 1
    for own, drafts in (("embedded", 4), ("llm_api", 0), ("trtllm://gpu:1", 0)):
        config = model_config(ENGINE, {"engine": own, "max_draft_len": "4"})
        async with reaching(config=config) as (engine, _):
            assert (await engine.capacity()).max_draft_tokens == drafts


@pytest.mark.parametrize(
    ("parameters", "one_step", "may_be"),
    [
        ({}, None, False),
        ({"gpt_model_type": "inflight_fused_batching"}, None, True),
        (
            {"gpt_model_type": "V1", "speculative_decoding_mode": "draft_tokens_external"},
            None,
            True,
        ),
        ({"gpt_model_type": "V1", "speculative_decoding_mode": "medusa"}, None, False),
        ({"gpt_model_type": "V1", "one_step_requests": "true"}, True, False),
        ({"gpt_model_type": "V1", "one_step_requests": "false"}, False, False),
    ],
    ids=str,
)
async def test_the_c_backend_may_end_requests_after_one_step_unless_it_tells(
    parameters: dict[str, str], one_step: bool | None, may_be: bool
) -> None:
    """Its template has no parameter for it; our own engine never does."""
    async with reaching(config=model_config(ENGINE, parameters)) as (engine, _):
        limits = await engine.capacity()
        assert (limits.one_step, limits.may_be_one_step) == (one_step, may_be)
