"""``trtllm-bls configure``: what it writes is what the C++ backend takes, or it says what is wrong.

``demo`` is a tokenizer and an engine directory as trtllm-build leaves it (the engine is empty).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.model_configurations import check_wires, rows_of_config, rows_of_table
from tests.models.configured import BUILD, NOT_PAGED, Demo, error_of, make_engine
from trtllm_bls.configure.pbtxt import PARAMETERS
from trtllm_bls.engines.triton_model import DeployedModel
from trtllm_bls.wire.contract import BLS, ENGINE, ENSEMBLE, MODELS, POSTPROCESSING, PREPROCESSING

CHECKOUT = Path(__file__).parents[2] / "models"


# --- what is written ------------------------------------------------------------------------


OLD_SPELLINGS = {"min_length", "random_seed"}
LLM_API = {
    *("lora_name", "lora_path", "lora_ckpt_source", "cache_salt", "priority"),
    "logits_post_processor_name",
}
GONE = {
    "tensorrt_llm": OLD_SPELLINGS
    | {"runtime_top_p_min", "min_p", "return_top_log_probs"}
    | {"cached_tokens", "top_log_prob_ids", "top_log_probs"}
    | LLM_API,
    "ensemble": OLD_SPELLINGS,
    "preprocessing": {"MIN_LENGTH"},
}


@pytest.mark.parametrize("model", MODELS, ids=[model.name for model in MODELS])
def test_every_tensor_is_the_contracts(demo: Demo, model: Any) -> None:
    """The last release has every row but the old spellings and what C++ would not read or send."""
    demo.write("--version", "last")
    config = demo.config(model.name)
    gone = GONE.get(model.name, set())
    inputs, outputs = (
        rows_of_table([tensor for tensor in tensors if tensor.name not in gone])
        for tensors in (model.inputs, model.outputs)
    )
    assert rows_of_config(config.input, inputs=True) == inputs
    assert rows_of_config(config.output, inputs=False) == outputs


def test_the_engines_slot_holds_the_cpp_backend_and_no_python(demo: Demo) -> None:
    """Triton takes the backend by its name; the version directory must be there and empty."""
    demo.write("--max-queue-size", "7", "--max-queue-delay-us", "1000")
    config = demo.config("tensorrt_llm")
    assert config.backend == "tensorrtllm"
    assert config.model_transaction_policy.decoupled
    assert list(config.dynamic_batching.preferred_batch_size) == [32]
    assert config.dynamic_batching.default_queue_policy.max_queue_size == 7
    assert config.dynamic_batching.max_queue_delay_microseconds == 1000
    assert list((demo.out / "tensorrt_llm" / "1").iterdir()) == []


@pytest.mark.parametrize(("largest", "handed_over"), [(32, 16), (8, 8)])
def test_so_many_requests_are_handed_over_as_one_process_reads_at_once(
    demo: Demo, largest: int, handed_over: int
) -> None:
    """More would wait in that process while others have nothing to do; Triton refuses a size
    above the largest batch."""
    demo.write("--max-batch-size", str(largest))
    config = demo.config(BLS.name)
    assert config.max_batch_size == largest
    assert list(config.dynamic_batching.preferred_batch_size) == [handed_over]


@pytest.mark.parametrize("model", [PREPROCESSING, POSTPROCESSING, BLS], ids=lambda m: m.name)
def test_our_own_models_come_with_their_model_files(demo: Demo, model: Any) -> None:
    """The same model.py as in the checkout, and the user's tokenizer."""
    demo.write()
    model_file = Path(model.name, "1", "model.py")
    assert (demo.out / model_file).read_bytes() == (CHECKOUT / model_file).read_bytes()
    assert demo.values(model.name)["tokenizer_dir"] == str(demo.tokenizer)
    assert demo.values(model.name).keys() == PARAMETERS[model.name].keys() - {"decoupled"}


