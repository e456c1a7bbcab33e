"""Formats against what others publish: fixtures, chat templates, and OpenAI's parser of Harmony.

``canitoolcall`` has raw answers of model families with the calls that are in them. The chat
templates come with the sources of ``llama-cpp-python``. ``openai-harmony`` is the reference for
Harmony and needs a vocabulary, which ``bpe-openai`` has; all that is installed only where
``TRTLLM_BLS_INSTALL_CLIENTS`` is set.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.packages import import_or_skip
from tests.helpers.published import pip_download, templates_of_llama_cpp
from tests.models.test_chat_templates import TOOL, tokenizer_of
from trtllm_bls.text.chat_formats import REASONING_TAGS, TOOL_FORMATS, formats_of
from trtllm_bls.text.chat_parser import Arguments, ChatParser, Content, Reasoning, ToolCall
from trtllm_bls.types import FinishReason

INSTALLS = pytest.mark.skipif(
    "TRTLLM_BLS_INSTALL_CLIENTS" not in os.environ,
    reason="downloads packages; set TRTLLM_BLS_INSTALL_CLIENTS=1 to run it",
)


class Answer:
    """What an answer holds, read in pieces."""

    def __init__(
        self,
        text: str,
        cuts: list[int],
        parser: ChatParser,
        end: FinishReason = FinishReason.END_ID,
    ) -> None:
        self.content = self.reasoning = ""
        self.calls: list[list[str]] = []  # id, name, arguments
        places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
        pieces = [text[start:stop] for start, stop in pairwise(places)]
        for event in [e for piece in pieces for e in parser.feed(piece)] + parser.flush(end):
            if isinstance(event, Content):
                self.content += event.separator + event.text
            elif isinstance(event, Reasoning):
                self.reasoning += event.separator + event.text
            elif isinstance(event, ToolCall):
                self.calls.append([event.id, event.name, ""])
            else:
                assert isinstance(event, Arguments)
                self.calls[event.index][2] += event.text

    @property
    def all(self) -> tuple[str, str, list[list[str]]]:
        return self.content, self.reasoning, self.calls

    @property
    def values(self) -> list[tuple[str, Any]]:
        """Of each call, the name and the arguments."""
        return [(name, json.loads(arguments)) for _, name, arguments in self.calls]


def cuttings(length: int) -> Iterator[list[int]]:
    """The text as a whole, in characters, and in pieces of other sizes."""
    yield []
    yield list(range(length))
    for seed in range(8):
        chance = random.Random(seed)
        yield [chance.randrange(length + 1) for _ in range(chance.randrange(1, 50))]


def answers(
    text: str, tools: str, tags: str, end: FinishReason = FinishReason.END_ID, **more: Any
) -> Answer:
    """The answer; every cutting gives the same."""
    found = [
        Answer(
            text,
            cuts,
            ChatParser(TOOL_FORMATS[tools], REASONING_TAGS[tags], new_id=lambda: "id", **more),
            end,
        )
        for cuts in cuttings(len(text))
    ]
    assert all(each.all == found[0].all for each in found)
    return found[0]


# --- fixtures ---------------------------------------------------------------------------------

FAMILIES = {
    "deepseek": ("deepseek", "think"),
    "gemma4": ("gemma4", "gemma4"),
    "glm": ("glm", "think"),
    "gpt-oss": ("harmony", "harmony"),
    "kimi": ("kimi_k2", "think"),
    "mistral": ("mistral", "mistral"),
    "qwen3-hermes": ("hermes", "think"),
    "qwen3-xml": ("qwen3_coder", "think"),
}
OTHER_FORMATS = {"Kimi-K3": None, "DeepSeek-V3.2": "deepseek_v32", "DeepSeek-V4": "deepseek_v32"}
# What a streaming parser cannot know, or what is done otherwise here.
DIFFERENT = {
    "gpt-oss/llamacpp-builtin-python-recipient": "a call of another's tool is reasoning",
    "kimi/k2i-vllm-noise-between-markers": "text between markers is content",
    "deepseek/vllm-v3-malformed-missing-brace": "a brace that is missing is supplied",
    "mistral/vllm-v11-think-text": "the tags of another template",
    "qwen3-xml/q38-truncated-at-tool-call-open": "a marker without a call is content",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_published_answers_are_read(family: str) -> None:
    """Content, reasoning and calls as others expect them, apart from white space in texts."""
    package = Path(import_or_skip("canitoolcall").__file__).parent
    folder = package / "_data" / "fixtures" / family
    models = json.loads((folder / "family.json").read_text())["reference_models"]
    prompts = {each["repo"]: each.get("default_generation_prompt") or "" for each in models}
    own, tags = FAMILIES[family]
    read = 0
    for line in "".join(path.read_text() for path in folder.glob("*.jsonl")).splitlines():
        fixture = json.loads(line)
        model, text = fixture["models"][0], fixture["raw_output"]
        others = (other for name, other in OTHER_FORMATS.items() if name in model)
        tools = next(others, own)
        if tools is None or fixture["id"] in DIFFERENT:
            continue
        prompt = fixture.get("generation_prompt") or prompts.get(model, "")
        schemas = {each["function"]["name"]: each["function"] for each in fixture["tools"]}
        cut = "truncated" in fixture["tags"]
        found = answers(
            text,
            tools,
            tags,
            FinishReason.LENGTH if cut else FinishReason.END_ID,
            opened=prompt.rstrip().endswith(REASONING_TAGS[tags].begin),
            schemas={name: function.get("parameters") for name, function in schemas.items()},
        )
        read += 1
        if expected := fixture.get("expected"):
            wanted = [(call["name"], call["arguments"]) for call in expected["tool_calls"]]
            # Of a call that is cut, clients get what there is.
            complete = found.calls[: len(wanted)] if cut else found.calls
            assert [(n, json.loads(a)) for _, n, a in complete] == wanted, fixture["id"]
            for kind, part in (("content", found.content), ("reasoning_content", found.reasoning)):
                assert "".join(part.split()) == "".join((expected[kind] or "").split())
        elif not cut:
            assert not found.calls, fixture["id"]
    assert read >= 20


# --- templates --------------------------------------------------------------------------------

FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "most": {"type": "integer"},
                "where": {"type": "object"},
            },
        },
    },
}
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (TOOL, FIND)}  # type: ignore[index]
CALLS = [
    ("weather", {"place": 'Oslo "{" \\ é\n</b>'}),
    ("find", {"most": 7, "text": "42", "where": {"a": [1, True]}}),
]
# Of each template: what precedes and what follows an assistant's turn, and what ``auto`` finds.
TEMPLATES = {
    "openai-gpt-oss-120b": ("<|start|>assistant", "<|start|>functions.", "harmony", "harmony"),
    "GLM-4.6": ("<|assistant|>", "<|observation|>", "glm", "think"),
    "GLM-4.7-Flash": ("<|assistant|>", "<|observation|>", "glm", "think"),
    "moonshotai-Kimi-K2": ("assistant<|im_middle|>", "<|im_end|>", "kimi_k2", None),
    "MiniMax-M2": ("]~b]ai\n", "[e~[", "minimax_m2", "think"),
    "google-gemma-4-31B-it": ("<|turn>model\n", "<|tool_response>", "gemma4", "gemma4"),
    "Qwen3-Coder": ("<|im_start|>assistant\n", "<|im_end|>", "qwen3_coder", None),
    "Qwen3.5-4B": ("<|im_start|>assistant\n", "<|im_end|>", "qwen3_coder", "think"),
    "Qwen-Qwen3-0.6B": ("<|im_start|>assistant\n", "<|im_end|>", "hermes", "think"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("[/INST]", "</s>", "mistral", None),
    "mistralai-Mistral-Nemo-Instruct-2407": ("[/INST]", "</s>", "mistral", None),
    "deepseek-ai-DeepSeek-V3.1": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>", "deepseek", "think"),
    "deepseek-ai-DeepSeek-V3.2": (
        "<｜Assistant｜></think>",
        "<｜end▁of▁sentence｜>",
        "deepseek_v32",
        "think",
    ),
    "meta-llama-Llama-3.3-70B-Instruct": (
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
        "llama3_json",
        None,
    ),
}
ONE_CALL = ("openai-gpt-oss-120b", "meta-llama-Llama-3.3-70B-Instruct")


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Chat templates by name."""
    return templates_of_llama_cpp(tmp_path_factory.mktemp("templates"))


