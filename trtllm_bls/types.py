"""The values that pass between modules: plain and free of Triton and numpy.

They are grouped by receiver: an engine's requests and answers (token ids), then the orchestrator's
(text). ``None`` in a field of a request means that the caller did not set it. Such a field is not
sent on, so the engine's own default applies. Arrays that are only passed on (logits, LoRA weights)
are typed ``Array``; ``wire`` makes and reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = np.ndarray[Any, Any]
else:
    Array = Any

TokenIds: TypeAlias = tuple[int, ...]
# A tuple, or an ``array`` of int32 for a prompt so long that each pass over a tuple of its ids
# would hold up every other stream. Never changed.
PromptIds: TypeAlias = Sequence[int]
# The likeliest ids at the place of one token, with their log-probabilities.
TopLogProbs: TypeAlias = tuple[tuple[int, float], ...]
# A turn of a conversation, or a tool, as chat templates take them: JSON's values, never changed.
Message: TypeAlias = Mapping[str, Any]
# Below it, temperature and top_p select the likeliest token, or overflow in the engine.
COLDEST = 1e-5
NOTHING: Mapping[str, Array] = MappingProxyType({})


def field_names(kind: type) -> tuple[str, ...]:
    """Return the names of a dataclass's fields, in order."""
    return tuple([field.name for field in fields(kind)])


class FinishReason(str, Enum):
    """The reason of a sequence's end; callers read the value.

    After ``CANCELLED`` and ``ERROR`` the request itself still has to end: with an error, or
    silently if its caller has left.
    """

    STOP = "stop"  # a stop string or stop sequence
    LENGTH = "length"  # max_tokens, or the model's longest sequence
    END_ID = "end_id"  # the model ended by itself
    CANCELLED = "cancelled"  # the caller left, the server goes down, or its batch failed
    TIMEOUT = "timeout"  # the request's own time was up
    ERROR = "error"  # the engine failed after it had begun to answer


# --- to the engine --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The choice of the next token. The contract table has the wire names of the fields."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_decay: float | None = None
    top_p_reset_id: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    beam_search_diversity_rate: float | None = None

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is always taken, as TensorRT-LLM reads these fields.

        A temperature by itself does not make it sample: that takes ``top_k`` above 1 or ``top_p``.
        """
        if self.temperature == 0 or self.top_k == 1:
            return True
        return not self.top_k and (self.top_p is None or self.top_p <= 0)


@dataclass(frozen=True, kw_only=True)
class Wants:
    """Data that the caller wants beside the tokens.

    ``top_log_probs``: the number of likeliest ids at the place of each token. An engine that does
    not report them (``EngineCapacity``) gives logits instead.
    """

    log_probs: bool = False
    top_log_probs: int = 0
    context_logits: bool = False
    generation_logits: bool = False
    perf_metrics: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False


# The engine's inputs of a guide, under whose names errors speak of it.
GUIDE_KIND_INPUT = "guided_decoding_guide_type"
GUIDE_TEXT_INPUT = "guided_decoding_guide"
# The beginning of a salt on the wire that an engine without salts has to ignore.
_OPTIONAL_SALT = "key:"


@dataclass(frozen=True)
class Guide:
    """The form that guided decoding gives an answer.

    ``kind``: ``json``, ``json_schema``, ``regex``, ``ebnf_grammar``, ``structural_tag``, or another
    that the engine knows. ``text``: the schema, expression or grammar; ``None``: the kind has none.
    """

    kind: str
    text: str | None = None


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A LoRA adapter, by a number, a name or its weights, as the engine takes it.

    ``task_id``: its number in the engine's cache. ``name``: its name in the server's
    ``model.yaml``. ``path``: its directory. ``checkpoint_source``: the program that made it.
    ``weights`` and ``config``: the adapter itself, for the C++ backend.
    """

    task_id: int | None = None
    name: str | None = None
    path: str | None = None
    checkpoint_source: str | None = None
    weights: Array | None = field(default=None, compare=False)  # [modules, size]
    config: Array | None = field(default=None, compare=False)  # [modules, 3]


