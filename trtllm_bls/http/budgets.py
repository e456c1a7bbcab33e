"""Every quantity that an HTTP client can name, send or repeat, and its bound.

Two halves: the numbers, which the modules that enforce them import, and ``BUDGETS``, the table of
what is counted, whose count it is, what is answered beyond the bound and which test holds it.
docs/security.md prints the table (``make generate``). ``tests/unit/test_budgets.py`` walks the
routes, the request schemas, the callbacks and frames of each protocol and the containers that
outlive a request, and demands a row for each.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_bls.text.json_values import MAX_CONTAINERS, MAX_DEPTH

KIB = 1024
MIB = 1024 * KIB

# --- one connection -----------------------------------------------------------------------------

HEADER_S = 10.0  # for the headers of a request
BODY_S = 30.0  # for the body of a request
IDLE_S = 75.0  # clients and proxies close idle connections earlier, so no request is lost
URL_BYTES = 8 * KIB
HEAD_BYTES = 64 * KIB  # headers, trailers and chunks' frames of a request
CONNECTION_REQUESTS = 1000
PARSED_AT_ONCE = 4 * KIB  # bytes, which hold 200 requests or fewer

FRAMES_A_TURN = 64  # from one WebSocket, in one turn of the event loop; about 2 ms
FRAMES_A_MESSAGE = 1024  # 4 KiB each for a message of 4 MiB
CONTROL_FRAMES = 100  # pings and pongs in a minute
TURNS_AFTER_CLOSE = 16  # for the client's close frame, which follows the frames that it had sent
SOCKET_S = 3600.0  # until a WebSocket is closed, as OpenAI has it
SOCKET_REFUSALS = 60  # messages that are refused in a minute

# --- all clients of a process together, who share it (``shares``) -------------------------------

SOCKETS = 256  # WebSockets
HELD_BODY_BYTES = 64 * MIB  # bodies that are received or read, for each port
HELD_TENSOR_BYTES = 128 * MIB  # bodies that are forwarded, until Triton has answered
SMALL_BODY_BYTES = 64 * KIB  # a quarter of the room is for bodies up to this
CONTINUED_BYTES = 16  # times ``--max-body-bytes``: conversations that WebSockets may go on from

# --- one body -----------------------------------------------------------------------------------

BODY_BYTES = 4 * MIB  # JSON, also unpacked; ``--max-body-bytes``
TENSOR_BYTES = 64 * MIB  # JSON and binary tensors
LONG_JSON_BYTES = 256 * KIB  # a longer text is read in a thread

# --- infer and generate -------------------------------------------------------------------------

MAX_MEMBERS = 1000  # parameters, inputs or outputs; Triton's time grows with their square
MAX_DIMENSIONS = 32  # in a shape
MAX_ELEMENTS = 64 * MIB  # in a tensor; each takes a byte of the body or more
MAX_TEXTS = 2**20  # in a BYTES tensor, whose lengths are read one by one

# --- the OpenAI API -----------------------------------------------------------------------------

MAX_FIELDS = 256  # in a request
MAX_ITEMS = 8192  # in a conversation, including those that references stand for
MAX_TOOLS = 512
MAX_PROMPTS = 256  # in a completion
MAX_TOKENS = 2**20  # in a list
MAX_PART_BYTES = 16 * MIB  # one image, sound or file in a conversation, decoded
MAX_PARTS = 256  # images, sounds and files in a conversation
MAX_EMBEDDED_TEXTS = 2048  # for ``/v1/embeddings``, as OpenAI has it
MAX_DOCUMENTS = 2048  # for ``/v1/rerank``
MAX_SPEECH_CHARACTERS = 2**16  # for ``/v1/audio/speech``
MAX_NAME = 256  # characters of a voice or a format
MAX_TEXT_TOKENS = 2**18  # for ``/detokenize``; one may stand for hundreds of bytes
STORED_RESPONSE_BYTES = 4 * MIB  # for a response's input, and for the rest of that response
STORED_CHAIN = 1000  # responses
REFERENCE_BYTES = 16  # times ``--max-body-bytes``: bodies that references are looked up in
MAX_NOTES = 100  # lines about requests, each logged once in a process
MAX_NOTE = 160  # characters


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A row of the table.

    ``unit``: what is counted. ``limit``: the bound, as the page says it. ``holder``: whose count it
    is. ``beyond``: what is answered, or done, beyond it. ``test``: the file and the test that hold
    it, with a colon between. ``covers``: what a walk finds, as "kind name".
    """

    unit: str
    limit: str
    holder: str
    beyond: str
    test: str
    covers: tuple[str, ...] = ()


