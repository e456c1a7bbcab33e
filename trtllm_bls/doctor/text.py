"""Checks of tokenizers against the engines' vocabularies."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from trtllm_bls.contract import ENGINE
from trtllm_bls.doctor.findings import Finding, Findings, check
from trtllm_bls.doctor.subject import Subject
from trtllm_bls.errors import SetupError
from trtllm_bls.tokenizer import Tokenizer, load_tokenizer

# Embeddings are padded to a multiple of 64 or 128 per GPU; more rows than that are another model's.
_MOST_PADDING = 1024


@cache
def _loaded(directory: Path) -> Tokenizer | SetupError:
    """The tokenizer, which takes seconds, or why there is none."""
    try:
        return load_tokenizer(directory)
    except SetupError as error:
        return error


@check("the tokenizer can be loaded", lambda s: s.tokenizer)
def tokenizer(subject: Subject) -> Findings:
    """By the packages that are installed here."""
    for directory in filter(None, (subject.tokenizer, subject.draft_tokenizer)):
        loaded = _loaded(directory)
        if isinstance(loaded, SetupError):
            yield Finding.of(loaded)


@check("engines and tokenizers have one vocabulary", lambda s: s.tokenizer and s.engines)
def vocabulary(subject: Subject) -> Findings:
    """An id beyond the embeddings ends a request; other tokens than the draft's waste drafts."""
    assert subject.tokenizer is not None
    loaded = _loaded(subject.tokenizer)
    if isinstance(loaded, SetupError):
        return  # told by the check of the tokenizer
    largest = max((i for i in range(loaded.vocab_size) if i not in loaded.added_ids), default=0)
    for model, engine in subject.engines.items():
        size, mend = engine.vocab_size, "use the tokenizer that the model was trained with"
        if not size:
            continue
        if largest >= size:
            what = f"{model}: the tokenizer has ids up to {largest}, the engine {size} embeddings"
            yield Finding("error", what, mend)
        elif loaded.vocab_size > size:
            what = f"{model}: {loaded.vocab_size - size} added tokens are beyond its embeddings"
            yield Finding("warn", what, "requests that use them are refused; " + mend)
        elif size - loaded.vocab_size > _MOST_PADDING:
            what = f"{model}: {size} embeddings for the tokenizer's {loaded.vocab_size} tokens"
            yield Finding("warn", what, mend)


@check("target and draft have one vocabulary", lambda s: len(s.engines) > 1)
def draft_vocabulary(subject: Subject) -> Findings:
    """Drafts are token ids: both models have to mean the same by them."""
    target = subject.engines.get(subject.target) or subject.engines.get(ENGINE.name)
    for model, engine in subject.engines.items():
        if target and target.vocab_size and engine.vocab_size not in (None, target.vocab_size):
            what = f"{model} has {engine.vocab_size} embeddings, the target {target.vocab_size}"
            yield Finding(
                "warn", what, "take a draft of the same family, or leave draft logits off"
            )
    if subject.tokenizer is None or subject.draft_tokenizer is None:
        return
    own, drafts = _loaded(subject.tokenizer), _loaded(subject.draft_tokenizer)
    if isinstance(own, SetupError) or isinstance(drafts, SetupError):
        return  # told by the check of the tokenizer
    if own.fingerprint != drafts.fingerprint:
        what = f"the tokenizer in {subject.draft_tokenizer} has another token table"
        yield Finding("error", what, "the draft is not used; take one of the target's family")
