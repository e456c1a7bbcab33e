"""How the draft learns to guess what the target will write."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from corpus import END, draw, render
from network import Llama
from tokenizers import Tokenizer
from tokens import ANSWER_BIT
from torch import Tensor
from tqdm import tqdm

ROWS = 2048
LONGEST_PROMPT, LONGEST_ANSWER = 160, 300
# Share of the loss that asks for the target's first choice only. Greedy acceptance needs the first
# choice, sampled acceptance the whole distribution.
FIRST_CHOICE = 0.5


def draft_loss(draft: Llama, target: Llama, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Distance of the draft's prediction to the target's, on every token of the row."""
    ids, _, weights = batch
    with torch.no_grad():
        wanted = target(ids).float().flatten(0, 1)
    guessed = F.log_softmax(draft(ids).float().flatten(0, 1), dim=-1)
    log_wanted = F.log_softmax(wanted, dim=-1)
    divergence = (log_wanted.exp() * (log_wanted - guessed)).sum(-1)
    choice = F.nll_loss(guessed, wanted.argmax(-1), reduction="none")
    losses = FIRST_CHOICE * choice + (1 - FIRST_CHOICE) * divergence
    return (losses * weights.flatten()).sum() / weights.sum()


def _prompt(rng: random.Random) -> str:
    """A prompt of the training side, plain or chat, with its markers."""
    return render(rng, draw(rng), 0.6)[0].text


def imitation_data(
    target: Llama, tokenizer: Tokenizer, prompts: int, seed: int, device: str
) -> tuple[np.ndarray, np.ndarray]:
    """Greedy answers of the target, in the form of a training array."""
    rng = random.Random(seed + 77)
    encoded = tokenizer.encode_batch(
        [_prompt(rng) for _ in range(prompts)], add_special_tokens=False
    )
    ids = [entry.ids for entry in encoded if len(entry.ids) <= LONGEST_PROMPT]
    # Batches of similar length pad little, and the array is shuffled afterwards.
    ids.sort(key=len)
    end = tokenizer.token_to_id(END)
    documents: list[list[int]] = []
    for first in tqdm(range(0, len(ids), ROWS), desc="answers of the target", mininterval=5):
        part = ids[first : first + ROWS]
        width = max(map(len, part))
        padded = torch.tensor([[end] * (width - len(row)) + row for row in part], device=device)
        real = torch.tensor(
            [[False] * (width - len(row)) + [True] * len(row) for row in part], device=device
        )
        with torch.autocast(device, torch.bfloat16):
            answers = target.complete(padded, real, end, LONGEST_ANSWER).tolist()
        for row, answer in zip(part, answers, strict=True):
            kept = answer[: answer.index(end) + 1] if end in answer else answer
            documents.append(row + [token | ANSWER_BIT for token in kept])
    rng.shuffle(documents)
    lengths = np.asarray([len(document) for document in documents], dtype=np.int64)
    return np.concatenate(
        [np.asarray(document, dtype=np.uint16) for document in documents]
    ), np.cumsum(lengths) - lengths
