"""Which architectures the embedded engine runs: those of docs/engines.md, with random weights.

What is computed is compared with the model's own logits by ``load`` itself; the texts of some of
them are compared with transformers' in ``test_embedded_exact``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM

from trtllm_bls.engines.embedded.model import load
from trtllm_bls.errors import CheckpointError
from trtllm_bls.settings.parameters import EngineParameters

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_HEADS = {"head_dim": 8}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}

RUN: dict[str, dict[str, Any]] = {
    "Cohere": {},
    "Gemma": _HEADS,
    "Gemma2": _HEADS,
    "Gemma3Text": _HEADS,
    "GPT2": _GPT,
    "GPTNeoX": {},
    "GptOss": {**_HEADS, **_EXPERTS, "num_local_experts": 4},
    "Granite": {},
    "Llama": {},
    "Mistral": {},
    "Mixtral": {**_EXPERTS, "num_local_experts": 4},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Olmo2": {},
    "Phi": {},
    "Phi3": {},
    "Qwen2": {},
    "Qwen3": _HEADS,
    "Qwen3Moe": {**_HEADS, **_EXPERTS, "num_experts": 4},
    "SmolLM3": {},
    "StableLm": {},
    "Starcoder2": {},
}
REFUSED: dict[str, dict[str, Any]] = {
    "Bloom": {"n_layer": 2, "n_head": 4},
    "Falcon": {},
    "Mamba": {},
    "Mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
}
# transformers 5.24 moved their attention to its common interface, in which the engine's slots work.
_SINCE_5_24 = {"CodeGen": {**_GPT, "rotary_dim": 4}, "GPTJ": {**_GPT, "rotary_dim": 8}}
(RUN if Version(transformers.__version__) >= Version("5.24") else REFUSED).update(_SINCE_5_24)


def checkpoint(directory: Path, name: str, changes: dict[str, Any]) -> Path:
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(**_SIZES | changes)
    transformers.utils.logging.disable_progress_bar()
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", RUN)
def test_an_architecture_of_the_list_runs(tmp_path: Path, name: str) -> None:
    """Its logits through our slots are the model's own."""
    load(EngineParameters(model_dir=checkpoint(tmp_path, name, RUN[name]), max_batch=1, threads=1))


@pytest.mark.parametrize("name", REFUSED)
def test_an_architecture_with_attention_of_its_own_is_refused(tmp_path: Path, name: str) -> None:
    """In one line, instead of being served wrong."""
    with pytest.raises(CheckpointError, match=r"its architecture is not supported$"):
        load(EngineParameters(model_dir=checkpoint(tmp_path, name, REFUSED[name]), threads=1))
