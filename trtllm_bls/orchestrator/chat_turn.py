"""One turn of a chat: the prompt that asks for it, the guide that holds it to a form, its parsers.

The HTTP APIs and pipelines make a ``Conversation`` of what their callers send. ``ChatTurns`` makes
a ``ChatTurn`` of it, by what the served model is known to write. This is the only place that
decides which calls may come, what guided decoding demands, and how the text of the answer is read.
It knows no API's fields, but for the names by which errors speak of them.

A model that reasons does so before any demanded form: the guide of its answer begins with the
reasoning. A form is enforced by the engine, or the request is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from trtllm_bls.errors import InvalidRequest
from trtllm_bls.text.chat_formats import (
    REASONING_TAGS,
    TOOL_FORMATS,
    ReasoningTags,
    ToolFormat,
    answer_markup,
    formats_of,
)
from trtllm_bls.text.chat_guides import calls_guide, form_guide, form_or_calls_guide, is_json
from trtllm_bls.text.chat_parser import ChatParser, EventParser
from trtllm_bls.text.tokenizer import Tokenizer
from trtllm_bls.text.turn_order import ANY_ORDER, TurnOrder
from trtllm_bls.types import NO_MARKUP, AnswerMarkup, ChatOptions, Guide, Message, TextRequest


def _ignore_call(tool_format: str, outcome: str) -> None:
    """Count nothing."""


@dataclass(frozen=True, kw_only=True)
class FormDemand:
    """A form that a request demands of its answer; ``field``: the request's field that does.

    ``of_message``: it is the form of a message, as ``response_format`` has it. A demanded call
    takes the message's place then. Any other form contradicts a demanded call.
    """

    field: str
    guide: Guide
    of_message: bool = False


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A conversation and what its caller demands of the next turn.

    ``messages`` and ``tools`` are as chat templates take them. ``choice``: ``auto``, ``none``, or
    ``required``: at least one call; ``forced`` names the tool that it has to call. ``allowed``:
    names of the only tools that may be called, as the request's field ``allowed_by`` says.
    ``parallel``: the answer may have several calls. ``form``: the form that the answer must have.
    """

    messages: Sequence[Message]
    tools: Sequence[Message] = ()
    choice: str = "auto"
    forced: str | None = None
    allowed: Collection[str] | None = None
    allowed_by: str = "tool_choice.tools"
    parallel: bool = True
    form: FormDemand | None = None
    options: ChatOptions = field(default_factory=ChatOptions)


@dataclass(frozen=True)
class ChatFormats:
    """A model's formats of tool calls and reasoning; ``None``: it writes none."""

    tools: ToolFormat | None = None
    reasoning: ReasoningTags | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, tools: str = "auto", reasoning: str = "auto") -> ChatFormats:
        """Return the formats of these names; ``auto`` finds them in the chat template."""
        template_tools, template_reasoning = formats_of(tokenizer.chat_template)
        if tools == "auto":
            tools = template_tools or ""
        if reasoning == "auto":
            reasoning = template_reasoning or ""
        return cls(TOOL_FORMATS.get(tools), REASONING_TAGS.get(reasoning))


@dataclass(frozen=True, kw_only=True)
class AnswerSyntax:
    """The syntax of an answer's text.

    ``tools``: the format of its calls; ``None``: none may come. ``schemas``: the parameters of the
    tools that may be called, by name. ``reasoning``: the tags around reasoning, if the model has
    any; ``opened``: the prompt ended with the first; ``is_reasoning_over``: with the second.
    ``max_calls``: calls beyond are left out.
    """

    tools: ToolFormat | None = None
    schemas: Mapping[str, Any] = field(default_factory=dict)
    reasoning: ReasoningTags | None = None
    opened: bool = False
    is_reasoning_over: bool = False
    max_calls: int | None = None

    @property
    def markup(self) -> AnswerMarkup:
        """The markup for the text layer, by which stops apply to the answer alone."""
        markup = answer_markup(self.tools, self.reasoning, opened=self.opened)
        if self.is_reasoning_over:
            return replace(markup, reasoning_begin="", reasoning_end="")
        return markup

    @property
    def tool_format_name(self) -> str:
        """The name of the format of calls, for metrics."""
        for name, tool_format in TOOL_FORMATS.items():
            if tool_format is self.tools:
                return name
        return "forced"

    def parser(self, count_call: Callable[[str, str], None] = _ignore_call) -> ChatParser:
        """Return a parser of one answer.

        ``count_call`` is called with the name of the format and a call's progress, as in
        ``ChatParser``.
        """
        return ChatParser(
            self.tools,
            self.reasoning,
            opened=self.opened,
            schemas=self.schemas,
            max_calls=self.max_calls,
            note_call=partial(count_call, self.tool_format_name),
        )


@dataclass(frozen=True, kw_only=True)
class ChatTurn:
    """The next turn of a conversation, as a request to the model.

    ``guide_field``: the request's field that demands the guide; empty where there is none.
    ``syntax``: ``None``: the model is a pipeline, which divides its answer itself.
    """

    messages: Sequence[Message]
    options: ChatOptions
    guide: Guide | None
    guide_field: str
    syntax: AnswerSyntax | None

    def request(self, **fields: Any) -> TextRequest:
        """Return the request for the turn; ``fields`` are further ones of the ``TextRequest``."""
        markup = NO_MARKUP
        if self.syntax is not None:
            markup = self.syntax.markup
        return TextRequest(
            messages=self.messages,
            chat=self.options,
            guide=self.guide,
            markup=markup,
            **fields,
        )

    def parser(
        self, count_call: Callable[[str, str], None] = _ignore_call
    ) -> ChatParser | EventParser:
        """Return a parser of one of the turn's answers; see ``AnswerSyntax.parser``."""
        if self.syntax is None:
            return EventParser()
        return self.syntax.parser(count_call)


