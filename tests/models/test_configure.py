"""``trtllm-bls configure``: what it writes is what the C++ backend takes, or it says what is wrong.

``demo`` is a tokenizer and an engine directory as trtllm-build leaves it (the engine is empty).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.unit.configurations import check_wires, parsed, rows_of_config, rows_of_table
from tests.unit.tokenizers_made import directory
from trtllm_bls.cli import main
from trtllm_bls.configure.versions import parse_version
from trtllm_bls.contract import BLS, ENGINE, ENSEMBLE, MODELS, POSTPROCESSING, PREPROCESSING
from trtllm_bls.contract.backend import keys_of as keys_of_table
from trtllm_bls.contract.pbtxt import PARAMETERS
from trtllm_bls.engines.dialect import Dialect
from trtllm_bls.parameters import ENGINE_FACTS

CHECKOUT = Path(__file__).parents[2] / "models"
BUILD = {
    "max_batch_size": 32,
    "max_seq_len": 4096,
    "max_num_tokens": 8192,
    "max_draft_len": 10,
    "speculative_decoding_mode": 2,
    "plugin_config": {"use_paged_context_fmha": True},
}
PLAIN = BUILD | {"max_draft_len": 0, "speculative_decoding_mode": 1}
NOT_PAGED = {"plugin_config": {"use_paged_context_fmha": False}}
FACTS = json.loads((Path(__file__).parent / "cpp_backend_keys.json").read_text())


def make_engine(place: Path, build: dict[str, Any], **more: Any) -> Path:
    place.mkdir()
    config = {"version": "1.0.0", "pretrained_config": {}, "build_config": build} | more
    (place / "config.json").write_text(json.dumps(config))
    (place / "rank0.engine").touch()
    return place


@dataclass
class Demo:
    engine: Path
    tokenizer: Path
    out: Path

    def run(self, *more: str) -> Result:
        places = ["--engine-dir", self.engine, "--tokenizer-dir", self.tokenizer, "--out", self.out]
        return CliRunner().invoke(main, ["configure", *map(str, places), *more])

    def write(self, *more: str) -> Result:
        """Without loading the tokenizer, for speed."""
        result = self.run("--no-check", *more)
        assert result.exit_code == 0, result.output
        return result

    def config(self, model: str) -> Any:
        return parsed(self.out, model)

    def values(self, model: str) -> dict[str, str]:
        parameters = self.config(model).parameters.items()
        return {key: value.string_value for key, value in parameters}


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    engine = make_engine(tmp_path / "engine", BUILD)
    return Demo(engine, directory("byte-level"), tmp_path / "repository")


def error_of(result: Result) -> str:
    """The one line that says what is wrong."""
    assert result.exit_code != 0
    assert "Traceback" not in result.output
    return result.output.strip().splitlines()[-1]


# --- what is written ------------------------------------------------------------------------


OLD_SPELLINGS = {"min_length", "random_seed"}
GONE = {
    "tensorrt_llm": OLD_SPELLINGS | {"runtime_top_p_min"},
    "ensemble": OLD_SPELLINGS,
    "preprocessing": {"MIN_LENGTH"},
}


@pytest.mark.parametrize("model", MODELS, ids=[model.name for model in MODELS])
def test_every_tensor_is_the_contracts(demo: Demo, model: Any) -> None:
    """The last release has every row but the old spellings and one that C++ would not read."""
    demo.write("--version", "last")
    config = demo.config(model.name)
    left = [t for t in model.inputs if t.name not in GONE.get(model.name, ())]
    assert rows_of_config(config.input, inputs=True) == rows_of_table(left)
    assert rows_of_config(config.output, inputs=False) == rows_of_table(model.outputs)


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


@pytest.mark.parametrize("model", [PREPROCESSING, POSTPROCESSING, BLS], ids=lambda m: m.name)
def test_our_own_models_come_with_their_doors(demo: Demo, model: Any) -> None:
    """The same model.py as in the checkout, and the user's tokenizer."""
    demo.write()
    door = Path(model.name, "1", "model.py")
    assert (demo.out / door).read_bytes() == (CHECKOUT / door).read_bytes()
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
    limits = Dialect.of(demo.config("tensorrt_llm")).limits
    assert (limits.max_sequence_tokens, limits.max_draft_tokens) == (4096, 10)
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


