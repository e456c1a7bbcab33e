"""Tool calls and reasoning out of a model's raw text, however it is cut."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count, groupby, pairwise
from typing import Any

import hypothesis.strategies as st
import jsonschema
import pytest
from hypothesis import example, given, settings

from tests.helpers.tools import ping_and_set_tree
from trtllm_bls.text.call_reader import MAX_TOKENS
from trtllm_bls.text.chat_formats import (
    FORCED,
    REASONING_TAGS,
    TOOL_FORMATS,
    forced_calls,
    formats_of,
)
from trtllm_bls.text.chat_parser import (
    Arguments,
    CallOutcome,
    ChatEvent,
    ChatParser,
    Content,
    Reasoning,
    ToolCall,
)
from trtllm_bls.text.json_values import JsonStrings, json_value
from trtllm_bls.types import FinishReason

ARGS = '{"city": "Oslo \\"{\\" é", "days": [1, {"a": null}]}'
CALL = '{"name": "weather", "arguments": ' + ARGS + "}"
SEP = "<｜tool▁sep｜>"
BEGIN, END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK = f"<｜tool▁calls▁begin｜>{BEGIN}function{SEP}weather\n```json\n{ARGS}\n```{END}"
XML = """<function=weather>
<parameter=city>
Oslo "{" é
</parameter>
<parameter=days>
[1, {"a": null}]
</parameter>
</function>"""
PYTHON = """weather(city='Oslo "{" é', days=[1, {"a": None}])"""
GLM = '<tool_call>weather{0}<arg_key>city</arg_key>{0}<arg_value>Oslo "{{" é</arg_value>{0}'
GLM += '<arg_key>days</arg_key>{0}<arg_value>[1, {{"a": null}}]</arg_value>{0}</tool_call>'
MINIMAX = """<invoke name="weather">
<parameter name="city">Oslo "{" é</parameter>
<parameter name="days">[1, {"a": null}]</parameter>
</invoke>"""
DSML = """<｜DSML｜function_calls>
<｜DSML｜invoke name="weather">
<｜DSML｜parameter name="city" string="true">Oslo "{" é</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">[1, {"a": null}]</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>"""
KIMI = "<|tool_call_begin|>functions.weather:{}<|tool_call_argument_begin|>" + (
    ARGS.replace("{", "{{").replace("}", "}}") + "<|tool_call_end|>"
)
SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
KIMI_F = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>%s<|tool_call_end|>"
GEMMA = '<|tool_call>call:weather{city:<|"|>Oslo "{" é<|"|>,days:[1,{a:null}]}<tool_call|>'
# Harmony: the recipient of a call stands behind the channel or before it.
START, CHANNEL, MESSAGE = "<|start|>assistant", "<|channel|>", "<|message|>"
HARMONY = f"{CHANNEL}commentary to=functions.weather <|constrain|>json{MESSAGE}{ARGS}"
ROLE_FIRST = f" to=functions.weather{CHANNEL}commentary json{MESSAGE}{ARGS}<|call|>"
ANALYSIS, FINAL = f"{CHANNEL}analysis{MESSAGE}", f"{CHANNEL}final{MESSAGE}"

COHERE = '{"tool_call_id": "0", "tool_name": "weather", "parameters": ' + ARGS + "}"
K3_CALL = '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>%s<|close|>call<|sep|>'
K3 = K3_CALL % (
    '<|open|>argument key="city" type="string"<|sep|>Oslo "{" é<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="array"<|sep|>[1, {"a": null}]<|close|>argument<|sep|>'
)
K3_JSON = K3_CALL % f'<|open|>json type="object"<|sep|>{ARGS}<|close|>json<|sep|>'

SCHEMA = {
    "properties": {
        "path": {"type": "string"},
        "name": {"type": ["string", "null"]},
        "line": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "force": {"type": ["boolean", "null"]},
        "lines": {"type": "array"},
    }
}

