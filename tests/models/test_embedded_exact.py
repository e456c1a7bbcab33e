"""The embedded engine gives what the model gives: token for token, or not at all."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.embedded_steps import (
    Steps,
    checkpoint,
    generated,
    prompt,
    request,
    runner,
)
from trtllm_bls.engines.embedded.attention import Segment
from trtllm_bls.engines.embedded.model import load
from trtllm_bls.errors import CheckpointError, SettingsError
from trtllm_bls.settings.parameters import EngineParameters

LENGTHS = (1, 30, 9, 90, 2, 17)


@pytest.mark.parametrize(
    "kind", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "gpt2"]
)
def test_greedy_text_is_that_of_generate_in_a_busy_batch(kind: str) -> None:
    """Requests that join at different steps, cut into chunks, read what they would read alone."""
    steps = Steps(kind, max_tokens_per_step=22)
    asked = []
    for place, length in enumerate(LENGTHS):
        asked.append(steps.add(request(prompt(length, start=place), 12)))
        steps.step(2)
    steps.run()
    for place, length in enumerate(LENGTHS):
        expected = generated(prompt(length, start=place), 12, kind)
        assert steps.text(asked[place]) == expected


def test_slots_far_apart_in_length_are_not_padded_and_stay_exact() -> None:
    """A long neighbour changes how attention is grouped, not what it gives."""
    steps = Steps(max_batch=8, max_tokens_per_step=256)
    asked = [steps.add(request(prompt(n, start=n), 10)) for n in (200, 3, 4, 5, 6, 7, 8)]
    steps.run()
    for submission, n in zip(asked, (200, 3, 4, 5, 6, 7, 8), strict=True):
        assert steps.text(submission) == generated(prompt(n, start=n), 10)


def test_an_architecture_that_ignores_our_attention_is_refused() -> None:
    """Bloom has its own attention: loading says so in one line, instead of serving nonsense."""
    with pytest.raises(CheckpointError, match="architecture is not supported") as caught:
        load(EngineParameters(model_dir=checkpoint("bloom")))
    assert "\n" not in str(caught.value)


def _copy(to: Path) -> Path:
    return Path(shutil.copytree(checkpoint(), to / "model"))


def _nothing(directory: Path) -> None:
    shutil.rmtree(directory)


def _no_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def _corrupt_weights(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not json at all!")


def _no_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def _fewer_weights(directory: Path) -> None:
    _rewrite(directory, num_hidden_layers=3)


def _other_shapes(directory: Path) -> None:
    _rewrite(directory, intermediate_size=64)


def _not_a_causal_lm(directory: Path) -> None:
    _rewrite(directory, model_type="vit")


def _unknown_type(directory: Path) -> None:
    _rewrite(directory, model_type="no-such-model")


def _encoder_decoder(directory: Path) -> None:
    _rewrite(directory, is_encoder_decoder=True)


def _rewrite(directory: Path, **changes: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    "damage",
    [
        _nothing,
        _no_config,
        _corrupt_weights,
        _no_weights,
        _fewer_weights,
        _other_shapes,
        _not_a_causal_lm,
        _unknown_type,
        _encoder_decoder,
    ],
)
def test_a_damaged_checkpoint_is_one_clear_line(damage: object, tmp_path: Path) -> None:
    """Whatever is wrong with the directory, the error names it, on one line."""
    directory = _copy(tmp_path)
    assert callable(damage)
    damage(directory)
    with pytest.raises(CheckpointError) as caught:
        load(EngineParameters(model_dir=directory))
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_kv_cache_is_cut_to_the_memory_allowed_or_refused() -> None:
    """A default length gives way to the memory limit; a length that was asked for does not."""
    per_token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, kv heads, head size, fp32
    limit = 4 * per_token * 100
    sizes = EngineParameters(model_dir=checkpoint(), max_batch=4)
    loaded = load(sizes, max_kv_bytes=limit)
    assert loaded.slots.length == 100
    with pytest.raises(SettingsError, match="lower max_batch"):
        load(replace(sizes, max_sequence_tokens=101), max_kv_bytes=limit)
    with pytest.raises(SettingsError, match="the model allows 512"):
        load(EngineParameters(model_dir=checkpoint(), max_sequence_tokens=513))


@pytest.mark.parametrize(
    ("change", "longest"),
    [
        # Qwen2-like models tell a window to their layers; Llama would not, so it never applies.
        ({"sliding_window": 40}, 40),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, 512),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                    "original_max_position_embeddings": 64,
                }
            },
            64,
        ),
    ],
)
def test_lengths_that_would_be_computed_otherwise_are_not_offered(
    change: dict[str, object], longest: int, tmp_path: Path
) -> None:
    """Where position or window rules change with the batch's length, the limit stays below."""
    directory = _copy(tmp_path)
    _rewrite(directory, **change)
    assert load(EngineParameters(model_dir=directory)).slots.length == longest


def test_copied_rows_are_the_rows() -> None:
    """A slot's keys and values, copied, continue the text as the original would."""
    model = runner()
    model.allocate(2, 32)
    ids = prompt(10)
    expected = model.forward([Segment(0, 0, ids, 1)])
    model.allocate(2, 32)
    taken, _ = model.slots.claim(ids, reuse=True)
    model.forward([Segment(taken, 0, ids[:9], 1)])
    other, reused = model.slots.claim(ids, reuse=True)
    assert (other, reused) == (1 - taken, 9)
    torch.testing.assert_close(model.forward([Segment(other, 9, ids[9:], 1)]), expected)
