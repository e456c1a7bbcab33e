"""The shipped models: transformers and the embedded engine say the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.embedded_steps import answers
from tests.helpers.tiers import budget
from trtllm_bls.engines.embedded import EmbeddedEngine
from trtllm_bls.settings.parameters import EngineParameters
from trtllm_bls.text.tokenizer import load_tokenizer
from trtllm_bls.types import EngineRequest

DEMO = Path(__file__).parents[2] / "assets" / "demo"
NEW_TOKENS = budget(24, 48)


@pytest.mark.parametrize("name", ["target", "draft"])
def test_both_find_the_same_greedy_tokens(name: str) -> None:
    """Three demo prompts, all at once in the engine, token for token as ``generate`` has them."""
    tokenizer = load_tokenizer(DEMO / name)
    end = tokenizer.eos_id
    prompts = [
        tokenizer.encode(prompt, add_special_tokens=True)
        for prompt in json.loads((DEMO / "prompts.json").read_text())["demo"]
    ]
    model = AutoModelForCausalLM.from_pretrained(DEMO / name, dtype=torch.float32)
    expected = []
    for ids in prompts:
        with torch.inference_mode():
            whole = model.generate(
                torch.tensor([ids]), do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=end
            )
        said = whole[0, len(ids) :].tolist()
        expected.append(tuple(said[:-1] if said[-1] == end else said))
    with EmbeddedEngine(EngineParameters(model_dir=DEMO / name, max_batch=4, threads=1)) as engine:
        requests = [
            EngineRequest(request_id=str(number), input_ids=ids, max_tokens=NEW_TOKENS, end_id=end)
            for number, ids in enumerate(prompts)
        ]
        chunks = answers(engine, *requests)
    found = [tuple(t for chunk in one for t in chunk.token_ids) for one in chunks]
    assert found == expected
    assert all(len(tokens) > 5 for tokens in found)
