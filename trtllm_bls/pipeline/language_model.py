"""A language model that any asyncio program may call: ``LLM``, and the steps of its answers.

In a pipeline each call belongs to the request whose task makes it, and ends with that request.
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
from dataclasses import dataclass, replace
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
    field_names,
)
from trtllm_bls.wire.contract import BLS, ENGINE
from trtllm_bls.wire.request_fields import TYPED_INPUTS, typed_fields

if sys.version_info >= (3, 11):
    from typing import Unpack
else:
    from typing_extensions import Unpack

_FAILED_REASONS = (FinishReason.ERROR, FinishReason.CANCELLED)  # an error follows
_call_numbers = itertools.count(1)


class PipelineRequest(Protocol):
    """A request that a pipeline answers, on whose behalf it calls models."""

    id: str
    pipeline_options: Collection[str]
    traceparent: str | None
    key: str | None
    cache_salt: str | None
    tokens: int
    prompt_tokens: int
    finish_reason: str

    def sent(self, options: Mapping[str, Any], tools: Any) -> set[str]:
        """Return the names of values that are the caller's own, and ``messages`` of a chat."""

    def input_with(self, text: str) -> str | None:
        """Return the name of the input that has this text."""

    def begins(self, call: Any) -> None:
        """Add a call, which the request closes at its end. Raises if the request has ended."""

    def ended(self, call: Any) -> None:
        """Remove a call that has ended."""


# The request that this task answers. ``StreamingModel`` sets it in the task of each request, and
# the tasks that this one starts inherit it.
CURRENT_REQUEST: ContextVar[PipelineRequest | None] = ContextVar("pipeline_request", default=None)


# --- options ----------------------------------------------------------------------------------


class Options(TypedDict, total=False):
    """The options of an answer, under the names of ``TextRequest`` and ``Sampling``.

    An option that is None or absent has the deployment's default. ``stop_words`` and ``bad_words``
    are several texts or one. ``json_schema``, ``regex`` or ``grammar`` (EBNF): the form that guided
    decoding gives the answer. ``token_bias`` and ``embedding_bias``: logits to add, by token id and
    by word. ``extras``: further inputs of the engine by name.
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
    """The options of a conversation's answer.

    ``variables``: further variables of the chat template. ``continue_final_message``: the answer
    continues the last message. ``tool_choice``: ``auto``, ``none``, ``required`` (at least one
    call), or the name of the tool to call. ``parallel_tool_calls``: whether there may be several.
    """

    variables: Mapping[str, Any] | None
    continue_final_message: bool | None
    tool_choice: str | None
    parallel_tool_calls: bool | None


_CONVERSATION_HINTS = get_type_hints(ConversationOptions)
_HINTS = get_type_hints(Options)
_STREAMED: dict[str, Any] = {"request_id": "", "stream": True, "return_tokens": True}
_BOUNDED_INPUTS = {tensor.key: tensor for tensor in BLS.inputs if tensor.bounds is not None}
_GUIDE_OPTIONS = {"json_schema": "json_schema", "regex": "regex", "grammar": "ebnf_grammar"}
_SAMPLING_OPTIONS = frozenset(field_names(Sampling))
_WANTS_OPTIONS = frozenset(field_names(Wants))
# The engine's inputs for these options are lists of token ids, and have other names.
_OPTIONS_OF_WORD_LISTS = {"stop_words_list": "stop_words", "bad_words_list": "bad_words"}
_ADAPTERS = ("lora_task_id", "lora_name")
_OPTION_TYPES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def _option(name: str, value: Any, hint: Any) -> Any:
    """Return an option's value as its type hint has it. Raises ``InvalidRequest``."""
    kinds: tuple[Any, ...] = (hint,)
    if get_origin(hint) in (Union, UnionType):
        kinds = get_args(hint)
    for kind in kinds:
        origin = get_origin(kind) or kind
        parameters = get_args(kind)
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
                items = {}
                for key, item in value.items():
                    items[_option(name, key, parameters[0])] = _option(name, item, parameters[1])
                return items
        elif parameters and isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            return tuple([_option(name, item, parameters[0]) for item in value])
    types = " or ".join([_type_name(kind) for kind in kinds if kind is not type(None)])
    raise InvalidRequest(name, f"{value!r:.80} is not {types}")


def _type_name(kind: Any) -> str:
    """Return a type hint in words, for an error."""
    name = str(_OPTION_TYPES.get(kind) or getattr(kind, "__name__", kind))
    parameters = get_args(kind)
    if parameters:
        name = f"{name} of {_type_name(parameters[-1])}".lower()
    return name