@dataclass(frozen=True)
class ChatTurns:
    """Makes the turns of one model's chats.

    ``tokenizer``: ``None``: nothing is known of what the model writes. ``order``: the orders of
    turns that its chat template accepts. ``variables`` of the template are set where a conversation
    does not set them.
    """

    tokenizer: Tokenizer | None
    formats: ChatFormats = ChatFormats()
    order: TurnOrder = ANY_ORDER
    variables: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        tools: str = "auto",
        reasoning: str = "auto",
        variables: Mapping[str, Any] = {},
    ) -> ChatTurns:
        """Find out what the tokenizer's chat template accepts, and what its model writes."""
        formats = ChatFormats.of(tokenizer, tools, reasoning)
        return cls(tokenizer, formats, TurnOrder.of(tokenizer), variables)

    def turn(self, conversation: Conversation) -> ChatTurn:
        """Return the next turn. Raises ``InvalidRequest`` for contradicting demands."""
        options = conversation.options
        if self.variables:
            options = replace(options, variables={**self.variables, **options.variables})
        parallel = conversation.parallel
        tools = _allowed_tools(conversation)
        schemas = {}
        for tool in tools:
            function = tool["function"]
            schemas[function["name"]] = function.get("parameters")
        model_format = self.formats.tools
        tags = self.formats.reasoning
        prompt_end = self._prompt_end(options)
        opened = tags is not None and prompt_end.endswith(tags.begin)
        # A form holds from the first token on, unless reasoning may still come before it.
        is_over = options.continue_final_message or (tags and prompt_end.endswith(tags.end))
        tags_before = tags
        if is_over and not opened:
            tags_before = None
        form = conversation.form
        guide: Guide | None = None
        guide_field = ""
        calls: ToolFormat | None = None
        if tools and conversation.choice == "auto":
            calls = model_format
        if conversation.choice == "required":
            _check_demanded_call(conversation, schemas)
            guide_field = "tool_choice"
            forced = conversation.forced
            if forced is not None:
                schemas = {forced: schemas[forced]}
            guide, calls = calls_guide(
                tools, forced, model_format, tags_before, parallel=parallel, opened=opened
            )
        elif form is not None:
            guide_field = form.field
            if calls is None:
                guide = form_guide(form.guide, tags_before, opened=opened)
            elif is_json(form.guide):
                guide = form_or_calls_guide(
                    form.guide, calls, list(schemas), tags_before, opened=opened
                )
            else:
                problem = "cannot be combined with tools that may be called"
                raise InvalidRequest(form.field, f"{problem}; send tool_choice none or required")
        return ChatTurn(
            messages=self.order.fitted(conversation.messages),
            options=replace(options, tools=_prompt_tools(conversation, tools)),
            guide=guide,
            guide_field=guide_field,
            syntax=AnswerSyntax(
                tools=calls,
                schemas=schemas,
                reasoning=tags,
                opened=opened,
                is_reasoning_over=tags_before is None and tags is not None,
                max_calls=None if parallel else 1,
            ),
        )

    def _prompt_end(self, options: ChatOptions) -> str:
        if self.formats.reasoning is None or self.tokenizer is None:
            return ""
        return self.tokenizer.prompt_end(options)


def pipeline_turn(conversation: Conversation) -> ChatTurn:
    """Return the next turn of a conversation with a pipeline, which writes its calls itself.

    Raises ``InvalidRequest``.
    """
    tools = _allowed_tools(conversation)
    choice = "auto"
    guide: Guide | None = None
    guide_field = ""
    if conversation.choice == "required":
        _check_demanded_call(conversation, [tool["function"]["name"] for tool in tools])
        choice = conversation.forced or "required"
    elif conversation.form is not None:
        guide = conversation.form.guide
        guide_field = conversation.form.field
    options = replace(
        conversation.options,
        tools=_prompt_tools(conversation, tools),
        tool_choice=choice,
        parallel_tool_calls=conversation.parallel,
    )
    return ChatTurn(
        messages=conversation.messages,
        options=options,
        guide=guide,
        guide_field=guide_field,
        syntax=None,
    )


def _prompt_tools(conversation: Conversation, tools: Sequence[Message]) -> Sequence[Message] | None:
    """Return the tools that the prompt describes, if any."""
    if not tools or conversation.choice == "none":
        return None
    return tools


def _allowed_tools(conversation: Conversation) -> Sequence[Message]:
    """Return the tools that may be called.

    The prompt has no other tools: a model does not call one that its prompt lacks.
    """
    allowed = conversation.allowed
    if allowed is None:
        return conversation.tools
    tools = [tool for tool in conversation.tools if tool["function"]["name"] in allowed]
    missing = set(allowed) - {tool["function"]["name"] for tool in tools}
    if missing:
        raise InvalidRequest(conversation.allowed_by, f"tools has none called {min(missing)!r}")
    return tools


def _check_demanded_call(conversation: Conversation, names: Collection[str]) -> None:
    form = conversation.form
    if form is not None and not form.of_message:
        problem = f"demands a call, and {form.field} another form; send one"
        raise InvalidRequest("tool_choice", problem)
    if not names:
        raise InvalidRequest("tool_choice", "is only allowed with tools")
    forced = conversation.forced
    if forced is not None and forced not in names:
        problem = f"there is no tool {forced!r:.80}; tools: {', '.join(names)}"
        raise InvalidRequest("tool_choice", problem)
