"""What a deployment and its callers choose about speculation, and what it cannot be chosen for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from trtllm_bls.errors import InvalidRequest, Unsupported
from trtllm_bls.types import GUIDE_KIND_INPUT, EngineRequest

_STARTS_AFRESH = "starts afresh in every round of speculation; send it without num_draft_tokens"
# Inputs that speculation cannot keep, by why.
_REFUSED_EXTRAS = {
    _STARTS_AFRESH: ("context_phase_params",),
    "is another way to speculate": (
        *("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size"),
    ),
    "is laid out for one prompt, which grows in every round of speculation": (
        *("decoder_input_ids", "encoder_input_features", "cross_attention_mask"),
        *("prompt_table_extra_ids", "mrope_rotary_cos_sin", "mrope_position_deltas"),
    ),
}


class DraftSource(str, Enum):
    """Where guesses come from; the value is what callers write."""

    MODEL = "model"
    NGRAM = "ngram"  # repeat what followed the same tokens in this text, or in earlier answers
    MIXED = "mixed"  # n-gram where it gains more than the model
    PREDICTION = "prediction"  # the caller's own; drafted from whatever else is chosen


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """How one request is speculated; times are seconds.

    ``num_draft_tokens`` absent means as many as pay off, none included; a number is kept whatever
    the load. ``max_draft_tokens`` is a ceiling beside the engine's own. ``overlap`` lets the draft
    model work while the target does: always, never, or (``None``) where that measures faster.
    ``memory_tokens`` of each tenant's finished answers are drafted from as n-grams.
    ``ignore_unverifiable``: a request that asks for drafts of an engine that verifies none is
    decoded plainly, not refused.
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
        """These defaults with what the request asks for; ``None`` for plain decoding.

        ``by_default``: requests that ask for nothing are speculated too, those excepted that
        speculation cannot keep. One that asks for it is refused by name instead: raises
        ``Unsupported``, and ``InvalidRequest`` for an unknown source. ``unverifiable``: why the
        engine verifies no drafts, if it does not.
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
                known = ", ".join(["off", *(source.value for source in DraftSource)])
                problem = f"'{requested.draft_source}' is unknown; send one of: {known}"
                raise InvalidRequest("draft_source", problem) from None
        elif not by_default and requested.num_draft_tokens is None:
            source = DraftSource.PREDICTION
        elif not by_default:
            source = DraftSource.MODEL if has_draft_model else DraftSource.NGRAM
        try:
            check_speculative(request)
        except Unsupported:
            if explicit:
                raise
            return None
        if unverifiable and explicit and not self.ignore_unverifiable:
            field = "draft_source" if requested.num_draft_tokens is None else "num_draft_tokens"
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
    refused = {
        "beam_width": (sampling.beam_width or 1) > 1,
        "num_return_sequences": request.num_return_sequences > 1,
        "runtime_top_p_min": sampling.top_p_min is not None,
        "runtime_top_p_decay": sampling.top_p_decay not in (None, 1.0),
        "runtime_top_p_reset_ids": sampling.top_p_reset_id is not None,
        "draft_input_ids": request.draft is not None,
    }
    for field, present in refused.items():
        if present:
            raise Unsupported(field, "cannot be combined with speculation")
    if request.guide is not None:
        raise Unsupported(GUIDE_KIND_INPUT, _STARTS_AFRESH)
    for why, fields in _REFUSED_EXTRAS.items():
        for field in fields:
            if field in request.extras:
                raise Unsupported(field, why)
