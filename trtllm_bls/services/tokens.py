"""Behind the ``preprocessing`` and ``postprocessing`` doors: arrays in, arrays out, no waiting.

They use the orchestrator's own objects (``PromptMaker``, ``SequenceText``), so an ensemble cannot
disagree with ``tensorrt_llm_bls`` about a prompt or about where a text ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trtllm_bls.assembly import SequenceText, TextRules
from trtllm_bls.contract import POSTPROCESSING, PREPROCESSING
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.messages import Array, EngineChunk, TextChunk, TextRequest, TokenIds
from trtllm_bls.prompts import Prompt, PromptMaker
from trtllm_bls.tokenizer import Tokenizer
from trtllm_bls.wire.fields import Fields, read_rows
from trtllm_bls.wire.text import text_request, words_of
from trtllm_bls.wire.words import pack_words


class Preprocessor:
    """Text to token ids."""

    def __init__(self, tokenizer: Tokenizer, add_special_tokens: bool) -> None:
        self._prompts = PromptMaker(tokenizer, add_special_tokens)
        self._pad_id = tokenizer.pad_id or 0
        self._vocab_size = tokenizer.vocab_size

    def arrays(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """All outputs for all batch rows; shorter rows are padded on the right."""
        rows = read_rows(PREPROCESSING, inputs)
        requests = [text_request(row, "") for row in rows]
        prompts = [self._prompts.make(request) for request in requests]
        return {
            "INPUT_ID": self._padded([prompt.ids for prompt in prompts]),
            "REQUEST_INPUT_LEN": _column([len(prompt.ids) for prompt in prompts]),
            "BAD_WORDS_IDS": _word_lists([prompt.bad_sequences for prompt in prompts]),
            "STOP_WORDS_IDS": _word_lists([prompt.engine_stops for prompt in prompts]),
            "EMBEDDING_BIAS": self._bias(prompts),
            "REQUEST_OUTPUT_LEN": _column([request.max_tokens for request in requests]),
            "OUT_END_ID": _column([prompt.end_id for prompt in prompts]),
            "OUT_PAD_ID": _column([prompt.pad_id or 0 for prompt in prompts]),
        }

    def _padded(self, rows: Sequence[TokenIds]) -> Array:
        ids = np.full((len(rows), max(map(len, rows))), self._pad_id, dtype=np.int32)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = tokens
        return ids

    def _bias(self, prompts: Sequence[Prompt]) -> Array:
        asked = any(prompt.embedding_bias for prompt in prompts)
        dense = np.zeros((len(prompts), self._vocab_size if asked else 0), dtype=np.float32)
        for row, prompt in enumerate(prompts):
            for token, weight in prompt.embedding_bias:
                dense[row, token] += weight
        return dense


class Postprocessor:
    """Token ids to text, cut where the caller's stop words say if they are passed on."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, exclude_input: bool) -> None:
        self._tokenizer = tokenizer
        self._prompts = PromptMaker(tokenizer, add_special_tokens=False)
        self._skip_special = skip_special
        self._exclude_input = exclude_input

    def arrays(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """All outputs for all batch rows, ``[B, beams]``; reasons and counts only if known."""
        rows = read_rows(POSTPROCESSING, inputs)
        results = [self._row(row) for row in rows]
        arrays = {"OUTPUT": _texts([[chunk.text for chunk in chunks] for chunks in results])}
        if all("max_tokens" in row for row in rows):
            arrays |= self._endings(rows[0], results)
        return arrays

    def _row(self, row: Fields) -> list[TextChunk]:
        lengths = row["SEQUENCE_LENGTH"].tolist()
        return [
            self._text(row, tuple(ids[:length].tolist()))
            for ids, length in zip(row["TOKENS_BATCH"], lengths, strict=True)
        ]

    def _text(self, row: Fields, ids: TokenIds) -> TextChunk:
        if (low := min(ids, default=0)) < 0:
            raise InvalidRequest("TOKENS_BATCH", f"{low} is not a token id")
        skip = row.get("skip_special_tokens", self._skip_special)
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=skip)
        echo: TokenIds = ()
        if not row.get("exclude_input_in_output", self._exclude_input):
            prompt_tokens = row.get("num_input_tokens", 0)
            echo, ids = ids[:prompt_tokens], ids[prompt_tokens:]
        sequence = SequenceText(self._rules(row, echo, len(ids)), detokenizer)
        return sequence.feed(EngineChunk(token_ids=ids, final=True))

    def _rules(self, row: Fields, echo: TokenIds, count: int) -> TextRules:
        known = "max_tokens" in row  # as part of an ensemble; otherwise every id is decoded
        request = TextRequest(request_id="", max_tokens=1, end_id=row.get("end_id"))
        stop_words = words_of(row, "stop_words")
        return TextRules(
            prompt_tokens=row.get("num_input_tokens", 0),
            max_tokens=row["max_tokens"] if known else count + 1,
            min_tokens=row.get("min_tokens", 0),
            end_ids=frozenset(self._prompts.end_ids(request)) if known else frozenset(),
            stop_words=stop_words,
            stop_sequences=tuple(map(self._tokenizer.encode_word, stop_words)),
            include_stop=row.get("include_stop", False),
            echo_ids=echo,
        )

    def _endings(self, asked: Fields, results: list[list[TextChunk]]) -> dict[str, Array]:
        endings = [[chunk.ending for chunk in chunks if chunk.ending] for chunks in results]
        arrays = {
            "OUT_FINISH_REASON": _texts([[e.finish_reason.value for e in r] for r in endings])
        }
        reasons = [[e.stop_reason or "" for e in row] for row in endings]
        if any(reason for row in reasons for reason in row):
            arrays["OUT_STOP_REASON"] = _texts(reasons)
        if asked.get("return_num_input_tokens"):
            arrays["OUT_NUM_INPUT_TOKENS"] = _column([row[0].prompt_tokens for row in endings])
        if asked.get("return_num_output_tokens"):
            counts = [sum(e.completion_tokens for e in row) for row in endings]
            arrays["OUT_NUM_OUTPUT_TOKENS"] = _column(counts)
        return arrays


def _column(values: Sequence[int]) -> Array:
    return np.array(values, dtype=np.int32).reshape(-1, 1)


def _word_lists(rows: Sequence[tuple[TokenIds, ...]]) -> Array:
    columns = max(sum(map(len, words)) for words in rows)
    return np.stack([pack_words(words, columns) for words in rows])


def _texts(rows: list[list[str]]) -> Array:
    return np.array([[text.encode("utf-8") for text in row] for row in rows], dtype=np.object_)
