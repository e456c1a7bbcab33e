"""Trains tokenizer, target and draft: `python assets/demo/training/train.py --out DIR`.

Every stage leaves its result in DIR/work and is skipped when it is there; the two training loops
save a checkpoint every few hundred steps and go on from it. Batches depend on the seed and the
step only, so a resumed run sees what an unbroken one would have seen.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from distil import draft_loss, imitation_data
from export import export
from network import DRAFT, TARGET, Llama, Shape
from optimise import Schedule, optimise
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokens import ANSWER_BIT, build_dataset, save_tokenizer, train_tokenizer
from torch import Tensor
from tqdm import tqdm

Batch = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Plan:
    """The numbers of one run, which are its options."""

    documents: int
    target_steps: int
    draft_steps: int
    imitations: int
    batch_tokens: int
    long_share: float
    rate: float
    seed: int


@dataclass(frozen=True)
class Beginning:
    """Where a continued run takes its tokenizer and weights from; None means from nothing."""

    folder: Path | None

    def tokenizer(self, plan: Plan) -> Tokenizer:
        if self.folder is None:
            return train_tokenizer(40_000, plan.seed)
        return Tokenizer.from_file(str(self.folder / "target" / "tokenizer.json"))

    def network(self, shape: Shape, part: str, plan: Plan, device: str) -> Llama:
        torch.manual_seed(plan.seed)
        network = Llama(shape)
        if self.folder is not None:
            weights = load_file(str(self.folder / part / "model.safetensors"))
            network.load_state_dict({name: weight.float() for name, weight in weights.items()})
        return network.to(device)


class Batches:
    """Rows that begin where a document begins; what follows it fills the row."""

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, plan: Plan, device: str) -> None:
        self.tokens = torch.from_numpy(tokens.astype(np.int32)).to(device)
        self.starts = torch.from_numpy(starts).to(device)
        self.plan, self.device = plan, device

    def at(self, step: int, length: int) -> Batch:
        """Inputs, next tokens and loss weights, each [rows, length], of one step."""
        picker = torch.Generator().manual_seed(self.plan.seed * 1_000_003 + step)
        usable = int((self.starts < len(self.tokens) - length - 1).sum())
        chosen = torch.randint(usable, (self.plan.batch_tokens // length,), generator=picker).to(
            self.device
        )
        rows = self.tokens[
            self.starts[chosen][:, None] + torch.arange(length + 1, device=self.device)
        ].long()
        ids, is_answer = rows & (ANSWER_BIT - 1), (rows[:, 1:] & ANSWER_BIT) > 0
        return ids[:, :-1], ids[:, 1:], is_answer.float()


def target_loss(network: Llama, batch: Batch) -> Tensor:
    """Cross entropy over answers only: how people go on typing is not to be imitated."""
    ids, wanted, weights = batch
    losses = F.cross_entropy(network(ids).float().flatten(0, 1), wanted.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def prepared(
    plan: Plan, beginning: Beginning, work: Path
) -> tuple[Tokenizer, np.ndarray, np.ndarray]:
    """Tokenizer and training tokens, made now or found."""
    tokenizer_file, data_file = work / "tokenizer" / "tokenizer.json", work / "data.npz"
    if not tokenizer_file.exists():
        save_tokenizer(
            beginning.tokenizer(plan), tokenizer_file.parent, TARGET.max_position_embeddings
        )
    if not data_file.exists():
        tokens, starts = build_dataset(
            tokenizer_file, plan.documents, plan.seed, max(1, (os.cpu_count() or 2) - 1)
        )
        np.savez(data_file, tokens=tokens, starts=starts)
    data = np.load(data_file)
    return Tokenizer.from_file(str(tokenizer_file)), data["tokens"], data["starts"]


def compiled(compute: Callable[[Batch], Tensor], device: str) -> Callable[[Batch], Tensor]:
    """The loss in bf16 and, on a GPU, compiled."""
    # One graph per row length: a graph for any length took longer to build than it ran.
    fast = torch.compile(compute, dynamic=False) if device == "cuda" else compute

    def inner(batch: Batch) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return fast(batch)

    return inner


def train_target(target: Llama, batches: Batches, plan: Plan, work: Path) -> None:
    """Plain language modelling on the generated documents."""
    loss = compiled(lambda batch: target_loss(target, batch), batches.device)
    schedule = Schedule(plan.target_steps, plan.rate, plan.long_share)
    optimise(
        target, lambda step, length: loss(batches.at(step, length)), schedule, work / "target.pt"
    )


def own_answers(target: Llama, tokenizer: Tokenizer, batches: Batches, work: Path) -> Batches:
    """The target's greedy answers, written now or found."""
    file, plan = work / "imitations.npz", batches.plan
    if not file.exists():
        tokens, starts = imitation_data(
            target, tokenizer, plan.imitations, plan.seed, batches.device
        )
        np.savez(file, tokens=tokens, starts=starts)
    data = np.load(file)
    return Batches(data["tokens"], data["starts"], plan, batches.device)


def train_draft(draft: Llama, target: Llama, both: tuple[Batches, Batches], work: Path) -> None:
    """Distillation on the documents and on the target's own answers."""
    documents, own = both
    plan = documents.plan
    target.eval().requires_grad_(False)
    loss = compiled(lambda batch: draft_loss(draft, target, batch), documents.device)

    def loss_of(step: int, length: int) -> Tensor:
        # Two of three steps on what the target wrote: that text the draft will have to guess.
        return loss((documents if step % 3 == 0 else own).at(step, length))

    optimise(
        draft,
        loss_of,
        Schedule(plan.draft_steps, 1.2 * plan.rate, plan.long_share),
        work / "draft.pt",
    )


def run(plan: Plan, beginning: Beginning, out: Path, device: str) -> None:
    """All stages in order."""
    work, began = out / "work", time.monotonic()
    work.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")

    def report(done: str) -> None:
        tqdm.write(f"{time.monotonic() - began:4.0f} s: {done}")

    tokenizer, tokens, starts = prepared(plan, beginning, work)
    report(f"{len(tokens) / 1e6:.1f} M tokens in {len(starts)} documents")
    batches = Batches(tokens, starts, plan, device)
    target = beginning.network(TARGET, "target", plan, device)
    train_target(target, batches, plan, work)
    export(target, tokenizer, out / "target")
    report("target trained")
    own = own_answers(target, tokenizer, batches, work)
    report(f"{len(own.tokens) / 1e6:.1f} M tokens of the target's own")
    draft = beginning.network(DRAFT, "draft", plan, device)
    train_draft(draft, target, (batches, own), work)
    export(draft, tokenizer, out / "draft")
    report("draft trained")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for target/, draft/ and the resumable work/"
    )
    parser.add_argument("--documents", type=int, default=800_000)
    parser.add_argument("--target-steps", type=int, default=9200)
    parser.add_argument("--draft-steps", type=int, default=4000)
    parser.add_argument(
        "--imitations",
        type=int,
        default=24_000,
        help="prompts that the target answers for the draft",
    )
    parser.add_argument("--batch-tokens", type=int, default=65_536)
    parser.add_argument(
        "--long-share", type=float, default=0.22, help="share of the steps with rows of 2048 tokens"
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=2.5e-3,
        help="highest learning rate; the draft gets 1.2 times it",
    )
    parser.add_argument("--seed", type=int, default=20250)
    parser.add_argument(
        "--start-from", type=Path, help="continue from an assets folder instead of from nothing"
    )
    args = parser.parse_args()
    plan = Plan(**{field.name: getattr(args, field.name) for field in fields(Plan)})
    run(plan, Beginning(args.start_from), args.out, "cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    main()
