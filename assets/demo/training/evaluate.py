"""Measures the demo models as shipped, on a CPU: `python assets/demo/training/evaluate.py`.

Perplexity, products that training never saw, paraphrases, and what greedy speculation accepts per
kind of text. The prompts come from the held-out side of the generator's split. Everything goes
through transformers, in fp32.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import defaultdict
from pathlib import Path

import torch
from corpus import Document, draw, is_held_out, render
from kinds.arithmetic import product_fact, product_pairs
from kinds.sample import Sample
from speculation import Acceptance, count_lookup_rounds, count_rounds
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

ASSETS = Path(__file__).resolve().parents[1]
DRAFT_LENGTH = 4
BATCH = 32


class Pair:
    """Both models, their tokenizer, and the few things that are measured with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder / "target")
        self.target = self._load(folder / "target")
        self.draft = self._load(folder / "draft")

    @staticmethod
    def _load(folder: Path) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model.eval()

    def encode(self, text: str) -> list[int]:
        """Tokens of a text that already holds its markers."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    @torch.no_grad()
    def complete(self, prompts: list[list[int]], limit: int = 320) -> list[list[int]]:
        """Greedy answers of the target, each up to and with its end token."""
        answers: dict[int, list[int]] = {}
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        for first in tqdm(range(0, len(order), BATCH), desc="answers", leave=False, mininterval=2):
            chosen = order[first : first + BATCH]
            batch = self.tokenizer.pad(
                {"input_ids": [prompts[index] for index in chosen]}, return_tensors="pt"
            )
            output = self.target.generate(**batch, max_new_tokens=limit, do_sample=False)
            for index, row in zip(
                chosen, output[:, batch["input_ids"].shape[1] :].tolist(), strict=True
            ):
                end = self.tokenizer.eos_token_id
                answers[index] = row[: row.index(end) + 1] if end in row else row
        return [answers[index] for index in range(len(prompts))]

    @torch.no_grad()
    def guesses(self, prompt: list[int], answer: list[int]) -> list[int]:
        """The draft's first choice for every token of the answer."""
        logits = self.draft(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        choices: list[int] = logits.argmax(-1).tolist()
        return choices

    def acceptance(
        self, prompts: list[list[int]], answers: list[list[int]]
    ) -> tuple[Acceptance, Acceptance]:
        """What the draft and what prompt lookup would get accepted over these answers."""
        drafted, looked_up = Acceptance(), Acceptance()
        for prompt, answer in zip(prompts, answers, strict=True):
            drafted += count_rounds(answer, self.guesses(prompt, answer), DRAFT_LENGTH)
            looked_up += count_lookup_rounds(prompt, answer, DRAFT_LENGTH)
        return drafted, looked_up

    @torch.no_grad()
    def surprise(self, model: PreTrainedModel, document: Document) -> tuple[float, int]:
        """Summed negative log-likelihood and number of the answer's tokens."""
        prompt, answer = self.encode(document[0].text), self.encode(document[1].text)
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        losses = torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum")
        return float(losses), len(answer)


def held_out_samples(per_kind: int, seed: int) -> dict[str, list[Sample]]:
    """Held-out samples by kind, each prompt once."""
    rng = random.Random(seed)
    by_kind: dict[str, dict[str, Sample]] = defaultdict(dict)
    for _ in range(per_kind * 100):
        sample = draw(rng, held_out=True)
        if len(by_kind[sample.kind]) < per_kind:
            by_kind[sample.kind].setdefault(sample.prompt, sample)
    return {kind: list(samples.values()) for kind, samples in sorted(by_kind.items())}


def measure_kinds(pair: Pair, per_kind: int, seed: int) -> dict[str, dict[str, float]]:
    """One row of numbers per kind of text."""
    rng, rows = random.Random(seed), {}
    samples = held_out_samples(per_kind, seed)
    for kind, chosen in tqdm(samples.items(), desc="kinds"):
        documents = [render(rng, sample, 0.5) for sample in chosen]
        losses = {
            name: [pair.surprise(model, document) for document in documents]
            for name, model in (("target", pair.target), ("draft", pair.draft))
        }
        prompts = [pair.encode(document[0].text) for document in documents]
        answers = pair.complete(prompts)
        drafted, looked_up = pair.acceptance(prompts, answers)
        wanted = [pair.encode(document[1].text) for document in documents]
        rows[kind] = {
            "prompts": len(chosen),
            **{
                f"perplexity_{name}": math.exp(
                    sum(loss for loss, _ in pairs) / sum(count for _, count in pairs)
                )
                for name, pairs in losses.items()
            },
            "exact": sum(a == w for a, w in zip(answers, wanted, strict=True)) / len(chosen),
            "ended": sum(pair.tokenizer.eos_token_id in answer for answer in answers) / len(chosen),
            **acceptance_columns(drafted, looked_up),
        }
    return rows


def measure_lists(pair: Pair) -> dict[str, dict[str, float]]:
    """Acceptance on the prompts of `prompts.json`, sent as they stand there."""
    lists = json.loads((pair.folder / "prompts.json").read_text(encoding="utf-8"))
    rows = {}
    for name, texts in lists.items():
        prompts: list[list[int]] = [pair.tokenizer(text)["input_ids"] for text in texts]
        answers = pair.complete(prompts)
        drafted, looked_up = pair.acceptance(prompts, answers)
        rows[name] = {"prompts": len(texts), **acceptance_columns(drafted, looked_up)}
    return rows


def acceptance_columns(drafted: Acceptance, looked_up: Acceptance) -> dict[str, float]:
    """The same columns for kinds of text and for lists of prompts."""
    return {
        "accepted_per_tested": drafted.per_tested,
        "accepted_per_drafted": drafted.per_drafted,
        "tokens_per_round": drafted.per_round,
        "lookup_tokens_per_round": looked_up.per_round,
    }


def measure_products(pair: Pair) -> dict[str, float]:
    """Share of held-out products whose final number is right, by size."""
    pairs = [
        (a, b)
        for a, b in product_pairs()
        if max(a, b) > 10 and is_held_out(Sample("", "", "", facts=(product_fact(a, b),)))
    ]
    ends = pair.complete([pair.encode(f"<|begin|>What is {a} * {b}?") for a, b in pairs], 60)
    right: dict[str, list[bool]] = defaultdict(list)
    for (a, b), ids in zip(pairs, ends, strict=True):
        text = pair.tokenizer.decode(ids, skip_special_tokens=True)
        size = "two digits by two" if min(a, b) > 9 else "two digits by one"
        right[size].append(text.strip().rstrip(".").split(" ")[-1] == str(a * b))
    return {
        **{size: sum(hits) / len(hits) for size, hits in right.items()},
        **{f"{size}, number": len(hits) for size, hits in right.items()},
    }


SHOWN = (
    "What is machine learning?",
    "What is 12 * 9?",
    "Tell me a story about a fox",
    "How do I count to nine in Hindi?",
    "Write a Python function that adds two numbers.",
    "  what is machine learning",
    "What is machine learning? ",
    "Could you briefly explain machine learning to me?",
    "whats 14 * 7",
    "Show me a family emoji.",
    "Who was Napoleon?",
    "What is the difference between latency and throughput?",
)


def show_samples(pair: Pair) -> None:
    """A look with one's own eyes."""
    ids: list[list[int]] = [pair.tokenizer(prompt)["input_ids"] for prompt in SHOWN]
    for prompt, answer in zip(SHOWN, pair.complete(ids), strict=True):
        sys.stdout.write(f"\n> {prompt!r}\n{pair.tokenizer.decode(answer)}\n")


def table(rows: dict[str, dict[str, float]]) -> str:
    """The rows as Markdown."""
    columns = list(next(iter(rows.values())))
    lines = [f"| | {' | '.join(columns)} |", "|" + " --- |" * (len(columns) + 1)]
    for kind, row in rows.items():
        cells = [
            f"{row[column]:.0f}" if column == "prompts" else f"{row[column]:.3f}"
            for column in columns
        ]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--assets", type=Path, default=ASSETS)
    parser.add_argument("--per-kind", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the numbers here as well")
    args = parser.parse_args()
    torch.set_num_threads(2)
    pair = Pair(args.assets)
    show_samples(pair)
    products = measure_products(pair)
    kinds = measure_kinds(pair, args.per_kind, args.seed)
    lists = measure_lists(pair)
    sys.stdout.write(f"\nHeld-out prompts by kind:\n\n{table(kinds)}\n")
    sys.stdout.write(f"\nThe lists of prompts.json:\n\n{table(lists)}\n")
    sys.stdout.write(f"\nHeld-out products: {json.dumps(products)}\n")
    if args.json:
        content = {"kinds": kinds, "lists": lists, "products": products}
        args.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
