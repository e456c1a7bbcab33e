"""A costlier copy of a Llama checkpoint that computes the same function, for benchmarks."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file, save_file


def pad(source: Path, target: Path, layers: int) -> None:
    """Copy a Llama checkpoint with ``layers`` more layers whose outputs are zero."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    own = int(config["num_hidden_layers"])
    weights = load_file(source / "model.safetensors")
    last = {name: w for name, w in weights.items() if name.startswith(f"model.layers.{own - 1}.")}
    for layer in range(own, own + layers):
        for name, weight in last.items():
            zero = name.endswith(("o_proj.weight", "down_proj.weight"))
            new = name.replace(f".{own - 1}.", f".{layer}.", 1)
            weights[new] = weight.new_zeros(weight.shape) if zero else weight.clone()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config["num_hidden_layers"] = own + layers
    config.pop("layer_types", None)
    (target / "config.json").write_text(json.dumps(config))


def demo_and_padded(layers: int) -> Iterator[tuple[str, Path]]:
    """Name and directory of the demo's target, and of its padded copy while that is used."""
    demo = Path(__file__).parents[1] / "assets" / "demo" / "target"
    yield "demo", demo
    with tempfile.TemporaryDirectory() as scratch:
        padded = Path(scratch) / "padded"
        pad(demo, padded, layers)
        yield "padded", padded