def request_fields(options: Mapping[str, Any], hints: Mapping[str, Any] = _HINTS) -> dict[str, Any]:
    """Return options as fields of a ``TextRequest``. Options of conversations keep their names.

    ``hints``: the type of each option that exists. Raises ``TrtllmBlsError``.
    """
    if unknown := options.keys() - hints.keys():
        remedy = suggestion(min(unknown), hints)
        raise TrtllmBlsError(f"{min(unknown)} is no option of a language model; {remedy}")
    values = {}
    for name, value in options.items():
        value = _option(name, value, hints[name])
        if value is not None:
            values[name] = value
    for name, value in values.items():
        if name in _BOUNDED_INPUTS and isinstance(value, (int, float)):
            _BOUNDED_INPUTS[name].check(value)
    arrays = _pop_engine_inputs(values)
    extras = {name: array for name, array in arrays.items() if name not in TYPED_INPUTS}
    form = _pop_form(values)
    if form is not None:
        values["guide"] = form.guide
    for name in ("stop_words", "bad_words"):
        if isinstance(values.get(name), str):
            values[name] = (values[name],)
    for name in ("token_bias", "embedding_bias"):
        if name in values:
            values[name] = tuple(values[name].items())
    sampling = _pop_options(values, _SAMPLING_OPTIONS)
    _set_temperature(sampling)
    return {
        "max_tokens": None,
        "sampling": Sampling(**sampling),
        "wants": Wants(**_pop_options(values, _WANTS_OPTIONS)),
        "extras": extras,
        **typed_fields(arrays),
        **values,
    }


def _pop_options(options: dict[str, Any], names: Set[str]) -> dict[str, Any]:
    """Remove the options of these names, and return them."""
    return {name: options.pop(name) for name in names & options.keys()}


def _set_temperature(sampling: dict[str, Any]) -> None:
    """Let a temperature alone sample, and a temperature near 0 take the likeliest token.

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


def _pop_engine_inputs(options: dict[str, Any]) -> dict[str, Array]:
    """Remove the options that are inputs of engines, and return their arrays by input name."""
    values = dict(options.pop("extras", {}))
    for name in _ADAPTERS:
        if name in options:
            values[name] = options.pop(name)
    arrays = {}
    for name, value in values.items():
        if name not in ENGINE.input_named:
            hint = nearest(name, ENGINE.input_named)
            raise InvalidRequest(name, f"is no input of an engine; {hint}".rstrip("; "))
        arrays[name] = ENGINE.input_named[name].array(value)
    return arrays


def _pop_form(options: dict[str, Any]) -> FormDemand | None:
    """Remove the option that demands a form, and return the form. Raises ``InvalidRequest``."""
    names = [name for name in _GUIDE_OPTIONS if name in options]
    if not names:
        return None
    if len(names) > 1:
        raise InvalidRequest(names[1], f"{names[0]} is another form; send one")
    (name,) = names
    form = options.pop(name)
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
    """Remove a conversation's options from ``fields``, and return the conversation.

    ``form_field``: the option that demands a form, if one does. Raises ``InvalidRequest``.
    """
    check_text_only(messages)
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest("tools", "each must have a function with a name")
    form: FormDemand | None = None
    guide = fields.pop("guide", None)
    if guide is not None:
        form = FormDemand(field=form_field, guide=guide)
    continues = fields.pop("continue_final_message", False)
    choice = fields.pop("tool_choice", "auto")
    forced = None
    if choice not in ("auto", "none", "required"):
        forced = choice
        choice = "required"
    return Conversation(
        messages=_copy("messages", messages),
        tools=_copy("tools", tools),
        choice=choice,
        forced=forced,
        parallel=fields.pop("parallel_tool_calls", True),
        form=form,
        options=ChatOptions(
            variables=fields.pop("variables", {}),
            continue_final_message=continues,
            add_generation_prompt=not continues,
        ),
    )


def _copy(name: str, values: Sequence[Mapping[str, Any]]) -> Any:
    """Copy JSON values, which the pipeline may change while the answer runs.

    Raises ``InvalidRequest``.
    """
    try:
        return msgspec.to_builtins(values)
    except (TypeError, RecursionError) as error:
        raise InvalidRequest(name, f"is not JSON: {error}") from None


# --- answers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepCall:
    """The model's call of a tool. ``text``: the arguments as the model wrote them."""

    id: str
    name: str
    text: str

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name. Raises ``EngineError`` if the model wrote no JSON object."""
        with suppress(ValueError, RecursionError):
            arguments = json.loads(self.text)
            if isinstance(arguments, dict):
                return arguments
        raise EngineError(f"the model called {self.name} with {self.text!r:.80}: no JSON object")

    def result(self, content: str) -> dict[str, Any]:
        """Return the message that gives the model the call's result."""
        return {"role": "tool", "tool_call_id": self.id, "name": self.name, "content": content}


