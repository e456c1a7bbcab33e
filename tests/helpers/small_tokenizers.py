"""Small tokenizers of every family we promise to stream, trained here in well under a second.

Each has special tokens and a plain added token in the middle of its table, as real ones do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.helpers.directories import shared_directory

CORPUS = (
    "The quick brown fox, it's said, jumped over 13 lazy dogs. It wasn't fun!  Twice?",
    "def main() -> None:\n    for index in range(10):\n\t\treturn {'a': [1, 2], \"b\": None}\n\n",
    "Ĝis revido; čeština, Ελληνικά, русский язык, العربية, עברית, हिन्दी, ไทย",
    "你好，世界。今天天气很好，我们去公园散步吧。日本語のテキスト、カタカナ。한국어 문장입니다.",
    "🙂😀 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 é e\u0301 ñ \u00a0 \u200d \u2028 ½ ∑ →",
    "naïve café — “quoted” … ‘single’ </tag> <div class='x'> $x_1^2$ \\alpha \r\n",
)
SPECIAL = ("<s>", "</s>", "<|pad|>")
CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _byte_level() -> Tokenizer:
    """Llama 3's style: bytes as characters, no unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 2, trainer)
    return tokenizer


def _sentencepiece() -> Tokenizer:
    """Llama 2's style: U+2581 for spaces, byte fallback, one leading space stripped."""
    letters = Tokenizer(models.BPE(unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=220,
        special_tokens=["<unk>"],
        limit_alphabet=110,
        show_progress=False,
    )
    letters.train_from_iterator(CORPUS[:2] * 3, trainer)
    trained = json.loads(letters.to_str())["model"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [token for token in trained["vocab"] if token != "<unk>"]
    merges = [tuple(pair) for pair in trained["merges"]]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def _gemma() -> Tokenizer:
    """Gemma's style: as SentencePiece, but the leading space is text."""
    tokenizer = _sentencepiece()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _unigram() -> Tokenizer:
    """T5's style: Unigram with Metaspace, where the first token's space is not text."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def _wordpiece() -> Tokenizer:
    """BERT's style: ``##`` joins a piece to the one before it."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=500, special_tokens=["[UNK]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 2, trainer)
    return tokenizer


def _wordlevel() -> Tokenizer:
    """Whole words and no decoder: words are joined by single spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(
        vocab_size=200, special_tokens=["[UNK]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _suffix() -> Tokenizer:
    """GPT-1's style: ``</w>`` ends a word, so a space is known only with the next token."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["[UNK]"],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 2, trainer)
    return tokenizer


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": _byte_level,
    "sentencepiece": _sentencepiece,
    "gemma": _gemma,
    "unigram": _unigram,
    "wordpiece": _wordpiece,
    "wordlevel": _wordlevel,
    "suffix": _suffix,
}


@cache
def directory(family: str, chat: bool = True) -> Path:
    """A tokenizer directory of the family, with ``<s>`` put before every text."""
    tokenizer = MAKERS[family]()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens(["<tool>", AddedToken(" \n é ", normalized=False)])
    tokenizer.add_special_tokens(["<|user|>", "<|assistant|>"])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    path = shared_directory(f"tokenizer-{family}")
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<|pad|>",
    }
    unknown = [token for token in ("<unk>", "[UNK]") if tokenizer.token_to_id(token) is not None]
    config |= {"unk_token": unknown[0]} if unknown else {}
    config |= {"chat_template": CHAT} if chat else {}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path