def conversation(ids: list[str], calls: list[tuple[str, Any]], **said: str) -> list[dict[str, Any]]:
    """A question, a turn with these calls, and their results."""
    made = [
        {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for call_id, (name, arguments) in zip(ids, calls, strict=True)
    ]
    said = {"reasoning": said["reasoning_content"], **said} if "reasoning_content" in said else said
    return [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "", **said, "tool_calls": made},
        *(
            {"role": "tool", "tool_call_id": each["id"], "name": name, "content": "none"}
            for each, (name, _) in zip(made, calls, strict=True)
        ),
    ]


@INSTALLS
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_is_read_and_written_again(
    templates: dict[str, str], name: str
) -> None:
    """A turn of the history is read, and the template writes the same from what was read."""
    before, after, tools, tags = TEMPLATES[name]
    assert formats_of(templates[name]) == (tools, tags)
    tokenizer = tokenizer_of(templates[name])
    ids = ["functions.weather:0", "functions.find:1"] if tools == "kimi_k2" else ["call00001"] * 2
    said = {"reasoning_content": "Hm."} if tags else {}
    prompt = tokenizer.render_chat(conversation(ids, CALLS, **said), tools=[TOOL, FIND])
    start = prompt.index(before, prompt.index("Where?")) + len(before)
    text = prompt[start : prompt.index(after, start)]
    found = answers(text, tools, tags or "think", schemas=SCHEMAS)
    wanted = CALLS[:1] if name in ONE_CALL else CALLS
    assert found.values == wanted and found.content == ""
    # The templates of DeepSeek leave reasoning out of the history.
    assert found.reasoning == ("Hm." if tags and "DeepSeek" not in name else "")
    if tools == "kimi_k2":
        assert [call[0] for call in found.calls] == ids
    told = {"reasoning_content": found.reasoning} if found.reasoning else said
    again = tokenizer.render_chat(
        conversation(ids[: len(wanted)], found.values, **told), tools=[TOOL, FIND]
    )
    assert again[: start + len(text)] == prompt[: start + len(text)]


