"""``configure --from``: a repository laid out and filled in as TensorRT-LLM's own is converted."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.helpers.model_configurations import check_wires, parsed
from tests.helpers.small_tokenizers import directory
from tests.models.configured import BUILD, PLAIN, error_of, make_engine
from trtllm_bls.cli import main

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


@pytest.fixture
def existing(tmp_path: Path) -> Path:
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
    return repository


def run(existing: Path, *more: str) -> Result:
    words = ["configure", "--from", existing, "--out", existing.parent / "new", "--no-check", *more]
    return CliRunner().invoke(main, list(map(str, words)))


def convert(existing: Path, *more: str) -> str:
    result = run(existing, *more)
    assert result.exit_code == 0, result.output
    return result.output


def values(existing: Path, model: str) -> dict[str, str]:
    parameters = parsed(existing.parent / "new", model).parameters.items()
    return {key: value.string_value for key, value in parameters}


def test_what_was_filled_in_is_kept(existing: Path) -> None:
    """Engine, tokenizer, sizes and every value that the release reads."""
    convert(existing)
    engine = values(existing, "tensorrt_llm")
    kept = engine_parameters(existing.parent / "engine")
    for key in ("gpt_model_path", "batch_scheduler_policy", "kv_cache_free_gpu_mem_fraction"):
        assert engine[key] == kept[key]
    assert engine["enable_kv_cache_reuse"] == "True"
    config = parsed(existing.parent / "new", "tensorrt_llm")
    assert config.max_batch_size == 16
    assert config.dynamic_batching.max_queue_delay_microseconds == 500
    assert config.dynamic_batching.default_queue_policy.max_queue_size == 7
    for model in ("preprocessing", "tensorrt_llm_bls"):
        assert values(existing, model)["tokenizer_dir"] == str(directory("byte-level"))
        assert values(existing, model)["add_special_tokens"] == "False"
    assert values(existing, "tensorrt_llm_bls")["accumulate_tokens"] == "true"
    check_wires(existing.parent / "new")


def test_placeholders_and_what_has_no_place_are_told(existing: Path) -> None:
    """Nothing is dropped without a word, and nothing is left to fill in."""
    output = convert(existing)
    assert "not filled in, so not set: encoder_model_path, max_tokens_in_paged_kv_cache" in output
    assert "tensorrt_llm_bls.multimodal_encoders_name has no place here" in output
    assert "had 12 instances" in output
    assert parsed(existing.parent / "new", "tensorrt_llm_bls").instance_group[0].count == 1
    assert "${" not in "".join(
        path.read_text() for path in (existing.parent / "new").rglob("config.pbtxt")
    )


def test_an_option_beats_what_was_there(existing: Path) -> None:
    """And ``--set`` comes after the values that were read."""
    convert(existing, "--max-batch-size", "8", "--set", "enable_kv_cache_reuse=false")
    assert parsed(existing.parent / "new", "tensorrt_llm").max_batch_size == 8
    assert values(existing, "tensorrt_llm")["enable_kv_cache_reuse"] == "false"


def test_a_value_that_had_no_effect_is_left_out(existing: Path) -> None:
    """0.13 does not read the later spelling of multiBlockMode."""
    engine = engine_parameters(existing.parent / "engine", multi_block_mode="true")
    (existing / "tensorrt_llm" / "config.pbtxt").unlink()
    (existing / "tensorrt_llm" / "1").rmdir()
    (existing / "tensorrt_llm").rmdir()
    write_model(existing, "tensorrt_llm", engine, "python", BATCHING)
    output = convert(existing, "--version", "0.13")
    assert "tensorrt_llm.multi_block_mode=true is left out" in output
    assert "did you mean multiBlockMode?" in output
    assert "its Python backend is replaced" in output


def test_a_draft_model_comes_along_and_drafts_on_request(existing: Path) -> None:
    """Under our name for it, and not for requests that did not ask for drafts before."""
    draft = make_engine(existing.parent / "draft_engine", PLAIN)
    gpus = {"gpu_device_ids": "1"}
    write_model(existing, "small_llama", engine_parameters(draft, **gpus), "tensorrtllm", BATCHING)
    config = existing / "tensorrt_llm_bls" / "config.pbtxt"
    config.write_text(config.read_text().replace("${tensorrt_llm_draft_model_name}", "small_llama"))
    output = convert(existing)
    assert "small_llama is called tensorrt_llm_draft here" in output
    assert values(existing, "tensorrt_llm_draft")["gpt_model_path"] == str(draft)
    assert values(existing, "tensorrt_llm_draft")["gpu_device_ids"] == "1"
    bls = values(existing, "tensorrt_llm_bls")
    assert bls["tensorrt_llm_draft_model_name"] == "tensorrt_llm_draft"
    assert bls["draft_source"] == "off"


def test_special_tokens_follow_the_releases_default(existing: Path) -> None:
    """Before 0.11 a prompt got none unless the parameter said so."""
    config = existing / "preprocessing" / "config.pbtxt"
    config.write_text(config.read_text().replace('"False"', '"${add_special_tokens}"'))
    convert(existing, "--version", "0.10")
    assert values(existing, "tensorrt_llm_bls")["add_special_tokens"] == "false"
    convert(existing, "--version", "0.11", "--force")
    assert values(existing, "tensorrt_llm_bls")["add_special_tokens"] == "true"


def test_a_template_that_is_not_filled_in_is_refused(existing: Path) -> None:
    """Where a placeholder stands for a number, the file cannot be read at all."""
    config = existing / "tensorrt_llm" / "config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 16", "max_batch_size: ${size}"))
    line = error_of(run(existing))
    assert str(config) in line
    assert "fill in the template" in line


def test_what_a_repository_does_not_tell_has_to_be_named(existing: Path) -> None:
    """The line names the option."""
    config = existing / "preprocessing" / "config.pbtxt"
    config.write_text(config.read_text().replace(str(directory("byte-level")), "${tokenizer}"))
    assert "--tokenizer-dir" in error_of(run(existing))
    convert(existing, "--tokenizer-dir", str(directory("byte-level")))
    (existing / "tensorrt_llm").rename(existing / "renamed")
    assert "it has no model tensorrt_llm" in error_of(run(existing, "--force"))