def test_every_mandatory_parameter_is_given(demo: Demo) -> None:
    """What the backend cannot do without, and what the orchestrator relies on."""
    demo.write()
    expected = {
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": str(demo.engine),
        "batch_scheduler_policy": "guaranteed_no_evict",
        "kv_cache_free_gpu_mem_fraction": "0.9",
        "max_beam_width": "1",
        "enable_kv_cache_reuse": "true",
        "exclude_input_in_output": "true",
        "executor_worker_path": "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
    }
    assert expected.items() <= demo.values("tensorrt_llm").items()


def test_nothing_is_left_to_fill_in(demo: Demo) -> None:
    """Not one placeholder in the whole repository."""
    demo.write()
    texts = [path.read_text() for path in demo.out.rglob("config.pbtxt")]
    assert len(texts) == len(MODELS)
    assert not any("${" in text for text in texts)


def test_the_engines_limits_reach_the_orchestrator(demo: Demo) -> None:
    """It reads them where it looks for every engine's limits, and sizes come from the build."""
    demo.write()
    capacity = DeployedModel.of(demo.config("tensorrt_llm")).capacity
    assert (capacity.max_sequence_tokens, capacity.max_draft_tokens) == (4096, 10)
    assert {demo.config(model.name).max_batch_size for model in MODELS} == {32}


def test_the_types_of_logits_and_cache_reuse_follow_the_build(demo: Demo, tmp_path: Path) -> None:
    """An engine with half-precision logits or without paged attention fails otherwise."""
    build = BUILD | NOT_PAGED
    demo.engine = make_engine(
        tmp_path / "half", build, pretrained_config={"logits_dtype": "float16"}
    )
    result = demo.write()
    check_wires(demo.out)
    outputs = rows_of_config(demo.config("ensemble").output, inputs=False)
    assert "context_logits FP16 [-1,-1]" in outputs
    assert demo.values("tensorrt_llm")["enable_kv_cache_reuse"] == "false"
    assert "KV cache reuse is off" in result.output


def test_the_answer_names_what_was_written_and_what_to_do_next(demo: Demo) -> None:
    """One line per model, then the command that serves them."""
    result = demo.run()
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert len(lines) == len(MODELS) + 1
    assert f"wrote {demo.out / 'tensorrt_llm'} (tensorrtllm)" in lines
    assert lines[-1] == f"next: trtllm-bls serve --model-repository {demo.out}"


def test_an_engine_of_several_ranks_is_not_sent_to_serve(demo: Demo) -> None:
    """It needs one server process per rank."""
    (demo.engine / "rank1.engine").touch()
    assert "--world_size 2" in demo.write().output


# --- versions -------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.9", "0.11", "0.13", "0.16", "0.18", "0.19", "0.20", "1.0"])
def test_the_ensemble_of_every_release_is_wired(demo: Demo, version: str) -> None:
    """Nothing is passed to an input that the release does not have."""
    demo.write("--version", version)
    check_wires(demo.out)


def engine_rows(demo: Demo, *more: str) -> set[str]:
    demo.write("--force", *more)
    return rows_of_config(demo.config("tensorrt_llm").input, inputs=True)


def test_an_option_is_spelled_as_the_release_spells_it(demo: Demo) -> None:
    """0.20 renamed two; the ensemble takes what its engine takes, the BLS model always both."""
    new_spellings = {"min_tokens", "seed"}
    for version, spelled, other in (
        ("0.19", OLD_SPELLINGS, new_spellings),
        ("0.20", new_spellings, OLD_SPELLINGS),
    ):
        demo.write("--version", version, "--force")
        for model in (ENGINE, ENSEMBLE):
            names = {tensor.name for tensor in demo.config(model.name).input}
            assert spelled <= names
            assert not other & names
        assert spelled | other <= {tensor.name for tensor in demo.config(BLS.name).input}


def test_a_release_has_what_it_had(demo: Demo) -> None:
    """Rows from both sides of their release."""
    assert "request_output_len INT32 [1] r" in engine_rows(demo, "--version", "0.11")
    assert "request_output_len INT32 [1] r s" in engine_rows(demo, "--version", "0.12")
    assert "num_return_sequences INT32 [1] s" not in engine_rows(demo, "--version", "0.13")
    assert "num_return_sequences INT32 [1] s" in engine_rows(demo, "--version", "v0.14.0")


