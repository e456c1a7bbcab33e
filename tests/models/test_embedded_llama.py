"""Our forward pass of the Llama family: where it runs, and its logits in steps of static shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.embedded_steps import checkpoint, prompt, reference, runner
from trtllm_bls.engines.embedded import llama
from trtllm_bls.engines.embedded.attention import Segment
from trtllm_bls.engines.embedded.graphs import Graphs
from trtllm_bls.engines.embedded.model import load
from trtllm_bls.settings.parameters import EngineParameters

FAMILY = ("llama", "mistral", "qwen3")


@pytest.mark.parametrize("kind", [*FAMILY, "gemma2", "gpt2"])
def test_the_llama_family_runs_on_our_own_forward_pass(kind: str) -> None:
    """Other architectures keep transformers' modules."""
    loaded = runner(kind)
    assert (loaded._llama is not None) == (kind in FAMILY)


def test_a_forward_pass_that_differs_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The probe sees it, and transformers' modules run instead."""

    def unrotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        return heads

    monkeypatch.setattr(llama, "_rotated", unrotated)
    loaded = load(EngineParameters(model_dir=checkpoint(), threads=1))
    assert loaded._llama is None
    assert "differs from transformers'" in caplog.text
    ids = prompt(9)
    with torch.no_grad():
        expected = reference()(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(loaded.forward([Segment(0, 0, ids, 9)]), expected, atol=1e-4, rtol=0)


class Rerun(Graphs):
    """Graphs of a machine without CUDA: what would be replayed is computed again."""

    def _record(self, step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Any]]:
        hidden = step()
        return hidden, lambda: hidden.copy_(step())


@pytest.mark.parametrize("kind", FAMILY)
def test_steps_of_static_shape_give_the_models_logits(kind: str) -> None:
    """Whatever is padded: single rows, drafts and prompts in one step, some slots idle."""
    loaded = runner(kind)
    loaded.allocate(5, 300)
    assert loaded._llama is not None
    loaded._graphs = Rerun(loaded._llama, loaded.slots, torch.device("cpu"))
    texts = [prompt(280, start=slot) for slot in range(5)]
    with torch.no_grad():
        expected = reference(kind)(torch.tensor(texts)).logits
    chance = np.random.default_rng(3)
    done = [0] * 5

    steps: list[
        tuple[Tensor, Tensor]
    ] = []  # compared at the end: no step may change an earlier one

    def run(sizes: dict[int, int]) -> None:
        """Run a step of so many tokens by slot, beside what transformers gave for them."""
        segments = []
        wanted = []
        for slot, size in sizes.items():
            end = done[slot] + size
            keep = int(chance.integers(1, size + 1))
            segments.append(Segment(slot, done[slot], texts[slot][done[slot] : end], keep))
            wanted.append(expected[slot, end - keep : end])
            done[slot] = end
        steps.append((loaded.forward(segments), torch.cat(wanted)))

    run(dict.fromkeys(range(5), 1))
    while min(done) < 280:
        sizes = {}
        for slot in chance.permutation(5).tolist()[: int(chance.integers(1, 6))]:
            if done[slot] < 280:
                size = int(chance.choice([1, 1, 1, 3, 6, 20, 70]))
                sizes[slot] = min(size, 280 - done[slot])
        if sizes:
            run(sizes)
    worst = max(float((logits - wanted).abs().max()) for logits, wanted in steps)
    shapes = set(loaded._graphs._recordings)
    assert worst < 1e-3
    assert {shape.sequences for shape in shapes} >= {1, 2, 5}
    assert {shape.length for shape in shapes} == {256, 300}
