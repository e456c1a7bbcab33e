"""Speculation with real weights on the embedded engine, through the real tritonserver.

    python benchmarks/speculation_models.py [--pad-layers 90] [--tokens 128] [--prompts 4]

Runs the demo pair, and the demo pair whose target has extra layers that add zero: the same
function at several times the cost, as a large target would have it. Wall-clock ratios to plain
decoding in the same run, per kind of prompt and source of drafts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
from pathlib import Path
from typing import Any

from padded import demo_and_padded

from trtllm_bls.client import Client, Result
from trtllm_bls.launcher import TritonServer
from trtllm_bls.settings import ServeSettings

DEMO = Path(__file__).parents[1] / "assets" / "demo"
WAYS: dict[str, dict[str, Any]] = {
    "k=4": {"num_draft_tokens": 4},
    "model": {"draft_source": "model"},
    "ngram": {"draft_source": "ngram"},
    "mixed": {"draft_source": "mixed"},
}


def run(url: str, prompts: list[str], tokens: int, **fields: Any) -> list[Result]:
    async def one_by_one() -> list[Result]:
        async with Client(url) as client:
            return [
                await client.generate(
                    text_input=prompt, max_tokens=tokens, return_num_output_tokens=True, **fields
                )
                for prompt in prompts
            ]

    return asyncio.run(one_by_one())


def speed(results: list[Result]) -> float:
    """Tokens per second over all requests."""
    tokens = sum(result.events[-1].num_output_tokens or 0 for result in results)
    return tokens / sum(result.events[-1].received_at - result.started_at for result in results)


def accepted(results: list[Result]) -> float:
    def total(name: str) -> int:
        return sum(int(result.events[-1].outputs[name].item()) for result in results)

    return total("total_accepted_draft_tokens") / max(1, total("total_draft_tokens"))


def measure(name: str, model: Path, given: argparse.Namespace) -> None:
    kinds = json.loads((DEMO / "prompts.json").read_text())
    settings = ServeSettings(
        http_port=0, grpc_port=0, metrics_port=0, model=model, draft_model=DEMO / "draft"
    )
    with TritonServer(settings) as server:
        for kind in ("easy", "hard", "copy"):
            prompts = kinds[kind][: given.prompts]
            run(server.grpc_url, prompts[:1], 16)
            plain = run(server.grpc_url, prompts, given.tokens)
            line = f"{name:>8} {kind:>5}: plain {speed(plain):6.1f} tokens/s"
            for way, fields in WAYS.items():
                run(server.grpc_url, prompts[:1], 32, **fields)
                drafted = run(server.grpc_url, prompts, given.tokens, **fields)
                same = all(a.text == b.text for a, b in zip(plain, drafted, strict=True))
                line += f" | {way} {speed(drafted) / speed(plain):.2f}x"
                line += f" (accepted {accepted(drafted):.0%}{'' if same else ', TEXT DIFFERS'})"
            print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pad-layers", type=int, default=90)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=4)
    given = parser.parse_args()
    print(
        f"Python {platform.python_version()}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.0f}; "
        f"{given.tokens} tokens, {given.prompts} prompts a kind, greedy, one request at a time"
    )
    for name, model in demo_and_padded(given.pad_layers):
        measure(name, model, given)


if __name__ == "__main__":
    main()
