"""No regular expression costs more than linear time, whatever text it reads.

They are collected from the code, those in tables too. A new one fails here until it is linear.
"""

from __future__ import annotations

import ast
import importlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import regex

from tests.helpers.growth import MOST, growth
from tests.helpers.hostile_text import MARKS, SIZE, module_names, modules
from tests.helpers.scripted_text import tokenizer
from tests.helpers.tiers import budget
from trtllm_bls.errors import SetupError
from trtllm_bls.http.routes import ROUTES
from trtllm_bls.text.chat_formats import FORCED, TOOL_FORMATS, ToolFormat
from trtllm_bls.text.xml_calls import _tags

# Functions that put patterns together, and what makes one of each. The rest is read from the code.
COMPOSED: dict[str, Callable[[], list[Any]]] = {
    "trtllm_bls.text.call_reader.compiled": lambda: [],  # those of the formats: below
    "trtllm_bls.text.chat_formats.formats_of": lambda: [],  # over a template, once at load
    "trtllm_bls.text.tokenizer._template_writes": lambda: [],  # the same
    "trtllm_bls.text.tokenizer._any_of": lambda: [
        guard._pattern for guard in tokenizer()._chat_guards if guard.tokens
    ],
    "trtllm_bls.text.tokenizer.__init__": lambda: [
        cache._border for cache in [tokenizer()._cache] if cache is not None
    ],
    "trtllm_bls.settings.cpp_backend.check_backend": lambda: [],  # over an operator's value
    "trtllm_bls.operate.triton_reasons.remedy_of": lambda: [],  # over a line of Triton's log
    "trtllm_bls.openai.document._page": lambda: [],  # over a page of our own
    "trtllm_bls.http.routes.__post_init__": lambda: [row.pattern for row in ROUTES],
}
_USES = ("compile", "search", "match", "fullmatch", "sub", "split", "findall", "finditer")


