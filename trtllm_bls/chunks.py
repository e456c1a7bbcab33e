"""One sequence's engine chunks as a single one: for answers that leave in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trtllm_bls.messages import EngineChunk


def join_chunks(chunks: Sequence[EngineChunk]) -> EngineChunk:
    """All tokens, scores and logits in order; the ending and the figures are the last chunk's."""
    if len(chunks) == 1:
        return chunks[0]
    log_probs = [chunk.log_probs for chunk in chunks if chunk.log_probs is not None]
    totals = [chunk.cum_log_prob for chunk in chunks if chunk.cum_log_prob is not None]
    rows = [chunk.generation_logits for chunk in chunks if chunk.generation_logits is not None]
    contexts = (chunk.context_logits for chunk in chunks if chunk.context_logits is not None)
    return replace(
        chunks[-1],
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        log_probs=tuple(value for values in log_probs for value in values) if log_probs else None,
        cum_log_prob=totals[-1] if totals else None,
        context_logits=next(contexts, None),
        generation_logits=np.concatenate(rows) if rows else None,
    )