@dataclass(frozen=True)
class CacheSalt:
    """A salt of the KV cache: requests share blocks only with requests of the same one.

    An engine that cannot keep blocks apart refuses a salt that is ``required`` and ignores any
    other, such as that of an API key. ``str`` of it is the salt on the wire.
    """

    text: str
    required: bool = True

    @classmethod
    def parsed(cls, text: str) -> CacheSalt:
        """Read a salt from the wire."""
        return cls(text.removeprefix(_OPTIONAL_SALT), not text.startswith(_OPTIONAL_SALT))

    def __str__(self) -> str:
        return self.text if self.required else _OPTIONAL_SALT + self.text

    def optional(self) -> CacheSalt:
        """Return the same salt for a request that an engine without salts may answer."""
        return replace(self, required=False)


@dataclass(frozen=True, kw_only=True)
class Draft:
    """Tokens that may come next, which the engine verifies in one forward pass."""

    token_ids: TokenIds
    logits: Array | None = None  # [len(token_ids), vocab]; absent = verify by id
    acceptance_threshold: float | None = None  # (0, 1]; absent = true speculative sampling


@dataclass(frozen=True, kw_only=True)
class SpeculationRequest:
    """A caller's choices for speculative decoding; ``None`` leaves one to the deployment.

    ``num_draft_tokens``: 0 turns it off; k > 0 makes drafts of exactly k tokens.
    ``draft_source``: the source of drafts: ``off``, ``model``, ``ngram``, ``mixed`` or
    ``prediction``.
    ``use_draft_logits``: verify against the draft model's logits, not only its token ids.
    ``calls``: the ids of a call of each of the request's tools, as the model writes them.
    ``prediction``: the ids of a text that the answer may resemble; drafts are taken from it first.
    A request with nothing but a prediction drafts from it alone, and is decoded plainly where
    speculation is impossible.
    """

    num_draft_tokens: int | None = None
    draft_source: str | None = None
    use_draft_logits: bool = False
    prediction: TokenIds = ()
    calls: TokenIds = ()


@dataclass(kw_only=True)  # see EngineChunk
class BaseRequest:
    """The fields that requests to an engine and to the orchestrator share.

    ``tenant``: the caller as the front end has authenticated it, never as the request names it.
    Requests of one tenant may draft from one another's answers; ``None``: there is none, or it
    must not. ``traceparent``: the caller's trace context (W3C). ``extras``: further engine tensors
    by wire name (prompt tables, retention, ...), which are passed on unopened.
    """

    request_id: str
    sampling: Sampling = Sampling()
    num_return_sequences: int = 1
    end_id: int | None = None
    pad_id: int | None = None
    speculation: SpeculationRequest = SpeculationRequest()
    wants: Wants = Wants()
    tenant: str | None = None
    guide: Guide | None = None
    adapter: Adapter | None = None
    cache_salt: CacheSalt | None = None
    traceparent: str | None = None
    extras: Mapping[str, Array] = field(default_factory=lambda: NOTHING, compare=False)


@dataclass(kw_only=True)
class EngineRequest(BaseRequest):
    """One prompt as token ids, for any engine.

    ``request_id`` is unique among this process's running requests. ``embedding_bias`` is sparse:
    ``(token id, added logit)`` pairs. ``speculation`` is for an engine that can draft by itself
    (``engines.routing``); ``draft`` for one that verifies.
    """

    input_ids: PromptIds
    max_tokens: int
    streaming: bool = True
    stop_sequences: tuple[TokenIds, ...] = ()
    bad_sequences: tuple[TokenIds, ...] = ()
    embedding_bias: tuple[tuple[int, float], ...] = ()
    draft: Draft | None = None

    def logit_rows(self, capacity: EngineCapacity) -> int:
        """Return the number of rows of logits in all responses.

        A stream repeats those of the context on each response.
        """
        num_new = self.max_tokens
        if capacity.max_sequence_tokens is not None:
            num_new = max(0, min(num_new, capacity.max_sequence_tokens - len(self.input_ids)))
        num_context = len(self.input_ids)
        if self.streaming:
            num_context *= num_new
        rows = num_context * self.wants.context_logits + num_new * self.wants.generation_logits
        return self.num_return_sequences * rows