@dataclass(slots=True)
class Step:
    """A piece of an answer. Only the last step of a sequence has a ``finish_reason``.

    ``ids``: the new token ids; an id comes with the text that it completes, so the bytes of one
    character come together. ``stop_reason``: the stop string that ended the answer. ``index``: the
    number of the sequence, of those that ``num_return_sequences`` asks for. In a conversation,
    ``text`` is without ``reasoning`` and ``calls``; ``calls`` are those that became complete.
    ``log_probs`` and ``top_log_probs``: of ``ids``, if the options ask for them.
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
        """The answer so far as a message for the next turn of the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning"] = self.reasoning
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = []
        for call in self.calls:
            function = {"name": call.name, "arguments": call.text}
            message["tool_calls"].append({"id": call.id, "type": "function", "function": function})
        return message


def joined(steps: Sequence[Step]) -> Step:
    """Join the steps of one sequence. The logits are those of the last step that has some."""
    ids: list[int] = []
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[StepCall] = []
    log_probs: list[float | None] = []
    top_log_probs: list[TopLogProbs] = []
    for step in steps:
        ids += step.ids
        texts.append(step.text)
        reasoning.append(step.reasoning)
        calls += step.calls
        log_probs += step.log_probs
        top_log_probs += step.top_log_probs
    return replace(
        steps[-1],
        ids=tuple(ids),
        text="".join(texts),
        reasoning="".join(reasoning),
        calls=tuple(calls),
        log_probs=tuple(log_probs),
        top_log_probs=tuple(top_log_probs),
    )


class _Answer:
    """The orchestrator's sink of one request, and the task that runs it."""

    def __init__(self, orchestrator: Orchestrator, request: TextRequest) -> None:
        self.chunks: asyncio.Queue[TextChunk | None] = asyncio.Queue()  # None: the end
        self._is_abandoned = False  # nobody reads the further chunks
        self._is_incomplete = False  # it was abandoned before its end
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = self._loop.create_task(
            orchestrator.run(request, self)
        )
        self._task.add_done_callback(self._on_done)

    async def ready(self) -> None:
        """Return once the reader has taken all steps."""
        await self.chunks.join()

    def send(self, chunk: TextChunk) -> None:
        """Take a chunk of the orchestrator."""
        self.chunks.put_nowait(chunk)

    async def raise_failure(self) -> None:
        """Raise the error of an answer that has ended with one."""
        if self._is_incomplete:
            raise EngineError("the answer was left before its end")
        # The traceback of a task that failed refers to this object. If this object kept the task,
        # both would stay until a garbage collection.
        task = self._task
        self._task = None
        if task is not None:
            await task

    def abandon(self) -> None:
        """End the engine's work, unless it has ended. Any thread may call it."""
        if self._task is not None:
            with suppress(RuntimeError):  # the loop is closed, and the work has ended
                self._loop.call_soon_threadsafe(self._abandon)

    async def aclose(self) -> None:
        """End the engine's work, and return when it has ended."""
        task = self._task
        self._abandon()
        if task is not None:
            await asyncio.wait({task})

    def _abandon(self) -> None:
        self._is_abandoned = True
        if self._task is not None and not self._task.cancel(CancelCause.CALLER_LEFT.value):
            self._on_done(self._task)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if self._is_abandoned:
            # asyncio would log an exception that nobody reads.
            self._is_incomplete = task.cancelled() or task.exception() is not None
            self._task = None
        self.chunks.put_nowait(None)


@dataclass(frozen=True)
class Provenance:
    """The parts of a language model's call that came from the pipeline's caller as they are.

    A refused call is the caller's mistake if the refused part is one of these, else the pipeline's.
    ``fields``: names of options, and ``messages``. ``prompt``: the name of the caller's input that
    is the prompt.
    """

    fields: Set[str] = frozenset()
    prompt: str | None = None

    @classmethod
    def of(
        cls,
        request: PipelineRequest | None,
        options: Mapping[str, Any],
        tools: Any = None,
        prompt: str | None = None,
    ) -> Provenance | None:
        """Return the provenance of a call, or None if no pipeline's request makes it."""
        if request is None:
            return None
        input_name = None
        if prompt is not None:
            input_name = request.input_with(prompt)
        fields = request.sent(options, tools)
        if not fields.isdisjoint(_GUIDE_OPTIONS):
            fields.add("json_schema")  # the field of each refused guide, whatever its kind
        return cls(fields, input_name)

    def failure(self, error: TrtllmBlsError) -> TrtllmBlsError:
        """Return the error as ``answer`` gets it: a refusal becomes an ``EngineError``."""
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
def _translated_errors(provenance: Provenance | None) -> Iterator[None]:
    """Raise an error inside the context as ``Provenance.failure`` has it."""
    try:
        yield
    except TrtllmBlsError as error:
        if provenance is None:
            raise
        failure = provenance.failure(error)
        if failure is error:
            raise
        raise failure from error