def release_number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def keys_of(release: str, which: str) -> set[str]:
    """The keys that the release reads or demands, as its sources say."""
    number = release_number(release)
    return {
        key
        for key, facts in FACTS["keys"].items()
        if which in facts
        and release_number(facts[which][0]) <= number <= release_number(facts[which][1])
    }


# What others read: Triton, and the orchestrator.
NOT_THE_BACKENDS = {"FORCE_CPU_ONLY_INPUT_TENSORS", *(row.key for row in ENGINE_FACTS)}


@pytest.mark.parametrize("release", FACTS["releases"])
def test_a_release_gets_the_keys_it_reads_and_all_it_demands(demo: Demo, release: str) -> None:
    """One that is absent can end the load; one that nobody reads promises what does not happen."""
    demo.write("--version", release)
    written = demo.values("tensorrt_llm")
    assert written.keys() - NOT_THE_BACKENDS <= keys_of(release, "read_by")
    assert keys_of(release, "demanded_by") <= written.keys()
    assert written["gpt_model_path"]
    assert written["gpt_model_type"]


@pytest.mark.parametrize("release", FACTS["releases"])
def test_every_key_of_a_release_and_no_other_can_be_set(release: str) -> None:
    """In the spelling of that release."""
    version = parse_version(release)
    assert keys_of_table(version).keys() == keys_of(release, "read_by")
    demanded = {key for key, row in keys_of_table(version).items() if row.demanded}
    assert demanded >= keys_of(release, "demanded_by")


@pytest.mark.parametrize(
    ("release", "key", "value", "mend"),
    [
        ("0.13", "multi_block_mode", "true", "did you mean multiBlockMode?"),
        ("0.15", "multiBlockMode", "true", "did you mean multi_block_mode?"),
        ("0.14", "enable_context_fmha_fp32_acc", "true", "enableContextFMHAFP32Acc?"),
        ("0.12", "max_attention_window_size", "1024,2048", "a whole number"),
    ],
)
def test_the_other_spelling_is_refused(
    demo: Demo, release: str, key: str, value: str, mend: str
) -> None:
    """The backend would ignore it without a word."""
    line = error_of(demo.run("--version", release, "--set", f"tensorrt_llm.{key}={value}"))
    assert mend in line


def test_the_right_spelling_is_written(demo: Demo) -> None:
    """Of a key and of a value whose form has changed."""
    demo.write("--version", "0.13", "--set", "tensorrt_llm.multiBlockMode=true")
    assert demo.values("tensorrt_llm")["multiBlockMode"] == "true"
    window = "tensorrt_llm.max_attention_window_size=1024,2048"
    demo.write("--version", "0.13", "--force", "--set", window)


# --- what the engine was built for ----------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "options", "expected"),
    [
        ({}, [], 4095),
        ({"max_num_tokens": 2048}, [], 2048),
        ({"max_num_tokens": 2048}, ["--set", "tensorrt_llm.enable_chunked_context=true"], 4095),
        ({"max_seq_len": None, "max_input_len": 1000, "max_output_len": 500}, [], 1000),
    ],
)
def test_the_longest_prompt_is_told(
    demo: Demo, tmp_path: Path, build: dict[str, Any], options: list[str], expected: int
) -> None:
    """It must fit one forward pass unless it may be chunked, and leave room for a token."""
    demo.engine = make_engine(tmp_path / "built", BUILD | build)
    result = demo.write(*options)
    assert demo.values("tensorrt_llm")["max_prompt_tokens"] == str(expected)
    assert ("limited to 2048 tokens by max_num_tokens" in result.output) == (expected == 2048)


@pytest.mark.parametrize(("mode", "name"), [(1, "none"), (4, "medusa"), (32, "eagle")])
def test_an_engine_that_speculates_by_itself_takes_no_drafts(
    demo: Demo, tmp_path: Path, mode: int, name: str
) -> None:
    """Its ``max_draft_len`` counts something else."""
    build = BUILD | {"speculative_decoding_mode": mode}
    demo.engine = make_engine(tmp_path / name, build)
    demo.write()
    values = demo.values("tensorrt_llm")
    assert (values["speculative_decoding_mode"], values["max_draft_len"]) == (name, "0")


