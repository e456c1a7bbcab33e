"""The tensor table, the checked-in configurations and the models' parameters agree."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

import pytest

from tests.helpers import upstream_tensors
from tests.helpers.model_configurations import check_wires, parsed, rows_of_config, rows_of_table
from trtllm_bls.configure.pbtxt import FORMAT, PARAMETERS, model_config
from trtllm_bls.settings.parameters import parameters_of
from trtllm_bls.wire.contract import BLS, MODELS, Model

REPOSITORY = Path(__file__).parents[2] / "models"
NAMES = [model.name for model in MODELS]

# What we add to TensorRT-LLM's tensors; docs/contract.md tells users of each.
LLM_API = {
    *("lora_name", "lora_path", "lora_ckpt_source", "cache_salt", "priority"),
    "logits_post_processor_name",
}
OURS = {
    ("preprocessing", "inputs"): {
        *("MESSAGES", "ADD_SPECIAL_TOKENS", "MIN_TOKENS", "MIN_LENGTH", "STREAM"),
    },
    ("ensemble", "inputs"): {"messages", "add_special_tokens"},
    ("tensorrt_llm_bls", "inputs"): {
        *("messages", "add_special_tokens", "skip_special_tokens", "include_stop", "draft_source"),
        "prediction",
        "timeout_ms",
        "stream_interval",
        *("runtime_top_p_min", "runtime_top_p_decay", "runtime_top_p_reset_ids"),
        *("early_stopping", "beam_search_diversity_rate", "min_p", "no_repeat_ngram_size"),
        *LLM_API,
    },
    ("tensorrt_llm", "inputs"): {
        *("min_p", "no_repeat_ngram_size", "return_top_log_probs"),
        *LLM_API,
    },
    ("tensorrt_llm", "outputs"): {"cached_tokens", "top_log_prob_ids", "top_log_probs"},
    ("tensorrt_llm_bls", "outputs"): {"finish_reason", "stop_reason", "seed", "num_draft_rounds"},
}
# Required there, optional here: a conversation may take the prompt's place; and an ensemble ends
# without a word where a step lacks a required input, so the step has to refuse by itself.
REFUSED_BY_US = {
    "preprocessing": {"QUERY", "REQUEST_OUTPUT_LEN"},
    "ensemble": {"text_input", "max_tokens"},
    "tensorrt_llm_bls": {"text_input"},
}


def rows_of_text(text: str, optional: Set[str]) -> set[str]:
    rows = {" ".join(line.split()) for line in text.splitlines() if line}
    return {line.removesuffix(" r") if line.split()[0] in optional else line for line in rows}


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_the_checked_in_configuration_is_what_the_table_writes(model: Model) -> None:
    """Nobody edits a tensor in config.pbtxt, or a row without writing the files again."""
    assert parsed(REPOSITORY, model.name) == model_config(model, PARAMETERS[model.name])


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_triton_reads_every_tensor_as_the_table_says(model: Model) -> None:
    """Names, types, dims, optional, reshape and ragged survive the way through the file."""
    config = parsed(REPOSITORY, model.name)
    assert rows_of_config(config.input, inputs=True) == rows_of_table(model.inputs)
    assert rows_of_config(config.output, inputs=False) == rows_of_table(model.outputs)


@pytest.mark.parametrize("side", ["inputs", "outputs"])
@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_the_table_is_tensorrt_llms_and_what_we_add_is_optional(model: Model, side: str) -> None:
    """A client of TensorRT-LLM's models finds every tensor as it knows it."""
    added = OURS.get((model.name, side), set())
    tensors = getattr(model, side)
    ours = tuple(tensor for tensor in tensors if tensor.name in added)
    theirs = tuple(tensor for tensor in tensors if tensor.name not in added)
    known = getattr(upstream_tensors, f"{model.name}_{side}".upper())
    assert rows_of_table(theirs) == rows_of_text(known, REFUSED_BY_US.get(model.name, set()))
    assert {tensor.name for tensor in ours} == added
    assert not any(tensor.required for tensor in ours)


def test_the_repository_holds_these_models_alone() -> None:
    """Triton loads every directory it finds."""
    assert sorted(path.name for path in REPOSITORY.iterdir()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_no_placeholder_is_left(name: str) -> None:
    """The files load as they stand; nothing is filled in."""
    assert "${" not in (REPOSITORY / name / "config.pbtxt").read_text(encoding="utf-8")


def test_only_models_that_stream_are_decoupled() -> None:
    """The ensemble streams through its steps and must not say so itself."""
    decoupled = {
        name for name in NAMES if parsed(REPOSITORY, name).model_transaction_policy.decoupled
    }
    assert decoupled == {"tensorrt_llm", "tensorrt_llm_bls"}


# --- the ensemble's wiring ------------------------------------------------------------------


def test_every_wire_of_the_ensemble_has_two_ends_and_nothing_is_left_over() -> None:
    """A step reads what the caller sent or an earlier step made, in the type it expects."""
    check_wires(REPOSITORY)


def test_options_reach_the_engine_under_the_engines_name() -> None:
    """The caller's names differ from tensorrt_llm's in three places and the table joins them."""
    (_, engine, _) = parsed(REPOSITORY, "ensemble").ensemble_scheduling.step
    renamed = {
        name: wire
        for name, wire in engine.input_map.items()
        if name != wire and not wire.startswith("_")
    }
    assert renamed == {
        "runtime_top_k": "top_k",
        "runtime_top_p": "top_p",
        "len_penalty": "length_penalty",
    }


# --- parameters -----------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_a_configuration_lists_exactly_the_models_parameters(model: Model) -> None:
    """What can be set is seen in the file; Triton's own switch stands where Triton looks."""
    keys = parameters_of(model.name).keys() - {"decoupled"}
    assert parsed(REPOSITORY, model.name).parameters.keys() == keys | FORMAT.keys()


def test_a_model_of_unary_requests_is_not_decoupled() -> None:
    """``decoupled`` is no parameter of the file but Triton's transaction policy."""
    config = model_config(BLS, {"decoupled": "false", "max_streams": "3"})
    assert not config.model_transaction_policy.decoupled
    assert config.parameters.keys() == {"max_streams", *FORMAT}
