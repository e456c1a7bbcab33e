"""The tokenizer of both models and the token arrays that they train on.

A training array is a flat uint16: the low bits are the token, the top bit marks the tokens of an
answer, which alone are learned. Documents lie one after the other; `starts` says where each
begins.
"""

from __future__ import annotations

import json
import multiprocessing
import random
from pathlib import Path

import numpy as np
from corpus import BEGIN, CHAT_TEMPLATE, END, PAD, SPECIALS, draw, draw_document
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm

ANSWER_BIT = 0x8000
VOCABULARY = 4096
CHUNK = 2000
# Single digits for arithmetic, single newlines so that a prompt's end is a token border, marks
# (\p{M}) kept with their letters for Hindi and Thai, and a run of blanks that leaves the last one
# to the next word, for indentation.
SPLIT = (
    r"\n|\r|\p{N}|[^\S\r\n]+(?=[\r\n]|$)|[^\S\r\n]+(?=[^\S\r\n])"
    r"| ?[\p{L}\p{M}]+| ?[^\s\p{L}\p{M}\p{N}]+|[^\S\r\n]"
)
# Kinds rich in bytes above 127 get a small say in the merges: their characters then span several
# tokens, and streaming has something to hold back.
MERGE_SHARE = {"language": 0.15, "emoji": 0.05}


def train_tokenizer(samples: int, seed: int) -> Tokenizer:
    """A byte-level BPE over samples of the mix."""
    rng = random.Random(seed)
    texts = []
    for _ in tqdm(range(samples), desc="text for the tokenizer", mininterval=5):
        sample = draw(rng)
        if rng.random() < MERGE_SHARE.get(sample.kind, 1.0):
            texts += [sample.prompt, sample.answer]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A $B",
        special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))],
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """The three files that transformers reads."""
    folder.mkdir(parents=True, exist_ok=True)
    # Without indentation the file is half the size.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [
            token for token in SPECIALS if token not in (BEGIN, END, PAD)
        ],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "padding_side": "left",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )


def _encode_chunk(job: tuple[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Documents of one seed as tokens and their lengths; runs in a worker process."""
    path, seed = job
    tokenizer = Tokenizer.from_file(path)
    rng = random.Random(seed)
    documents = [draw_document(rng) for _ in range(CHUNK)]
    flat = [segment for document in documents for segment in document]
    encoded = iter(
        tokenizer.encode_batch([segment.text for segment in flat], add_special_tokens=False)
    )
    tokens: list[int] = []
    lengths = []
    for document in documents:
        before = len(tokens)
        for segment in document:
            ids = next(encoded).ids
            tokens += [token | ANSWER_BIT for token in ids] if segment.answer else ids
        lengths.append(len(tokens) - before)
    return np.asarray(tokens, dtype=np.uint16), np.asarray(lengths, dtype=np.int64)


def build_dataset(
    tokenizer_file: Path, documents: int, seed: int, workers: int
) -> tuple[np.ndarray, np.ndarray]:
    """All training tokens and the start of every document. The same for any number of workers."""
    jobs = [(str(tokenizer_file), seed + 1 + index) for index in range(documents // CHUNK)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        parts = list(
            tqdm(pool.imap(_encode_chunk, jobs), total=len(jobs), desc="documents", mininterval=5)
        )
    lengths = np.concatenate([part[1] for part in parts])
    return np.concatenate([part[0] for part in parts]), np.cumsum(lengths) - lengths