def test_drafts_need_the_cache_to_be_reused(demo: Demo, tmp_path: Path) -> None:
    """Where it is off, the orchestrator is told that no draft is taken."""
    demo.write("--set", "tensorrt_llm.enable_kv_cache_reuse=false")
    assert demo.values("tensorrt_llm")["max_draft_len"] == "0"
    demo.engine = make_engine(tmp_path / "not_paged", BUILD | NOT_PAGED)
    demo.write("--force")
    assert demo.values("tensorrt_llm")["max_draft_len"] == "0"


@pytest.mark.parametrize(
    ("release", "one_step", "said"),
    [("0.18.2", "true", "ends every request after one step"), ("0.19", None, "not certain")],
)
def test_the_one_step_rule_is_said_and_told(
    demo: Demo, tmp_path: Path, release: str, one_step: str | None, said: str
) -> None:
    """Before 0.19 plain requests to a target for external drafts would look finished."""
    output = demo.write("--version", release).output
    assert demo.values("tensorrt_llm").get("one_step_requests") == one_step
    assert said in output
    demo.engine = make_engine(tmp_path / "plain", PLAIN)
    assert said not in demo.write("--version", release, "--force").output
    assert "one_step_requests" not in demo.values("tensorrt_llm")


@pytest.mark.parametrize("key", ["enable_kv_cache_reuse", "enable_chunked_context"])
def test_what_needs_paged_context_is_refused_without_it(
    demo: Demo, tmp_path: Path, key: str
) -> None:
    """The engine would say so at its first request."""
    demo.engine = make_engine(tmp_path / "not_paged", BUILD | NOT_PAGED)
    line = error_of(demo.run("--set", f"tensorrt_llm.{key}=true"))
    assert key in line
    assert "--use_paged_context_fmha enable" in line


# --- how tensorrt_llm_bls serves ------------------------------------------------------------


def test_unary_requests_are_a_choice_for_the_bls_model_alone(demo: Demo) -> None:
    """The engine answers in streams whatever its callers do, and so does the ensemble of it."""
    demo.write("--decoupled", "false", "--bls-instances", "3")
    assert not demo.config("tensorrt_llm_bls").model_transaction_policy.decoupled
    assert demo.config("tensorrt_llm").model_transaction_policy.decoupled
    counts = {m.name: demo.config(m.name).instance_group[0].count for m in (BLS, ENGINE)}
    assert counts == {"tensorrt_llm_bls": 3, "tensorrt_llm": 1}
    demo.write("--force")
    assert demo.config("tensorrt_llm_bls").model_transaction_policy.decoupled
    demo.write("--force", "--set", "tensorrt_llm_bls.decoupled=false")
    assert not demo.config("tensorrt_llm_bls").model_transaction_policy.decoupled


# --- a draft engine -------------------------------------------------------------------------


def test_a_draft_engine_becomes_a_model_and_drafts_by_default(demo: Demo, tmp_path: Path) -> None:
    """The same model under another name, memory shared, and the BLS model told of it."""
    draft = make_engine(tmp_path / "draft", PLAIN | {"max_batch_size": 16})
    demo.write("--draft-engine-dir", str(draft))
    one, other = demo.config("tensorrt_llm"), demo.config("tensorrt_llm_draft")
    assert (list(one.input), one.backend) == (list(other.input), other.backend)
    assert demo.values("tensorrt_llm_draft")["gpt_model_path"] == str(draft)
    assert demo.values("tensorrt_llm_draft")["kv_cache_free_gpu_mem_fraction"] == "0.45"
    assert demo.values("tensorrt_llm")["kv_cache_free_gpu_mem_fraction"] == "0.45"
    bls = demo.values("tensorrt_llm_bls")
    assert bls["tensorrt_llm_draft_model_name"] == "tensorrt_llm_draft"
    assert bls["draft_source"] == "model"
    assert one.max_batch_size == other.max_batch_size == 16


def test_a_target_that_cannot_verify_drafts_is_refused(demo: Demo, tmp_path: Path) -> None:
    """It has to be built for that, and the line says how."""
    plain = make_engine(tmp_path / "plain", PLAIN)
    draft, demo.engine = demo.engine, plain
    line = error_of(demo.run("--draft-engine-dir", str(draft)))
    assert "--draft-engine-dir" in line
    assert "--max_draft_len" in line