# format, text; each calls weather(ARGS) as often as the number says, with or without content.
TEXTS = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", 1),
    ("hermes", f"I look.\n\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>\n", 2),
    ("hermes", f'<tool_call>{{"arguments": {ARGS}, "name": "weather"}}', 1),
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {json.dumps(ARGS)}}}</tool_call>', 1),
    ("llama3_json", f"<|python_tag|>{CALL.replace('arguments', 'parameters')}", 1),
    ("llama3_json", CALL.replace("arguments", "parameters"), 1),
    ("llama3_json", f" {CALL}; {CALL}<|eom_id|>", 2),
    ("llama3_json", f'{{"type": "function", {CALL[1:]}', 1),
    ("mistral", f"[TOOL_CALLS][{CALL}]", 1),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", 2),
    ("mistral", f"Well: [TOOL_CALLS]weather{ARGS}[TOOL_CALLS]weather{ARGS}", 2),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]x7[ARGS]{ARGS}", 1),
    ("qwen3_coder", f"<tool_call>\n{XML}\n</tool_call>", 1),
    ("qwen3_coder", f"I look.\n{XML}\n</tool_call>\n<tool_call>{XML}</tool_call>", 2),
    ("qwen3_coder", XML, 1),
    ("pythonic", f"[{PYTHON}]", 1),
    ("pythonic", f"<|python_start|>[{PYTHON}, {PYTHON}]<|python_end|>", 2),
    ("deepseek", f"{DEEPSEEK}<｜tool▁calls▁end｜>", 1),
    ("deepseek", f"{DEEPSEEK}\n{BEGIN}weather{SEP}{ARGS}{END}<｜tool▁calls▁end｜>", 2),
    ("deepseek_v32", f"I look.\n\n{DSML}", 1),
    ("deepseek_v32", DSML.replace("function_calls", " calls").replace("｜invoke", "｜ invoke"), 1),
    ("glm", GLM.format(""), 1),
    ("glm", f"I look.\n{GLM.format(chr(10))}\n{GLM.format('')}", 2),
    ("minimax_m2", f"\n<minimax:tool_call>\n{MINIMAX}\n</minimax:tool_call>", 1),
    ("minimax_m2", f"I look.<minimax:tool_call>{MINIMAX}\n{MINIMAX}</minimax:tool_call>", 2),
    ("kimi_k2", f"{SECTION[0]}{KIMI.format(0)}{SECTION[1]}", 1),
    ("kimi_k2", f"I look. {SECTION[0]}{KIMI.format(0)}{KIMI.format(1)}{SECTION[1]}", 2),
    ("kimi_k2", f"{SECTION[0]} {KIMI.format(0)}\n", 1),
    ("gemma4", GEMMA, 1),
    ("gemma4", f"I look.\n{GEMMA}{GEMMA}<|tool_response>", 2),
    ("seed_oss", f"<seed:tool_call>\n{XML}\n</seed:tool_call>", 1),
    ("seed_oss", f"I look.\n<seed:tool_call>{XML}</seed:tool_call>{XML}</seed:tool_call>", 2),
    ("kimi_k3", K3, 1),
    ("kimi_k3", f"<|open|>response<|sep|>I look.<|close|>response<|sep|>{K3}", 1),
    ("kimi_k3", K3_JSON, 1),
    ("cohere", f"<|START_ACTION|>[\n{COHERE}\n]<|END_ACTION|>", 1),
    ("cohere", f"<|START_TEXT|>I look.<|END_TEXT|><|START_ACTION|>[{COHERE}, {COHERE}]", 2),
    ("granite", f"<|tool_call|>[{CALL}]", 1),
    ("granite", f"I look.<|tool_call|> [{CALL}, {CALL}]", 2),
    ("phi4_mini", f"functools[{CALL}]", 1),
    ("longcat", f"<longcat_tool_call>\n{CALL}\n</longcat_tool_call>", 1),
    ("hunyuan", f"I look.\n<tool_calls>[{CALL}, {CALL}]</tool_calls>", 2),
    ("lfm2", f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>", 1),
    ("lfm2", f"I look.<|tool_call_start|>[{PYTHON}, {PYTHON}]<|tool_call_end|>", 2),
    ("olmo3", f"<function_calls>\n{PYTHON}\n{PYTHON}\n</function_calls>", 2),
    ("harmony", HARMONY, 1),
    ("harmony", ROLE_FIRST, 1),
    ("harmony", f"{CHANNEL}commentary{MESSAGE}I look.<|end|>{START}{HARMONY}<|call|>", 1),
    ("harmony", f"{HARMONY}<|call|>{START}{ROLE_FIRST}{START}{ROLE_FIRST}", 3),
]


def parse(
    text: str,
    cuts: list[int],
    tools: str | None = None,
    tags: str | None = None,
    end: FinishReason = FinishReason.LENGTH,
    **more: Any,
) -> list[ChatEvent]:
    """Return the events of ``text`` cut at these places."""
    ids = count()
    parser = ChatParser(
        FORCED if tools == "forced" else TOOL_FORMATS.get(tools or ""),
        REASONING_TAGS.get(tags or ""),
        new_id=lambda: f"id{next(ids)}",
        **more,
    )
    events: list[ChatEvent] = []
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for start, stop in pairwise(places):
        events += parser.feed(text[start:stop])
    events += parser.flush(end)
    assert len(parser.outcomes) == sum(isinstance(event, ToolCall) for event in events)
    assert parser.has_calls == any(isinstance(event, ToolCall) for event in events)
    return events


def test_arguments_that_come_twice_are_unreadable() -> None:
    """All that the model wrote is there, and is no object that a tool could run with."""
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}, "parameters": {"b": 2}}'
    events = joined(parse(text, [], "hermes"))
    assert events == [ToolCall(0, "id0", "f"), Arguments(0, '{"a": 1}{"b": 2}}')]


@pytest.mark.parametrize("arguments", ["1", "**{'a': 1}", "a=1, **{}"])
def test_python_arguments_need_names(arguments: str) -> None:
    """What cannot be said in JSON is content."""
    text = f"[weather({arguments})]"
    assert joined(parse(text, [], "pythonic")) == [Content(text)]


def test_white_space_around_calls_is_no_content() -> None:
    """Nor at the end of what follows them."""
    text = f"<tool_call>{CALL}</tool_call>\n\nDone. \n"
    assert joined(parse(text, [], "hermes"))[-1] == Content("Done.")


def test_a_name_that_does_not_end_is_content() -> None:
    """It is not held back until the answer ends."""
    parser = ChatParser(TOOL_FORMATS["pythonic"])
    assert joined(parser.feed("[" + "a" * 300)) == [Content("[" + "a" * 300)]


def test_a_named_call_is_forced_once() -> None:
    """Any others as often as the model wants, unless the request says otherwise."""
    tools = [{"function": {"name": name}} for name in ("f", "g")]
    asked = (forced_calls(tools, "f"), forced_calls(tools, parallel=False), forced_calls(tools))
    assert [json.loads(schema).get("maxItems") for schema in asked] == [1, 1, None]


