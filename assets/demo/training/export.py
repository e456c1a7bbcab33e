"""Writes a trained network as a folder in the Hugging Face layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from corpus import BEGIN, END, PAD
from network import Llama, config_json
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokens import save_tokenizer


def export(network: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """config.json, generation_config.json, model.safetensors in bf16 and the tokenizer's files."""
    save_tokenizer(tokenizer, folder, network.shape.max_position_embeddings)
    specials = {
        "bos_token_id": tokenizer.token_to_id(BEGIN),
        "eos_token_id": tokenizer.token_to_id(END),
        "pad_token_id": tokenizer.token_to_id(PAD),
    }
    files = {
        "config.json": config_json(network.shape, specials),
        "generation_config.json": {**specials, "do_sample": False, "max_new_tokens": 320},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in network.state_dict().items()
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
