"""The tensor table, the checked-in configurations and the models' parameters agree."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import upstream_tensors
from tests.helpers.model_configurations import check_wires, parsed, rows_of_config, rows_of_table
from trtllm_bls.contract import MODELS, Model
from trtllm_bls.contract.pbtxt import PARAMETERS, model_config
from trtllm_bls.parameters import BlsParameters, EngineParameters, Parameters

REPOSITORY = Path(__file__).parents[2] / "models"
NAMES = [model.name for model in MODELS]

# What we add to TensorRT-LLM's tensors; docs/contract.md tells users of each.
OURS = {
    ("preprocessing", "inputs"): {
        *("MESSAGES", "ADD_SPECIAL_TOKENS", "MIN_TOKENS", "MIN_LENGTH", "STREAM"),
    },
    ("ensemble", "inputs"): {"messages", "add_special_tokens"},
    ("tensorrt_llm_bls", "inputs"): {
        *("messages", "add_special_tokens", "skip_special_tokens", "include_stop", "draft_source"),
        "timeout_ms",
        *("runtime_top_p_min", "runtime_top_p_decay", "runtime_top_p_reset_ids"),
        *("early_stopping", "beam_search_diversity_rate"),
    },
    ("tensorrt_llm_bls", "outputs"): {"finish_reason", "stop_reason", "seed", "num_draft_rounds"},
}
# A conversation may take the prompt's place, so these are required there and optional here.
PROMPTS = {"QUERY", "text_input"}


def rows_of_text(text: str) -> set[str]:
    rows = {" ".join(line.split()) for line in text.splitlines() if line}
    return {line.removesuffix(" r") if line.split()[0] in PROMPTS else line for line in rows}


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
    assert rows_of_table(theirs) == rows_of_text(known)
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


class Listening(Parameters):
    """Parameters that remember which keys were asked for."""

    def __init__(self, model: str, directory: Path) -> None:
        values = {
            key: {"string_value": "." if key in ("model_dir", "tokenizer_dir") else value}
            for key, value in PARAMETERS[model].items()
        }
        config = json.dumps({"name": model, "parameters": values})
        super().__init__({"model_config": config, "model_repository": str(directory / model)})
        self.asked: set[str] = set()

    def text(self, key: str, default: str = "", env: str | None = None) -> str:
        self.asked.add(key)
        return super().text(key, default, env)


@pytest.mark.parametrize(
    ("model", "reader"),
    [("tensorrt_llm_bls", BlsParameters.read), ("tensorrt_llm", EngineParameters.read)],
)
def test_a_configuration_lists_exactly_the_parameters_that_are_read(
    model: str, reader: Any, tmp_path: Path
) -> None:
    """What can be set is seen in the file, and nothing in it is without effect."""
    parameters = Listening(model, tmp_path)
    reader(parameters)
    assert parameters.asked == set(PARAMETERS[model])


@pytest.mark.parametrize("model", ["preprocessing", "postprocessing"])
def test_a_small_door_reads_exactly_its_parameters(model: str) -> None:
    """The same for the models that read their parameters in model.py itself."""
    source = (REPOSITORY / model / "1" / "model.py").read_text(encoding="utf-8")
    assert set(re.findall(r'parameters\.\w+\("(\w+)"', source)) == set(PARAMETERS[model])
