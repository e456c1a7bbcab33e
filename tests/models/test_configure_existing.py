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


def test_a_draft_model_comes_along_and_drafts_on_request(
    existing: Existing, tmp_path: Path
) -> None:
    """Under our name for it, and not for requests that did not ask for drafts before."""
    draft = make_engine(tmp_path / "draft_engine", PLAIN)
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