def _option_of(field: str) -> str:
    """Return the option of a refused field, which may be an engine's input."""
    name = field.partition("[")[0]
    if name in PROMPT_FIELDS:
        return "messages"
    if name in (GUIDE_KIND_INPUT, GUIDE_TEXT_INPUT):
        return "json_schema"
    if name in _CONVERSATION_HINTS:
        return name
    if name in _OPTIONS_OF_WORD_LISTS:
        return _OPTIONS_OF_WORD_LISTS[name]
    tensor = ENGINE.input_named.get(name)
    return name if tensor is None else tensor.key


class Steps(AsyncIterator[Step], AbstractAsyncContextManager["Steps"]):
    """The answers to one request of a language model, step by step. The engine starts at once.

    A step holds all tokens that arrived since the step before, so a slow reader gets fewer, larger
    steps. Leaving before the end in any way (``aclose``, the end of ``async with``, dropping the
    object, the end of a pipeline's request) frees the engine's slot. Raises the engine's errors.
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        request: TextRequest,
        parsers: Sequence[ChatParser | EventParser] = (),
        provenance: Provenance | None = None,
    ) -> None:
        self._parsers = parsers
        self._provenance = provenance
        # The call of each sequence that is not complete yet, and the pieces of its arguments.
        self._open_calls: dict[int, tuple[ToolCall, list[str]]] = {}
        self._is_conversation = request.messages is not None
        self._steps: list[Step] = []  # the steps of a conversation so far
        self._pipeline_request = CURRENT_REQUEST.get()
        if self._pipeline_request is not None:
            self._pipeline_request.begins(self)
        self._answer = _Answer(orchestrator, request)

    async def __anext__(self) -> Step:
        answer = self._answer
        chunk = await answer.chunks.get()
        if chunk is None:
            answer.chunks.put_nowait(None)  # for a reader that iterates again
            if self._pipeline_request is not None:
                self._pipeline_request.ended(self)
            with _translated_errors(self._provenance):
                await answer.raise_failure()
            raise StopAsyncIteration
        answer.chunks.task_done()
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
        step.context_logits = chunk.context_logits
        step.generation_logits = chunk.generation_logits
        if self._parsers:
            self._parse(step)
        if self._is_conversation:
            self._steps.append(step)
        request = self._pipeline_request
        if request is not None:
            request.tokens += len(step.ids)
            request.prompt_tokens += step.prompt_tokens
            request.finish_reason = step.finish_reason or request.finish_reason
        return step

    def _parse(self, step: Step) -> None:
        """Divide a step's text into content, reasoning and complete calls."""
        reason: FinishReason | None = None
        if step.finish_reason is not None:
            reason = FinishReason(step.finish_reason)
        texts = {Content: "", Reasoning: ""}
        calls: list[StepCall] = []
        events: Iterable[Any] = self._parsers[step.index].feed(step.text, reason)
        for event in events:
            if isinstance(event, Arguments):
                self._open_calls[step.index][1].append(event.text)
                continue
            if step.index in self._open_calls:  # any other event ends its arguments
                calls.append(self._complete_call(step.index))
            if isinstance(event, ToolCall):
                self._open_calls[step.index] = (event, [])
            else:
                texts[type(event)] += event.separator + event.text
        if reason is not None and step.index in self._open_calls:
            calls.append(self._complete_call(step.index))
        step.text = texts[Content]
        step.reasoning = texts[Reasoning]
        step.calls = tuple(calls)

    def _complete_call(self, index: int) -> StepCall:
        """Remove a sequence's open call, and return it as a complete one."""
        call, pieces = self._open_calls.pop(index)
        return StepCall(call.id, call.name, "".join(pieces) or "{}")

    async def answers(self) -> list[Step]:
        """Return the complete answers, one for each of ``num_return_sequences``."""
        steps: dict[int, list[Step]] = {}
        async for step in self:
            steps.setdefault(step.index, []).append(step)
        return [joined(steps[index]) for index in sorted(steps)]

    @property
    def message(self) -> dict[str, Any]:
        """The answer of a conversation so far, as a message for the next turn."""
        return joined([step for step in self._steps if step.index == 0]).message

    async def aclose(self) -> None:
        """End the engine's work, unless it has ended. May be called twice."""
        await self._answer.aclose()
        if self._pipeline_request is not None:
            self._pipeline_request.ended(self)

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_answer"):  # ``break`` out of a plain ``async for`` ends here
            self._answer.abandon()