def test_white_space_after_reasoning_is_no_content() -> None:
    """Also where nothing follows it."""
    for text in ("<think>a \n</think>", "<think>a \n</think>\n\n"):
        assert parse(text, [], None, "think") == [Reasoning("a")]


def joined(events: list[ChatEvent]) -> list[ChatEvent]:
    """Neighbours of one kind as one; an empty line is before each further part of a kind."""
    whole: list[ChatEvent] = []
    for key, group in groupby(events, key=lambda event: (type(event), getattr(event, "index", 0))):
        several = list(group)
        if key[0] is ToolCall:
            whole += several
            continue
        text = ""
        for event in several:
            text += getattr(event, "separator", "") + event.text  # type: ignore[union-attr]
        whole.append(Arguments(key[1], text) if key[0] is Arguments else key[0](text))
    return whole


def test_every_event_of_text_is_a_part_of_the_answer() -> None:
    """Its span says which; spans follow one another, however the answer is cut."""
    for family, text, _ in TEXTS:
        answer = f"<think> Why? </think>\n{text} \nDone. "
        for piece in (1, 3, len(answer)):
            spans = []
            for event in parse(answer, list(range(0, len(answer), piece)), family, "think"):
                if isinstance(event, (Content, Reasoning)):
                    assert answer[slice(*event.span)] == event.text
                    spans.append(event.span)
            assert spans == sorted(spans) and all(a[1] <= b[0] for a, b in pairwise(spans))
            assert spans


@pytest.mark.parametrize("cuts", [[], list(range(400))])
@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"a": "x\ny\t"}', {"a": "x\ny\t"}),
        (r'{"a": "\ud83d", "b": "\ude00\ud83d\ude00\ud83d\n"}', {"a": "�", "b": "�😀�\n"}),
        (r'{"a": "\\ud83d\"\\"}', {"a": '\\ud83d"\\'}),
        (r'{"\ud83d": {"b": [1, "\u00e9"]}}', {"�": {"b": [1, "é"]}}),
    ],
)
def test_strings_of_arguments_are_json(written: str, read: object, cuts: list[int]) -> None:
    """Raw line ends become escapes, half of a character U+FFFD, however the text is cut."""
    quoted = json.dumps(written)
    for arguments in (written, quoted):
        text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
        events = joined(parse(text, cuts, "hermes"))
        assert json.loads(events[1].text) == read  # type: ignore[union-attr]


