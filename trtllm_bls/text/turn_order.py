"""The orders of turns that a chat template accepts, and conversations fitted to them.

A template is a program that may refuse turns, drop them or write them in another order. Agents send
turns that it may never have seen: a call that was denied, a user who interrupts, two answers in a
row. A conversation that is refused once is refused for ever, since every later request holds it.

``TurnOrder.of`` tries short conversations, each with one order that templates are known to refuse.
``TurnOrder.fitted`` changes a conversation where, and only where, the template needs it: a change
at the front of a prompt would cost its KV cache.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_bls.errors import InvalidRequest
from trtllm_bls.text.tokenizer import Tokenizer, without_calls
from trtllm_bls.types import ChatOptions, Message

# Texts in place of turns that the template demands and the conversation lacks.
_NO_RESULT = "There is no result: the call was not carried out."
_ANSWER = "Understood."
_QUESTION = "Hello."
_PROBE_TOOL = "probe_tool"


@dataclass(frozen=True, kw_only=True)
class TurnOrder:
    """The orders of turns that a template accepts; all of them, unless said otherwise.

    ``system``: a conversation may begin with a system message. ``systems``: system messages may
    stand anywhere. ``users`` and ``answers``: two messages of users, or two answers, may follow one
    another. ``greeting``: an answer may come first. ``tools``: calls and their results are shown.
    ``lone_calls``: a call needs no result. ``lone_results``: a result needs no call.
    ``interruptions``: a user's message may follow a result. ``text_beside_calls``: the text of a
    turn is shown beside its calls.
    """

    system: bool = True
    systems: bool = True
    users: bool = True
    answers: bool = True
    greeting: bool = True
    tools: bool = True
    lone_calls: bool = True
    lone_results: bool = True
    interruptions: bool = True
    text_beside_calls: bool = True

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TurnOrder:
        """Find the orders that the tokenizer's template accepts, by prompts that it writes.

        A conversation is spelled by its turns: s(ystem), u(ser), a(nswer), c(all), t(ext beside a
        call), r(esult). Each goes on for a turn or two, since some templates only count turns of
        some kinds.
        """

        def accepts(*conversations: str) -> bool:
            return all(_is_shown(tokenizer, turns) for turns in conversations)

        tools = accepts("ucrau")
        return cls(
            system=accepts("su"),
            systems=accepts("ssu", "suasu", "usu") and (not tools or accepts("ucrsu")),
            users=accepts("uua"),
            answers=accepts("uaau") and (not tools or accepts("uacrau")),
            greeting=accepts("aua"),
            tools=tools,
            lone_calls=tools and accepts("ucua", "ucau"),
            lone_results=tools and accepts("urau"),
            interruptions=tools and accepts("ucrua"),
            text_beside_calls=tools and accepts("utrau"),
        )

    def fitted(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the conversation in the nearest form that the template accepts."""
        if self == ANY_ORDER:
            return messages
        turns = self._with_systems_in_front(list(messages))
        if not self.tools:
            turns = list(map(_as_plain_text, turns))
        elif any(turn["role"] == "tool" or turn.get("tool_calls") for turn in turns):
            turns = self._with_calls_and_results(turns)
        if self.answers and self.tools and not self.text_beside_calls:
            turns = list(itertools.chain.from_iterable(map(_text_before_calls, turns)))
        if not self.greeting:
            turns = _with_question_first(turns)
        joined_roles = set()
        if not self.users:
            joined_roles.add("user")
        if not self.answers:
            joined_roles.add("assistant")
        joined: list[Message] = []
        for role, run in itertools.groupby(turns, lambda turn: turn["role"]):
            group = list(run)
            if role in joined_roles:
                group = _joined(group)
            joined += group
        return joined

    def _with_systems_in_front(self, turns: list[Message]) -> list[Message]:
        systems: list[Message] = []
        dialogue: list[Message] = []
        for turn in turns:
            if turn["role"] == "system":
                systems.append(turn)
            else:
                dialogue.append(turn)
        if not systems:
            return turns
        is_usual = len(systems) == 1 and turns[0]["role"] == "system"
        if not (self.systems or is_usual):
            turns = [*_joined(systems), *dialogue]
        if not self.system:
            turns[0] = {**turns[0], "role": "user"}
        return turns

    def _with_calls_and_results(self, turns: Sequence[Message]) -> list[Message]:
        """Pair calls with results, and results with answers, as far as the template needs it."""
        fitted: list[Message] = []
        open_calls: dict[str, Mapping[str, Any]] = {}  # by id, those of the last turn with calls
        for turn in turns:
            if turn["role"] == "system":
                fitted.append(turn)
                continue
            if turn["role"] == "tool":
                call_id = str(turn.get("tool_call_id"))
                if self.lone_results or call_id in open_calls:
                    open_calls.pop(call_id, None)
                    fitted.append(turn)
                    continue
                turn = _result_as_text(turn)
            if not self.lone_calls:
                fitted += _missing_results(open_calls)
            open_calls = {}
            follows_result = bool(fitted) and fitted[-1]["role"] == "tool"
            if turn["role"] == "user" and follows_result and not self.interruptions:
                fitted.append({"role": "assistant", "content": _ANSWER})
            if turn["role"] == "assistant":
                open_calls = {str(call.get("id")): call for call in turn.get("tool_calls") or ()}
            fitted.append(turn)
        if not self.lone_calls:
            fitted += _missing_results(open_calls)
        return fitted


