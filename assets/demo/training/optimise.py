"""One training loop for both models: a learning rate that rises and falls, checkpoints, a curve."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from network import Llama
from torch import Tensor
from tqdm import tqdm

CHECKPOINT_EVERY = 500
SHORT, LONG = 512, 2048

Loss = Callable[[int, int], Tensor]


@dataclass(frozen=True)
class Schedule:
    """How long and how fast; the last `long_share` of the steps has rows of 2048 tokens."""

    steps: int
    peak: float
    long_share: float

    def rate(self, step: int) -> float:
        """A short warm-up, then a straight line down to almost nothing."""
        return self.peak * min((step + 1) / 200, max(0.01, 1 - step / self.steps))

    def length(self, step: int) -> int:
        return LONG if step >= self.steps * (1 - self.long_share) else SHORT


def _optimizer(network: Llama) -> torch.optim.Optimizer:
    matrices = [weight for weight in network.parameters() if weight.dim() == 2]
    vectors = [weight for weight in network.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def optimise(network: Llama, loss_of: Loss, schedule: Schedule, state: Path) -> None:
    """Runs the steps that are missing and leaves weights, optimizer and loss curve in `state`."""
    optimizer = _optimizer(network)
    first, curve = 0, []
    if state.exists():
        saved = torch.load(state, map_location=next(network.parameters()).device)
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        first, curve = saved["step"], saved["curve"]
    steps = range(first, schedule.steps)
    bar = tqdm(steps, initial=first, total=schedule.steps, desc=state.stem, mininterval=5)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        loss = loss_of(step, schedule.length(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            curve.append((step, round(loss.item(), 4)))
            bar.set_postfix(loss=f"{curve[-1][1]:.4f}")
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == schedule.steps:
            content = {
                "network": network.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step + 1,
                "curve": curve,
            }
            # A checkpoint that was cut off half-way must not replace a whole one.
            torch.save(content, state.with_suffix(".tmp"))
            os.replace(state.with_suffix(".tmp"), state)
    state.with_suffix(".curve.json").write_text(json.dumps(curve) + "\n")
