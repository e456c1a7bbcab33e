"""``trtllm-bls recipe``: commands whose flags the release has, and which its engine needs."""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.models.configured import error_of
from trtllm_bls.cli import main
from trtllm_bls.configure.recipe import (
    BUILD,
    CONVERT,
    NEWEST,
    PRESETS,
    QUANTIZE,
    lookahead_draft_len,
)

RELEASES = [*(f"0.{minor}" for minor in range(9, 22)), "1.0", "1.1", "1.2"]
# The builder's flags that not every release has, by the release notes: the first and the last.
FLAGS = {
    "max_output_len": ("0.9", "0.10"),
    "max_seq_len": ("0.11", "1.2"),
    "multiple_profiles": ("0.10", "1.2"),
    "use_fp8_context_fmha": ("0.11", "1.2"),
    "reduce_fusion": ("0.11", "1.2"),
    "low_latency_gemm_plugin": ("0.17", "1.2"),
    "low_latency_gemm_swiglu_plugin": ("0.17", "1.2"),
    "speculative_decoding_mode": ("0.10", "1.2"),
}


def commands(*words: str) -> list[list[str]]:
    result = CliRunner().invoke(main, ["recipe", *words])
    assert result.exit_code == 0, result.output
    lines = result.output.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line and not line.startswith("#")]


def flags(command: list[str]) -> dict[str, str]:
    """A command's flags with their values."""
    found = {}
    for word, after in zip(command, [*command[1:], ""], strict=True):
        if word.startswith("--"):
            found[word.removeprefix("--")] = "" if after.startswith("--") else after
    return found


def tool_of(command: list[str]) -> str:
    return next(tool for tool in (CONVERT, QUANTIZE, BUILD) if tool in " ".join(command[:2]))


@pytest.mark.parametrize(
    ("preset", "release"),
    [
        (preset, release)
        for preset in PRESETS
        for release in RELEASES[RELEASES.index(PRESETS[preset].since) :]
    ],
)
def test_every_release_gets_flags_that_it_has(preset: str, release: str) -> None:
    """The builder would stop at any other, after the checkpoint was converted."""
    words = (preset, "--release", release, "--tp-size", "2", "--lookahead", "off")
    for name in flags(commands(*words)[1]):
        first, last = FLAGS.get(name, (RELEASES[0], RELEASES[-1]))
        assert RELEASES.index(first) <= RELEASES.index(release) <= RELEASES.index(last), name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("latency", "--release", "0.16"), "preset latency needs 0.17"),
        (("latency", "--release", "0.18"), "--lookahead off"),
        (("latency", "--precision", "bf16"), "--precision bf16"),
        (("throughput", "--release", "0.8"), "--release 0.8: use a release"),
        (("throughput", "--release", "1.3"), "trtllm-serve --grpc"),
        (("latency", "--lookahead", "7,7"), "window,n-gram,verification set"),
    ],
)
def test_what_a_release_cannot_build_is_refused(words: tuple[str, ...], said: str) -> None:
    """In one line that names the way out."""
    assert said in error_of(CliRunner().invoke(main, ["recipe", *words]))


def test_lengths_follow_the_releases_spelling() -> None:
    """0.11 replaced the longest answer by the longest sequence."""
    old, new = (flags(commands("throughput", "--release", r)[1]) for r in ("0.10", "0.11"))
    assert (old["max_input_len"], old["max_output_len"]) == ("256", "256")
    assert (new["max_seq_len"], new["max_batch_size"]) == ("512", "128")
    assert "max_seq_len" not in old
    assert (old["gemm_plugin"], new["gemm_plugin"]) == ("bfloat16", "auto")


def test_a_target_verifies_prompts_that_grow() -> None:
    """Each round is a request whose prompt is all text so far; a draft has the same prompts."""
    lengths = ("--max-input-len", "9000", "--max-output-len", "1000", "--max-draft-len", "5")
    target = flags(commands("target", *lengths)[1])
    assert target["speculative_decoding_mode"] == "draft_tokens_external"
    assert target["use_paged_context_fmha"] == "enable"
    assert (target["max_input_len"], target["max_seq_len"]) == ("10000", "10005")
    assert target["max_num_tokens"] == "10005"
    draft = flags(commands("draft", *lengths)[1])
    assert "speculative_decoding_mode" not in draft
    assert draft["max_num_tokens"] == "10000"
    assert "gather_generation_logits" in draft


def test_lookahead_is_built_and_configured_alike() -> None:
    """The engine's longest draft follows from the three sizes, as TensorRT-LLM defines it."""
    assert lookahead_draft_len(7, 7, 7) == 83
    _, build, configure = commands("latency", "--lookahead", "4,5,6")
    assert flags(build)["max_draft_len"] == str(lookahead_draft_len(4, 5, 6))
    assert flags(build)["gemm_plugin"] == "disable"
    sets = [after for word, after in itertools.pairwise(configure) if word == "--set"]
    assert sets == [
        "decoding_mode=lookahead",
        "lookahead_window_size=4",
        "lookahead_ngram_size=5",
        "lookahead_verification_set_size=6",
    ]


