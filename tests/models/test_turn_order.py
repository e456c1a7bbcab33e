"""Conversations in an order that chat templates accept: what agents send after denied, interrupted
and parallel calls. Small templates refuse one order each; published ones refuse what they do."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.helpers.published import templates, templates_of_llama_cpp
from tests.models.test_chat_templates import tokenizer_of
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.text.turn_order import ANY_ORDER, TurnOrder

INSTALLS = pytest.mark.skipif(
    "TRTLLM_BLS_INSTALL_CLIENTS" not in os.environ,
    reason="downloads templates; set TRTLLM_BLS_INSTALL_CLIENTS=1 to run it",
)
LOOP = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}{% endfor %}"
)


def refusing(condition: str) -> str:
    """A template that refuses conversations of which a turn ``m`` behind ``before`` is so."""
    return (
        "{% set ns = namespace(before=none, turns=0) %}{% for m in messages %}"
        "{% set calls = (m.tool_calls or []) | length > 0 %}{% set before = ns.before %}"
        f"{{% if {condition} %}}{{{{ raise_exception('order') }}}}{{% endif %}}"
        "{% if m.role in ('user', 'assistant') and not calls %}"
        "{% set ns.turns = ns.turns + 1 %}{% endif %}"
        "{% set ns.before = 'call' if calls else m.role %}{% endfor %}" + LOOP
    )


TEMPLATES = {
    "any order": LOOP,
    "two users": refusing("m.role == 'user' and before == 'user'"),
    "two answers": refusing("m.role == 'assistant' and before in ('assistant',)"),
    "a greeting": refusing("m.role == 'assistant' and before is none"),
    "an interruption": refusing("m.role == 'user' and before == 'tool'"),
    "a call without its result": refusing("m.role != 'tool' and before == 'call'"),
    "a result without its call": refusing("m.role == 'tool' and before not in ('call', 'tool')"),
    # As Mistral's: only turns without calls and results are counted, and they alternate.
    "turns that do not alternate": refusing(
        "m.role in ('user', 'assistant') and not calls and"
        " (m.role == 'user') != (ns.turns % 2 == 0)"
    ),
    "text beside calls": "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}"
    "{% for call in m.tool_calls %}"
    "[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "tools": "{% for m in messages %}{% if m.role == 'tool' or m.tool_calls %}"
    "{{ raise_exception('tools') }}{% endif %}{% endfor %}" + LOOP,
    "all but pairs": refusing(
        "m.role not in ('user', 'assistant') or calls or (m.role == 'user') != (ns.turns % 2 == 0)"
    ),
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, *calls: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {
                "id": f"{name:a<9}",
                "type": "function",
                "function": {"name": name, "arguments": {"command": f"do_{name}"}},
            }
            for name in calls
        ]
    return message


def result(name: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"{name:a<9}", "name": name, "content": text}


CONVERSATIONS = {
    "a denied call": [user("q1"), answer("", "ls"), result("ls", "denied"), user("q2")],
    "an interrupted call": [user("q1"), answer("t1", "ls"), user("q2")],
    "a call that is the last turn": [user("q1"), answer("t1", "ls")],
    "parallel calls of which one was interrupted": [
        *(user("q1"), answer("", "ls", "cat"), result("ls", "r1"), user("q2")),
    ],
    "two answers": [user("q1"), answer("t1"), answer("t2"), user("q2")],
    "an answer before a call": [
        *(user("q1"), answer("t1"), answer("t2", "ls"), result("ls", "r1"), user("q2")),
    ],
    "an answer between calls": [
        *(user("q1"), answer("", "ls"), result("ls", "r1"), answer("t1")),
        *(answer("t2", "cat"), result("cat", "r2"), answer("t3"), user("q2")),
    ],
    "a greeting": [answer("t1"), user("q1"), answer("t2"), user("q2")],
    "a lost call": [user("q1"), result("ls", "r1"), user("q2")],
    "users in a row": [user("q1"), user("q2"), answer("t1"), user("q3")],
}


def texts_of(messages: list[dict[str, Any]]) -> list[str]:
    texts = []
    for message in messages:
        texts.append(message["content"])
        for call in message.get("tool_calls", ()):
            texts.append(call["function"]["arguments"]["command"])
    return [text for text in texts if text]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_gets_every_text_in_its_order(template: str) -> None:
    """Whatever it refuses: no text, call or result of a conversation is lost."""
    tokenizer = tokenizer_of(TEMPLATES[template])
    order = TurnOrder.of(tokenizer)
    assert (order == ANY_ORDER) is (template == "any order")
    for name, messages in CONVERSATIONS.items():
        prompt = tokenizer.render_chat(order.fitted(messages))
        places = [prompt.find(text) for text in texts_of(messages)]
        assert -1 not in places and places == sorted(places), f"{name}: {prompt}"


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_conversation_that_a_template_accepts_stays_as_it_is(template: str) -> None:
    """A change at the front of a prompt would cost its KV cache."""
    tokenizer = tokenizer_of(TEMPLATES[template])
    order = TurnOrder.of(tokenizer)
    plain = [user("q1"), answer("t1"), user("q2")]
    loop = [user("q1"), answer("t0", "ls"), result("ls", "r1"), answer("t1"), user("q2")]
    assert order.fitted(plain) == plain
    if order.tools and order.text_beside_calls:
        assert order.fitted(loop) == loop


def accepted(template: str) -> list[str]:
    """The conversations that a template writes whole."""
    tokenizer = tokenizer_of(template)
    order = TurnOrder.of(tokenizer)
    names = []
    for name, messages in CONVERSATIONS.items():
        try:
            prompt = tokenizer.render_chat(order.fitted(messages))
        except InvalidRequest:
            continue
        if all(text in prompt for text in texts_of(messages)):
            names.append(name)
    return names


@INSTALLS
def test_published_templates_accept_what_agents_send(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """All conversations with all templates of two collections."""
    published = dict(templates(tmp_path_factory.mktemp("npm")))
    published |= templates_of_llama_cpp(tmp_path_factory.mktemp("llama-cpp"))
    lost = {name: CONVERSATIONS.keys() - accepted(text) for name, text in published.items()}
    names = {name for name, conversations in lost.items() if conversations}
    # Judges of one text, and templates that want variables of their own, are no chats.
    no_chats = ("firefunction", "guardian", "llama-guard", "shieldgemma", "README", "tool_use")
    assert {name for name in names if not any(word in name for word in no_chats)} <= {
        # Neither a second answer nor the text beside a call has a place in them.
        *("Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Mistral-Nemo-Instruct-2407"),
        # The text before a call of an answer that another call precedes is left out.
        *("openai-gpt-oss-120b", "library/r1-1776:671b", "NVIDIA-Nemotron-Nano-v2"),
    }
