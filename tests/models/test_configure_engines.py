"""What ``configure`` makes of a release and of what an engine was built for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.model_configurations import rows_of_config
from tests.models.configured import BUILD, NOT_PAGED, PLAIN, Demo, error_of, make_engine
from trtllm_bls.errors import SettingsError
from trtllm_bls.settings.cpp_backend import check_backend, parse_version
from trtllm_bls.settings.cpp_backend import keys_of as keys_of_table
from trtllm_bls.settings.parameters import EngineFacts, parameters_in

FACTS = json.loads((Path(__file__).parent / "cpp_backend_keys.json").read_text())


# --- releases ----------------------------------------------------------------------------


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
NOT_THE_BACKENDS = {"FORCE_CPU_ONLY_INPUT_TENSORS", *parameters_in(EngineFacts)}


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
    required = {key for key, row in keys_of_table(version).items() if row.required_since}
    assert required >= keys_of(release, "demanded_by")


# By type: values that the backend reads, and values that it would take for "not set".
VALUES = {
    "flag": (["true", "0", "False"], ["yes", "", "2"]),
    "whole": (["1", "128"], ["-1", "1.5", "many", ""]),
    "fraction": (["0.5", "1"], ["1.5", "-0.5", "half", ""]),
    "list": (["128"], ["a,b", "128,", ""]),
    "tree": (["{0}", "{0, 0}, {0, 1}"], ["0", "{}", "{0", ""]),
    "text": ([], ["${placeholder}", ""]),
}


@pytest.mark.parametrize("release", FACTS["releases"])
def test_every_key_takes_the_values_of_its_type_alone(release: str) -> None:
    """What the backend cannot read it ignores with a warning in the log."""
    version = parse_version(release)
    for key in keys_of(release, "read_by"):
        good, bad = VALUES[FACTS["keys"][key]["type"]]
        for value in good:
            check_backend(key, value, version)
        for value in bad:
            with pytest.raises(SettingsError, match="is not allowed; it must be"):
                check_backend(key, value, version)


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
    """It must fit one forward pass unless it may be chunked, and one more token has to fit."""
    demo.engine = make_engine(tmp_path / "built", BUILD | build)
    result = demo.write(*options)
    assert demo.values("tensorrt_llm")["max_prompt_tokens"] == str(expected)
    assert ("limited to 2048 tokens by max_num_tokens" in result.output) == (expected == 2048)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("{", "config.json cannot be read"),
        ("[]", "config.json cannot be read"),
        ('{"build_config": {"max_input_len": [1]}}', "config.json cannot be read"),
        ('{"pretrained_config": {"logits_dtype": "float8"}}', "its logits are float8"),
    ],
)
def test_an_engine_whose_directory_says_nothing_usable(demo: Demo, config: str, told: str) -> None:
    """Named before the first file is written."""
    (demo.engine / "config.json").write_text(config)
    assert told in error_of(demo.run())
    assert not demo.out.exists()


@pytest.mark.parametrize(
    ("build", "options", "note"),
    [
        ({"speculative_decoding_mode": None}, [], "the engine may refuse drafts"),
        ({"speculative_decoding_mode": "DRAFT_TOKENS_EXTERNAL"}, [], ""),
        ({"speculative_decoding_mode": 8}, [], "lookahead decoding, which is off"),
        (
            {"max_num_tokens": 2048},
            ["--set", "tensorrt_llm_bls.draft_source=ngram"],
            "with drafts, whole answers are limited to 2048",
        ),
    ],
)
def test_surprises_of_an_engine_are_noted(
    demo: Demo, tmp_path: Path, build: dict[str, Any], options: list[str], note: str
) -> None:
    """The repository is written all the same."""
    demo.engine = make_engine(tmp_path / "built", BUILD | build)
    output = demo.write(*options).output
    assert note in output and (bool(note) == ("note: " in output))


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


RANKS = {"pretrained_config": {"mapping": {"world_size": 2}}}


@pytest.mark.parametrize(
    ("build", "more", "options", "said"),
    [
        ({"max_beam_width": 2}, {}, ["--set", "max_beam_width=4"], "at most 2"),
        ({}, {}, ["--gpu-device-ids", "0,1"], "the engine has 1 ranks"),
        ({}, {}, ["--gpu-device-ids", "0;1,2"], "the engine has 1 ranks"),
        ({}, RANKS, [], "1 rank*.engine in it, it was built for 2 ranks"),
        ({}, {"version": "0.18.0"}, ["--version", "0.19"], "0.18, which 0.19 does not load"),
        ({"kv_cache_type": "CONTINUOUS"}, {}, [], "no paged KV cache"),
        ({"plugin_config": {"paged_kv_cache": False}}, {}, [], "no paged KV cache"),
        ({}, {"pretrained_config": {"vocab_size": 100}}, [], "the engine 100 embeddings"),
        ({}, {}, ["--set", "encoder_model_path=/e"], "models with an encoder"),
        (
            {},
            {},
            ["--set", "guided_decoding_backend=xgrammar"],
            "without xgrammar_tokenizer_info_path nothing would be guided",
        ),
        ({}, {}, ["--set", "xgrammar_tokenizer_info_path=/i"], "nobody reads it without"),
    ],
)
def test_what_would_not_load_is_refused(
    demo: Demo,
    tmp_path: Path,
    build: dict[str, Any],
    more: dict[str, Any],
    options: list[str],
    said: str,
) -> None:
    """Before anything is written, with what to do."""
    demo.engine = make_engine(tmp_path / "built", BUILD | build, **more)
    assert said in error_of(demo.run(*options))
    assert not demo.out.exists()


def test_what_loads_is_not_refused(demo: Demo, tmp_path: Path) -> None:
    """One list of GPUs for each instance; a file for guided decoding beside its backend."""
    build = BUILD | {"max_beam_width": 2, "kv_cache_type": "KVCacheType.PAGED"}
    demo.engine = make_engine(tmp_path / "built", build)
    guides = ("guided_decoding_backend=xgrammar", "xgrammar_tokenizer_info_path=/info.json")
    sets = [word for each in (*guides, "max_beam_width=2") for word in ("--set", each)]
    demo.write("--gpu-device-ids", "0;1", *sets)
    assert demo.values("tensorrt_llm")["xgrammar_tokenizer_info_path"] == "/info.json"


def test_engines_of_two_releases_are_refused(demo: Demo, tmp_path: Path) -> None:
    """One server loads both."""
    draft = str(make_engine(tmp_path / "draft", PLAIN, version="0.20.0"))
    line = error_of(demo.run("--no-check", "--draft-engine-dir", draft))
    assert "tensorrt_llm_draft: the engine" in line and "0.20, which 1.0 does not load" in line


def test_logits_of_any_type(demo: Demo, tmp_path: Path) -> None:
    """The engine's own, or as told of an engine that is elsewhere."""
    row = "generation_logits BF16 [-1,-1,-1]"
    more = {"pretrained_config": {"logits_dtype": "bfloat16"}}
    demo.engine = make_engine(tmp_path / "built", BUILD, **more)
    demo.write()
    assert row in rows_of_config(demo.config("tensorrt_llm").output, inputs=False)
    line = error_of(demo.run("--force", "--logits-dtype", "float16"))
    assert "--logits-dtype float16" in line and "has BF16" in line
    demo.engine = tmp_path / "elsewhere"
    demo.write("--force", "--logits-dtype", "bfloat16")
    assert row in rows_of_config(demo.config("tensorrt_llm").output, inputs=False)


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
