"""A language model that any asyncio program may call: ``LLM``, and the steps of its answers.

Inside a pipeline each call belongs to the request on whose behalf it is made, and ends with it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import sys
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import cached_property
from numbers import Integral, Real
from types import UnionType
from typing import Any, Protocol, TypedDict, Union, get_args, get_origin, get_type_hints

import msgspec

from trtllm_bls.errors import (
    PROMPT_FIELDS,
    CancelCause,
    EngineError,
    EngineRefusal,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    TrtllmBlsError,
    Unsupported,
)
from trtllm_bls.orchestrator.chat_turn import ChatFormats, ChatTurns, Conversation, FormDemand
from trtllm_bls.orchestrator.orchestrator import Orchestrator
from trtllm_bls.pipeline.content_parts import check_text_only
from trtllm_bls.settings.parameters import nearest, suggestion
from trtllm_bls.text.chat_formats import REASONING_TAGS, TOOL_FORMATS
from trtllm_bls.text.chat_parser import (
    Arguments,
    ChatParser,
    Content,
    EventParser,
    Reasoning,
    ToolCall,
)
from trtllm_bls.text.tokenizer import Tokenizer
from trtllm_bls.types import (
    COLDEST,
    GUIDE_KIND_INPUT,
    GUIDE_TEXT_INPUT,
    Array,
    CacheSalt,
    ChatOptions,
    FinishReason,
    Guide,
    Sampling,
    SpeculationRequest,
    TextChunk,
    TextRequest,
    TokenIds,
    TopLogProbs,
    Wants,
)
from trtllm_bls.wire.contract import BLS, ENGINE
from trtllm_bls.wire.request_fields import TYPED_INPUTS, typed_fields

if sys.version_info >= (3, 11):
    from typing import Unpack
else:
    from typing_extensions import Unpack

_FAILED_REASONS = (FinishReason.ERROR, FinishReason.CANCELLED)  # an error follows
_numbers = itertools.count(1)


class PipelineRequest(Protocol):
    """A pipeline's request, on whose behalf models are called."""

    id: str
    own_options: Collection[str]
    traceparent: str | None
    key: str | None
    cache_salt: str | None
    tokens: int
    prompt_tokens: int
    finish_reason: str

    def sent(self, options: Mapping[str, Any], tools: Any) -> set[str]:
        """Return which of these the caller sent as they are, and ``messages`` if it sent some."""

    def input_with(self, text: str) -> str | None:
        """Return the name of the input that has this text."""

    def begins(self, call: Any) -> None:
        """Note a call, which is closed with the request. Raises where the request has ended."""

    def ended(self, call: Any) -> None:
        """Forget a call that is over."""


# The request of this task. ``StreamingModel`` sets it in the task of each request, so tasks that
# it starts inherit it.
CALLER: ContextVar[PipelineRequest | None] = ContextVar("caller", default=None)


# --- options ----------------------------------------------------------------------------------


class Options(TypedDict, total=False):
    """What an answer may be asked for, under the names of ``TextRequest`` and ``Sampling``.

    ``None`` and what is absent are the deployment's defaults. One ``stop_words`` or ``bad_words``
    may be a text alone. ``json_schema``, ``regex`` or ``grammar`` (EBNF): the form that guided
    decoding gives the answer. ``token_bias`` and ``embedding_bias``: logits added, by id and by
    word. ``extras``: further inputs of the engine by name.
    """

    temperature: float | None
    top_k: int | None
    top_p: float | None
    top_p_min: float | None
    top_p_decay: float | None
    top_p_reset_id: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    no_repeat_ngram_size: int | None
    min_tokens: int | None
    seed: int | None
    length_penalty: float | None
    beam_search_diversity_rate: float | None
    max_tokens: int | None
    fits_max_tokens: bool | None
    timeout_s: float | None
    stop_words: str | Sequence[str] | None
    include_stop: bool | None
    stop_token_ids: Sequence[int] | None
    bad_words: str | Sequence[str] | None
    end_id: int | None
    pad_id: int | None
    token_bias: Mapping[int, float] | None
    embedding_bias: Mapping[str, float] | None
    json_schema: Mapping[str, Any] | str | None
    regex: str | None
    grammar: str | None
    num_return_sequences: int | None
    echo: bool | None
    log_probs: bool | None
    top_log_probs: int | None
    context_logits: bool | None
    generation_logits: bool | None
    add_special_tokens: bool | None
    skip_special_tokens: bool | None
    speculation: SpeculationRequest | None
    prediction: str | None
    stream_interval: int | None
    lora_task_id: int | None
    lora_name: str | None
    prompt_table_extra_id: int | None
    extras: Mapping[str, Any] | None