def _named(kind: str, names: str) -> tuple[str, ...]:
    return tuple(f"{kind} {name}" for name in names.split())


def _size(num_bytes: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if num_bytes % unit == 0:
            return f"{num_bytes // unit} {name}"
    return f"{num_bytes} bytes"


_GUARD = "tests/openai/test_http_guard.py"
_SOCKETS = "tests/openai/test_sockets.py"
_STORED = "tests/openai/test_stored.py"
_INFER = "tests/unit/test_infer.py"
_SHARE_NOTE = "; half of it while others ask"

_CONNECTION = (
    Budget(
        unit="bytes of a URL",
        limit=_size(URL_BYTES),
        holder="request",
        beyond="414",
        test=f"{_GUARD}:test_what_is_no_body_has_a_limit",
        covers=("callback on_url", "place {model}", "place {name}"),
    ),
    Budget(
        unit="bytes of headers, trailers and chunks' frames, and 32 for each header",
        limit=_size(HEAD_BYTES),
        holder="request",
        beyond="431",
        test=f"{_GUARD}:test_what_is_no_body_has_a_limit",
        covers=(
            *_named("callback", "on_header on_headers_complete"),
            *_named("header", "traceparent inference-header-content-length"),
        ),
    ),
    Budget(
        unit="time for headers; for a body; between requests",
        limit=f"{HEADER_S:g} s; {BODY_S:g} s; {IDLE_S:g} s",
        holder="connection",
        beyond="408; 408; it is closed",
        test=f"{_GUARD}:test_bodies_have_a_time",
    ),
    Budget(
        unit="requests, one after another",
        limit=f"{CONNECTION_REQUESTS:,}",
        holder="connection",
        beyond="it is closed",
        test=f"{_GUARD}:test_requests_that_wait_for_others_are_parsed_later",
        covers=(
            *_named("callback", "on_message_begin on_message_complete on_response_complete"),
            "kept limits.GuardedProtocol._cycles",
        ),
    ),
    Budget(
        unit="bytes that are parsed while an earlier request is answered",
        limit=_size(PARSED_AT_ONCE),
        holder="connection",
        beyond="the rest is parsed later",
        test=f"{_GUARD}:test_requests_that_wait_for_others_are_parsed_later",
    ),
    Budget(
        unit="connections",
        limit="the limit of open files, less 256",
        holder="process",
        beyond="503",
        test=f"{_GUARD}:test_slow_clients_do_not_keep_others_out",
        covers=("kept accepting.Acceptor.opening",),
    ),
)

_WEBSOCKETS = (
    Budget(
        unit="WebSockets",
        limit=f"{SOCKETS}{_SHARE_NOTE}",
        holder="key or address",
        beyond="503; an idle one of the client with most of them is closed (1013)",
        test=f"{_SOCKETS}:test_one_client_leaves_sockets_for_others",
    ),
    Budget(
        unit="time of a WebSocket",
        limit="1 hour",
        holder="connection",
        beyond="an error event, and it is closed",
        test=f"{_SOCKETS}:test_an_hour_ends_a_connection",
    ),
    Budget(
        unit="bytes of a message, which must not be compressed",
        limit=f"{_size(BODY_BYTES)} (`--max-body-bytes`)",
        holder="message",
        beyond="closed (1009)",
        test=f"{_SOCKETS}:test_what_is_no_request_is_told_and_the_connection_lives_on",
    ),
    Budget(
        unit="frames of a message",
        limit=f"{FRAMES_A_MESSAGE:,}",
        holder="message",
        beyond="closed (1008)",
        test=f"{_SOCKETS}:test_frames_are_counted_and_others_have_their_turns",
        covers=_named("frame", "CONTINUATION TEXT BINARY"),
    ),
    Budget(
        unit="pings and pongs in a minute",
        limit=f"{CONTROL_FRAMES}",
        holder="connection",
        beyond="closed (1008)",
        test=f"{_SOCKETS}:test_frames_are_counted_and_others_have_their_turns",
        covers=_named("frame", "PING PONG"),
    ),
    Budget(
        unit="frames that one turn of the event loop works on",
        limit=f"{FRAMES_A_TURN}, or one message",
        holder="connection",
        beyond="others have their turn",
        test=f"{_SOCKETS}:test_a_read_of_many_frames_is_worked_on_in_turns",
    ),
    Budget(
        unit="turns after a close frame",
        limit=f"{TURNS_AFTER_CLOSE}",
        holder="connection",
        beyond="it is closed",
        test=f"{_SOCKETS}:test_frames_are_counted_and_others_have_their_turns",
        covers=("frame CLOSE",),
    ),
    Budget(
        unit="messages that wait beside the response that runs",
        limit="1",
        holder="connection",
        beyond="429 as an event",
        test=f"{_SOCKETS}:test_one_request_waits_for_the_one_that_runs",
        covers=("kept sockets._Connection._waiting",),
    ),
    Budget(
        unit="messages that are refused in a minute",
        limit=f"{SOCKET_REFUSALS}",
        holder="connection",
        beyond="closed (1008)",
        test=f"{_SOCKETS}:test_frames_are_counted_and_others_have_their_turns",
    ),
    Budget(
        unit="bytes of the conversations that WebSockets may go on from",
        limit=f"{CONTINUED_BYTES} times `--max-body-bytes`; each at most that once",
        holder="process",
        beyond="the oldest are forgotten",
        test=f"{_SOCKETS}:test_what_connections_go_on_from_is_bounded",
        covers=("kept sockets.LastResponses._responses",),
    ),
)

_BODIES = (
    Budget(
        unit="bytes of JSON, also unpacked",
        limit=f"{_size(BODY_BYTES)} (`--max-body-bytes`)",
        holder="request",
        beyond="413",
        test=f"{_GUARD}:test_packed_bodies_are_read_within_the_same_limit",
        covers=(
            *_named("callback", "on_body on_chunk_header on_chunk_complete"),
            *_named("body", "application/json unnamed"),
            *_named("list", "guided_choice choice include tool_calls summary output"),
        ),
    ),
    Budget(
        unit="bytes of JSON and binary tensors, also unpacked",
        limit=_size(TENSOR_BYTES),
        holder="request",
        beyond="413",
        test="tests/unit/test_triton_http.py:test_a_body_that_is_forwarded_has_limits",
        covers=("body application/octet-stream",),
    ),
    Budget(
        unit="bytes of bodies in flight, for each port",
        limit=f"{_size(HELD_BODY_BYTES)}{_SHARE_NOTE}; the last quarter for bodies up to "
        f"{_size(SMALL_BODY_BYTES)}",
        holder="key or address",
        beyond="503; unfinished bodies of the client with most of them end",
        test=f"{_GUARD}:test_unfinished_bodies_of_one_client_leave_room_for_others",
        covers=_named("kept", "shares.Shares._shares shares.Shares._held_by"),
    ),
    Budget(
        unit="bytes of bodies that Triton is answering",
        limit=f"{_size(HELD_TENSOR_BYTES)}, shared as above",
        holder="key or address",
        beyond="503",
        test=f"{_GUARD}:test_unfinished_bodies_of_one_client_leave_room_for_others",
    ),
    Budget(
        unit="lists and objects within each other; in one body",
        limit=f"{MAX_DEPTH}; {MAX_CONTAINERS:,}",
        holder="request",
        beyond="400",
        test=f"{_GUARD}:test_counts_are_checked_before_work",
        covers=_named(
            "object",
            "messages[] content[] tools[] input[] output[] summary[] system[] tool "
            "action operation schema json guided_json chat_template_kwargs metadata input_schema "
            "parameters tool_choice",
        ),
    ),
    Budget(
        unit="bytes that the event loop itself reads",
        limit=_size(LONG_JSON_BYTES),
        holder="request",
        beyond="a longer body is read in a thread",
        test=f"{_GUARD}:test_a_large_body_is_read_beside_the_event_loop",
    ),
)

_TENSOR_ROWS = (
    Budget(
        unit="parameters; inputs; outputs of `infer`; other members of `generate`",
        limit=f"{MAX_MEMBERS:,}",
        holder="request",
        beyond="400",
        test=f"{_INFER}:test_a_body_that_triton_does_not_bear_is_refused",
    ),
    Budget(
        unit="dimensions of a shape",
        limit=f"{MAX_DIMENSIONS}",
        holder="tensor",
        beyond="400",
        test=f"{_INFER}:test_a_wrong_input_is_refused_by_its_place",
    ),
    Budget(
        unit="elements of a shape; of one of texts",
        limit=f"as many as there are values, and {MAX_ELEMENTS // MIB} Mi; {MAX_TEXTS // MIB} Mi",
        holder="tensor",
        beyond="400",
        test=f"{_INFER}:test_only_the_product_of_the_shape_is_taken",
        covers=("list data",),
    ),
    Budget(
        unit="texts of tensors; all inputs of a request together",
        limit="`max_prompt_bytes`; `max_request_bytes`",
        holder="request",
        beyond="400",
        test="tests/unit/test_limits.py:test_sizes_are_refused_before_anything_is_decoded",
        covers=_named(
            "tensor",
            "text_input messages prediction draft_source cache_salt QUERY MESSAGES lora_name "
            "lora_path lora_ckpt_source logits_post_processor_name guided_decoding_guide "
            "guided_decoding_guide_type stop_words bad_words embedding_bias_words "
            "STOP_WORDS_DICT BAD_WORDS_DICT EMBEDDING_BIAS_WORDS",
        ),
    ),
    Budget(
        unit="numbers of tensors",
        limit="`max_request_bytes`; of one number the range of its type",
        holder="request",
        beyond="400",
        test="tests/unit/test_limits.py:test_more_tokens_than_the_operator_allows_are_refused",
        covers=_named(
            "tensor",
            "EMBEDDING_BIAS_WEIGHTS SEQUENCE_LENGTH TOKENS_BATCH bad_words_list decoder_input_ids "
            "draft_input_ids draft_logits embedding_bias embedding_bias_weights input_ids "
            "lora_config lora_weights prompt_embedding_table prompt_table_extra_ids "
            "retention_token_range_durations_ms retention_token_range_ends "
            "retention_token_range_priorities retention_token_range_starts stop_words_list PAD_ID "
            "REQUEST_OUTPUT_LEN decoder_input_lengths input_lengths lookahead_ngram_size "
            "lookahead_verification_set_size lookahead_window_size lora_task_id pad_id "
            "prompt_vocab_size retention_decode_duration_ms retention_decode_priority",
        ),
    ),
    Budget(
        unit="integers of the protocol (sizes, `priority`, `timeout`, …)",
        limit="their types",
        holder="request",
        beyond="400",
        test=f"{_INFER}:test_parameters_of_the_protocol_have_types",
        covers=("integer parameters{}",),
    ),
)

_REQUEST_ROWS = (
    Budget(
        unit="fields of a request",
        limit=f"{MAX_FIELDS}",
        holder="request",
        beyond="400",
        test=f"{_GUARD}:test_counts_are_checked_before_work",
    ),
    Budget(
        unit="messages or items of a conversation, references resolved; tools",
        limit=f"{MAX_ITEMS:,}; {MAX_TOOLS}",
        holder="request",
        beyond="400",
        test=f"{_STORED}:test_items_are_counted_with_those_before_them",
        covers=_named("list", "tools system content"),
    ),
    Budget(
        unit="bytes that references to stored items stand for",
        limit="`--max-body-bytes`, each mention counted",
        holder="request",
        beyond="400",
        test=f"{_STORED}:test_references_cost_what_they_stand_for",
    ),
    Budget(
        unit="bytes of stored responses that references are looked up in",
        limit=f"{REFERENCE_BYTES} times `--max-body-bytes`",
        holder="request",
        beyond="400",
        test=f"{_STORED}:test_references_read_a_bounded_number_of_bytes",
    ),
    Budget(
        unit="stored bytes; of one response; responses of a chain",
        limit=f"`--store-bytes`{_SHARE_NOTE}; {_size(STORED_RESPONSE_BYTES)}; {STORED_CHAIN:,}",
        holder="key",
        beyond="the least used go; it is not stored; it is refused",
        test=f"{_STORED}:test_a_key_pushes_out_its_own_responses",
    ),
    Budget(
        unit="texts of the prompt",
        limit="`max_prompt_bytes`",
        holder="request",
        beyond="400",
        test="tests/unit/test_limits.py:test_sizes_are_refused_before_anything_is_decoded",
        covers=_named(
            "text",
            "content prompt input instructions arguments output system thinking name namespace "
            "description encrypted_content type call_id id tool_use_id status reasoning_effort "
            "effort draft_source model previous_response_id",
        ),
    ),
    Budget(
        unit="stop words; bad words; characters of each",
        limit="100; 1,024; 256",
        holder="request",
        beyond="400",
        test="tests/text/test_token_services.py:test_lists_are_bounded_before_they_cost_time",
        covers=_named("text", "stop stop[] stop_sequences[] bad_words[]"),
    ),
    Budget(
        unit="a schema, expression or grammar",
        limit="`max_guide_bytes`, `max_guide_depth`, `max_guide_nodes`",
        holder="request",
        beyond="400",
        test="tests/unit/test_limits.py:test_a_guide_that_is_costly_to_compile_is_refused",
        covers=_named(
            "text",
            "ebnf regex grammar json guided_json guided_regex guided_grammar guided_choice[] "
            "choice[]",
        ),
    ),
    Budget(
        unit="texts that nothing is computed from",
        limit="the bytes of JSON",
        holder="request",
        beyond="413",
        test=f"{_GUARD}:test_a_client_reads_why_its_body_is_too_large",
        covers=_named(
            "text",
            "user metadata{} prompt_cache_key safety_identifier include[] tool_choice "
            "parameters{} shared_memory_region",
        ),
    ),
    Budget(
        unit="tokens of a list; of `/detokenize`; prompts of a completion",
        limit=f"{MAX_TOKENS:,}; {MAX_TEXT_TOKENS:,}; {MAX_PROMPTS}",
        holder="request",
        beyond="400",
        test=f"{_GUARD}:test_counts_are_checked_before_work",
        covers=("list prompt",),
    ),
    Budget(
        unit="bytes of an image, sound or file for a pipeline, decoded; of those",
        limit=f"{_size(MAX_PART_BYTES)}; {MAX_PARTS}",
        holder="part; request",
        beyond="400",
        test="tests/openai/test_parts.py:test_a_part_that_cannot_be_is_refused_by_its_place",
    ),
    Budget(
        unit="texts of an embedding; documents of a rerank; characters that are said",
        limit=f"{MAX_EMBEDDED_TEXTS:,}; {MAX_DOCUMENTS:,}; {MAX_SPEECH_CHARACTERS:,}",
        holder="request",
        beyond="400",
        test="tests/openai/test_faces.py:test_counts_of_faces_are_checked_before_work",
        covers=_named("text", "query text documents[]"),
    ),
    Budget(
        unit="numbers of a request",
        limit="the range of their type (`/openapi.json`)",
        holder="request",
        beyond="400",
        test="tests/openai/test_refusals.py:test_wrong_values_are_refused_by_the_callers_names",
        covers=("integer max_tool_calls",),
    ),
    Budget(
        unit="sequences that run; that wait",
        limit=f"`max_running_requests`; `max_queued_requests`; of both together{_SHARE_NOTE}",
        holder="key or address",
        beyond="429 with `Retry-After`",
        test="tests/unit/test_triton_http.py:test_one_client_leaves_places_for_others",
        covers=("kept orchestrator.Admission._waiting",),
    ),
)

_KEPT_ROWS = (
    Budget(
        unit="kinds of content, tools and fields that are logged once",
        limit=f"{MAX_NOTES} lines of {MAX_NOTE} characters",
        holder="process",
        beyond="they are not logged",
        test="tests/openai/test_conversations.py:test_what_is_noted_once_stays_small",
        covers=("kept content._notes",),
    ),
    Budget(
        unit="defects that are not counted yet",
        limit="10,000 names of types",
        holder="process",
        beyond="the oldest are forgotten",
        test="tests/unit/test_budgets.py:test_a_container_that_outlives_a_request_has_a_row",
        covers=("kept errors.defects",),
    ),
    Budget(
        unit="what is known of models",
        limit="the models and versions that Triton has",
        holder="process",
        beyond="404, and nothing is kept",
        test="tests/unit/test_triton_http.py:test_a_version_is_asked_for_in_one_spelling",
        covers=("kept generate.TritonHttp._metadata",),
    ),
    Budget(
        unit="requests that run, and what is kept of each",
        limit="as many as run",
        holder="process",
        beyond="each goes when it ends",
        test="tests/unit/test_amplification.py:test_memory_is_a_bounded_multiple_of_what_was_sent",
        covers=_named(
            "kept",
            "exchange.RunningRequests._running orchestrator.Orchestrator._open "
            "reports.RequestReports._queue",
        ),
    ),
)

BUDGETS = (*_CONNECTION, *_WEBSOCKETS, *_BODIES, *_TENSOR_ROWS, *_REQUEST_ROWS, *_KEPT_ROWS)


def table() -> str:
    """Return the table for docs/security.md."""
    rows = [
        ("what is counted", "limit", "of a", "beyond it", "held by"),
        ("---",) * 5,
    ]
    for budget in BUDGETS:
        path, _, test = budget.test.partition(":")
        file = path.rpartition("/")[2]
        held_by = f"[`{test}`](../{path})"
        assert file
        rows.append((budget.unit, budget.limit, budget.holder, budget.beyond, held_by))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)
