"""Choices of a deployment and its callers about speculation, and the requests that exclude it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from trtllm_bls.errors import InvalidRequest, Unsupported
from trtllm_bls.types import GUIDE_KIND_INPUT, EngineRequest

_STARTS_AFRESH = "starts afresh in every round of speculation; send it without num_draft_tokens"
# Inputs that speculation cannot keep, by the reason.
_REFUSED_EXTRAS = {
    _STARTS_AFRESH: ("context_phase_params",),
    "is another way to speculate": (
        "lookahead_window_size",
        "lookahead_ngram_size",
        "lookahead_verification_set_size",
    ),
    "is laid out for one prompt, which grows in every round of speculation": (
        "decoder_input_ids",
        "encoder_input_features",
        "cross_attention_mask",
        "prompt_table_extra_ids",
        "mrope_rotary_cos_sin",
        "mrope_position_deltas",
    ),
}


class DraftSource(str, Enum):
    """The source of guesses; callers send its value."""

    MODEL = "model"
    NGRAM = "ngram"  # repeat what followed the same tokens in this text, or in earlier answers
    MIXED = "mixed"  # n-gram where it gains more than the model
    PREDICTION = "prediction"  # the caller's text; drafted from beside any other source


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """Choices for the speculation of one request; times are seconds.

    ``num_draft_tokens``: an exact number of drafted tokens, at any load; ``None`` drafts as many
    as pay off, possibly none. ``max_draft_tokens`` limits a draft, as the engine's limit does.
    ``overlap`` lets the draft model work while the target does: always, never, or (``None``) where
    that measures faster. ``memory_tokens``: tokens of each tenant's finished answers to draft from
    as n-grams. ``ignore_unverifiable``: decode a request plainly that asks an engine for drafts
    which the engine cannot verify; otherwise refuse it.
    """

    num_draft_tokens: int | None = None
    use_draft_logits: bool = False
    draft_source: DraftSource = DraftSource.MODEL
    max_draft_tokens: int = 32
    draft_deadline_s: float = 0.5
    overlap: bool | None = False
    memory_tokens: int = 0
    ignore_unverifiable: bool = False

    def for_request(
        self,
        request: EngineRequest,
        *,
        by_default: bool,
        has_draft_model: bool,
        unverifiable: str = "",
    ) -> SpeculationOptions | None:
        """Return these defaults with the request's choices; ``None`` for plain decoding.

        ``by_default``: speculate also requests that choose nothing, but for those with a field
        that speculation cannot keep. ``unverifiable``: the reason why the engine verifies no
        drafts; empty if it does. Raises ``Unsupported`` for a request that chooses speculation and
        has such a field or such an engine, and ``InvalidRequest`` for an unknown source.
        """
        requested = request.speculation
        if requested.num_draft_tokens is not None and requested.num_draft_tokens < 0:
            raise InvalidRequest("num_draft_tokens", f"{requested.num_draft_tokens} is below 0")
        if requested.num_draft_tokens == 0 or requested.draft_source == "off":
            return None
        explicit = requested.num_draft_tokens is not None or requested.draft_source is not None
        if not explicit and not by_default and not requested.prediction:
            return None
        source = self.draft_source
        if requested.draft_source is not None:
            try:
                source = DraftSource(requested.draft_source)
            except ValueError:
                sources = ", ".join(["off", *(source.value for source in DraftSource)])
                problem = f"'{requested.draft_source}' is unknown; send one of: {sources}"
                raise InvalidRequest("draft_source", problem) from None
        elif not by_default and requested.num_draft_tokens is None:
            source = DraftSource.PREDICTION
        elif not by_default:
            source = DraftSource.NGRAM
            if has_draft_model:
                source = DraftSource.MODEL
        try:
            check_speculative(request)
        except Unsupported:
            if explicit:
                raise
            return None
        if unverifiable and explicit and not self.ignore_unverifiable:
            field = "num_draft_tokens"
            if requested.num_draft_tokens is None:
                field = "draft_source"
            raise Unsupported(field, f"cannot be honoured: {unverifiable}")
        if unverifiable:
            return None
        return replace(
            self,
            draft_source=source,
            num_draft_tokens=requested.num_draft_tokens or self.num_draft_tokens,
            use_draft_logits=requested.use_draft_logits or self.use_draft_logits,
        )


def check_speculative(request: EngineRequest) -> None:
    """Raise ``Unsupported``, with the wire name, for a field that speculation cannot keep."""
    sampling = request.sampling
    presence = {
        "beam_width": (sampling.beam_width or 1) > 1,
        "num_return_sequences": request.num_return_sequences > 1,
        "runtime_top_p_min": sampling.top_p_min is not None,
        "runtime_top_p_decay": sampling.top_p_decay not in (None, 1.0),
        "runtime_top_p_reset_ids": sampling.top_p_reset_id is not None,
        "draft_input_ids": request.draft is not None,
    }
    for field, is_present in presence.items():
        if is_present:
            raise Unsupported(field, "cannot be combined with speculation")
    if request.guide is not None:
        raise Unsupported(GUIDE_KIND_INPUT, _STARTS_AFRESH)
    for reason, fields in _REFUSED_EXTRAS.items():
        for field in fields:
            if field in request.extras:
                raise Unsupported(field, reason)