@INSTALLS
@pytest.mark.parametrize("name", ONE_CALL)
def test_calls_of_one_turn_are_written_in_turns_of_their_own(
    templates: dict[str, str], name: str
) -> None:
    """Where the template has place for one. Each result follows its call."""
    before, after, tools, tags = TEMPLATES[name]
    tokenizer = tokenizer_of(templates[name])
    messages = conversation(["a00000001", "b00000002"], CALLS)
    prompts = {
        tokenizer.render_chat([*messages[:2], *results], tools=[TOOL, FIND])
        for results in (messages[2:], messages[:1:-1])
    }
    (prompt,) = prompts
    turns = prompt[prompt.index("Where?") :].split(before)[1:3]
    found = [answers(turn.split(after)[0], tools, tags or "think") for turn in turns]
    assert [each.values for each in found] == [[call] for call in CALLS]


@INSTALLS
def test_reasoning_and_content_beside_a_call_of_gpt_oss_are_both_written(
    templates: dict[str, str],
) -> None:
    """The template refuses them side by side; as analysis it takes both."""
    tokenizer = tokenizer_of(templates["openai-gpt-oss-120b"])
    messages = conversation(["a"], CALLS[:1], reasoning_content="Hm.", content="I look.")
    prompt = tokenizer.render_chat(messages, tools=[TOOL])
    assert "<|channel|>analysis<|message|>Hm.\n\nI look.<|end|>" in prompt


# --- Harmony ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """OpenAI's package, and its encoding."""
    package = import_or_skip("openai_harmony")
    folder = tmp_path_factory.mktemp("vocabulary")
    wheel = pip_download(tmp_path_factory.mktemp("wheel"), "bpe-openai==0.1.4")
    with zipfile.ZipFile(wheel) as archive:
        packed = archive.read("bpe_openai/data/o200k_base.tiktoken.gz")
    (folder / "o200k_base.tiktoken").write_bytes(gzip.decompress(packed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        encoding = package.load_harmony_encoding(package.HarmonyEncodingName.HARMONY_GPT_OSS)
    return package, encoding


HEADERS = [
    "<|channel|>analysis",
    "<|channel|>commentary",
    "<|channel|>final",
    "<|channel|>commentary to=functions.find <|constrain|>json",
    " to=functions.weather<|channel|>commentary json",
    "<|channel|>analysis to=functions.find",
]
TEXTS = ["Hm.", "Two\n\nlines", "é 🌸", "a <b> {c}", "1 < 2 <|en"]


@INSTALLS
def test_harmony_is_read_as_openais_parser_reads_it(harmony: Any) -> None:
    """Any messages in any order."""
    package, encoding = harmony
    chance = random.Random(1)
    for _ in range(200):
        parts = []
        for header in chance.choices(HEADERS, k=chance.randrange(1, 7)):
            is_call = "functions." in header
            body = json.dumps({"a": chance.choice(TEXTS)}) if is_call else chance.choice(TEXTS)
            parts.append(f"{header}<|message|>{body}" + ("<|call|>" if is_call else "<|end|>"))
        text = "<|start|>assistant".join(parts)
        tokens = encoding.encode(text, allowed_special="all")
        messages = encoding.parse_messages_from_completion_tokens(tokens, package.Role.ASSISTANT)
        calls, reasoning, content = [], [], []
        for message in messages:
            (part,) = message.content
            if message.recipient:
                name = message.recipient.removeprefix("functions.")
                calls.append((name, json.loads(part.text)))
            else:
                (reasoning if message.channel == "analysis" else content).append(part.text)
        found = answers(text, "harmony", "harmony")
        assert found.values == calls, text
        assert found.reasoning == "\n\n".join(reasoning), text
        assert found.content == "\n\n".join(content), text
