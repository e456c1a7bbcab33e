"""Compiles the grammars of guided decoding, first on trial in a process of their own.

A grammar is a caller's. A chain of 4,000 rules overflows the compiler's stack and ends the process
that compiles it; a grammar of 20,000 rules compiles for minutes. So a child process compiles every
grammar first, on a smaller stack than the engine's and within limits on CPU time and memory. Only a
grammar that passes is compiled in the engine's process, where it takes no longer and goes no
deeper.

``tried`` is the engine's side of that. ``python -m trtllm_bls.engines.grammars`` is the child: its
input is a grammar, its output a JSON string with the grammar's problem, or null. It imports no
torch.
"""

from __future__ import annotations

import json
import math
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

ENGINE_STACK_BYTES = 32 * 2**20  # for the thread that compiles in the engine's process
_TRIAL_STACK_BYTES = 8 * 2**20
_MEMORY_BYTES = 2 * 2**30  # limit of the child's address space, of which it needs a tenth
# The longest wait by the clock: for the child to load the vocabulary, and for each second of CPU
# that the guide may take. On a busy machine a child gets little CPU. A guide that is too dear ends
# by its CPU time, so this limit is for a child that is stuck.
_START_SECONDS = 60.0
_CLOCK_FACTOR = 60
# llguidance reads numbers as doubles: a larger integer may come out as another, and the smallest
# one with 64 bits ends the process.
_MAX_NUMBER = 2**53 - 1
_SET_OPERATORS = ("[", "[^", "[]", "[^]", "&&", "--", "~~")
# JSON on one line: a model may otherwise write white space for ever. No escapes by number: a key
# could be written as "\u0061" beside "a", and would have a value that the schema does not allow for
# it. A schema's own "x-guidance" could lift these rules, so all of them are set.
_JSON_RULES = {
    "json_allowed_escapes": 'nrbtf\\"',
    "whitespace_pattern": "[ ]?",
    "coerce_one_of": False,
    "lenient": False,
}


def tried(
    tokenizer_file: Path, vocab_size: int, seconds: float, kind: str, text: str
) -> str | None:
    """Return a grammar's problem; ``None`` if it compiles within ``seconds`` of CPU time.

    Raises ``TimeoutError`` if the machine was too busy for an answer; another trial may have one.
    """
    arguments = [str(tokenizer_file), str(vocab_size), str(seconds), kind]
    command = [sys.executable, "-m", "trtllm_bls.engines.grammars", *arguments]
    by_clock = _START_SECONDS + _CLOCK_FACTOR * seconds
    try:
        trial = subprocess.run(
            command,
            input=json.dumps(text),  # ASCII, whatever the locale is
            stdout=subprocess.PIPE,
            text=True,
            timeout=by_clock,
            check=False,
        )
    except subprocess.TimeoutExpired:
        busy = f"compiling the guide did not end in {by_clock:g} s; this machine has too much to do"
        raise TimeoutError(busy) from None
    if trial.stdout:
        problem: str | None = json.loads(trial.stdout)
        return problem
    if trial.returncode == -signal.SIGXCPU:
        limit = f"more than {seconds:g} s (parameter guide_compile_seconds)"
        return f"cannot be enforced: compiling it takes {limit}"
    return "cannot be enforced: its rules are too many, nested or chained too deeply"


def compiled(tokenizer: LLTokenizer, kind: str, text: str) -> LLMatcher:
    """Return a matcher at the beginning of a text. Raises ``ValueError`` with the problem."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        grammar = _grammar(tokenizer, kind, text)
    except ValueError as error:
        raise ValueError(f"is no {kind}: {first_line(str(error))}") from None
    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(f"cannot be enforced: {first_line(matcher.get_error())}")
    return matcher


def load_tokenizer(file: Path, vocab_size: int) -> LLTokenizer:
    """Load the vocabulary for matching grammars. Raises the errors of llguidance."""
    from llguidance import LLTokenizer

    return LLTokenizer(file.read_text(encoding="utf-8"), n_vocab=vocab_size)


def first_line(text: str) -> str:
    """Return the part of a library's error that a caller gets."""
    lines = text.strip().splitlines() or ["no reason given"]
    if lines[0] == "NoExtensionBias":
        return "no text fits it"
    return lines[0][:300]