@given(
    st.recursive(
        st.text() | st.none() | st.floats(allow_nan=False),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
    st.lists(st.integers(0, 400)),
    st.booleans(),
)
def test_valid_json_stays_as_it_is(value: object, cuts: list[int], is_ascii: bool) -> None:
    """Not a character of it changes; nor is any held back at its end."""
    text = json.dumps(value, ensure_ascii=is_ascii)
    strings, places = JsonStrings(), sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    assert "".join(strings.feed(text[a:b]) for a, b in pairwise(places)) == text


@pytest.mark.parametrize(("tools", "text", "calls"), TEXTS)
def test_calls_come_out_of_every_family(tools: str, text: str, calls: int) -> None:
    """The name whole and first, once; the arguments as the text that the model wrote."""
    events = joined(parse(text, [], tools))
    wanted: list[ChatEvent] = []
    for index in range(calls):
        call_id = f"functions.weather:{index}" if tools == "kimi_k2" else f"id{index}"
        wanted += [ToolCall(index, call_id, "weather"), Arguments(index, ARGS)]
    assert [event for event in events if not isinstance(event, Content)] == wanted
    content = [event.text for event in events if isinstance(event, Content)]
    assert content == [before for before in ("I look.", "Well:") if before in text]


def test_arguments_leave_while_they_are_written() -> None:
    """A long argument is not held back until it is complete."""
    parser = ChatParser(TOOL_FORMATS["hermes"])
    events = parser.feed('<tool_call>{"name": "write", "arguments": {"text": "Once upon')
    assert isinstance(events[0], ToolCall) and events[0].name == "write"
    assert events[1:] == [Arguments(0, '{"text": "Once upon')]
    assert parser.feed(" a time") == [Arguments(0, " a time")]


_PIECES = st.sampled_from(
    [
        *(text for _, text, _ in TEXTS),
        *("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "[TOOL_CALLS]", BEGIN),
        *("<tool", "<", "[", "{", "}", '{"name"', '{"name": "f"', '{"a": 1}', " ", "\n", "a", "é"),
        *("<function=f>", "<function=", "<parameter=a>", "\n", "</parameter>", "</function>", "<"),
        *("[f(", "f(a=1", "a='x'", ")", ", ", "<|python_start|>", "f", "("),
        *("<tool_call>f", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"),
        *('<invoke name="f">', '<parameter name="a">', "</invoke>", "</parameter>"),
        *(*SECTION, "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>"),
        *("<|tool_call>call:f", "{a:", '<|"|>', "<|channel>thought", "<channel|>", "1", ","),
        *(START, CHANNEL, MESSAGE, ANALYSIS, FINAL, "<|end|>", "<|call|>", "<|return|>"),
        *("commentary", " to=functions.f", " to=python", "<|constrain|>", "json"),
        *('{"name": "f"}', '{"name": 7}', '{"name": "f", "arguments": null}', ", ", ";", '"', "\\"),
    ]
)


@settings(max_examples=400, deadline=None)
@given(
    text=st.lists(_PIECES, max_size=6).map("".join),
    cuts=st.lists(st.integers(0, 2000), max_size=12),
    tools=st.sampled_from([None, "forced", *TOOL_FORMATS]),
    tags=st.sampled_from([None, *REASONING_TAGS]),
    opened=st.booleans(),
    end=st.sampled_from([FinishReason.END_ID, FinishReason.LENGTH]),
)
@example(TEXTS[1][1], list(range(200)), "hermes", "think", False, FinishReason.END_ID)
@example(TEXTS[11][1], list(range(200)), "mistral", None, False, FinishReason.LENGTH)
def test_where_the_text_is_cut_makes_no_difference(
    text: str,
    cuts: list[int],
    tools: str | None,
    tags: str | None,
    opened: bool,
    end: FinishReason,
) -> None:
    """Streamed and whole agree, for texts that are no calls just as for those that are."""
    whole = parse(text, [], tools, tags, end, opened=opened)
    assert joined(parse(text, cuts, tools, tags, end, opened=opened)) == joined(whole)


def test_each_message_of_harmony_is_told_by_its_channel() -> None:
    """Analysis is reasoning, commentary and final are content; parts of one kind stay apart."""
    text = f"{ANALYSIS}One.<|end|>{START}{CHANNEL}commentary{MESSAGE}I look.\n<|end|>{START}"
    text += f"{ANALYSIS} Two <|call|> three.<|end|>{START}{ROLE_FIRST}{START}{FINAL}Done."
    wanted = [
        Reasoning("One."),
        Content("I look."),
        Reasoning("\n\nTwo <|call|> three."),
        ToolCall(0, "id0", "weather"),
        Arguments(0, ARGS),
        Content("\n\nDone."),
    ]
    for end in ("", "<|end|>", "<|return|>"):
        assert joined(parse(text + end, [], "harmony", "harmony")) == wanted


def test_harmony_without_tools_has_reasoning_and_content() -> None:
    """Where no tool may be called, a call is text, and without a reader all is as written."""
    text = f"{ANALYSIS}One.<|end|>{START}"
    assert joined(parse(f"{text}{FINAL}Two.", [], None, "harmony")) == [
        Reasoning("One."),
        Content("Two."),
    ]
    called = joined(parse(f"{text}{HARMONY}", [], None, "harmony"))
    assert called == [Reasoning("One."), Content(ARGS)]
    assert joined(parse(f"{ANALYSIS}One.", [], "harmony")) == [Content("One.")]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Hello", [Content("Hello")]),
        (f"{CHANNEL}analysis", []),
        (f"{ANALYSIS}One.<|end|>{START}{HARMONY[:60]}", [Reasoning("One.")]),
        (f"{ANALYSIS}One", [Reasoning("One")]),
        (f"{CHANNEL}commentary to=python code{MESSAGE}print(1)", [Reasoning("print(1)")]),
        (f"{CHANNEL}??<|end|>{START}{FINAL}Hi", [Content(f"{CHANNEL}??\n\nHi")]),
        (f"{FINAL}Say {START} to begin", [Content("Say\n\nto begin")]),
        (
            HARMONY[: -len(ARGS)] + "print(1)",
            [ToolCall(0, "id", "weather"), Arguments(0, "print(1)")],
        ),
    ],
)
def test_harmony_that_is_not_as_it_should_be(text: str, wanted: list[ChatEvent]) -> None:
    """Headers that are cut are left out; what is no header is content."""
    events = joined(parse(text, list(range(300)), "harmony", "harmony"))
    assert [replace(e, id="id") if isinstance(e, ToolCall) else e for e in events] == wanted


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("{}", {}),
        ('{a b:<|"|><|"|>, c:[],}', {"a b": "", "c": []}),
        (
            '{<|"|>a:<|"|>:-1.5e-05,b:{c:None,d:true}}',
            {"a:": -1.5e-05, "b": {"c": None, "d": True}},
        ),
        ("{a:10:30,b:NaN}", {"a": "10:30", "b": "NaN"}),
        ('{a:<|"|><|"<|\n"\\|>} </b><tool_call|><|"|>}', {"a": '<|"<|\n"\\|>} </b><tool_call|>'}),
    ],
)
def test_arguments_of_gemma_become_json(written: str, arguments: object) -> None:
    """Its texts are verbatim between its quotes, also where they look like a marker."""
    events = parse(f"<|tool_call>call:f{written}<tool_call|>", list(range(100)), "gemma4")
    assert json.loads("".join(e.text for e in events if isinstance(e, Arguments))) == arguments
    assert not any(isinstance(event, Content) for event in events)


def test_texts_of_gemma_leave_while_they_are_written() -> None:
    """What may be the quote that ends them waits."""
    parser = ChatParser(TOOL_FORMATS["gemma4"])
    events = parser.feed('<|tool_call>call:f{a:<|"|>Once "<|')
    assert events[1:] == [Arguments(0, '{"a": "Once \\"')]
    assert parser.feed("b") == [Arguments(0, "<|b")]


