"""What the ``preprocessing`` and ``postprocessing`` models do: arrays in, arrays out, no waiting.

They use the orchestrator's own prompt maker and detokeniser, so an ensemble cannot disagree with
``tensorrt_llm_bls`` about the ids of a prompt or the text of ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trtllm_bls.admission import RequestLimits
from trtllm_bls.prompts import Prompt, PromptMaker
from trtllm_bls.tokenizer import Tokenizer
from trtllm_bls.types import Array, TokenIds
from trtllm_bls.wire.server import prompt_requests, sequence_ids
from trtllm_bls.wire.words import dense_bias, pack_words


class Preprocessor:
    """Text to token ids."""

    def __init__(
        self, tokenizer: Tokenizer, add_special_tokens: bool, limits: RequestLimits | None = None
    ) -> None:
        self._prompts = PromptMaker(tokenizer, add_special_tokens)
        self._pad_id = tokenizer.pad_id or 0
        self._vocab_size = tokenizer.model_vocab_size
        self._limits = limits

    def arrays(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """All outputs for all batch rows; shorter rows are padded on the right."""
        requests = prompt_requests(inputs, self._limits)
        prompts = [self._prompts.make(request) for request in requests]
        pads = _column([prompt.pad_id or 0 for prompt in prompts])
        widest = max(len(prompt.ids) for prompt in prompts)
        ids = np.full((len(prompts), widest), self._pad_id, dtype=np.int32)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt.ids)] = prompt.ids
        return {
            "INPUT_ID": ids,
            "REQUEST_INPUT_LEN": _column([len(prompt.ids) for prompt in prompts]),
            "BAD_WORDS_IDS": _word_lists([prompt.bad_sequences for prompt in prompts]),
            "STOP_WORDS_IDS": _word_lists([prompt.engine_stops for prompt in prompts]),
            "EMBEDDING_BIAS": self._bias(prompts),
            "REQUEST_OUTPUT_LEN": _column([request.max_tokens or 0 for request in requests]),
            "OUT_END_ID": _column([prompt.end_id for prompt in prompts]),
            "OUT_PAD_ID": pads,
            # What upstream's sends for a request without text for a decoder.
            "DECODER_INPUT_ID": pads,
            "REQUEST_DECODER_INPUT_LEN": np.ones_like(pads),
        }

    def _bias(self, prompts: Sequence[Prompt]) -> Array:
        size = self._vocab_size if any(prompt.embedding_bias for prompt in prompts) else 0
        return np.stack([dense_bias(prompt.embedding_bias, size) for prompt in prompts])


class Postprocessor:
    """Token ids to text: every id of every sequence, whether prompt, completion or stop."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, limits: RequestLimits | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._skip_special_tokens = skip_special_tokens

    def arrays(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """``OUTPUT`` ``[B * beams]``, as TensorRT-LLM's own model sends it."""
        texts = [self._text(ids).encode("utf-8") for ids in sequence_ids(inputs, self._limits)]
        return {"OUTPUT": np.array(texts, dtype=np.object_)}

    def _text(self, ids: TokenIds) -> str:
        detokenizer = self._tokenizer.detokenizer(self._skip_special_tokens)
        return detokenizer.feed(ids) + detokenizer.flush()


def _column(values: Sequence[int]) -> Array:
    return np.array(values, dtype=np.int32).reshape(-1, 1)


def _word_lists(rows: Sequence[tuple[TokenIds, ...]]) -> Array:
    columns = max(sum(map(len, words)) for words in rows)
    return np.stack([pack_words(words, columns) for words in rows])
