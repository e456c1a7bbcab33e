"""Fills `assets/demo/prompts.json` from held-out prompts by what the models do with them.

Easy: the draft guesses nearly everything. Hard: the target is right and the draft is mostly wrong.
Copy: prompt lookup alone yields several tokens per step. All are raw prompts, to be sent as they
are. The demo's own three are fixed.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from pathlib import Path

import torch
from evaluate import ASSETS, DRAFT_LENGTH, Pair, held_out_samples
from speculation import count_lookup_rounds, count_rounds

DEMO = [
    "What is speculative decoding?",
    "How do I count to nine in Hindi?",
    "Tell me a story about a fox",
]
PER_LIST, PER_KIND = 16, 3
SHORTEST = 24
# Most prompts are easy ones; the hard ones have to be looked for among orders and copies.
POOL = {"ordering": 260, "copy": 120, "lookup": 0}


def belongs(accepted: float, looked_up: float, kind: str) -> str | None:
    """The list for a prompt, by accepted drafts and by tokens per step of prompt lookup."""
    if kind == "copy" and looked_up >= 3.5:
        return "copy"
    if accepted >= 0.95 and kind != "copy":
        return "easy"
    return "hard" if accepted <= 0.55 else None


def choose(pair: Pair, seed: int) -> dict[str, list[str]]:
    """Prompts by list, at most a few of a kind among the easy ones."""
    rng = random.Random(seed)
    pool = held_out_samples(max(POOL.values()), seed)
    chosen: dict[str, list[str]] = {"easy": [], "hard": [], "copy": []}
    kinds: Counter[tuple[str, str]] = Counter()
    samples = [
        sample
        for kind, part in pool.items()
        for sample in part[: POOL.get(kind, 12)]
        if not sample.continues
    ]
    rng.shuffle(samples)
    prompts = [pair.encode(f"<|begin|>{sample.prompt}") for sample in samples]
    for sample, prompt, answer in zip(samples, prompts, pair.complete(prompts), strict=True):
        wanted = pair.encode(f"\n{sample.answer}<|end|>")
        if len(answer) < SHORTEST or (answer != wanted and sample.kind != "story"):
            continue
        accepted = count_rounds(answer, pair.guesses(prompt, answer), DRAFT_LENGTH).per_drafted
        looked_up = count_lookup_rounds(prompt, answer, DRAFT_LENGTH).per_round
        name = belongs(accepted, looked_up, sample.kind)
        if name is None or len(chosen[name]) == PER_LIST:
            continue
        if name == "easy" and kinds[name, sample.kind] == PER_KIND:
            continue
        kinds[name, sample.kind] += 1
        chosen[name].append(sample.prompt)
    return {**chosen, "demo": DEMO}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--assets", type=Path, default=ASSETS)
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(2)
    lists = choose(Pair(args.assets), args.seed)
    text = json.dumps(lists, indent=2, ensure_ascii=False) + "\n"
    (args.assets / "prompts.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
