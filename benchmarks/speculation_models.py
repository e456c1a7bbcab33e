"""Speculation with real weights on the embedded engine, through the real tritonserver.

    python benchmarks/speculation_models.py [--pad-layers 90] [--tokens 128] [--prompts 4]
                                            [--in-process | --prediction [--repeats 3]]

Runs the demo pair, and the demo pair whose target has extra layers that add zero: the same
function at several times the cost, as a large target would have it. Wall-clock ratios to plain
decoding in the same run, per kind of prompt and source of drafts. ``--in-process`` needs no
server: both engines are in this process, on the CPU or on CUDA.

``--prediction`` measures predicted outputs in this process, without a draft model: each prompt asks
for an edit of a text. By turns it is asked plainly, with the text as prediction, and with another
text of no use. Medians of wall clock over ``--repeats``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from trtllm_bls.bundled import DEMO
from trtllm_bls.client import Client
from trtllm_bls.engines.embedded import EmbeddedEngine, EmbeddedSettings
from trtllm_bls.engines.routing import RoutingEngine
from trtllm_bls.launcher import TritonServer
from trtllm_bls.settings import ServeSettings
from trtllm_bls.tokenizer import load_tokenizer
from trtllm_bls.types import EngineRequest, Sampling, SpeculationRequest

WAYS: dict[str, dict[str, Any]] = {
    "k=4": {"num_draft_tokens": 4},
    "model": {"draft_source": "model"},
    "ngram": {"draft_source": "ngram"},
    "mixed": {"draft_source": "mixed"},
}


NAMES = ("Ada", "Bruno", "Chen", "Dana", "Emil", "Fatima", "Goro", "Hana")
THINGS = ("a red clock", "a blue map", "a silver stone", "a brown drum", "a golden kite")
CITIES = ("Rome", "Prague", "Berlin", "Seoul", "Dublin", "Bern", "Tokyo", "Madrid")
UNRELATED = "The weather was fine, and nobody had expected the boat to come back before noon. " * 8


@dataclass
class Answer:
    """What came, how many tokens that is, in how many seconds; drafted and accepted tokens."""

    content: object
    tokens: int
    seconds: float
    drafted: int
    accepted: int


# Asks a prompt for so many tokens, with what it wants of speculation.
Ask = Callable[..., Awaitable[Answer]]


@asynccontextmanager
async def through_triton(model: Path) -> AsyncIterator[Ask]:
    settings = ServeSettings(
        http_port=0, grpc_port=0, metrics_port=0, model=model, draft_model=DEMO / "draft"
    )
    with TritonServer(settings) as server:
        async with Client(server.grpc_url) as client:

            async def ask(prompt: str, tokens: int, **speculation: Any) -> Answer:
                result = await client.generate(
                    text_input=prompt,
                    max_tokens=tokens,
                    return_num_output_tokens=True,
                    **speculation,
                )
                last = result.events[-1]
                drafted, accepted = (
                    int(last.outputs[name].item()) if name in last.outputs else 0
                    for name in ("total_draft_tokens", "total_accepted_draft_tokens")
                )
                seconds = last.received_at - result.started_at
                return Answer(result.text, last.num_output_tokens or 0, seconds, drafted, accepted)

            yield ask


@asynccontextmanager
async def in_process(model: Path, with_draft: bool = True) -> AsyncIterator[Ask]:
    tokenizer = load_tokenizer(DEMO / "target")
    settings = EmbeddedSettings(max_batch=8, max_sequence_tokens=1024)
    draft = EmbeddedEngine(DEMO / "draft", settings) if with_draft else None
    engine = RoutingEngine(EmbeddedEngine(model, settings), draft)

    async def ask(prompt: str, tokens: int, prediction: str = "", **speculation: Any) -> Answer:
        ids_of_prediction = tokenizer.encode(prediction, add_special_tokens=False)
        asked = EngineRequest(
            request_id="r",
            input_ids=tokenizer.encode(prompt, add_special_tokens=True),
            max_tokens=tokens,
            end_id=2,
            sampling=Sampling(top_k=1),
            speculation=SpeculationRequest(
                prediction=ids_of_prediction if prediction else (), **speculation
            ),
        )
        begun, ids, counts = time.perf_counter(), [], None
        async with aclosing(engine.generate(asked)) as stream:
            async for chunk in stream:
                ids += chunk.token_ids
                counts = chunk.speculation
        drafted, accepted = 0, 0
        if counts and prediction:
            drafted, accepted = counts.predicted, counts.predicted_accepted
        elif counts:
            drafted, accepted = counts.drafted, counts.accepted
        return Answer(ids, len(ids), time.perf_counter() - begun, drafted, accepted)

    yield ask
    await engine.close()


def speed(answers: list[Answer]) -> float:
    """Tokens per second over all of them."""
    return sum(each.tokens for each in answers) / sum(each.seconds for each in answers)


async def measure(name: str, ask: Ask, tokens: int, count: int) -> None:
    kinds = json.loads((DEMO / "prompts.json").read_text())
    for kind in ("easy", "hard", "copy"):
        prompts = kinds[kind][:count]
        await ask(prompts[0], 16)
        plain = [await ask(prompt, tokens) for prompt in prompts]
        line = f"{name:>8} {kind:>5}: plain {speed(plain):6.1f} tokens/s"
        for way, speculation in WAYS.items():
            await ask(prompts[0], 32, **speculation)
            drafted = [await ask(prompt, tokens, **speculation) for prompt in prompts]
            same = [each.content for each in plain] == [each.content for each in drafted]
            right = sum(each.accepted for each in drafted)
            share = right / max(1, sum(each.drafted for each in drafted))
            line += f" | {way} {speed(drafted) / speed(plain):.2f}x"
            line += f" (accepted {share:.0%}{'' if same else ', TEXT DIFFERS'})"
        print(line, flush=True)


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
    demo = DEMO / "target"
    yield "demo", demo
    with tempfile.TemporaryDirectory() as scratch:
        padded = Path(scratch) / "padded"
        pad(demo, padded, layers)
        yield "padded", padded


def edits(count: int) -> list[tuple[str, str]]:
    """Prompts that ask for an edit, and the text that is to be edited."""
    found = []
    for number in range(count):
        old, new = NAMES[number % 8], NAMES[(number + 3) % 8]
        sentences = [
            f"{old if place % 4 == 0 else NAMES[(number + place) % 8]} "
            f"{('sees', 'sells', 'wants', 'finds')[place % 4]} "
            f"{THINGS[(place + number) % 5]} in {CITIES[(3 * place + number) % 8]}."
            for place in range(12)
        ]
        text = " ".join(sentences)
        found.append((f"Change the name {old} to {new}:\n{text}", text))
    return found


async def measure_prediction(name: str, ask: Ask, tokens: int, count: int, repeats: int) -> None:
    sums = {"plain": 0.0, "text": 0.0, "useless": 0.0}
    with_text: list[Answer] = []
    in_all = 0
    for prompt, text in edits(count):
        predictions = {"plain": "", "text": text, "useless": UNRELATED}
        answers: dict[str, list[Answer]] = {way: [] for way in predictions}
        for _ in range(repeats + 1):
            for way, prediction in predictions.items():
                answers[way].append(await ask(prompt, tokens, prediction=prediction))
        contents = [tuple(each.content) for one in answers.values() for each in one]
        assert len(set(contents)) == 1, "speculation has changed the answer"
        in_all += len(contents[0])
        with_text += answers["text"][1:]
        for way, one in answers.items():  # the first of each warms up
            sums[way] += statistics.median(each.seconds for each in one[1:])
    drafted = sum(each.drafted for each in with_text)
    accepted = sum(each.accepted for each in with_text)
    counted = sum(each.tokens for each in with_text)
    print(
        f"{name:>8}: plain {in_all / sums['plain']:6.1f} tokens/s | the text as prediction "
        f"{sums['plain'] / sums['text']:.2f}x (accepted {accepted / max(1, drafted):.0%}, "
        f"{counted / (counted - accepted):.1f} tokens a pass of the target) | "
        f"useless prediction {sums['plain'] / sums['useless']:.3f}x; {in_all} tokens, texts equal",
        flush=True,
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pad-layers", type=int, default=90)
    parser.add_argument("--tokens", type=int, help="default: 128, with --prediction 256")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3, help="with --prediction")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--in-process", action="store_true")
    way.add_argument("--prediction", action="store_true")
    given = parser.parse_args()
    tokens = given.tokens or (256 if given.prediction else 128)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"Python {platform.python_version()}, {device}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.0f}; "
        f"{tokens} tokens, {given.prompts} prompts a kind, greedy, one request at a time"
    )
    for name, model in demo_and_padded(given.pad_layers):
        if given.prediction:
            async with in_process(model, with_draft=False) as ask:
                await measure_prediction(name, ask, tokens, given.prompts, given.repeats)
            continue
        async with (in_process if given.in_process else through_triton)(model) as ask:
            await measure(name, ask, tokens, given.prompts)


if __name__ == "__main__":
    asyncio.run(main())
