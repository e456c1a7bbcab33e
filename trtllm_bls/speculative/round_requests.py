"""The requests of each round, made so that the caller's fields hold for the answer as a whole.

A round is a new engine request whose prompt holds what was generated so far. There are three groups
of fields. What counts from the start of the answer (``min_tokens``) is passed on as what is left of
it. What an engine counts over prompt and answer together (penalties) is passed on unchanged. What
would start again in each request (a grammar) is refused. Knows no engine.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from trtllm_bls.errors import Unsupported
from trtllm_bls.speculative.progress import Progress
from trtllm_bls.types import Draft, EngineRequest, Sampling, Wants

_RESTARTS = "starts afresh in every round of speculation; send it without num_draft_tokens"
_PER_PROMPT = "is laid out for one prompt, which grows in every round of speculation"

REFUSED_EXTRAS = {
    "guided_decoding_guide_type": _RESTARTS,
    "guided_decoding_guide": _RESTARTS,
    "context_phase_params": _RESTARTS,
    "lookahead_window_size": "is another way to speculate",
    "lookahead_ngram_size": "is another way to speculate",
    "lookahead_verification_set_size": "is another way to speculate",
    "decoder_input_ids": _PER_PROMPT,
    "encoder_input_features": _PER_PROMPT,
    "cross_attention_mask": _PER_PROMPT,
    "prompt_table_extra_ids": _PER_PROMPT,
    "mrope_rotary_cos_sin": _PER_PROMPT,
    "mrope_position_deltas": _PER_PROMPT,
}


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
    for field, why in REFUSED_EXTRAS.items():
        if field in request.extras:
            raise Unsupported(field, why)


def round_seed(seed: int, generated: int, who: str = "target") -> int:
    """63 bits that no two rounds, nor draft and target, share.

    An engine draws from the start of its random stream in every request: one seed for all rounds
    would draw the same numbers again and bend the distribution.
    """
    digest = blake2b(f"{who} {seed} {generated}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class RoundRequests:
    """Makes the engine requests of one caller's request."""

    def __init__(self, request: EngineRequest, use_draft_logits: bool) -> None:
        self._request = request
        self._made = 0
        sampling = request.sampling
        self._by_logits = use_draft_logits and not sampling.is_greedy
        self._seed = sampling.seed
        if self._seed is None and not sampling.is_greedy:  # the default would repeat each round
            self._seed = secrets.randbits(63)
        self._likeliest = Sampling(
            top_k=1,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            no_repeat_ngram_size=sampling.no_repeat_ngram_size,
            min_tokens=sampling.min_tokens,
        )
        # The prompt's logits come with the first round.
        self._later_wants = replace(request.wants, context_logits=False)

    def plain(self, progress: Progress, num_tokens: int, streaming: bool) -> EngineRequest:
        """Ask the target for tokens as any request does."""
        return self._target(progress, num_tokens, streaming, None)

    def verify(self, progress: Progress, draft: Draft) -> EngineRequest:
        """Ask the target to verify ``draft`` in one pass.

        With logits the draft may end with the end id, which is accepted or replaced like any
        token; the target is sent none, so that the answer shows it (``Progress``).
        """
        request = self._target(progress, len(draft.token_ids) + 1, False, draft)
        return replace(request, end_id=-1) if draft.logits is not None else request

    def draft(self, progress: Progress, guessed: Sequence[int], num_tokens: int) -> EngineRequest:
        """Ask the draft model to continue the answer so far, taking ``guessed`` as accepted.

        It decodes greedily, since its likeliest token is accepted most often whatever the target
        draws. Only where its logits are used must it draw as it says; then the end id is a token
        like any other, since leaving it out would make the target's distribution another one.
        """
        request, generated = self._request, progress.generated + len(guessed)
        # Not while a minimum of tokens forbids the end id, which only the engine can do.
        by_logits = self._by_logits and progress.may_end
        if by_logits:
            sampling = self._sampling(generated, "draft")
        else:
            sampling = _with_minimum(self._likeliest, generated)
        return replace(
            request,
            request_id=self._request_id("draft"),
            input_ids=(*progress.ids, *guessed),
            max_tokens=num_tokens,
            streaming=False,
            sampling=sampling,
            end_id=-1 if by_logits else request.end_id,
            wants=Wants(generation_logits=by_logits),
            extras={},
        )

    def _target(
        self, progress: Progress, num_tokens: int, streaming: bool, draft: Draft | None
    ) -> EngineRequest:
        first = progress.generated == 0
        return replace(
            self._request,
            request_id=self._request_id("target"),
            input_ids=tuple(progress.ids),
            max_tokens=num_tokens,
            streaming=streaming,
            sampling=self._sampling(progress.generated, "target"),
            draft=draft,
            wants=self._request.wants if first else self._later_wants,
        )

    def _sampling(self, generated: int, who: str) -> Sampling:
        """The caller's sampling for a request that begins after ``generated`` tokens."""
        sampling = _with_minimum(self._request.sampling, generated)
        if self._seed is None:
            return sampling
        return replace(sampling, seed=round_seed(self._seed, generated, who))

    def _request_id(self, who: str) -> str:
        self._made += 1
        return f"{self._request.request_id}-{who}-{self._made}"


def _with_minimum(sampling: Sampling, generated: int) -> Sampling:
    """``sampling`` with what is left of its minimum after ``generated`` tokens.

    Later rounds say a minimum of 0 tokens aloud: an engine may take its absence for 1, and would
    then forbid the end id at the beginning of every round.
    """
    if generated == 0:
        return sampling
    return replace(sampling, min_tokens=max(0, (sampling.min_tokens or 0) - generated))