def test_the_release_is_the_engines_unless_it_is_named(demo: Demo, tmp_path: Path) -> None:
    """An engine runs on the release that built it."""
    demo.engine = make_engine(tmp_path / "older", BUILD, version="0.17.0.post1")
    assert "random_seed UINT64 [1] s" in engine_rows(demo)
    assert "seed UINT64 [1] s" in engine_rows(demo, "--version", "last")
    demo.engine = make_engine(tmp_path / "own", BUILD, version="main")
    assert f"{demo.engine}: version main: use a release" in error_of(demo.run("--force"))
    assert "seed UINT64 [1] s" in engine_rows(demo, "--version", "last")


# --- how tensorrt_llm_bls serves ------------------------------------------------------------


def test_unary_requests_are_a_choice_for_all_models(demo: Demo) -> None:
    """Each answers once, with the prompt in front, as TensorRT-LLM's models do then."""
    names = ("tensorrt_llm_bls", "tensorrt_llm")
    demo.write("--decoupled", "false", "--bls-instances", "3")
    assert [demo.config(name).model_transaction_policy.decoupled for name in names] == [False] * 2
    assert [demo.values(name)["exclude_input_in_output"] for name in names] == ["false"] * 2
    counts = {m.name: demo.config(m.name).instance_group[0].count for m in (BLS, ENGINE)}
    assert counts == {"tensorrt_llm_bls": 3, "tensorrt_llm": 1}
    demo.write("--force")
    assert [demo.config(name).model_transaction_policy.decoupled for name in names] == [True] * 2
    demo.write("--force", "--set", "tensorrt_llm_bls.decoupled=false")
    assert not demo.config("tensorrt_llm_bls").model_transaction_policy.decoupled


# --- values that cannot be used -------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-batch-size", "0"),
        ("--max-batch-size", "33"),
        ("--max-queue-size", "-1"),
        ("--max-queue-delay-us", "soon"),
        ("--kv-cache-free-gpu-mem-fraction", "1.1"),
        ("--kv-cache-free-gpu-mem-fraction", "0"),
        ("--kv-cache-free-gpu-mem-fraction", "nan"),
        ("--set", "batch_scheduler_policy=fastest"),
        ("--version", "0.8"),
        ("--version", "newest"),
        ("--set", "max_beam_with=2"),
        ("--set", "max_beam_width"),
        ("--set", "tensorrt_llm_draft.max_beam_width=2"),
        ("--draft-gpu-device-ids", "1"),
        ("--gpu-device-ids", "first"),
        ("--max-num-tokens", "4096"),
        ("--engine-url", "trtllm://127.0.0.1:50051"),
        ("--set", "tensorrt_lm.max_beam_width=2"),
        ("--set", "tensorrt_llm.max_beam_with=2"),
        ("--set", "tensorrt_llm.max_beam_width=0"),
        ("--set", "tensorrt_llm.enable_kv_cache_reuse=yes"),
        ("--set", "tensorrt_llm.gpt_model_type=V1"),
        ("--set", "tensorrt_llm.gpu_device_ids=${ids}"),
        ("--set", "tensorrt_llm_bls.accumulate=true"),
    ],
)
def test_a_bad_value_is_one_line_naming_option_and_value(
    demo: Demo, option: str, value: str
) -> None:
    """And nothing is written."""
    line = error_of(demo.run(option, value))
    assert option in line
    assert value in line
    assert not demo.out.exists()


@pytest.mark.parametrize(
    ("model", "key", "value"),
    [
        ("tensorrt_llm_bls", "draft_source", "oracle"),
        ("tensorrt_llm_bls", "engine_stall_seconds", "-1"),
        ("preprocessing", "add_special_tokens", "perhaps"),
        ("postprocessing", "skip_special_tokens", "${skip}"),
    ],
)
def test_our_own_parameters_are_judged_by_their_own_reader(
    demo: Demo, model: str, key: str, value: str
) -> None:
    """The line is the one the model would fail with at load."""
    line = error_of(demo.run("--set", f"{model}.{key}={value}"))
    assert model in line
    assert f"{key} = '{value}'" in line


