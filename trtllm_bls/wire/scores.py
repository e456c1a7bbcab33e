"""Outputs that several models share, as arrays: log-probabilities, logits, metrics.

Shapes are as TensorRT-LLM's own models send them, batch dimension 1 included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from trtllm_bls.contract import ENGINE
from trtllm_bls.types import Array, EngineMetrics, TopLogProbs

METRICS = tuple(field.name for field in fields(EngineMetrics))


def score_arrays(
    log_probs: Sequence[float] | None,
    cum_log_prob: float | None,
    context_logits: Array | None,
    generation_logits: Array | Sequence[Array] | None,
    top_log_probs: Sequence[TopLogProbs] | None = None,
    *,
    streaming: bool,
) -> dict[str, Array]:
    """Those of the outputs that are given: ``output_log_probs`` ``[1, 1, T]``, ``cum_log_probs``
    ``[1, 1]``, ``context_logits`` ``[1, prompt, vocab]``, ``generation_logits``, and both of
    ``top_log_probs``, ``[1, T, alternatives]``.

    ``generation_logits`` are ``[1, 1, steps, vocab]``, or ``[1, steps, 1, vocab]`` of a stream.
    TensorRT-LLM pads them to the token limit. Here they are not padded, because a caller could fill
    this process's memory with rows that mean nothing.
    """
    arrays: dict[str, Array] = {}
    if log_probs is not None:
        arrays["output_log_probs"] = np.array([[log_probs]], dtype=np.float32)
    if cum_log_prob is not None:
        arrays["cum_log_probs"] = np.array([[cum_log_prob]], dtype=np.float32)
    if context_logits is not None:
        arrays["context_logits"] = np.asarray(context_logits, dtype=np.float32)[None]
    if generation_logits is not None:
        rows = np.asarray(generation_logits, dtype=np.float32)
        arrays["generation_logits"] = rows[None, :, None] if streaming else rows[None, None]
    if top_log_probs:
        pairs = np.array(top_log_probs)[None]
        arrays["top_log_prob_ids"] = pairs[..., 0].astype(np.int32)
        arrays["top_log_probs"] = pairs[..., 1].astype(np.float32)
    return arrays


def metrics_arrays(metrics: EngineMetrics | None, filled: bool) -> dict[str, Array]:
    """The performance outputs that are known, each ``[1, 1]``; where ``filled``, 0 for the others.

    TensorRT-LLM's own models send all of them on each response, and its client reads all.
    """
    found = {name: getattr(metrics, name, None) for name in METRICS}
    values = {name: value or 0 for name, value in found.items() if filled or value is not None}
    drafted, accepted = found["total_draft_tokens"], found["total_accepted_draft_tokens"]
    if filled or (drafted is not None and accepted is not None):
        values["acceptance_rate"] = (accepted or 0) / drafted if drafted else 0.0
    return {
        name: np.array([[value]], dtype=ENGINE.output_named[name].numpy_type)
        for name, value in values.items()
    }
