"""Predicted outputs with real weights: texts to be edited, the text itself as the prediction.

    python benchmarks/prediction.py [--pad-layers 90] [--prompts 4] [--repeats 3]

One embedded engine in this process, one request at a time, greedy; the demo target, and the demo
target with extra layers that add zero, as a large model would cost. By turns for each prompt:
plain, with the text as prediction, and with another text of no use. Medians of wall clock.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import time
from contextlib import aclosing
from pathlib import Path

from padded import demo_and_padded

from trtllm_bls.engines.base import Engine
from trtllm_bls.engines.embedded import EmbeddedEngine, EmbeddedSettings
from trtllm_bls.engines.routing import RoutingEngine
from trtllm_bls.tokenizer import Tokenizer, load_tokenizer
from trtllm_bls.types import EngineRequest, Sampling, SpeculationRequest

DEMO = Path(__file__).parents[1] / "assets" / "demo"
NAMES = ("Ada", "Bruno", "Chen", "Dana", "Emil", "Fatima", "Goro", "Hana")
THINGS = ("a red clock", "a blue map", "a silver stone", "a brown drum", "a golden kite")
CITIES = ("Rome", "Prague", "Berlin", "Seoul", "Dublin", "Bern", "Tokyo", "Madrid")
UNRELATED = "The weather was fine, and nobody had expected the boat to come back before noon. " * 8


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


async def answer(engine: Engine, asked: EngineRequest) -> tuple[float, tuple[int, ...], int, int]:
    """Seconds, tokens, and of the prediction how many were drafted and accepted."""
    begun, last = time.perf_counter(), None
    tokens: list[int] = []
    async with aclosing(engine.generate(asked)) as stream:
        async for last in stream:
            tokens += last.token_ids
    counts = last.speculation if last else None
    drafted, accepted = (counts.predicted, counts.predicted_accepted) if counts else (0, 0)
    return time.perf_counter() - begun, tuple(tokens), drafted, accepted


async def measure(
    name: str, target: Engine, tokenizer: Tokenizer, given: argparse.Namespace
) -> None:
    engine = RoutingEngine(target)
    took: dict[str, list[float]] = {"plain": [], "text": [], "useless": []}
    drafted = accepted = tokens = counted = 0
    for number, (prompt, text) in enumerate(edits(given.prompts)):
        ids = tokenizer.encode(prompt, add_special_tokens=True)
        predictions = {"plain": "", "text": text, "useless": UNRELATED}
        seconds: dict[str, list[float]] = {way: [] for way in predictions}
        answers = set()
        for repeat in range(given.repeats + 1):
            for way, predicted in predictions.items():
                asked = EngineRequest(
                    request_id=f"{number}-{repeat}-{way}",
                    input_ids=ids,
                    max_tokens=given.tokens,
                    end_id=2,
                    sampling=Sampling(top_k=1),
                    speculation=SpeculationRequest(
                        prediction=tokenizer.encode(predicted, add_special_tokens=False)
                        if predicted
                        else ()
                    ),
                )
                spent, got, given_away, right = await answer(engine, asked)
                answers.add(got)
                if repeat:  # the first one warms up
                    seconds[way].append(spent)
                if repeat and way == "text":
                    drafted, accepted = drafted + given_away, accepted + right
                    counted += len(got)
        tokens += len(next(iter(answers)))
        assert len(answers) == 1, "speculation has changed the answer"
        for way, spent_all in seconds.items():
            took[way].append(statistics.median(spent_all))
    plain = sum(took["plain"])
    print(
        f"{name:>8}: plain {tokens / plain:6.1f} tokens/s | the text as prediction "
        f"{plain / sum(took['text']):.2f}x (accepted {accepted / max(1, drafted):.0%}, "
        f"{counted / (counted - accepted):.1f} tokens a pass of the target) | "
        f"useless prediction {plain / sum(took['useless']):.3f}x; {tokens} tokens, texts equal",
        flush=True,
    )


def run(name: str, model: Path, given: argparse.Namespace) -> None:
    settings = EmbeddedSettings(max_batch=4, max_sequence_tokens=1024)
    with EmbeddedEngine(model, settings) as target:
        asyncio.run(measure(name, target, load_tokenizer(DEMO / "target"), given))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pad-layers", type=int, default=90)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    print(
        f"Python {platform.python_version()}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.0f}; at most {given.tokens} tokens, {given.prompts} prompts"
    )
    for name, model in demo_and_padded(given.pad_layers):
        run(name, model, given)


if __name__ == "__main__":
    main()