@pytest.mark.parametrize(
    ("tools", "cut", "kept"),
    [
        *(
            ("gemma4", f"<|tool_call>call:f{cut}", kept)
            for cut, kept in [
                ("{a:1]", '{"a": 1]'),
                ("{a:<b", '{"a": "<b'),
                ('{a:<|"|>b', '{"a": "b'),
                ("{a:hello wor", '{"a": "hello wor'),
                ("{a:tru", '{"a": "tru'),
                ("{a:true", '{"a": true'),
                ("{a:[1, 2", '{"a": [1, 2'),
                ("{a:1,b c", '{"a": 1, "b c'),
            ]
        ),
        *(
            ("qwen3_coder", f"<tool_call>\n<function=f>\n<parameter={cut}", kept)
            for cut, kept in [
                ("line>\n12", '{"line": 12'),
                ("line>\n12\n</param", '{"line": 12'),
                ("name>\nnul", '{"name": "nul'),
                ("lines>\n[1, 2", '{"lines": "[1, 2'),
                ("other>\nwords he", '{"other": "words he'),
                ("path>\na/b", '{"path": "a/b'),
            ]
        ),
        ("glm", "<tool_call>f<arg_key>line</arg_key><arg_value>12", '{"line": 12'),
        ("hermes", '<tool_call>{"name": "f", "arguments": 12', "12"),
        ("hermes", r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\u00', '{"a": "'),
    ],
)
@pytest.mark.parametrize("cuts", [[], list(range(100))])
def test_a_call_that_breaks_off_keeps_what_there_is(
    tools: str, cut: str, kept: str, cuts: list[int]
) -> None:
    """Also of a value that is read as a whole; the client sees which call it was."""
    events = joined(parse(cut, cuts, tools, schemas={"f": SCHEMA}))
    assert events[:2] == [ToolCall(0, "id0", "f"), Arguments(0, kept)]
    assert not isinstance(json_value(kept), dict)


@pytest.mark.parametrize(
    ("value", "is_read"),
    [
        ("[1.5, 1e308]", True),
        ("NaN", False),
        ("1e999", False),
        ("[" * 100 + "]" * 100, False),
        ("[" * 99 + "]" * 99, True),
        ("9" * 5000, False),
    ],
)
def test_arguments_that_no_client_is_sure_to_read_are_noted(value: str, is_read: bool) -> None:
    """Those for which the Messages API has the text in place of the object."""
    noted: list[str] = []
    parser = ChatParser(TOOL_FORMATS["hermes"], note_call=noted.append)
    call = f'{{"name": "f", "arguments": {{"a": {value}}}}}'
    parser.feed(f"<tool_call>{call}</tool_call>", end=True)
    assert noted == ["begun", "whole" if is_read else "unreadable"]


@pytest.mark.parametrize("cuts", [[], list(range(300))])
@pytest.mark.parametrize(
    ("tools", "call", "between", "end"),
    [
        ("kimi_k2", KIMI_F, "", SECTION[1]),
        ("hermes", '<tool_call>{"name": "f", "arguments": %s</tool_call>', "\n", ""),
        ("mistral", "[TOOL_CALLS]f%s", "", ""),
        ("deepseek", f"{BEGIN}function{SEP}f\n```json\n%s```{END}", "\n", ""),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": %s', "", "<|eom_id|>"),
    ],
)
def test_a_marker_ends_a_call_whose_braces_are_forgotten(
    tools: str, call: str, between: str, end: str, cuts: list[int]
) -> None:
    """The braces are supplied, and a further call is read as ever."""
    written = between.join([call % '{"a": {"b": "</tool_call>"}', call % '{"a": [2]}'])
    events = joined(parse(written + end, cuts, tools))
    first, second = [event.text for event in events if isinstance(event, Arguments)]
    assert (first.rstrip(), second) == ('{"a": {"b": "</tool_call>"}}', '{"a": [2]}')
    assert [type(event) for event in events] == [ToolCall, Arguments] * 2


@pytest.mark.parametrize("cuts", [[], list(range(300))])
@pytest.mark.parametrize(
    ("tools", "call"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}\n}\n</tool_call>'),
        ("kimi_k2", KIMI_F % '{"a": 1}}'),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}}'),
        ("gemma4", "<|tool_call>call:f{a:1}}<tool_call|>"),
    ],
)
def test_a_brace_too_many_is_no_content(tools: str, call: str, cuts: list[int]) -> None:
    events = joined(parse(call, cuts, tools))
    assert [type(event) for event in events] == [ToolCall, Arguments]
    assert json_value(events[1].text) == {"a": 1}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        ("", True),
        ("<think>Hm", False),
        ("<think>Hm</think>", True),
        ("<think>Hm</think>\n", True),
        ("<think>Hm</think>So", False),
        ("<think>Hm</think><to", False),
        (f"<tool_call>{CALL[:-1]}", False),
        (f"<tool_call>{CALL}", True),
        (f"<tool_call>{CALL}</tool_", True),
        (f"<tool_call>{CALL}</tool_call>\n", True),
        (f"<tool_call>{CALL}</tool_call>\nSo", False),
        ("So <tool_call>", False),  # which is content, as no call follows
    ],
)
def test_the_end_of_the_last_part_is_known(text: str, ended: bool) -> None:
    """By it an API tells a part that was cut from one that had ended."""
    parser = ChatParser(TOOL_FORMATS["hermes"], REASONING_TAGS["think"])
    parser.feed(text, end=FinishReason.END_ID)
    assert parser.ended is ended


def test_what_nobody_can_read_in_a_call_is_its_arguments() -> None:
    """As text, from the first character on that no rule explains, up to the next marker."""
    broken = '<tool_call>{"name": "f", '
    assert joined(parse(f"{broken}so it is</tool_call>\nDone.", [], "hermes")) == [
        ToolCall(0, "id0", "f"),
        Arguments(0, "so it is"),
        Content("Done."),
    ]
    events = joined(parse(f"{broken}<tool_call>{CALL}", [], "hermes"))
    assert events[1:] == [ToolCall(1, "id1", "weather"), Arguments(1, ARGS)]