class ConversationOptions(Options, total=False):
    """``variables``: further ones of the chat template. ``continue_final_message``: the answer goes
    on where the last message ends. ``tool_choice``: ``auto``, ``none``, ``required``, which demands
    a call, or the name of the tool to call. ``parallel_tool_calls``: there may be several."""

    variables: Mapping[str, Any] | None
    continue_final_message: bool | None
    tool_choice: str | None
    parallel_tool_calls: bool | None


_HINTS = get_type_hints(ConversationOptions)
_PLAIN_HINTS = get_type_hints(Options)
_STREAMED: dict[str, Any] = {"request_id": "", "stream": True, "return_tokens": True}
_BOUNDED = {tensor.key: tensor for tensor in BLS.inputs if tensor.bounds is not None}
_GUIDE_OPTIONS = {"json_schema": "json_schema", "regex": "regex", "grammar": "ebnf_grammar"}
_SAMPLING_OPTIONS = frozenset(each.name for each in fields(Sampling))
_WANTS_OPTIONS = frozenset(each.name for each in fields(Wants))
# Engines have words as token ids.
_OPTIONS_OF_IDS = {"stop_words_list": "stop_words", "bad_words_list": "bad_words"}
_ADAPTERS = ("lora_task_id", "lora_name")


def _read(name: str, value: Any, hint: Any) -> Any:
    """The value of an option as ``hint`` has it. Raises ``InvalidRequest``."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for kind in kinds:
        origin, inner = get_origin(kind) or kind, get_args(kind)
        if kind is Any or (kind is type(None) and value is None):
            return value
        if kind is bool and isinstance(value, bool):
            return value
        if kind is int and isinstance(value, Integral) and not isinstance(value, bool):
            return int(value)
        if kind is float and isinstance(value, Real) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise InvalidRequest(name, f"{value} is no finite number")
            return float(value)
        if kind in (str, SpeculationRequest) and isinstance(value, kind):
            return value
        if origin is Mapping or getattr(origin, "__name__", "") == "Mapping":
            if isinstance(value, Mapping):
                pairs = value.items()
                return {_read(name, k, inner[0]): _read(name, v, inner[1]) for k, v in pairs}
        elif inner and isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            return tuple([_read(name, item, inner[0]) for item in value])
    words = " or ".join(_word(kind) for kind in kinds if kind is not type(None))
    raise InvalidRequest(name, f"{value!r:.80} is not {words}")


def _word(kind: Any) -> str:
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    inner = get_args(kind)
    plain = str(words.get(kind) or getattr(kind, "__name__", kind))
    return plain if not inner else f"{plain} of {_word(inner[-1])}".lower()


def request_fields(
    options: Mapping[str, Any], hints: Mapping[str, Any] = _PLAIN_HINTS
) -> dict[str, Any]:
    """Return these options as fields of a ``TextRequest``, and those of chats under their names.

    ``hints``: the options that there are, with their types. Raises ``TrtllmBlsError``.
    """
    if unknown := options.keys() - hints.keys():
        mend = suggestion(min(unknown), hints)
        raise TrtllmBlsError(f"{min(unknown)} is no option of a language model; {mend}")
    read = {name: _read(name, value, hints[name]) for name, value in options.items()}
    read = {name: value for name, value in read.items() if value is not None}
    for name, value in read.items():
        if name in _BOUNDED and isinstance(value, (int, float)):
            _BOUNDED[name].check(value)
    arrays = _engine_inputs(read)
    extras = {name: array for name, array in arrays.items() if name not in TYPED_INPUTS}
    form = _form(read)
    if form is not None:
        read["guide"] = form.guide
    for name in ("stop_words", "bad_words"):
        if isinstance(read.get(name), str):
            read[name] = (read[name],)
    for name in ("token_bias", "embedding_bias"):
        if name in read:
            read[name] = tuple(read[name].items())
    sampling = {name: read.pop(name) for name in _SAMPLING_OPTIONS & read.keys()}
    _set_temperature(sampling)
    wants = {name: read.pop(name) for name in _WANTS_OPTIONS & read.keys()}
    return {
        "max_tokens": None,
        "sampling": Sampling(**sampling),
        "wants": Wants(**wants),
        "extras": extras,
        **typed_fields(arrays),
        **read,
    }


def _set_temperature(sampling: dict[str, Any]) -> None:
    """Have a temperature alone sample, and one of about 0 take the likeliest token.

    TensorRT-LLM samples only with ``top_k`` or ``top_p``.
    """
    temperature = sampling.get("temperature")
    if temperature is None:
        return
    if temperature < COLDEST:
        for name in ("temperature", "top_p", "top_k", "min_p"):
            sampling.pop(name, None)
    elif "top_p" not in sampling and "top_k" not in sampling:
        sampling["top_p"] = 1.0


def _engine_inputs(read: dict[str, Any]) -> dict[str, Array]:
    """Take the options that are inputs of engines out of ``read``, as arrays by input name."""
    values = dict(read.pop("extras", {}))
    for name in _ADAPTERS:
        if name in read:
            values[name] = read.pop(name)
    arrays = {}
    for name, value in values.items():
        if name not in ENGINE.input_named:
            hint = nearest(name, ENGINE.input_named)
            raise InvalidRequest(name, f"is no input of an engine; {hint}".rstrip("; "))
        arrays[name] = ENGINE.input_named[name].array(value)
    return arrays


def _form(read: dict[str, Any]) -> FormDemand | None:
    """Take the option that demands a form out of ``read``. Raises ``InvalidRequest``."""
    names = [name for name in _GUIDE_OPTIONS if name in read]
    if not names:
        return None
    if len(names) > 1:
        raise InvalidRequest(names[1], f"{names[0]} is another form; send one")
    (name,) = names
    form = read.pop(name)
    try:
        text = form if isinstance(form, str) else json.dumps(form)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(name, f"is not JSON: {error}") from None
    return FormDemand(field=name, guide=Guide(_GUIDE_OPTIONS[name], text))


def _conversation(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    fields: dict[str, Any],
    form_field: str,
) -> Conversation:
    """Take what only a conversation has out of ``fields``. Raises ``InvalidRequest``.

    ``form_field``: the option that demands a form, if one does.
    """
    check_text_only(messages)
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest("tools", "each must have a function with a name")
    guide = fields.pop("guide", None)
    continues = fields.pop("continue_final_message", False)
    choice = fields.pop("tool_choice", "auto")
    forced = None
    if choice not in ("auto", "none", "required"):
        forced = choice
        choice = "required"
    return Conversation(
        messages=_copied("messages", messages),
        tools=_copied("tools", tools),
        choice=choice,
        forced=forced,
        parallel=fields.pop("parallel_tool_calls", True),
        form=None if guide is None else FormDemand(field=form_field, guide=guide),
        options=ChatOptions(
            variables=fields.pop("variables", {}),
            continue_final_message=continues,
            add_generation_prompt=not continues,
        ),
    )


def _copied(name: str, values: Sequence[Mapping[str, Any]]) -> Any:
    """Return JSON values that nobody changes while the answer runs. Raises ``InvalidRequest``."""
    try:
        return msgspec.to_builtins(values)
    except (TypeError, RecursionError) as error:
        raise InvalidRequest(name, f"is not JSON: {error}") from None


# --- answers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepCall:
    """A tool that the model calls; ``text``: its arguments, as the model wrote them."""

    id: str
    name: str
    text: str

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name. Raises ``EngineError`` if the model wrote no JSON object."""
        with suppress(ValueError, RecursionError):
            if isinstance(read := json.loads(self.text), dict):
                return read
        raise EngineError(f"the model called {self.name} with {self.text!r:.80}: no JSON object")

    def result(self, content: str) -> dict[str, Any]:
        """The message that tells the model what the call has returned."""
        return {"role": "tool", "tool_call_id": self.id, "name": self.name, "content": content}