@pytest.mark.parametrize(
    ("build", "options", "said"),
    [
        ({"speculative_decoding_mode": 4}, [], "speculative_decoding_mode medusa"),
        (NOT_PAGED, [], "--use_paged_context_fmha enable"),
        ({}, ["--set", "tensorrt_llm.enable_kv_cache_reuse=false"], "enable_kv_cache_reuse=true"),
        (
            {},
            ["--set", "tensorrt_llm.speculative_decoding_fast_logits=true"],
            "speculative_decoding_fast_logits",
        ),
        (
            {},
            ["--set", "tensorrt_llm_draft.speculative_decoding_fast_logits=1"],
            "speculative_decoding_fast_logits",
        ),
    ],
)
@pytest.mark.parametrize("source", ["model", "ngram"])
def test_what_could_not_verify_drafts_is_refused(
    demo: Demo, tmp_path: Path, build: dict[str, Any], options: list[str], said: str, source: str
) -> None:
    """Drafts of a model or of n-grams: the first request would fail, or drafting stop unseen."""
    draft = make_engine(tmp_path / "draft", PLAIN)
    demo.engine = make_engine(tmp_path / "target", BUILD | build)
    drafting = ["--draft-engine-dir", str(draft)]
    if source == "ngram" and "draft." not in str(options):
        drafting = ["--set", "tensorrt_llm_bls.draft_source=ngram"]
    line = error_of(demo.run(*drafting, *options))
    assert said in line
    assert not demo.out.exists()


def test_a_draft_engine_that_ends_after_one_step_is_refused(demo: Demo, tmp_path: Path) -> None:
    """Each of its drafts would be one token; a later release lets it run on."""
    draft = str(make_engine(tmp_path / "draft", BUILD))
    line = error_of(demo.run("--version", "0.18", "--draft-engine-dir", draft))
    assert "--draft-engine-dir" in line
    assert "speculative_decoding_mode" in line
    demo.write("--version", "0.20", "--draft-engine-dir", draft)


def test_each_engines_logits_have_its_own_type(demo: Demo, tmp_path: Path) -> None:
    """A draft in half precision beside a target in full; what a target is given is its own type."""
    half = {"pretrained_config": {"logits_dtype": "float16"}}
    draft = make_engine(tmp_path / "draft", PLAIN, **half)
    demo.write("--draft-engine-dir", str(draft))
    rows = {
        model: rows_of_config(demo.config(model).output, inputs=False)
        for model in ("tensorrt_llm", "tensorrt_llm_draft")
    }
    assert "generation_logits FP32 [-1,-1,-1]" in rows["tensorrt_llm"]
    assert "generation_logits FP16 [-1,-1,-1]" in rows["tensorrt_llm_draft"]
    assert "draft_logits FP32 [-1,-1] R" in rows_of_config(
        demo.config("tensorrt_llm").input, inputs=True
    )


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
        ("--batch-scheduler-policy", "fastest"),
        ("--version", "0.8"),
        ("--version", "newest"),
        ("--set", "max_beam_width=2"),
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


# --- what is there already ------------------------------------------------------------------


def test_a_repository_that_is_there_is_not_touched(demo: Demo) -> None:
    """One line, and the file is still the old one."""
    demo.out.mkdir()
    (demo.out / "notes.txt").write_text("mine")
    line = error_of(demo.run())
    assert f"--out {demo.out}" in line
    assert "--force" in line
    assert [path.name for path in demo.out.iterdir()] == ["notes.txt"]


def test_force_replaces_our_models_and_nothing_else(demo: Demo) -> None:
    """No model.py or draft model of an earlier repository is left to be loaded."""
    demo.write("--draft-engine-dir", str(demo.engine))
    (demo.out / "tensorrt_llm" / "1" / "model.py").write_text("old")
    (demo.out / "another_model").mkdir()
    demo.write("--force")
    found = {path.name for path in demo.out.iterdir()}
    assert found == {model.name for model in MODELS} | {"another_model"}
    assert list((demo.out / "tensorrt_llm" / "1").iterdir()) == []