@pytest.mark.parametrize("cuts", [[], list(range(400))])
def test_a_forgotten_brace_costs_nothing_of_what_follows(cuts: list[int]) -> None:
    """The end of the call is read as ever, and so are a further call and text."""
    one, two = '<tool_call>{"name": "f", "arguments": {"a": 1}', "</tool_call>"
    events = joined(parse(f"{one}{two}x", cuts, "hermes"))
    assert [type(event) for event in events] == [ToolCall, Arguments, Content]
    assert (events[1].text, events[2].text) == ('{"a": 1}', "x")  # type: ignore[union-attr]
    events = joined(parse(f"{one}\n{two}\n{one}}}{two}", cuts, "hermes"))
    assert [type(event) for event in events] == [ToolCall, Arguments] * 2


def test_ids_are_what_the_templates_take() -> None:
    """Mistral's refuse ids that have not nine characters; Kimi's are the model's own."""
    call = ChatParser(TOOL_FORMATS["mistral"]).feed(f"[TOOL_CALLS][{CALL}]")[0]
    assert isinstance(call, ToolCall) and len(call.id) == 9


@pytest.mark.parametrize("tools", [None, *TOOL_FORMATS])
@pytest.mark.parametrize(
    "text",
    [
        " plain text, with { braces } and [lists]\n",
        "a < b <tool",
        '{"answer": 42}',
        '{"name": "Ada", "age": 36}',
        "[TOOL_CALLS] is a marker",
        "<tool_call>nothing</tool_call>",
        '<tool_call>{"nam',
        "x <tool_call>\n",
        '{"nam',
        "<|python_tag|>print(1)",
        f"{BEGIN}what is this",
        "[1, 2]",
    ],
)
def test_what_is_no_call_is_content(tools: str | None, text: str) -> None:
    """Nothing is lost and nothing added, but white space in front of what may be a message."""
    if tools == "glm" and text == "<tool_call>nothing</tool_call>":
        assert joined(parse(text, [], tools)) == [ToolCall(0, "id0", "nothing"), Arguments(0, "{}")]
    else:
        content = text.lstrip() if tools == "harmony" else text
        assert joined(parse(text, [], tools)) == [Content(content)]


def test_reasoning_is_told_from_the_answer() -> None:
    """Whether the model or the prompt opens it; what is left open is reasoning to its end."""
    answer = [Reasoning("I see."), Content("It is 4.\n")]
    assert joined(parse("<think>\nI see.\n</think>\n\nIt is 4.\n", [], tags="think")) == answer
    opened = parse("\nI see.\n</think>\nIt is 4.\n", [], tags="think", opened=True)
    assert joined(opened) == answer
    assert joined(parse("<think>I see", [], tags="think")) == [Reasoning("I see")]
    assert joined(parse("It <think> is", [], tags="think")) == [Content("It <think> is")]


def test_reasoning_and_calls_go_together() -> None:
    """The usual answer of a reasoning model with tools."""
    events = joined(parse(f"<think>Hm.</think>\n{TEXTS[0][1]}", [], "hermes", "think"))
    assert events == [Reasoning("Hm."), ToolCall(0, "id0", "weather"), Arguments(0, ARGS)]


def test_a_call_cut_short_keeps_what_there_is() -> None:
    """The client sees which call it was, and decides."""
    events = parse('<tool_call>{"name": "f", "arguments": {"a": [1,', [], "hermes")
    assert joined(events) == [ToolCall(0, "id0", "f"), Arguments(0, '{"a": [1,')]


def test_a_call_without_arguments_has_none() -> None:
    """Arguments are always JSON."""
    for text in (
        '{"name": "f"}',
        '{"name": "f", "arguments": null}',
        '{"name":"f","arguments":""}',
    ):
        events = parse(f"<tool_call>{text}</tool_call>", [], "hermes")
        assert joined(events) == [ToolCall(0, "id0", "f"), Arguments(0, "{}")]


MARKED = "a </parameter> </arg_value> &amp; <arg_key>"
# Around a value of the key ``{}``; each format's own call of ``f``.
XML_CALLS = {
    "qwen3_coder": (
        "<tool_call><function=f>\n<parameter={}>\n",
        "\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm": (
        "<tool_call>f\n<arg_key>{}</arg_key>\n<arg_value>",
        "</arg_value>\n</tool_call>",
    ),
    "minimax_m2": (
        '<minimax:tool_call><invoke name="f"><parameter name="{}">',
        "</parameter></invoke></minimax:tool_call>",
    ),
}


@pytest.mark.parametrize("tools", XML_CALLS)
@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("path", "12", "12"),
        ("path", MARKED, MARKED),
        ("name", "null", None),
        ("name", "12", "12"),
        ("path", "\na\n\n", "\na\n\n"),
        ("path", '{"a": "</b>"}', '{"a": "</b>"}'),
        ("line", "12", 12),
        ("line", "None", None),
        ("line", "twelve", "twelve"),
        ("force", "True", True),
        ("lines", "['a', \"b\"]", ["a", "b"]),
        ("lines", "NaN", "NaN"),
        ("other", "12", "12"),
        ("other", '{"a": [1]}', {"a": [1]}),
    ],
)
def test_values_between_tags_are_what_the_schema_says(
    tools: str, key: str, written: str, value: object
) -> None:
    """A text stays one, whatever it looks like; what does not fit is one, too."""
    before, after = XML_CALLS[tools]
    call = before.format(key) + written + after
    parser = ChatParser(TOOL_FORMATS[tools], schemas={"f": SCHEMA})
    events = [event for char in call for event in parser.feed(char)] + parser.flush()
    assert json.loads("".join(e.text for e in events if isinstance(e, Arguments))) == {key: value}