ANY_ORDER = TurnOrder()


def _text_before_calls(turn: Message) -> list[Message]:
    """Return the text and the calls of a turn as two turns."""
    if not turn.get("tool_calls") or not turn.get("content"):
        return [turn]
    calls = {"role": "assistant", "content": "", "tool_calls": turn["tool_calls"]}
    return [without_calls(turn), calls]


def _missing_results(calls: Mapping[str, Mapping[str, Any]]) -> list[Message]:
    results: list[Message] = []
    for call_id, call in calls.items():
        name = call["function"]["name"]
        result = {"role": "tool", "tool_call_id": call_id, "name": name, "content": _NO_RESULT}
        results.append(result)
    return results


def _with_question_first(turns: list[Message]) -> list[Message]:
    """Put a question before an answer that comes first, perhaps behind system messages."""
    question = {"role": "user", "content": _QUESTION}
    for place, turn in enumerate(turns):
        if turn["role"] == "assistant":
            return [*turns[:place], question, *turns[place:]]
        if turn["role"] != "system":
            break
    return turns


def _as_plain_text(turn: Message) -> Message:
    """Write a call or a result as text, for a template that shows neither."""
    if turn["role"] == "tool":
        return _result_as_text(turn)
    calls = turn.get("tool_calls")
    if not calls:
        return turn
    texts = [turn.get("content") or ""]
    for call in calls:
        function = call["function"]
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        texts.append(f"Call of {function['name']}: {arguments}")
    return {**without_calls(turn), "content": _text(texts)}


def _result_as_text(turn: Message) -> Message:
    name = turn.get("name") or turn.get("tool_call_id")
    return {"role": "user", "content": _text([f"Result of {name}:", turn.get("content") or ""])}


def _joined(turns: Sequence[Message]) -> list[Message]:
    """Return one turn with the texts, the reasoning and the calls of all.

    Contents in parts are left as they are, and with them the turns.
    """
    contents = [turn.get("content") or "" for turn in turns]
    if len(turns) < 2 or not all(isinstance(content, str) for content in contents):
        return list(turns)
    joined = dict(turns[0])
    joined["content"] = _text(contents)
    for key in ("reasoning", "reasoning_content"):
        reasoning = _text(str(turn.get(key) or "") for turn in turns)
        if reasoning:
            joined[key] = reasoning
    calls: list[Any] = []
    for turn in turns:
        calls += turn.get("tool_calls") or ()
    if calls:
        joined["tool_calls"] = calls
    return [joined]


def _text(texts: Iterable[Any]) -> Any:
    """Join texts as paragraphs. If one is a content in parts, the texts become parts, too."""
    parts = list(filter(None, texts))
    if all(isinstance(part, str) for part in parts):
        return "\n\n".join(parts)
    listed: list[Any] = []
    for part in parts:
        if isinstance(part, str):
            listed.append({"type": "text", "text": part})
        else:
            listed += part
    return listed


def _is_shown(tokenizer: Tokenizer, turns: str) -> bool:
    """True if the template writes the texts of all these turns, in their order."""
    messages: list[Message] = []
    texts: list[str] = []
    call_id = "probecall"  # some templates want ids of nine characters
    for number, kind in enumerate(turns):
        text = f"{kind}{number}9q"
        if kind in "ct":
            function = {"name": _PROBE_TOOL, "arguments": {"probe_key": text}}
            call_id = f"probecal{number}"
            call = {"id": call_id, "type": "function", "function": function}
            content = ""
            if kind == "t":
                content = f"{text}beside"
                texts.append(content)
            messages.append({"role": "assistant", "content": content, "tool_calls": [call]})
        elif kind == "r":
            result = {"role": "tool", "tool_call_id": call_id, "name": _PROBE_TOOL}
            messages.append({**result, "content": text})
        else:
            role = {"s": "system", "u": "user", "a": "assistant"}[kind]
            messages.append({"role": role, "content": text})
        texts.append(text)
    has_calls = not {"c", "t", "r"}.isdisjoint(turns)
    parameters = {"type": "object", "properties": {"probe_key": {"type": "string"}}}
    function = {"name": _PROBE_TOOL, "description": "a", "parameters": parameters}
    tools = None
    if has_calls:
        tools = ({"type": "function", "function": function},)
    options = ChatOptions(add_generation_prompt=not turns.endswith("a"))
    try:
        prompt = tokenizer.render_chat(messages, options, tools)
    except InvalidRequest:
        return False
    places = [prompt.find(text) for text in texts]
    return places[0] >= 0 and places == sorted(places)