@dataclass(slots=True)
class Step:
    """What is new in an answer. ``finish_reason`` is set in the last step of a sequence alone.

    ``ids``: the new token ids; an id comes with the text that it completes, so the bytes of one
    character come together. ``stop_reason``: the stop string that ended the answer. ``index``: of
    the sequence, where several were asked for. Of a conversation, ``text`` is without ``reasoning``
    and ``calls``, which are the calls that became complete. ``log_probs`` and ``top_log_probs`` are
    those of ``ids``, if asked for.
    """

    ids: TokenIds
    text: str
    finish_reason: str | None = None
    stop_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    index: int = 0
    reasoning: str = ""
    calls: tuple[StepCall, ...] = ()
    log_probs: tuple[float | None, ...] = ()
    top_log_probs: tuple[TopLogProbs, ...] = ()
    context_logits: Array | None = None
    generation_logits: Sequence[Array] | None = None

    @property
    def message(self) -> dict[str, Any]:
        """What the model has said, as a message for the next turn of the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning"] = message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": function}
                for call in self.calls
                for function in [{"name": call.name, "arguments": call.text}]
            ]
        return message


def joined(steps: Sequence[Step]) -> Step:
    """Steps of one sequence as one. The logits are those of the last step that has some."""
    last = steps[-1]
    return replace(
        last,
        ids=tuple(itertools.chain.from_iterable(step.ids for step in steps)),
        text="".join([step.text for step in steps]),
        reasoning="".join([step.reasoning for step in steps]),
        calls=tuple(itertools.chain.from_iterable(step.calls for step in steps)),
        log_probs=tuple(itertools.chain.from_iterable(step.log_probs for step in steps)),
        top_log_probs=tuple(itertools.chain.from_iterable(step.top_log_probs for step in steps)),
    )


class _Answer:
    """The orchestrator's sink of one request, and the task that runs it."""

    def __init__(self, orchestrator: Orchestrator, request: TextRequest) -> None:
        self.arrived: asyncio.Queue[TextChunk | None] = asyncio.Queue()  # None: the end
        self._left = self._cut = False  # nobody takes the rest; it ended before its end for that
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = self._loop.create_task(
            orchestrator.run(request, self)
        )
        self._task.add_done_callback(self._ended)

    async def ready(self) -> None:
        """Return once the reader has taken all steps."""
        await self.arrived.join()

    def send(self, chunk: TextChunk) -> None:
        """Take a chunk of the orchestrator."""
        self.arrived.put_nowait(chunk)

    async def raise_failure(self) -> None:
        """Raise what ended the answer, which is over, unless it ended well."""
        if self._cut:
            raise EngineError("the answer was left before its end")
        # The traceback of a task that failed refers to this object: kept here, both would stay
        # until a garbage collection.
        task, self._task = self._task, None
        if task is not None:
            await task

    def leave(self) -> None:
        """End the engine's work, unless it has ended; any thread may call it."""
        if self._task is not None:
            with suppress(RuntimeError):  # the loop is closed, and the work over
                self._loop.call_soon_threadsafe(self._leave)

    async def aclose(self) -> None:
        """The same, and return when it has ended."""
        task = self._task
        self._leave()
        if task is not None:
            await asyncio.wait({task})

    def _leave(self) -> None:
        self._left = True
        if self._task is not None and not self._task.cancel(CancelCause.CALLER_LEFT.value):
            self._ended(self._task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._left:  # asyncio would log an error that nobody took
            self._cut = task.cancelled() or task.exception() is not None
            self._task = None
        self.arrived.put_nowait(None)


@dataclass(frozen=True)
class Responsible:
    """Tells of a refused call whose mistake it was: that of the caller, or of the pipeline.

    ``fields``: the options that the caller sent, by name, and ``messages``. ``prompt``: the name of
    the caller's input that is the prompt.
    """

    fields: Set[str] = frozenset()
    prompt: str | None = None

    @classmethod
    def of(
        cls,
        caller: PipelineRequest | None,
        options: Mapping[str, Any],
        tools: Any = None,
        prompt: str | None = None,
    ) -> Responsible | None:
        """Return who is responsible for a call; None: no request makes it."""
        if caller is None:
            return None
        name = None if prompt is None else caller.input_with(prompt)
        fields = caller.sent(options, tools)
        if not fields.isdisjoint(_GUIDE_OPTIONS):
            fields.add("json_schema")  # as a refused guide is called, whatever its kind
        return cls(fields, name)

    def failure(self, error: TrtllmBlsError) -> TrtllmBlsError:
        """Return the error as ``answer`` gets it: an ``EngineError`` for what was refused."""
        if isinstance(error, Overloaded):
            return EngineUnavailable(str(error))
        if not isinstance(error, InvalidRequest):
            return error
        mistake: InvalidRequest | None = None
        option = _option_of(error.field)
        if option in self.fields:
            mistake = error
        elif option == "messages" and self.prompt is not None:
            mistake = InvalidRequest(self.prompt, error.problem)
            if isinstance(error, PromptTooLong):
                mistake = error.of_field(self.prompt)
        return EngineRefusal(f"the language model refused the call: {error}", error, mistake)


@contextmanager
def _answered_for(responsible: Responsible | None) -> Iterator[None]:
    """Raise what is raised inside as ``Responsible.failure`` tells it."""
    try:
        yield
    except TrtllmBlsError as error:
        failure = error if responsible is None else responsible.failure(error)
        if failure is error:
            raise
        raise failure from error


def _option_of(field: str) -> str:
    """The option that a field of a refusal belongs to, which may be an engine's input."""
    name = field.partition("[")[0]
    if name in PROMPT_FIELDS:
        return "messages"
    if name in (GUIDE_KIND_INPUT, GUIDE_TEXT_INPUT):
        return "json_schema"
    if name in _HINTS:
        return name
    tensor = ENGINE.input_named.get(name)
    return _OPTIONS_OF_IDS.get(name, name if tensor is None else tensor.key)


class Steps(AsyncIterator[Step], AbstractAsyncContextManager["Steps"]):
    """The answers to one request of a language model, step by step; they begin to run at once.

    A step holds all tokens that arrived since the one before, so a slow reader gets fewer, larger
    steps. Leaving before the end in any way (``aclose``, the end of ``async with``, dropping the
    object, the end of a pipeline's request) frees the engine's slot. Raises what the engine raises.
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        request: TextRequest,
        parsers: Sequence[ChatParser | EventParser] = (),
        responsible: Responsible | None = None,
    ) -> None:
        self._parsers = parsers
        self._responsible = responsible
        self._calls: dict[int, tuple[ToolCall, list[str]]] = {}  # of each sequence, the open one
        self._taken: list[Step] | None = None if request.messages is None else []
        self._caller = CALLER.get()
        if self._caller is not None:
            self._caller.begins(self)
        self._answer = _Answer(orchestrator, request)

    async def __anext__(self) -> Step:
        answer = self._answer
        chunk = await answer.arrived.get()
        if chunk is None:
            answer.arrived.put_nowait(None)  # for a reader that asks again
            if self._caller is not None:
                self._caller.ended(self)
            with _answered_for(self._responsible):
                await answer.raise_failure()
            raise StopAsyncIteration
        answer.arrived.task_done()
        tokens = chunk.tokens or ()
        step = Step(tuple([token.token_id for token in tokens]), chunk.text)
        step.index = chunk.sequence_index
        ending = chunk.ending
        if ending is not None and ending.finish_reason not in _FAILED_REASONS:
            step.finish_reason = ending.finish_reason.value
            step.stop_reason = ending.stop_reason
            step.prompt_tokens = ending.prompt_tokens
            step.completion_tokens = ending.completion_tokens
        if tokens and tokens[0].log_prob is not None:
            step.log_probs = tuple([token.log_prob for token in tokens])
            step.top_log_probs = tuple([token.top_log_probs for token in tokens])
        step.context_logits, step.generation_logits = chunk.context_logits, chunk.generation_logits
        if self._parsers:
            self._parse(step)
        if self._taken is not None:
            self._taken.append(step)
        if (caller := self._caller) is not None:
            caller.tokens += len(step.ids)
            caller.prompt_tokens += step.prompt_tokens
            caller.finish_reason = step.finish_reason or caller.finish_reason
        return step

    def _parse(self, step: Step) -> None:
        """Divide the text into what is said, thought and called."""
        texts, calls = {Content: "", Reasoning: ""}, []
        ends = step.finish_reason is not None
        reason = FinishReason(step.finish_reason) if ends else None
        events: Iterable[Any] = self._parsers[step.index].feed(step.text, reason)
        for event in (*events, *([None] if ends else [])):
            if isinstance(event, Arguments):
                self._calls[step.index][1].append(event.text)
                continue
            if (call := self._calls.pop(step.index, None)) is not None:
                calls.append(StepCall(call[0].id, call[0].name, "".join(call[1]) or "{}"))
            if isinstance(event, ToolCall):
                self._calls[step.index] = event, []
            elif event is not None:
                texts[type(event)] += event.separator + event.text
        step.text, step.reasoning, step.calls = texts[Content], texts[Reasoning], tuple(calls)

    async def answers(self) -> list[Step]:
        """The whole answers, one for each sequence that was asked for."""
        steps: dict[int, list[Step]] = {}
        async for step in self:
            steps.setdefault(step.index, []).append(step)
        return [joined(parts) for _, parts in sorted(steps.items())]

    @property
    def message(self) -> dict[str, Any]:
        """What the model has said so far in a conversation, as a message for the next turn."""
        return joined([step for step in self._taken or () if not step.index]).message

    async def aclose(self) -> None:
        """End the engine's work, unless it has ended. May be called twice."""
        await self._answer.aclose()
        if self._caller is not None:
            self._caller.ended(self)

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_answer"):  # ``break`` out of a plain ``async for`` ends here
            self._answer.leave()


class LLM:
    """A language model; any number of answers run at once on one event loop.

    Each method begins an answer and returns its steps. A call raises ``TrtllmBlsError`` for an
    option that does not exist, and ``InvalidRequest`` for a value that is of another type or out of
    its bounds; the steps raise ``InvalidRequest`` and ``EngineError``. In a pipeline's request,
    ``EngineRefusal``, an ``EngineError``, takes the place of ``InvalidRequest``.
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        tokenizer: Tokenizer | None,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        self._orchestrator = orchestrator
        self._tokenizer = tokenizer
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser

    def generate(self, ids: Sequence[int], **options: Unpack[Options]) -> Steps:
        """Continue a prompt of token ids. Special tokens are part of ``Step.text``."""
        responsible = Responsible.of(CALLER.get(), options)
        prompt = tuple([int(token_id) for token_id in ids])
        with _answered_for(responsible):
            fields = request_fields({"skip_special_tokens": False, **options})
        request = TextRequest(prompt_ids=prompt, **fields, **_STREAMED)
        return self._begin(request, responsible)

    def text(self, prompt: str, **options: Unpack[Options]) -> Steps:
        """Continue a text."""
        responsible = Responsible.of(CALLER.get(), options, prompt=prompt)
        with _answered_for(responsible):
            fields = request_fields(options)
        return self._begin(TextRequest(text=prompt, **fields, **_STREAMED), responsible)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Unpack[ConversationOptions],
    ) -> Steps:
        """Answer a conversation (``[{"role": "user", "content": "…"}]``) by the chat template.

        ``tools`` (as in OpenAI's API) may be called: see ``Step.calls``.
        """
        caller = CALLER.get()
        if caller is not None and caller.own_options:
            own = caller.own_options
            options = {name: value for name, value in options.items() if name not in own}  # type: ignore[assignment]
        responsible = Responsible.of(caller, options, tools)
        with _answered_for(responsible):
            fields = request_fields(options, _HINTS)
            form_field = next(
                (name for name in _GUIDE_OPTIONS if options.get(name) is not None), "extras"
            )
            conversation = _conversation(messages, tools or (), fields, form_field)
            self._check_calls_are_read(conversation)
            turn = self._turns.turn(conversation)
        parsers = [turn.parser() for _ in range(fields.get("num_return_sequences", 1))]
        return self._begin(turn.request(**fields, **_STREAMED), responsible, parsers)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of ``transformers``."""
        return self._loaded.hf

    @property
    def first_table_id(self) -> int:
        """The id that an engine reads as the first row of a prompt's embedding table."""
        return self._loaded.first_table_id

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The token ids of a text."""
        return list(self._loaded.encode(text, add_special_tokens))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self._loaded.decode([int(token_id) for token_id in ids], skip_special_tokens)

    @property
    def _loaded(self) -> Tokenizer:
        if self._tokenizer is None:
            raise TrtllmBlsError("no tokenizer is loaded; set tokenizer_dir")
        return self._tokenizer

    @cached_property
    def _turns(self) -> ChatTurns:
        parsers = (self._tool_parser, self._reasoning_parser)
        if self._tokenizer is not None:
            return ChatTurns.of(self._tokenizer, *parsers)
        tools = TOOL_FORMATS.get(self._tool_parser)
        reasoning = REASONING_TAGS.get(self._reasoning_parser)
        return ChatTurns(None, ChatFormats(tools, reasoning))

    def _check_calls_are_read(self, conversation: Conversation) -> None:
        """Raise ``Unsupported`` where the model may call tools in a form that nobody knows."""
        is_known = self._turns.formats.tools is not None or self._tool_parser == "none"
        if is_known or not conversation.tools or conversation.choice != "auto":
            return
        problem = "the chat template has none of the formats of calls that are known"
        mend = f"set the parameter tool_parser: none (calls are text), {', '.join(TOOL_FORMATS)}"
        raise Unsupported("tools", f"{problem}; {mend}")

    def _begin(
        self,
        request: TextRequest,
        responsible: Responsible | None,
        parsers: Sequence[ChatParser | EventParser] = (),
    ) -> Steps:
        caller = CALLER.get()
        request.request_id = f"{caller.id if caller else 'llm'}/{next(_numbers)}"
        if caller is not None:
            request.traceparent = caller.traceparent
            request.tenant = caller.key
            if caller.cache_salt is not None:
                request.cache_salt = CacheSalt.parsed(caller.cache_salt)
        return Steps(self._orchestrator, request, parsers, responsible)