def test_texts_between_tags_leave_while_they_are_written() -> None:
    """What may be the end of the value waits."""
    parser = ChatParser(TOOL_FORMATS["qwen3_coder"], schemas={"f": SCHEMA})
    events = parser.feed("<tool_call><function=f><parameter=path>\nOnce\n</param")
    assert events[1:] == [Arguments(0, '{"path": "Once')]
    assert parser.feed('s> "a"') == [Arguments(0, '\\n</params> \\"a\\"')]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("<parameter=a>\nx\n<parameter=b>\ny\n</parameter>\n</function>", {"a": "x", "b": "y"}),
        ("<parameter=a>\nx\n</function>\n</tool_call>", {"a": "x"}),
        ("<parameter=a>\n<parameter=b> </function>\n</parameter></function>", None),
    ],
)
def test_the_end_of_a_value_may_be_missing(written: str, arguments: object) -> None:
    """Where a line is a tag that can only stand after it; within a line it is text."""
    call = f"<tool_call>\n<function=f>\n{written}"
    events = parse(call, list(range(200)), "qwen3_coder", end=FinishReason.END_ID)
    found = json.loads("".join(e.text for e in events if isinstance(e, Arguments)))
    assert found == (arguments or {"a": "<parameter=b> </function>"})


@pytest.mark.parametrize("schemas", [{"g": None}, {"f": {"properties": 7}}, {"f": [1]}, None])
def test_schemas_may_be_anything(schemas: dict[str, object] | None) -> None:
    """A caller writes them; a value then is a text, unless it looks like more."""
    parser = ChatParser(TOOL_FORMATS["qwen3_coder"], schemas=schemas)
    parser.feed("<tool_call><function=f><parameter=a>\n1\n</parameter></function></tool_call>")
    assert parser.has_calls


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("", {}),
        (r"a='it\'s (', b=-1.5,", {"a": "it's (", "b": -1.5}),
        (
            "a=true, b=[false, null], c={'d': None}",
            {"a": True, "b": [False, None], "c": {"d": None}},
        ),
        (r"a='\d+'", {"a": "\\d+"}),
    ],
)
def test_arguments_in_python_become_json(written: str, arguments: object) -> None:
    """Its literals, and JSON's words for them."""
    events = parse(f"[f({written})]", [], "pythonic")
    assert json.loads(events[1].text) == arguments  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "text", ["[f(1)]", "[f(a=b)]", "[f(**a)]", "[g(a=1)]", "f(a=1) is 2", "Say f(a=1)", "[f(a='1"]
)
def test_python_that_calls_no_tool_is_content(text: str) -> None:
    """Also a function that is no tool of the request."""
    parser = ChatParser(TOOL_FORMATS["pythonic"], schemas={"f": None})
    events = parser.feed(text) + parser.flush()
    assert joined(events) == [Content(text)]


TOOLS = ping_and_set_tree(again={"$ref": "#"})


@pytest.mark.parametrize("name", [None, "set_tree", "ping"])
@pytest.mark.parametrize("parallel", [True, False])
def test_forced_calls_fit_their_schema(name: str | None, parallel: bool) -> None:
    """A published validator agrees on what is allowed, references inside parameters included."""
    schema = json.loads(forced_calls(TOOLS, name, parallel=parallel))
    validator = jsonschema.Draft202012Validator(schema)
    tree = {"name": "set_tree", "arguments": {"tree": {"on": True, "sub": {"on": False}}}}
    ping = {"name": "ping", "arguments": {}}
    assert validator.is_valid([tree]) == (name != "ping")
    assert validator.is_valid([ping]) == (name != "set_tree")
    assert validator.is_valid([tree, ping]) == (name is None and parallel)
    wrong = {"name": "set_tree", "arguments": {"tree": {"on": True, "sub": {}}}}
    assert not any(map(validator.is_valid, ([], [wrong], tree, [{"name": "other"}])))


def test_arguments_of_forced_calls_are_an_object() -> None:
    """Also where the parameters leave out their type."""
    parameters = {"properties": {"a": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    schema = json.loads(forced_calls([tool], "f"))
    jsonschema.validate([{"name": "f", "arguments": {"a": 1}}], schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([{"name": "f", "arguments": "-2"}], schema)


def test_forced_calls_are_parsed() -> None:
    """Their text is a list of calls and nothing else."""
    events = joined(parse(f" [{CALL}, {CALL}]", [], "forced"))
    assert [event for event in events if isinstance(event, ToolCall)] == [
        ToolCall(0, "id0", "weather"),
        ToolCall(1, "id1", "weather"),
    ]
    assert events[1] == Arguments(0, ARGS)
    assert joined(parse(f'[{CALL}, {{"na', [], "forced")) == events[:2]  # cut


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ '<tool_call>' }} {{ '</think>' }}", ("hermes", "think")),
        ("<seed:tool_call>\\n<function=f>\\n<parameter=a> </seed:think>", ("seed_oss", "seed")),
        ("'<|open|>call tool=' <|open|>think<|sep|>", ("kimi_k3", "kimi_k3")),
        ("<|START_ACTION|> <|END_THINKING|>", ("cohere", "cohere")),
        ("'<|tool_call|>' + calls", ("granite", None)),
        ("functools[", ("phi4_mini", None)),
        ("<longcat_tool_call>", ("longcat", None)),
        ("<tool_calls>[{", ("hunyuan", None)),
        ("<|tool_call_start|>[", ("lfm2", None)),
        ("<function_calls>", ("olmo3", None)),
        ("{%- if tools %}[TOOL_CALLS] [/THINK]", ("mistral", "mistral")),
        ('Environment: ipython ... "parameters": x', ("llama3_json", None)),
        (f"{BEGIN} </think>", ("deepseek", "think")),
        ("<tool_call>\\n<function=f>\\n<parameter=a>", ("qwen3_coder", None)),
        ("ipython: [func_name1(params_name1=1)] parameters", ("pythonic", None)),
        ("<tool_call>{name}\\n<arg_key>{key}</arg_key> </think>", ("glm", "think")),
        ("{{ '<minimax:tool_call>' }}", ("minimax_m2", None)),
        ("<|tool_call_argument_begin|>", ("kimi_k2", None)),
        ("'<|tool_call>call:' <|channel>thought <channel|>", ("gemma4", "gemma4")),
        ("<|start|>assistant<|channel|>analysis<|message|>", ("harmony", "harmony")),
        ("<|user|>{{ text }}<|end|>", (None, None)),
        ("{{ messages }}", (None, None)),
        (None, (None, None)),
    ],
)
def test_the_template_tells_the_formats(
    template: str | None, found: tuple[str | None, str | None]
) -> None:
    """By the markers that it writes itself."""
    assert formats_of(template) == found