class LLM:
    """A language model. Any number of answers run at once on one event loop.

    Each method starts an answer and returns its steps. A call raises ``TrtllmBlsError`` for an
    option that does not exist, and ``InvalidRequest`` for a value of a wrong type or out of bounds.
    The steps raise ``InvalidRequest`` and ``EngineError``. In a pipeline's request,
    ``EngineRefusal``, which is an ``EngineError``, takes the place of ``InvalidRequest``.
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
        provenance = Provenance.of(CURRENT_REQUEST.get(), options)
        prompt = tuple(map(int, ids))
        with _translated_errors(provenance):
            fields = request_fields({"skip_special_tokens": False, **options})
        request = TextRequest(prompt_ids=prompt, **fields, **_STREAMED)
        return self._start(request, provenance)

    def text(self, prompt: str, **options: Unpack[Options]) -> Steps:
        """Continue a text."""
        provenance = Provenance.of(CURRENT_REQUEST.get(), options, prompt=prompt)
        with _translated_errors(provenance):
            fields = request_fields(options)
        return self._start(TextRequest(text=prompt, **fields, **_STREAMED), provenance)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Unpack[ConversationOptions],
    ) -> Steps:
        """Answer a conversation (``[{"role": "user", "content": "…"}]``) with the chat template.

        ``tools`` are as in OpenAI's API. ``Step.calls`` has the model's calls of them.
        """
        pipeline_request = CURRENT_REQUEST.get()
        chat_options: dict[str, Any] = dict(options)
        if pipeline_request is not None:
            # Pipelines pass ``ChatRequest.options`` on, which also has options of their own.
            for name in pipeline_request.pipeline_options:
                chat_options.pop(name, None)
        provenance = Provenance.of(pipeline_request, chat_options, tools)
        with _translated_errors(provenance):
            fields = request_fields(chat_options, _CONVERSATION_HINTS)
            form_field = "extras"
            for name in _GUIDE_OPTIONS:
                if chat_options.get(name) is not None:
                    form_field = name
                    break
            conversation = _conversation(messages, tools or (), fields, form_field)
            self._check_tool_parser(conversation)
            turn = self._turns.turn(conversation)
        parsers: list[ChatParser | EventParser] = []
        for _ in range(fields.get("num_return_sequences", 1)):
            parsers.append(turn.parser())
        return self._start(turn.request(**fields, **_STREAMED), provenance, parsers)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of ``transformers``."""
        return self._loaded.hf

    @property
    def first_table_id(self) -> int:
        """The id that an engine reads as the first row of a prompt's embedding table."""
        return self._loaded.first_table_id

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text."""
        return list(self._loaded.encode(text, add_special_tokens))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return self._loaded.decode(list(map(int, ids)), skip_special_tokens)

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

    def _check_tool_parser(self, conversation: Conversation) -> None:
        """Raise ``Unsupported`` if the model may call tools and no parser reads its calls."""
        has_parser = self._turns.formats.tools is not None or self._tool_parser == "none"
        if has_parser or not conversation.tools or conversation.choice != "auto":
            return
        problem = "the chat template has none of the formats of calls that are known"
        remedy = f"set the parameter tool_parser: none (calls are text), {', '.join(TOOL_FORMATS)}"
        raise Unsupported("tools", f"{problem}; {remedy}")

    def _start(
        self,
        request: TextRequest,
        provenance: Provenance | None,
        parsers: Sequence[ChatParser | EventParser] = (),
    ) -> Steps:
        pipeline_request = CURRENT_REQUEST.get()
        prefix = "llm"
        if pipeline_request is not None:
            prefix = pipeline_request.id
            request.traceparent = pipeline_request.traceparent
            request.tenant = pipeline_request.key
            if pipeline_request.cache_salt is not None:
                request.cache_salt = CacheSalt.parsed(pipeline_request.cache_salt)
        request.request_id = f"{prefix}/{next(_call_numbers)}"
        return Steps(self._orchestrator, request, parsers, provenance)