@pytest.mark.parametrize(
    ("precision", "tool", "expected"),
    [
        ("fp16", CONVERT, {"dtype": "float16"}),
        ("bf16", CONVERT, {"dtype": "bfloat16"}),
        ("int4_awq", QUANTIZE, {"qformat": "int4_awq", "awq_block_size": "128"}),
        ("fp8", QUANTIZE, {"qformat": "fp8", "kv_cache_dtype": "fp8"}),
    ],
)
def test_a_precision_is_converted_or_quantized(
    precision: str, tool: str, expected: dict[str, str]
) -> None:
    """Quantization calibrates on a GPU, conversion only rewrites weights; so for every preset."""
    for preset in PRESETS:
        if precision in PRESETS[preset].precisions:
            first = commands(preset, "--precision", precision)[0]
            assert tool_of(first) == tool
            assert expected.items() <= flags(first).items()


def test_the_script_is_the_one_of_the_checkpoints_family(tmp_path: Path) -> None:
    """In the tree of the release; a family without a recipe is refused."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "qwen2"}))
    there = ("throughput", "--checkpoint", str(tmp_path), "--release")
    assert "examples/models/core/qwen/" in commands(*there, "0.20")[0][1]
    assert "examples/qwen/" in commands(*there, "0.18")[0][1]
    for model_type in ("bloom", ["bloom"]):
        config.write_text(json.dumps({"model_type": model_type}))
        line = error_of(CliRunner().invoke(main, ["recipe", *there, "0.20"]))
        assert f"model_type {model_type}" in line
    config.write_text("{")
    line = error_of(CliRunner().invoke(main, ["recipe", *there, "0.20"]))
    assert f"--checkpoint: {config} cannot be read" in line
    config.write_text(json.dumps({"model_type": "bloom"}))
    quantized = commands(*there, "0.20", "--precision", "fp8")[0]
    assert quantized[1].endswith("examples/quantization/quantize.py")


@pytest.mark.parametrize(
    ("model_type", "since", "script", "expected"),
    [
        ("gemma2", "0.13", "gemma/convert_checkpoint.py", {"ckpt-type": "hf", "world-size": "1"}),
        ("gemma3_text", "0.19", "gemma/convert_checkpoint.py", {"output-model-dir": "x"}),
        ("nemotron", "0.15", "quantization/quantize.py", {"qformat": "full_prec"}),
        ("nemotron-nas", "0.14", "nemotron_nas/convert_checkpoint.py", {"trust_remote_code": ""}),
        ("deepseek", "0.14", "deepseek_v1/convert_checkpoint.py", {"tp_size": "1"}),
        ("deepseek_v2", "0.15", "deepseek_v2/convert_checkpoint.py", {"dtype": "bfloat16"}),
        ("granite", "0.16", "llama/convert_checkpoint.py", {"dtype": "bfloat16"}),
        ("qwen3", "1.0", "models/core/qwen/convert_checkpoint.py", {"dtype": "bfloat16"}),
    ],
)
def test_a_family_is_converted_since_a_release(
    tmp_path: Path, model_type: str, since: str, script: str, expected: dict[str, str]
) -> None:
    """With its script's own flags; an earlier release says so."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    there = ("throughput", "--checkpoint", str(tmp_path), "--release")
    words = commands(*there, since)[0]
    assert any(word.endswith(script) for word in words)
    found = flags(words)
    assert expected.keys() <= found.keys()
    assert all(found[name] == value for name, value in expected.items() if value != "x")
    assert (words[0] == "env") == (model_type == "granite")
    earlier = RELEASES[RELEASES.index(since) - 1]
    line = error_of(CliRunner().invoke(main, ["recipe", *there, earlier]))
    assert f"--release {earlier}: it cannot convert model_type {model_type}" in line
    if model_type == "deepseek_v2":
        assert "models/contrib/deepseek_v2" in commands(*there, "0.20")[0][1]
        line = error_of(CliRunner().invoke(main, ["recipe", *there, since, "--precision", "fp8"]))
        assert "is converted to bf16 only" in line


def test_the_last_step_is_a_command_of_ours_that_parses() -> None:
    """Its engine is the one that was built, and the target's draft the one of preset draft."""
    for preset in PRESETS.keys() - {"draft"}:
        *_, build, configure = commands(preset)
        assert configure[:2] == ["trtllm-bls", "configure"]
        assert flags(configure)["engine-dir"] == flags(build)["output_dir"]
    draft = flags(commands("draft")[-1])["output_dir"]
    assert flags(commands("target")[-1])["draft-engine-dir"] == draft
    assert flags(commands("target")[-1])["version"] == str(NEWEST)