# Beyond what tests/text/model_outputs.json has: format, call, what is read of it.
MENDED = [
    (
        "glm",
        "<tool_call>run\n<arg_key>command</arg_key>\n<arg_value>rm -r build\n"
        "<arg_key>cwd</arg_key>\n<arg_value>/tmp</arg_value>\n</tool_call>",
        {"command": "rm -r build", "cwd": "/tmp"},
    ),
    (
        "qwen3_coder",
        "<function=run>\n<parameter=command>\nls\n<parameter=cwd>\n/tmp\n</function>\n</tool_call>",
        {"command": "ls", "cwd": "/tmp"},
    ),
    (
        "qwen3_coder",
        "<function=run>\n<parameter=command>\nSee\n<parameter=cwd>\nx\n</parameter>\nhere\n"
        "</parameter>\n</function>",
        {"command": "See\n<parameter=cwd>\nx\n</parameter>\nhere"},
    ),
    (
        "minimax_m2",
        '<invoke name="run"><parameter name="command">Say </invoke> once</parameter></invoke>',
        {"command": "Say </invoke> once"},
    ),
    (
        "hermes",
        '<tool_call>{"name": "run", "arguments": {"command": "ls", "cwd": "/",}}</tool_call>',
        {"command": "ls", "cwd": "/"},
    ),
    (
        "hermes",
        "<tool_call>{'name': 'run', 'arguments': {'command': 'it\\'s \"a\"'}}</tool_call>",
        {"command": 'it\'s "a"'},
    ),
    (
        "hermes",
        '<tool_call>{"name": "run", "arguments": {"command": "ls", "cwd": ["a"',
        {"command": "ls", "cwd": ["a"]},
    ),
    (
        "harmony",
        "<|channel|>commentary<|channel|>commentary to=run <|constrain|>json<|message|>",
        {},
    ),
    (
        "harmony",
        '<|channel|>commentary? to=functions.run<|message|>{"command": "ls"}',
        {"command": "ls"},
    ),
    (
        "kimi_k2",
        '<|tool_call_begin|>functions_run_1<|tool_call_argument_begin|>{"command": "ls"}',
        {"command": "ls"},
    ),
    (
        "deepseek_v32",
        "<｜DSML｜invoke name='run'><｜DSML｜parameter name='command' string=\"True\">ls"
        "</｜DSML｜parameter></｜DSML｜invoke>",
        {"command": "ls"},
    ),
    ("gemma4", '<|tool_call>call:run({"command": "ls", cwd=\'/\'})<tool_call|>', None),
    (
        "gemma4",
        "<|tool_call>call:run(command: 'ls', \"cwd\": /tmp)<tool_call|>",
        {"command": "ls", "cwd": "/tmp"},
    ),
    (
        "llama3_json",
        'I run it.\n[{"name": "run", "parameters": {"command": "ls"}}]',
        {"command": "ls"},
    ),
]
RUN = {"run": {"properties": {"command": {"type": "string"}, "cwd": {}}}}


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(("tools", "text", "arguments"), MENDED)
def test_what_models_get_wrong_is_read(
    tools: str, text: str, arguments: dict[str, object] | None, size: int
) -> None:
    """However it comes: whole with all that was written, else raw text that is no object."""
    cuts = list(range(0, len(text), size))
    events = joined(parse(text, cuts, tools, end=FinishReason.END_ID, schemas=RUN))
    (written,) = [event.text for event in events if isinstance(event, Arguments)]
    assert [event.name for event in events if isinstance(event, ToolCall)] == ["run"]
    assert json_value(written) == arguments


@pytest.mark.parametrize(
    ("tools", "head", "mark"),
    [
        ("gemma4", "<|tool_call>call:f{a:[", "1,"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [', "1,"),
        ("minimax_m2", '<invoke name="f">', '<parameter name="a">1</parameter>'),
    ],
)
def test_a_call_of_too_many_values_is_unreadable(tools: str, head: str, mark: str) -> None:
    """It would keep the event loop; its text goes on as it is."""
    parser = ChatParser(TOOL_FORMATS[tools], schemas={"f": {}})
    events = parser.feed(head + mark * (MAX_TOKENS + 1), FinishReason.END_ID)
    text = "".join(event.text for event in events if isinstance(event, Arguments))
    assert text.endswith(mark)
    assert parser.outcomes == [CallOutcome.UNREADABLE]