# --- from the engine ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EngineMetrics:
    """Figures of one engine request; ``None`` where the engine does not report it.

    Times are steady-clock nanoseconds; blocks are KV-cache blocks.
    """

    kv_cache_alloc_new_blocks: int | None = None
    kv_cache_reused_blocks: int | None = None
    kv_cache_alloc_total_blocks: int | None = None
    arrival_time_ns: int | None = None
    first_scheduled_time_ns: int | None = None
    first_token_time_ns: int | None = None
    last_token_time_ns: int | None = None
    total_accepted_draft_tokens: int | None = None
    total_draft_tokens: int | None = None

    def without_reuse(self) -> EngineMetrics:
        """Return the metrics without those that show how much of the prompt was in the KV cache."""
        return replace(self, kv_cache_alloc_new_blocks=None, kv_cache_reused_blocks=None)


ENGINE_METRICS = field_names(EngineMetrics)  # as the outputs are called


@dataclass(frozen=True, kw_only=True)
class SpeculationStats:
    """The figures of speculative decoding for one request so far; tokens unless named otherwise.

    ``rounds``: the number of verified drafts; plain decoding between them is not counted.
    ``ngram_drafted`` and ``predicted``: the tokens among ``drafted`` that came from the text itself
    and from the prediction. ``fallback``: the reason, in one word, why drafting was given up
    (error, deadline, vocabulary, refused).
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    ngram_drafted: int = 0
    predicted: int = 0
    predicted_accepted: int = 0
    draft_failures: int = 0
    overlap_used: int = 0  # drafts that were ready when their round began
    overlap_wasted: int = 0  # drafts thrown away because the guess before them was wrong
    fallback: str | None = None

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the drafted tokens that was accepted; ``None`` if nothing was drafted."""
        if not self.drafted:
            return None
        return self.accepted / self.drafted


# One is made per token. Frozen or with keyword-only fields, making one would take several times as
# long; so would it without slots.
@dataclass(slots=True)
class EngineChunk:
    """Tokens new since the last chunk of the same sequence; may be none.

    ``log_probs``, ``top_log_probs`` and ``generation_logits`` belong to exactly these
    ``token_ids``. ``final`` marks the last chunk of a sequence; ``finish_reason`` is ``None`` even
    there when the engine's wire does not say. ``speculation`` counts all rounds so far; ``None``
    where there are none. ``cached_tokens``, on a sequence's first chunk: how many tokens of the
    prompt were in the KV cache already; ``None`` where the engine does not say.
    """

    token_ids: TokenIds
    sequence_index: int = 0
    final: bool = False
    finish_reason: FinishReason | None = None
    log_probs: tuple[float, ...] | None = None
    top_log_probs: tuple[TopLogProbs, ...] | None = None
    cum_log_prob: float | None = None
    context_logits: Array | None = None  # [prompt tokens, vocab]
    generation_logits: Array | None = None  # [len(token_ids), vocab]
    metrics: EngineMetrics | None = None
    speculation: SpeculationStats | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class EngineCapacity:
    """An engine's limits; ``None``: it does not state one.

    ``max_sequence_tokens`` counts prompt and completion together.
    ``one_step``: the engine ends every request after one step, as older engines built for external
    drafts do. ``may_be_one_step``: it is of a kind that may do so without stating it.
    ``tells_top_log_probs``: it reports the likeliest ids beside each token, without logits.
    ``speculates``: the setting by which the engine speculates itself, if it does and takes no
    drafts.
    """

    vocab_size: int | None = None
    max_sequence_tokens: int | None = None
    max_prompt_tokens: int | None = None
    max_draft_tokens: int | None = None
    one_step: bool | None = None
    may_be_one_step: bool = False
    tells_top_log_probs: bool = False
    speculates: str = ""