def test_a_good_value_is_written_as_it_stands(demo: Demo) -> None:
    """Also for a parameter that is not written otherwise."""
    demo.write(
        *("--set", "tensorrt_llm.decoding_mode=top_k", "--set", "tensorrt_llm_bls.max_draft_len=4"),
        *("--set", "tensorrt_llm.enable_chunked_context=True", "--max-batch-size", "8"),
    )
    assert demo.values("tensorrt_llm")["decoding_mode"] == "top_k"
    assert demo.values("tensorrt_llm")["enable_chunked_context"] == "True"
    assert demo.values("tensorrt_llm_bls")["max_draft_len"] == "4"
    assert demo.config("ensemble").max_batch_size == 8


@pytest.mark.parametrize("missing", ["config.json", "rank0.engine"])
def test_a_directory_without_an_engine_is_refused(demo: Demo, missing: str) -> None:
    """The line names the option, the directory and what is not there."""
    (demo.engine / missing).unlink()
    line = error_of(demo.run())
    assert f"--engine-dir {demo.engine}" in line
    assert missing.removeprefix("rank0") in line


def test_a_directory_without_a_tokenizer_is_refused(demo: Demo, tmp_path: Path) -> None:
    """Better now than when the server loads."""
    demo.tokenizer = tmp_path / "empty"
    demo.tokenizer.mkdir()
    line = error_of(demo.run())
    assert "--tokenizer-dir" in line
    assert str(demo.tokenizer) in line


def test_unchecked_directories_may_be_on_another_machine(demo: Demo) -> None:
    """Then sizes are ours and the release is the last."""
    demo.engine = demo.tokenizer = Path("/elsewhere")
    demo.write()
    assert demo.values("tensorrt_llm")["gpt_model_path"] == "/elsewhere"
    assert demo.config("tensorrt_llm").max_batch_size == 64


def test_what_cannot_be_written_is_one_line(demo: Demo, tmp_path: Path) -> None:
    """A script without a directory is refused before anything is written."""
    line = error_of(demo.run("--no-check", "--slurm", "/nowhere/job.sh"))
    assert line == "error: --slurm /nowhere/job.sh: there is no such directory"
    assert not demo.out.exists()
    (tmp_path / "file").touch()
    demo.out = tmp_path / "file" / "repository"
    line = error_of(demo.run("--no-check"))
    assert str(demo.out) in line and "cannot be written: Not a directory" in line


# --- what is there already ------------------------------------------------------------------


def test_a_repository_that_is_there_is_not_touched(demo: Demo) -> None:
    """One line, and the file is still the old one."""
    demo.out.mkdir()
    (demo.out / "notes.txt").write_text("mine")
    line = error_of(demo.run())
    assert f"--out {demo.out}" in line
    assert "--force" in line
    assert [path.name for path in demo.out.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("name", ["engine", "tokenizer"])
def test_force_deletes_no_engine_and_no_tokenizer(demo: Demo, name: str) -> None:
    """Some lie in the version directory of the very model that is to be replaced."""
    inside = Path(shutil.copytree(getattr(demo, name), demo.out / "tensorrt_llm" / "1"))
    setattr(demo, name, inside)
    line = error_of(demo.run("--no-check", "--force"))
    assert line == f"error: --force: would delete {inside}; choose another --out"
    assert any(inside.iterdir())


def test_force_replaces_our_models_and_nothing_else(demo: Demo) -> None:
    """No model.py or draft model of an earlier repository is left to be loaded."""
    demo.write("--draft-engine-dir", str(demo.engine))
    (demo.out / "tensorrt_llm" / "1" / "model.py").write_text("old")
    (demo.out / "another_model").mkdir()
    demo.write("--force")
    found = {path.name for path in demo.out.iterdir()}
    assert found == {model.name for model in MODELS} | {"another_model"}
    assert list((demo.out / "tensorrt_llm" / "1").iterdir()) == []