def calls_in(scope: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """Calls of the libraries that read patterns, and the function's name."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of_library = ast.unparse(node.func.value) in ("re", "regex")
            if of_library and node.func.attr in _USES:
                yield node, node.func.attr


def members(name: str) -> dict[str, Any]:
    try:
        return vars(importlib.import_module(name))
    except (ImportError, SetupError):  # Triton's utilities, torch, a library of another machine
        return {}


def uses_in(trees: Iterable[ast.Module]) -> dict[str, set[str]]:
    """Return by name how patterns are used: its own, and those that a table of the name holds."""
    uses: dict[str, set[str]] = {}
    for tree in trees:
        in_module: dict[str, set[str]] = {}
        sources: dict[str, set[str]] = {}  # names by those that a loop or an assignment makes
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in _USES:
                owner = node.value.value if isinstance(node.value, ast.Subscript) else node.value
                in_module.setdefault(ast.unparse(owner), set()).add(node.attr)
            elif isinstance(node, (ast.For, ast.comprehension)):
                sources.setdefault(ast.unparse(node.target), set()).update(names_in(node.iter))
            elif isinstance(node, ast.Assign):
                target = ast.unparse(node.targets[0])
                sources.setdefault(target, set()).update(names_in(node.value))
        for name, functions in in_module.items():
            for owner_name in {name, *filter(str.isupper, sources.get(name, ()))}:
                uses.setdefault(owner_name, set()).update(functions)
    return uses


def names_in(expression: ast.expr) -> set[str]:
    """Return the names that an expression reads, but not those whose methods it calls."""
    called = {id(part.value) for part in ast.walk(expression) if isinstance(part, ast.Attribute)}
    return {
        part.id
        for part in ast.walk(expression)
        if isinstance(part, ast.Name) and id(part) not in called
    }


def patterns_in(value: object) -> Iterator[Any]:
    """Yield a pattern, or those that a table holds."""
    if isinstance(value, (re.Pattern, regex.Pattern)):
        yield value
    elif isinstance(value, dict):
        yield from patterns_in(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from patterns_in(item)


@cache
def patterns() -> dict[str, dict[str, tuple[Any, set[str]]]]:
    """Every pattern of the package and how it is used, by the first module that has it.

    The modules are imported for it, so it is made when the first test runs: each process of a run
    collects the tests, and one of them runs these.
    """
    by_module: dict[str, dict[str, tuple[Any, set[str]]]] = {}
    known: dict[str, tuple[Any, set[str]]] = {}
    unknown = []
    trees = dict(modules())
    uses = uses_in(trees.values())

    def note(module: str, pattern: Any, how: set[str]) -> None:
        name = repr(pattern)
        if name not in known:
            known[name] = (pattern, set())
            by_module.setdefault(module, {})[name] = known[name]
        known[name][1].update(how)

    for name, tree in trees.items():
        for key, value in members(name).items():
            for pattern in patterns_in(value):
                note(name, pattern, uses.get(key, set(_USES)))
        for scope in ast.walk(tree):
            if not isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            for node, function in calls_in(scope):
                written, place = node.args[0], f"{name}.{scope.name}"
                if isinstance(written, ast.Constant):
                    flags = re.DOTALL if "DOTALL" in ast.unparse(node) else 0
                    note(name, re.compile(written.value, flags), {function})
                elif place in COMPOSED:
                    for each in COMPOSED[place]():
                        note(name, each, set(_USES))
                else:
                    unknown.append(place)
    assert not unknown, f"say in COMPOSED what these make: {unknown}"
    for family, each in (*TOOL_FORMATS.items(), ("forced", FORCED)):
        for text, use in patterns_of(each):
            note(family, regex.compile(text), {use})
    return by_module


def patterns_of(tools: ToolFormat) -> Iterator[tuple[str, str]]:
    """Yield the patterns that read a format, and how they are used."""
    for text in (tools.header, tools.key, tools.line_key, tools.stray, tools.loose):
        yield text, "match"
    if tools.language == "xml":
        for tags in (_tags(tools, complete) for complete in (False, True)):
            for text in (tags.between, tags.after_value, tags.after_call):
                yield text, "match"
            for text in (tags.value, tags.held):
                yield text, "search"


def samples(pattern: str, flags: int) -> list[str]:
    """Texts that the pattern matches, or nearly so, each a way through its alternatives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sre_constants as constants
        import sre_parse

        pattern = re.sub(r"\(\?P<\w+>", "(", pattern)  # names that come twice
        parsed = sre_parse.parse(pattern, flags & ~regex.VERSION0 & ~regex.VERSION1 & 0x1FF)

    def ways(items: Any) -> list[str]:
        found = [""]
        for kind, value in items:
            more = [""]
            if kind is constants.LITERAL:
                more = [chr(value)]
            elif kind is constants.NOT_LITERAL:
                more = ["a" if value != ord("a") else "b"]
            elif kind is constants.ANY:
                more = ["a"]
            elif kind is constants.IN:
                more = _members(value, constants)
            elif kind is constants.BRANCH:
                more = [way for branch in value[1] for way in ways(branch)]
            elif kind is constants.SUBPATTERN:
                more = ways(value[-1])
            elif kind in (constants.ASSERT,):
                more = ways(value[1])
            elif kind in (constants.MAX_REPEAT, constants.MIN_REPEAT) or "REPEAT" in str(kind):
                more = [way * max(1, min(value[0], 3)) for way in ways(value[2])]
                more += [""] if value[0] == 0 else []
            elif "ATOMIC" in str(kind):
                more = ways(value)
            found = [begin + end for begin in found for end in more][:12]
        return found

    return ways(parsed)


def _members(items: Any, constants: Any) -> list[str]:
    kinds = {"CATEGORY_DIGIT": "1", "CATEGORY_SPACE": " ", "CATEGORY_WORD": "a"}
    found = []
    for kind, value in items:
        if kind is constants.LITERAL:
            found.append(chr(value))
        elif kind is constants.RANGE:
            found.append(chr(value[0]))
        elif kind is constants.CATEGORY:
            found.append(kinds.get(str(value), "-"))
        elif kind is constants.NEGATE:
            return ["x", "é"]
    return found[:4]


def hostile(pattern: Any) -> list[tuple[str, str]]:
    """Heads and what is repeated after them."""
    text = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode()
    ways = samples(text, pattern.flags)
    ways = list(dict.fromkeys(way for way in ways if way))[:4]
    heads = list(dict.fromkeys(way[:end] for way in ways for end in range(len(way) + 1)))
    heads = heads[:: max(1, len(heads) // 5)]
    marks = list(dict.fromkeys([*"".join(ways)[:12], *MARKS[:6]]))
    cases = [(head, mark) for head in heads for mark in marks]
    return cases + [("", head) for head in heads if head]


def modules_and_families() -> list[str]:
    """Return the names by which ``patterns`` may have any: of modules, and of families of calls."""
    return [*module_names(), *TOOL_FORMATS, "forced"]


@pytest.mark.parametrize("place", modules_and_families())
def test_no_regular_expression_reads_a_text_more_than_once(place: str) -> None:
    """Repeated and never-ending material, made of the pattern's own parts."""
    for name, (pattern, uses) in patterns().get(place, {}).items():
        for head, mark in hostile(pattern):
            grown = growth(partial(work, pattern, uses, head, mark), budget(SIZE, 4 * SIZE))
            assert grown <= MOST, f"{name}: {head!r} and {mark!r} repeated: {grown:.0f} times"


def work(pattern: Any, uses: set[str], head: str, mark: str, size: int) -> Callable[[], object]:
    """Return the uses of a pattern on a text of that size."""
    text: Any = head + mark * (size // len(mark))
    text = text.encode() if isinstance(pattern.pattern, bytes) else text
    more = {"partial": True} if isinstance(pattern, regex.Pattern) else {}

    def run() -> None:
        if uses & {"match", "compile"}:
            pattern.match(text, **more)
        if uses & {"fullmatch", "compile"}:
            pattern.fullmatch(text)
        if uses - {"match", "fullmatch"}:
            for _ in pattern.finditer(text, **more):
                pass

    return run


def test_every_pattern_is_read() -> None:
    """A place without a test would leave its patterns out."""
    assert patterns().keys() <= set(modules_and_families())
    assert sum(map(len, patterns().values())) > 100