# --- to the orchestrator --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options of a conversation for the chat template.

    ``tools``: the tools that the model may call. ``variables``: further variables of the template.
    ``continue_final_message``: the answer goes on where the last message ends. ``tool_choice``, of
    a pipeline's request: ``auto``, ``required``, or the name of the tool to call, to which guided
    decoding holds the model. ``parallel_tool_calls``: there may be several calls.
    """

    tools: Sequence[Message] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CallerFields:
    """Fields of an HTTP request that are for a pipeline alone.

    ``metadata`` and ``prompt_cache_key`` are the request's, ``user`` is the client's own name of
    the person who asks. ``headers``: those that ``--pipeline-header`` names, in lower case.
    ``further``: the fields that the API does not have. ``session`` is the same for all requests of
    a conversation that the server knows of.
    """

    metadata: Mapping[str, Any] = field(default_factory=dict)
    user: str | None = None
    prompt_cache_key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    further: Mapping[str, Any] = field(default_factory=dict)
    session: str | None = None


@dataclass(frozen=True, kw_only=True)
class AnswerMarkup:
    """The markers in the text of a chat's answer.

    ``reasoning_begin`` and ``reasoning_end`` stand around reasoning; they are empty if none may
    come. ``is_opened``: the prompt ended with the first. ``header_end``: the end of a message's
    header, if all text is in messages. ``markers``: a text that holds all markers of the format;
    special tokens in it stay in the answer where others are left out.
    """

    reasoning_begin: str = ""
    reasoning_end: str = ""
    is_opened: bool = False
    header_end: str = ""
    markers: str = ""


NO_MARKUP = AnswerMarkup()


@dataclass(kw_only=True)
class TextRequest(BaseRequest):
    """A prompt with all fields of its request.

    The prompt is one of ``text``, ``prompt_ids`` (token ids) and ``messages`` (a conversation,
    written by the chat template as ``chat`` says).
    ``max_tokens``: ``None`` for as many as the model has room for, 0 for the prompt alone; where
    the model has less room, a request with ``fits_max_tokens`` gets what there is.
    ``echo``: the prompt comes in front of the completion, also of a stream.
    ``stop_token_ids`` end a sequence as the model's own end ids do, beside them.
    ``token_bias``: ``(token id, added logit)`` pairs. ``return_tokens`` and ``return_drafted`` ask
    for ``tokens`` and ``draft_spans`` of each chunk.
    ``markup``: the markup of a chat's answer; ``None``: as the chat template has it. Stops apply to
    the answer alone, not to the reasoning before it.
    ``prediction``: a text that the answer is expected to resemble, to draft from.
    ``timeout_s``: seconds from arrival after which the answer ends with what there is.
    ``stream_interval``: a chunk of a stream has so many tokens, but for the first and the last.
    ``prompt_table_extra_id`` tells a prompt embedding table from others, for KV cache reuse.
    ``api``: the kind of answer that an HTTP API makes of it, for the log and the metrics.
    ``text_ids``: the token ids of ``text``, if it has been tokenised already.
    ``caller``: the caller's fields for a pipeline.
    """

    text: str | None = None
    prompt_ids: TokenIds | None = None
    messages: Sequence[Message] | None = None
    chat: ChatOptions = ChatOptions()
    markup: AnswerMarkup | None = None
    max_tokens: int | None
    fits_max_tokens: bool = False
    stream: bool = False
    echo: bool = False
    stop_words: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: TokenIds = ()
    bad_words: tuple[str, ...] = ()
    embedding_bias: tuple[tuple[str, float], ...] = ()
    token_bias: tuple[tuple[int, float], ...] = ()
    exclude_input_in_output: bool = True
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    prediction: str | None = None
    timeout_s: float | None = None
    stream_interval: int = 1
    return_tokens: bool = False
    return_drafted: bool = False
    prompt_table_extra_id: int | None = None
    api: str | None = None
    text_ids: PromptIds | None = field(default=None, compare=False, repr=False)
    caller: CallerFields = CallerFields()


# --- from the orchestrator ------------------------------------------------------------------


@dataclass(kw_only=True)  # see EngineChunk
class Ending:
    """The end of a sequence; every sequence has exactly one, on its last chunk.

    ``completion_tokens`` counts every generated token up to and including the one that completed
    a stop; the end token itself is not counted. ``seed``: the seed of the sampling.
    ``cached_tokens``: the number of the prompt's tokens that were in the KV cache already; ``None``
    if the engine does not state it or ``expose_kv_cache_metrics`` is off. ``reasoning_tokens``: the
    number of the completion's tokens in reasoning and the tags around it; ``None`` if none may
    come.
    """

    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    stop_reason: str | None = None  # the stop string that fired
    seed: int | None = None
    speculation: SpeculationStats | None = None  # None: the request ran without it
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class TokenText(NamedTuple):
    """One token with the bytes that it adds to the text; a character may be spread over several.

    ``log_prob`` is ``None`` if it was not asked for, and for the tokens of a prompt.
    ``top_log_probs`` are empty unless the engine reports them.
    """

    token_id: int
    data: bytes
    log_prob: float | None
    top_log_probs: TopLogProbs = ()


@dataclass(slots=True)  # see EngineChunk
class TextChunk:
    """Text new since the last chunk of the same sequence, or all so far when accumulating.

    Scores belong to tokens whose whole text has left. ``log_probs`` are all of them so far, as on
    TensorRT-LLM's wire, unless ``tokens`` were asked for, which have their own. Of
    ``generation_logits`` there are only those of this chunk. ``context_logits`` and ``metrics`` are
    on every chunk from the first that has them, as TensorRT-LLM sends them.
    ``tokens`` are those whose whole text has left with this chunk, those of an echoed prompt first;
    ``None`` if they were not asked for.
    ``draft_spans``: the parts of ``text`` that accepted draft tokens wrote, as ``(begin, end)`` in
    characters, one for each such token; empty when accumulating or echoing.
    """

    text: str
    sequence_index: int = 0
    ending: Ending | None = None
    log_probs: Sequence[float] | None = None
    cum_log_prob: float | None = None
    context_logits: Array | None = None
    generation_logits: Sequence[Array] | None = None  # one row [vocab] per token
    tokens: tuple[TokenText, ...] | None = None
    draft_spans: tuple[tuple[int, int], ...] = ()
    metrics: EngineMetrics | None = None


# --- a request that is over -----------------------------------------------------------------

# Characters of a prompt and of an error: figures may wait to be read, and prompts are large.
MAX_REPORT_CHARS = 1000


class Outcome(str, Enum):
    """The outcome of a request; ``RequestStats.reason`` says more."""

    SUCCESS = "success"  # reason: its finish reason
    REFUSED = "refused"  # reason: the limit's parameter, or the field that has a mistake
    OVERLOADED = "overloaded"  # refused for want of room; reason: the limit's parameter, if ours
    FAILED = "failed"  # reason: the kind of error
    CANCELLED = "cancelled"  # reason: a ``CancelCause``


@dataclass(kw_only=True)  # see EngineChunk
class RequestStats:
    """The figures of a request (one prompt) that is over. Times are seconds from its arrival.

    ``queue_s`` lasts until the engine was given the request, ``ttft_s`` until the first response of
    a stream; ``None`` where that never happened. ``inter_token_s`` is the mean time between two
    tokens of a sequence, ``longest_gap_s`` the longest between two responses, each of which may
    hold several tokens. ``error``: the text of the error that the caller got.
    """

    request_id: str
    outcome: Outcome
    reason: str
    error: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    sequences: int = 1
    responses: int = 0
    duration_s: float = 0.0
    queue_s: float | None = None
    ttft_s: float | None = None
    inter_token_s: float | None = None
    longest_gap_s: float | None = None
    speculation: SpeculationStats | None = None
    traceparent: str | None = None
    api: str | None = None
    # At most MAX_REPORT_CHARS, for the request log.
    prompt: str | None = field(default=None, repr=False)


# --- waiting --------------------------------------------------------------------------------

Amount = TypeVar("Amount", int, float)


@dataclass(frozen=True)
class Backoff(Generic[Amount]):
    """Pauses between tries, each twice as long as the last: from ``shortest`` to ``longest``."""

    shortest: Amount
    longest: Amount

    def after(self, pause: Amount) -> Amount:
        """Return the pause that follows ``pause``; ``shortest`` follows 0."""
        return min(max(2 * pause, self.shortest), self.longest)