def _grammar(tokenizer: LLTokenizer, kind: str, text: str) -> str:
    """Return the guide in llguidance's form. Raises ``ValueError`` if it is not of its kind."""
    from llguidance import LLMatcher

    if kind == "regex":
        return LLMatcher.grammar_from_regex(_portable(text))
    if kind == "ebnf_grammar":
        return _lark(text)
    if kind == "json":
        text = '{"type": "object"}'
    try:
        document = json.loads(
            text,
            object_hook=_checked,
            parse_int=_number,
            parse_float=_number,
            parse_constant=_number,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if kind == "structural_tag":
        return _TagGrammar(tokenizer).grammar(document)
    return LLMatcher.grammar_from_json_schema(
        json.dumps(_schema(document)),
        overrides=_JSON_RULES,  # type: ignore[arg-type]
    )


def _lark(text: str) -> str:
    """Translate an EBNF grammar."""
    from llguidance import grammar_from

    grammar = str(grammar_from("ebnf", text))
    if grammar == text and "%json" in text:  # Lark's own, whose schema nobody has checked
        raise ValueError("%json is not allowed in it; send a json_schema")
    return grammar


def _schema(document: Any) -> dict[str, Any]:
    if document is True:
        return {}
    if document is False:
        return {"enum": []}
    if not isinstance(document, dict):
        raise ValueError("a schema is an object or a boolean")
    return document


class _TagGrammar:
    """Writes a structural tag, as xgrammar describes it, in llguidance's form.

    It knows what ``text.chat_guides`` needs: a form or calls, and reasoning before either.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._special: dict[str, int] = {}
        for token in range(tokenizer.vocab_size):
            if tokenizer.is_special_token(token):
                self._special[tokenizer.decode_str([token])] = token
        self._rules: list[str] = []

    def grammar(self, tag: Any) -> str:
        """Return the grammar. Raises ``ValueError`` for parts that it does not know."""
        if not isinstance(tag, dict):
            raise ValueError("a structural tag is an object")
        start = self._part(tag.get("format"))
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules])

    def _part(self, part: Any) -> str:
        match part:
            case {"type": "json_schema", "json_schema": schema}:
                rules = json.dumps({**_schema(schema), "x-guidance": _JSON_RULES})
                return self._rule(f": %json {rules}")
            case {"type": "regex", "pattern": str(pattern)}:
                return self._rule(f": /{_without_slashes(_portable(pattern))}/")
            case {"type": "grammar", "grammar": str(grammar)}:
                lark = _lark(grammar).replace("%llguidance {}", "")
                return self._rule(f": %lark {{\n{lark}\n}}")
            case {"type": "const_string", "value": str(value)}:
                return self._constant(value)
            case {"type": "any_text"}:
                return "<[*]>*"
            case {
                "type": "tag",
                "begin": str(begin),
                "content": {"type": "any_text"},
                "end": str(end),
            } if end:
                opening = ""
                if begin:
                    opening = self._constant(begin)
                return f"({opening} {self._until(end)})"
            case {"type": "or" | "sequence" as kind, "elements": list(parts)} if parts:
                separator = " | " if kind == "or" else " "
                return f"({separator.join(map(self._part, parts))})"
        kinds = "or, sequence, json_schema, regex, grammar, const_string, any_text and a tag of it"
        raise ValueError(f"only {kinds} are supported")

    def _rule(self, body: str) -> str:
        name = f"part{len(self._rules)}"
        self._rules.append(name + body)
        return name

    def _constant(self, text: str) -> str:
        if text in self._special:
            return f"({_literal(text)} | <[{self._special[text]}]>)"
        return f"({_literal(text)})"

    def _until(self, end: str) -> str:
        """Match any text up to a marker, which is one token or spelled."""
        token = self._special.get(end)
        if token is not None:
            return f"<[^{token}]>* <[{token}]>"
        return self._rule(f"[suffix={_literal(end)}]: /(?s:.*)/")


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _without_slashes(pattern: str) -> str:
    """Escape the slashes, which would end a regular expression in Lark."""
    return re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", pattern, flags=re.DOTALL)


def _portable(pattern: str) -> str:
    """Narrow a regular expression to its meaning in every dialect.

    llguidance reads Rust's. There ``\\d`` takes digits of all alphabets, and ``.`` takes line ends
    that JavaScript's does not. Raises ``ValueError`` for sets that other dialects read otherwise.
    """
    over_lines = re.search(r"\(\?\w*s", pattern)  # the flag of ``.``
    parts: list[str] = []
    inside = ""  # the opening bracket of a set
    for part in re.findall(r"\\.|\[\^?\]?|&&|--|~~|.", pattern, re.DOTALL):
        if inside and part in _SET_OPERATORS:
            advice = f"write it as \\{part[0]}"
            raise ValueError(f"{part} inside [] has another meaning elsewhere; {advice}")
        if part[0] == "[":
            inside = part
        elif part == "]":
            inside = ""
        if part == r"\d" and not inside.startswith("[^"):
            part = "0-9"
            if not inside:
                part = "[0-9]"
        elif part == "." and not inside and not over_lines:
            part = r"[^\n\r\u2028\u2029]"
        parts.append(part)
    return "".join(parts)


def _checked(schema: dict[str, Any]) -> dict[str, Any]:
    """Refuse a minimum that llguidance does not keep: it counts a repeated key twice."""
    minimum = schema.get("minProperties")
    required = schema.get("required")
    num_required = 0
    if isinstance(required, list):
        num_required = len(set(map(str, required)))
    if isinstance(minimum, int) and minimum > max(1, num_required):
        raise ValueError("minProperties is beyond the required keys; name more keys as required")
    return schema


def _number(text: str) -> float:
    number = int(text) if text.lstrip("-").isdecimal() else float(text)
    if not abs(number) <= _MAX_NUMBER:  # NaN, too
        raise ValueError(f"the number {text[:40]} in it is beyond {_MAX_NUMBER}")
    return number


# --- the child --------------------------------------------------------------------------------


def main() -> None:
    """Try the grammar of standard input."""
    file, vocab_size, seconds, kind = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = load_tokenizer(Path(file), int(vocab_size))
    cpu_seconds = math.ceil(time.process_time() + float(seconds))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, resource.RLIM_INFINITY))
    threading.stack_size(_TRIAL_STACK_BYTES)
    problems: list[str | None] = []
    trial = threading.Thread(target=_try, args=(tokenizer, kind, json.load(sys.stdin), problems))
    trial.start()
    trial.join()
    print(json.dumps(problems[0]))


def _try(tokenizer: LLTokenizer, kind: str, text: str, problems: list[str | None]) -> None:
    try:
        matcher = compiled(tokenizer, kind, text)
        matcher.compute_bitmask()  # the work for the first token counts as well
        problem: str | None = None
        if matcher.is_error():
            problem = f"cannot be enforced: {first_line(matcher.get_error())}"
        problems.append(problem)
    except (ValueError, RecursionError, MemoryError) as error:
        problems.append(str(error) or f"cannot be enforced: {type(error).__name__}")


if __name__ == "__main__":
    main()
