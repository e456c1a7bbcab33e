"""Trains tokenizer, target and draft from nothing: `python tools/train_demo/train.py --out DIR`.

Every stage leaves its result in DIR/work and is skipped when it is there; the two training loops save a checkpoint
every few hundred steps and go on from it. Batches depend on the seed and the step only, so a resumed run sees what an
unbroken one would have seen.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from distil import draft_loss, imitation_data
from export import export
from network import DRAFT, TARGET, Llama, Shape
from tokenizers import Tokenizer
from tokens import ANSWER_BIT, build_dataset, save_tokenizer, train_tokenizer
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

CHECKPOINT_EVERY = 500
SHORT, LONG = 512, 2048


@dataclass(frozen=True)
class Plan:
    """The numbers of one run. The last `long_share` of the steps uses rows of 2048 tokens instead of 512."""

    documents: int
    target_steps: int
    draft_steps: int
    imitations: int
    batch_tokens: int
    long_share: float
    target_rate: float
    draft_rate: float
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

    def at(self, step: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, next tokens and loss weights, each [rows, length], of one step."""
        picker = torch.Generator().manual_seed(self.plan.seed * 1_000_003 + step)
        usable = int((self.starts < len(self.tokens) - length - 1).sum())
        chosen = torch.randint(usable, (self.plan.batch_tokens // length,), generator=picker).to(self.device)
        rows = self.tokens[self.starts[chosen][:, None] + torch.arange(length + 1, device=self.device)].long()
        ids, is_answer = rows & (ANSWER_BIT - 1), (rows[:, 1:] & ANSWER_BIT) > 0
        return ids[:, :-1], ids[:, 1:], is_answer.float()


def target_loss(network: Llama, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Cross entropy over the tokens of answers. Prompts carry none: how people go on typing is not to be imitated."""
    ids, wanted, weights = batch
    losses = F.cross_entropy(network(ids).float().flatten(0, 1), wanted.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def rate_at(step: int, steps: int, peak: float) -> float:
    """A short warm-up, then a straight line down to almost nothing."""
    return peak * min((step + 1) / 200, max(0.01, 1 - step / steps))


def optimise(network: Llama, loss_of: Callable[[int, int], Tensor], steps: int, peak: float, plan: Plan, state: Path) -> None:
    """Runs the steps that are still missing and leaves weights, optimizer and loss curve in `state`."""
    matrices = [weight for weight in network.parameters() if weight.dim() == 2]
    vectors = [weight for weight in network.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)
    first, curve = 0, []
    if state.exists():
        saved = torch.load(state, map_location=next(network.parameters()).device)
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        first, curve = saved["step"], saved["curve"]
    bar = tqdm(range(first, steps), initial=first, total=steps, desc=state.stem, mininterval=5)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps, peak)
        loss = loss_of(step, LONG if step >= steps * (1 - plan.long_share) else SHORT)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            curve.append((step, round(loss.item(), 4)))
            bar.set_postfix(loss=f"{curve[-1][1]:.4f}")
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == steps:
            content = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1, "curve": curve}
            torch.save(content, state.with_suffix(".tmp"))
            os.replace(state.with_suffix(".tmp"), state)
    state.with_suffix(".curve.json").write_text(json.dumps(curve) + "\n")


def prepared(plan: Plan, beginning: Beginning, work: Path) -> tuple[Tokenizer, np.ndarray, np.ndarray]:
    """Tokenizer and training tokens, made now or found."""
    tokenizer_file, data_file = work / "tokenizer" / "tokenizer.json", work / "data.npz"
    if not tokenizer_file.exists():
        save_tokenizer(beginning.tokenizer(plan), tokenizer_file.parent, TARGET.max_position_embeddings)
    if not data_file.exists():
        tokens, starts = build_dataset(tokenizer_file, plan.documents, plan.seed, max(1, (os.cpu_count() or 2) - 1))
        np.savez(data_file, tokens=tokens, starts=starts)
    data = np.load(data_file)
    return Tokenizer.from_file(str(tokenizer_file)), data["tokens"], data["starts"]


def run(plan: Plan, beginning: Beginning, out: Path, device: str) -> None:
    """All stages in order."""
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    tokenizer, tokens, starts = prepared(plan, beginning, work)
    tqdm.write(f"{len(tokens) / 1e6:.1f} M tokens in {len(starts)} documents after {time.monotonic() - began:.0f} s")
    batches = Batches(tokens, starts, plan, device)
    # One graph per row length: a graph for any length took longer to build than it ran.
    fast = partial(torch.compile, dynamic=False) if device == "cuda" else (lambda function: function)
    torch.set_float32_matmul_precision("high")

    def in_bf16(compute: Callable[[int, int], Tensor]) -> Callable[[int, int], Tensor]:
        def inner(step: int, length: int) -> Tensor:
            with torch.autocast(device, torch.bfloat16):
                return compute(step, length)
        return inner

    target = beginning.network(TARGET, "target", plan, device)
    loss = fast(lambda batch: target_loss(target, batch))
    optimise(target, in_bf16(lambda step, length: loss(batches.at(step, length))), plan.target_steps, plan.target_rate, plan, work / "target.pt")
    export(target, tokenizer, out / "target")
    tqdm.write(f"target done after {time.monotonic() - began:.0f} s")

    imitated = work / "imitations.npz"
    if not imitated.exists():
        written, begins = imitation_data(target, tokenizer, plan.imitations, plan.seed, device)
        np.savez(imitated, tokens=written, starts=begins)
    data = np.load(imitated)
    tqdm.write(f"{len(data['tokens']) / 1e6:.1f} M tokens of the target's own after {time.monotonic() - began:.0f} s")
    own = Batches(data["tokens"], data["starts"], plan, device)
    draft = beginning.network(DRAFT, "draft", plan, device)
    target.eval().requires_grad_(False)
    imitate = fast(lambda batch: draft_loss(draft, target, batch))

    def draft_step(step: int, length: int) -> Tensor:
        # Two of three steps on the target's own greedy answers: this is the text that the draft will have to guess.
        return imitate((batches if step % 3 == 0 else own).at(step, length))

    optimise(draft, in_bf16(draft_step), plan.draft_steps, plan.draft_rate, plan, work / "draft.pt")
    export(draft, tokenizer, out / "draft")
    tqdm.write(f"draft done after {time.monotonic() - began:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for target/, draft/ and the resumable work/")
    parser.add_argument("--documents", type=int, default=600_000)
    parser.add_argument("--target-steps", type=int, default=6000)
    parser.add_argument("--draft-steps", type=int, default=6000)
    parser.add_argument("--imitations", type=int, default=40_000, help="prompts that the target answers for the draft")
    parser.add_argument("--batch-tokens", type=int, default=65_536)
    parser.add_argument("--long-share", type=float, default=0.22, help="share of the steps with rows of 2048 tokens")
    parser.add_argument("--rate", type=float, default=2.5e-3, help="highest learning rate; the draft gets 1.2 times it")
    parser.add_argument("--seed", type=int, default=20250)
    parser.add_argument("--start-from", type=Path, help="continue from an assets folder instead of from nothing")
    args = parser.parse_args()
    plan = Plan(args.documents, args.target_steps, args.draft_steps, args.imitations, args.batch_tokens,
                args.long_share, args.rate, 1.2 * args.rate, args.seed)
    run(plan, Beginning(args.start_from), args.out, "cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    main()
