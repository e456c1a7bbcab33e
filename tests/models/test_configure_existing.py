"""``configure --from``: a repository laid out and filled in as TensorRT-LLM's own is converted."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.model_configurations import check_wires
from tests.helpers.small_tokenizers import directory
from tests.models.configured import BUILD, PLAIN, Written, error_of, make_engine

MODEL = """
name: "{name}"
backend: "{backend}"
max_batch_size: 16
{more}
parameters: {{
{parameters}
}}
"""


def write_model(
    repository: Path,
    name: str,
    parameters: dict[str, str],
    backend: str = "python",
    more: str = "",
) -> None:
    entries = "\n}\nparameters: {\n".join(
        f'  key: "{key}"\n  value: {{ string_value: "{value}" }}'
        for key, value in parameters.items()
    )
    text = MODEL.format(name=name, backend=backend, parameters=entries, more=more)
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(text)


BATCHING = """
model_transaction_policy { decoupled: true }
dynamic_batching {
    preferred_batch_size: [ 16 ]
    max_queue_delay_microseconds: 500
    default_queue_policy: { max_queue_size: 7 }
}
instance_group [ { count: 1 kind : KIND_CPU } ]
"""
BLS = """
model_transaction_policy { decoupled: true }
instance_group [ { count: 12 kind : KIND_CPU } ]
"""


def engine_parameters(engine: Path, **more: str) -> dict[str, str]:
    return {
        "max_beam_width": "1",
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": str(engine),
        "encoder_model_path": "${encoder_engine_dir}",
        "max_tokens_in_paged_kv_cache": "${max_tokens_in_paged_kv_cache}",
        "batch_scheduler_policy": "max_utilization",
        "kv_cache_free_gpu_mem_fraction": "0.6",
        "exclude_input_in_output": "true",
        "enable_kv_cache_reuse": "True",
        "executor_worker_path": "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
        **more,
    }


@dataclass
class Existing(Written):
    repository: Path

    def places(self) -> list[object]:
        return ["--from", self.repository]


@pytest.fixture
def existing(tmp_path: Path) -> Existing:
    repository, tokenizer = tmp_path / "existing", str(directory("byte-level"))
    engine = make_engine(tmp_path / "engine", BUILD, version="0.16.0")
    write_model(repository, "tensorrt_llm", engine_parameters(engine), "tensorrtllm", BATCHING)
    write_model(
        repository, "preprocessing", {"tokenizer_dir": tokenizer, "add_special_tokens": "False"}
    )
    write_model(repository, "postprocessing", {"tokenizer_dir": tokenizer})
    write_model(
        repository,
        "tensorrt_llm_bls",
        {
            "accumulate_tokens": "true",
            "tensorrt_llm_model_name": "tensorrt_llm",
            "tensorrt_llm_draft_model_name": "${tensorrt_llm_draft_model_name}",
            "multimodal_encoders_name": "encoders",
        },
        more=BLS,
    )
    return Existing(tmp_path / "new", repository)


def test_what_was_filled_in_is_kept(existing: Existing, tmp_path: Path) -> None:
    """Engine, tokenizer, sizes and every value that the release reads."""
    existing.write()
    engine = existing.values("tensorrt_llm")
    kept = engine_parameters(tmp_path / "engine")
    for key in ("gpt_model_path", "batch_scheduler_policy", "kv_cache_free_gpu_mem_fraction"):
        assert engine[key] == kept[key]
    assert engine["enable_kv_cache_reuse"] == "True"
    config = existing.config("tensorrt_llm")
    assert config.max_batch_size == 16
    assert config.dynamic_batching.max_queue_delay_microseconds == 500
    assert config.dynamic_batching.default_queue_policy.max_queue_size == 7
    for model in ("preprocessing", "tensorrt_llm_bls"):
        assert existing.values(model)["tokenizer_dir"] == str(directory("byte-level"))
        assert existing.values(model)["add_special_tokens"] == "False"
    assert existing.values("tensorrt_llm_bls")["accumulate_tokens"] == "true"
    check_wires(existing.out)


def test_placeholders_and_what_has_no_place_are_told(existing: Existing) -> None:
    """Nothing is dropped without a word, and nothing is left to fill in."""
    output = existing.write().output
    assert "not filled in, so not set: encoder_model_path, max_tokens_in_paged_kv_cache" in output
    assert (
        "tensorrt_llm_bls.multimodal_encoders_name is left out: tensorrt_llm_bls has no parameter"
        in output
    )
    assert "had 12 instances" in output
    assert existing.config("tensorrt_llm_bls").instance_group[0].count == 1
    assert "${" not in "".join(path.read_text() for path in existing.out.rglob("config.pbtxt"))


def test_an_option_beats_what_was_there(existing: Existing) -> None:
    """And ``--set`` comes after the values that were read."""
    existing.write("--max-batch-size", "8", "--set", "enable_kv_cache_reuse=false")
    assert existing.config("tensorrt_llm").max_batch_size == 8
    assert existing.values("tensorrt_llm")["enable_kv_cache_reuse"] == "false"


def test_a_value_that_had_no_effect_is_left_out(existing: Existing, tmp_path: Path) -> None:
    """0.13 does not read the later spelling of multiBlockMode."""
    engine = engine_parameters(tmp_path / "engine", multi_block_mode="true")
    shutil.rmtree(existing.repository / "tensorrt_llm")
    write_model(existing.repository, "tensorrt_llm", engine, "python", BATCHING)
    output = existing.write("--version", "0.13").output
    assert "tensorrt_llm.multi_block_mode=true is left out" in output
    assert "did you mean multiBlockMode?" in output
    assert "its Python backend is replaced" in output


@pytest.mark.parametrize("more", [(), ("--map", "llama_engine=tensorrt_llm")])
def test_an_engine_of_another_name_is_known_by_it(existing: Existing, more: tuple[str]) -> None:
    """``tensorrt_llm_bls`` says which one it calls, also where ``--map`` says what it is."""
    (existing.repository / "tensorrt_llm").rename(existing.repository / "llama_engine")
    for model in ("llama_engine", "tensorrt_llm_bls"):
        config = existing.repository / model / "config.pbtxt"
        text = config.read_text()
        config.write_text(text.replace('"tensorrt_llm"', '"llama_engine"'))
    output = existing.write(*more).output
    assert output.count("llama_engine is called tensorrt_llm here") == 1
    assert existing.values("tensorrt_llm")["batch_scheduler_policy"] == "max_utilization"
    assert existing.values("tensorrt_llm_bls")["tensorrt_llm_model_name"] == "tensorrt_llm"


def test_a_draft_model_comes_along_and_drafts_on_request(
    existing: Existing, tmp_path: Path
) -> None:
    """Under our name for it, and not for requests that did not ask for drafts before."""
    draft = make_engine(tmp_path / "draft_engine", PLAIN, version="0.16.0")
    parameters = engine_parameters(draft, gpu_device_ids="1")
    write_model(existing.repository, "small_llama", parameters, "tensorrtllm", BATCHING)
    config = existing.repository / "tensorrt_llm_bls" / "config.pbtxt"
    config.write_text(config.read_text().replace("${tensorrt_llm_draft_model_name}", "small_llama"))
    output = existing.write().output
    assert "small_llama is called tensorrt_llm_draft here" in output
    assert existing.values("tensorrt_llm_draft")["gpt_model_path"] == str(draft)
    assert existing.values("tensorrt_llm_draft")["gpu_device_ids"] == "1"
    bls = existing.values("tensorrt_llm_bls")
    assert bls["tensorrt_llm_draft_model_name"] == "tensorrt_llm_draft"
    assert bls["draft_source"] == "off"


def test_special_tokens_follow_the_releases_default(existing: Existing) -> None:
    """Before 0.11 a prompt got none unless the parameter said so."""
    config = existing.repository / "preprocessing" / "config.pbtxt"
    config.write_text(config.read_text().replace('"False"', '"${add_special_tokens}"'))
    existing.write("--version", "0.10")
    assert existing.values("tensorrt_llm_bls")["add_special_tokens"] == "false"
    existing.write("--version", "0.11", "--force")
    assert existing.values("tensorrt_llm_bls")["add_special_tokens"] == "true"


def test_a_template_that_is_not_filled_in_is_refused(existing: Existing) -> None:
    """Where a placeholder stands for a number, the file cannot be read at all."""
    config = existing.repository / "tensorrt_llm" / "config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 16", "max_batch_size: ${size}"))
    line = error_of(existing.run("--no-check"))
    assert str(config) in line
    assert "fill in the template" in line


def test_what_a_repository_does_not_tell_has_to_be_named(existing: Existing) -> None:
    """The line names the option."""
    config = existing.repository / "preprocessing" / "config.pbtxt"
    config.write_text(config.read_text().replace(str(directory("byte-level")), "${tokenizer}"))
    assert "--tokenizer-dir" in error_of(existing.run("--no-check"))
    existing.write("--tokenizer-dir", str(directory("byte-level")))
    (existing.repository / "tensorrt_llm").rename(existing.repository / "renamed")
    assert "it has no model tensorrt_llm" in error_of(existing.run("--no-check", "--force"))


# --- what is kept, and what is not -----------------------------------------------------------

KEPT = """
model_transaction_policy { decoupled: true }
dynamic_batching {
    preferred_batch_size: [ 4, 16 ]
    priority_levels: 3
    default_priority_level: 2
    default_queue_policy { max_queue_size: 7 default_timeout_microseconds: 9000000 }
}
instance_group [ { count: 2 kind: KIND_CPU } ]
model_warmup [ {
    name: "short"
    batch_size: 1
    inputs { key: "input_ids" value { data_type: TYPE_INT32 dims: [ 4 ] zero_data: true } }
} ]
"""


def rewritten(existing: Existing, model: str, more: str, **parameters: str) -> None:
    shutil.rmtree(existing.repository / model)
    write_model(existing.repository, model, parameters, "tensorrtllm", more)


def test_instances_queue_policies_and_warm_up_are_kept(existing: Existing, tmp_path: Path) -> None:
    """Half of the capacity was lost without a word."""
    more = {"gpu_device_ids": "0;1", "enable_trt_overlap": "true"}
    rewritten(existing, "tensorrt_llm", KEPT, **engine_parameters(tmp_path / "engine", **more))
    output = existing.write().output
    config = existing.config("tensorrt_llm")
    assert config.instance_group[0].count == 2
    assert config.model_warmup[0].inputs["input_ids"].zero_data
    batching = config.dynamic_batching
    assert (batching.priority_levels, batching.default_priority_level) == (3, 2)
    assert list(batching.preferred_batch_size) == [16]
    policy = batching.default_queue_policy
    assert (policy.max_queue_size, policy.default_timeout_microseconds) == (7, 9000000)
    values = existing.values("tensorrt_llm")
    assert (values["gpu_device_ids"], values["enable_trt_overlap"]) == ("0;1", "true")
    assert "--multi-model" in output  # workers on each of the GPUs


def test_the_worker_of_0_9_is_kept_under_its_later_name(existing: Existing, tmp_path: Path) -> None:
    """And under its own on 0.9."""
    parameters = engine_parameters(tmp_path / "engine", worker_path="/worker")
    del parameters["executor_worker_path"]
    rewritten(existing, "tensorrt_llm", BATCHING, **parameters)
    existing.write()
    assert existing.values("tensorrt_llm")["executor_worker_path"] == "/worker"
    existing.write("--version", "0.9", "--force")
    assert existing.values("tensorrt_llm")["worker_path"] == "/worker"


def test_logits_of_an_engine_elsewhere_keep_their_type(existing: Existing) -> None:
    """Triton refuses a tensor of another type."""
    logits = 'output { name: "generation_logits" data_type: TYPE_FP16 dims: [ -1, -1, -1 ] }'
    parameters = engine_parameters(existing.repository / "elsewhere")
    rewritten(existing, "tensorrt_llm", BATCHING + logits, **parameters)
    existing.write("--version", "0.18")
    found = {tensor.name: tensor.data_type for tensor in existing.config("tensorrt_llm").output}
    assert found["generation_logits"] == found["context_logits"] == 10  # TYPE_FP16


def test_a_unary_repository_stays_one(existing: Existing, tmp_path: Path) -> None:
    """With the prompt in front, as its clients know it."""
    once = BATCHING.replace("decoupled: true", "decoupled: false")
    parameters = engine_parameters(tmp_path / "engine", exclude_input_in_output="false")
    rewritten(existing, "tensorrt_llm", once, **parameters)
    shutil.rmtree(existing.repository / "tensorrt_llm_bls")
    existing.write()
    for model in ("tensorrt_llm", "tensorrt_llm_bls"):
        assert not existing.config(model).model_transaction_policy.decoupled
        assert existing.values(model)["exclude_input_in_output"] == "false"


def test_each_model_keeps_its_transaction_policy(existing: Existing) -> None:
    """An orchestrator that answers once before an engine that streams."""
    config = existing.repository / "tensorrt_llm_bls" / "config.pbtxt"
    config.write_text(config.read_text().replace("decoupled: true", "decoupled: false"))
    existing.write()
    assert existing.config("tensorrt_llm").model_transaction_policy.decoupled
    assert not existing.config("tensorrt_llm_bls").model_transaction_policy.decoupled
    existing.write("--force", "--decoupled", "false")
    assert not existing.config("tensorrt_llm").model_transaction_policy.decoupled


@pytest.mark.parametrize(
    ("more", "parameters", "lost"),
    [
        ("version_policy { all {} }", {}, "tensorrt_llm.version_policy is left out"),
        (
            'input { name: "multimodal_embedding" data_type: TYPE_INT32 dims: [ 1 ] }',
            {},
            "input multimodal_embedding is left out",
        ),
        (
            'input { name: "prompt_embedding_table" data_type: TYPE_BF16 dims: [ -1, -1 ] }',
            {},
            "input prompt_embedding_table is FP16 here, not BF16",
        ),
        (
            'model_warmup { name: "w" batch_size: 1 inputs { key: "input_ids" value '
            '{ data_type: TYPE_INT32 dims: [ 4 ] input_data_file: "ids" } } }',
            {},
            "tensorrt_llm.model_warmup is left out: set it by hand; copy its files",
        ),
        ("", {"gpt_model_type": "V1"}, "gpt_model_type V1 becomes in-flight batching"),
    ],
)
def test_strict_is_for_those_who_want_no_loss(
    existing: Existing, tmp_path: Path, more: str, parameters: dict[str, str], lost: str
) -> None:
    """Each loss is named; with ``--strict`` nothing is written."""
    shutil.rmtree(existing.repository / "tensorrt_llm_bls")  # which has encoders for pictures
    existing.write("--strict")
    values = engine_parameters(tmp_path / "engine", **parameters)
    rewritten(existing, "tensorrt_llm", BATCHING + more, **values)
    line = error_of(existing.run("--strict", "--force", "--no-check"))
    assert line.startswith("error: --strict: ") and lost in line
    assert f"lost: tensorrt_llm{lost.removeprefix('tensorrt_llm')}" in existing.write(
        "--force"
    ).output.replace("lost: tensorrt_llm: ", "lost: tensorrt_llm")


def test_an_encoder_and_a_batch_that_do_not_fit_are_refused(
    existing: Existing, tmp_path: Path
) -> None:
    """With the option that mends it."""
    larger = BATCHING + '\nparameters { key: "x" value { string_value: "" } }'
    rewritten(existing, "tensorrt_llm", larger, **engine_parameters(tmp_path / "engine"))
    config = existing.repository / "tensorrt_llm" / "config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 16", "max_batch_size: 64"))
    line = error_of(existing.run())
    assert line.startswith(f"error: --from {existing.repository}: --max-batch-size 64")
    assert line.endswith("add --max-batch-size 32")
    existing.write("--max-batch-size", "32")
    parameters = engine_parameters(tmp_path / "engine", encoder_model_path="/encoder")
    rewritten(existing, "tensorrt_llm", BATCHING, **parameters)
    assert "models with an encoder are not served" in error_of(existing.run("--no-check"))
