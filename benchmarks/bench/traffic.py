"""Requests and their answers, without a model.

``categories``: the eleven of NVIDIA's SPEED-Bench (arXiv 2604.09557), with prompts and answers of
our own. ``kinds``: the history of a repository gives edits, diffs, new files and the turns of an
agent, Python's own documentation gives prose; calls of functions and SQL are written by rule from a
fixed seed. Each kind is in the order in which one user would ask.
"""

from __future__ import annotations

import difflib
import json
import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

LONGEST_FILE = 16_000  # characters of a file that is edited or written
LONGEST_PROSE = 2_000
SYSTEM = "You are a careful assistant. Answer briefly and exactly.\n"


@dataclass(frozen=True)
class Exchange:
    """A prompt and its answer, as text; ``prediction``: what a client would expect instead."""

    prompt: str
    answer: str
    prediction: str = ""


@dataclass(frozen=True)
class Category:
    """Exchanges as with a large model, and prompts of which the demo's models know the answer."""

    exchanges: list[Exchange]
    demo: list[str]


def categories() -> dict[str, Category]:
    """Of ``categories.txt``: === category, --- demo, then --- prompt and --- answer in turns."""
    found = {}
    for text in Path(__file__).with_name("categories.txt").read_text().split("=== ")[1:]:
        name, *parts = re.split(r"\n--- \w+\n", text)
        demo = [line.replace("\\n", "\n") for line in parts[0].splitlines()]
        pairs = zip(parts[1::2], parts[2::2], strict=True)
        found[name] = Category([Exchange(*(each.strip() for each in pair)) for pair in pairs], demo)
    return found


def git(repository: Path, *words: str) -> str:
    command = ["git", "-C", str(repository), *words]
    return subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout


@dataclass(frozen=True)
class Change:
    """What one commit did to one file; ``old`` is empty for a new one."""

    subject: str
    path: str
    old: str
    new: str

    @property
    def diff(self) -> str:
        old, new = self.old.splitlines(keepends=True), self.new.splitlines(keepends=True)
        return "".join(difflib.unified_diff(old, new, f"a/{self.path}", f"b/{self.path}", n=3))

    def replacements(self) -> Iterator[tuple[str, str]]:
        """Old and new text of each place, with a line of context before and after."""
        old, new = self.old.splitlines(keepends=True), self.new.splitlines(keepends=True)
        matcher = difflib.SequenceMatcher(a=old, b=new, autojunk=False)
        for group in matcher.get_grouped_opcodes(1):
            (_, a, _, b, _), (_, _, c, _, d) = group[0], group[-1]
            yield "".join(old[a:c]), "".join(new[b:d])


def changes(repository: Path, commit: str, kind: str, count: int) -> list[Change]:
    """The latest ``count`` changes of Python files before ``commit``, oldest first.

    ``kind``: M for modified files, A for new ones. At most one change of each commit.
    """
    log = git(
        repository,
        *("log", "--no-merges", f"--diff-filter={kind}", "--name-only", "--format=%x00%H %s"),
        *(commit, "--", "*.py"),
    )
    found: list[Change] = []
    for entry in log.split("\0")[1:]:
        head, *paths = [line for line in entry.splitlines() if line]
        sha, subject = head.split(" ", 1)
        for path in paths:
            new = git(repository, "show", f"{sha}:{path}")
            old = git(repository, "show", f"{sha}^:{path}") if kind == "M" else ""
            if 400 < len(new) <= LONGEST_FILE and len(old) <= LONGEST_FILE:
                found.append(Change(subject, path, old, new))
                break
        if len(found) == count:
            break
    return found[::-1]


def of_changes(edited: list[Change], added: list[Change]) -> dict[str, list[Exchange]]:
    """Whole files, diffs and new code."""
    found: dict[str, list[Exchange]] = {"whole files": [], "diffs": [], "new code": []}
    for change in edited:
        ask = f"{change.path}: {change.subject}\n```python\n{change.old}```\n"
        old, new = (f"```python\n{text}```\n" for text in (change.old, change.new))
        diff = f"```diff\n{change.diff}```\n"
        found["whole files"].append(Exchange(f"{SYSTEM}Change {ask}", new, old))
        found["diffs"].append(Exchange(f"{SYSTEM}Write a diff of {ask}", diff))
    for change in added:
        ask = f"{SYSTEM}Write {change.path}: {change.subject}\n"
        found["new code"].append(Exchange(ask, f"```python\n{change.new}```\n"))
    return found


def agent_turns(edited: list[Change]) -> Iterator[Exchange]:
    """A session for each change: the file is read, each place replaced, and the end reported."""
    tools = [call_schema("read_file", "path"), call_schema("replace", "path", "old", "new")]
    system = f"{SYSTEM}Tools:\n{json.dumps(tools, indent=1)}\n"
    for each in edited:
        said = f"{system}<user>{each.subject}</user>\n"
        turns = [("read_file", {"path": each.path}, each.old)]
        for old, new in list(each.replacements())[:8]:
            turns.append(("replace", {"path": each.path, "old": old, "new": new}, "replaced"))
        for name, arguments, result in turns:
            answer = json.dumps({"name": name, "arguments": arguments}) + "\n"
            yield Exchange(said + "<assistant>", answer)
            said += f"<assistant>{answer}</assistant>\n<tool>{result}</tool>\n"
        yield Exchange(said + "<assistant>", f"Done: {each.subject}. Changed {each.path}.\n")


def call_schema(name: str, *fields: str) -> dict[str, object]:
    members = {field: {"type": "string", "description": f"The {field}."} for field in fields}
    return {"name": name, "parameters": {"type": "object", "properties": members}}


PEOPLE = ("Ada Quist", "Bruno Ferrante", "Chen Wei", "Dana Oduya", "Emil Sand", "Fatima Noor")
PLACES = ("Lisbon", "Bergen", "Kyoto", "Montreal", "Nairobi", "Porto Alegre", "Graz", "Oulu")
CALLS = {
    "search_flights": ("origin", "destination", "date", "cabin", "passengers"),
    "create_ticket": ("title", "customer", "priority", "assignee", "labels"),
    "send_invoice": ("customer", "amount", "currency", "due_date", "reference"),
    "book_room": ("city", "from_date", "to_date", "guests", "breakfast"),
}


def json_calls(count: int) -> Iterator[Exchange]:
    """One call each, whose arguments stand in the question or are usual."""
    rng = random.Random(1)
    tools = json.dumps([call_schema(name, *fields) for name, fields in CALLS.items()], indent=1)
    for _ in range(count):
        name = rng.choice(list(CALLS))
        who, here, there = rng.choice(PEOPLE), *rng.sample(PLACES, 2)
        day, other = (f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}" for _ in range(2))
        number = rng.randint(1000, 99999)
        # All are drawn for every call, so that one draws no other numbers than another.
        passengers = rng.randint(1, 4)
        title = f"Order {number} has not arrived in {here}"
        labels = ["delivery", "customer-contact"]
        priority = rng.choice(("normal", "high"))
        values: dict[str, tuple[object, ...]] = {
            "search_flights": (here, there, day, "economy", passengers),
            "create_ticket": (title, who, priority, "support-tier-1", labels),
            "send_invoice": (who, number / 100, "EUR", day, f"INV-2026-{number}"),
            "book_room": (here, day, other, rng.randint(1, 4), True),
        }
        arguments = dict(zip(CALLS[name], values[name], strict=True))
        spoken = ", ".join(f"{key} {value}" for key, value in arguments.items())
        ask = f"{SYSTEM}Functions:\n{tools}\nUser: please {name.replace('_', ' ')}: {spoken}\n"
        call = {"id": f"call_{rng.randrange(16**8):08x}", "type": "function"}
        call["function"] = {"name": name, "arguments": arguments}
        yield Exchange(ask, json.dumps(call, indent=2) + "\n")


TABLES = {
    "customers": ("customer_id", "full_name", "country", "created_at"),
    "orders": ("order_id", "customer_id", "ordered_at", "status", "total_amount"),
    "order_lines": ("order_line_id", "order_id", "product_id", "quantity", "unit_price"),
    "products": ("product_id", "product_name", "category", "weight_grams"),
}


def sql(count: int) -> Iterator[Exchange]:
    """Questions about a schema of four tables."""
    rng = random.Random(2)
    schema = "\n".join(
        f"CREATE TABLE {name} ({', '.join(f'{field} text' for field in fields)});"
        for name, fields in TABLES.items()
    )
    for _ in range(count):
        place, year, most = rng.choice(PLACES), rng.randint(2019, 2026), rng.choice((5, 10, 20))
        group = rng.choice(("c.country", "p.category", "o.status", "c.full_name"))
        measure, words = rng.choice(
            (
                ("SUM(ol.quantity * ol.unit_price)", "revenue"),
                ("COUNT(DISTINCT o.order_id)", "number of orders"),
                ("AVG(o.total_amount)", "average order"),
            )
        )
        where = rng.choice(
            (
                f"c.country = '{place}'",
                f"o.ordered_at >= '{year}-01-01'",
                f"o.status = '{rng.choice(('paid', 'open', 'sent'))}' AND c.country <> '{place}'",
                f"p.weight_grams > {rng.choice((100, 250, 500))}",
            )
        )
        name = words.replace(" ", "_")
        ask = f"{SYSTEM}{schema}\nThe {words} by {group}, {most} highest, where {where}\n"
        answer = (
            f"```sql\nSELECT {group}, {measure} AS {name}\nFROM orders AS o\n"
            "JOIN customers AS c ON c.customer_id = o.customer_id\n"
            "JOIN order_lines AS ol ON ol.order_id = o.order_id\n"
        )
        if "p." in group + where:
            answer += "JOIN products AS p ON p.product_id = ol.product_id\n"
        answer += f"WHERE {where}\nGROUP BY {group}\nORDER BY {name} DESC\nLIMIT {most};\n```\n"
        yield Exchange(ask, answer)


def prose() -> Iterator[Exchange]:
    """Questions about Python, and paragraphs of its documentation."""
    for name, text in topics.items():
        title, _, body = text.partition("\n")
        body = body.lstrip("*=\n")[:LONGEST_PROSE]
        if len(body) > 300:
            yield Exchange(f"{SYSTEM}User: explain {title.lower()} ({name}) in Python.\n", body)


def extraction() -> Iterator[Exchange]:
    """Quotations from an article, as JSON."""
    rng = random.Random(3)
    for name, text in topics.items():
        text = text[:6_000]
        sentences = [s for s in re.split(r"(?<=\.)\s+", text) if 40 < len(s) < 240]
        if len(sentences) < 4:
            continue
        quoted = [" ".join(each.split()) for each in sorted(rng.sample(sentences, 3))]
        found = {"topic": name, "title": text.split("\n", 1)[0], "quotations": quoted}
        ask = f"{SYSTEM}Quote the three statements that matter most, as JSON.\n{text}\n"
        yield Exchange(ask, json.dumps(found, indent=2) + "\n")


def kinds(repository: Path, commit: str, count: int) -> dict[str, list[Exchange]]:
    """Each kind of traffic, ``count`` exchanges at most."""
    edited = changes(repository, commit, "M", count)
    changed = of_changes(edited, changes(repository, commit, "A", count))
    found = {
        "whole files": changed["whole files"],
        "diffs": changed["diffs"],
        "agent turns": agent_turns(edited[: count // 4]),
        "new code": changed["new code"],
        "JSON calls": json_calls(count),
        "SQL": sql(count),
        "extraction": extraction(),
        "prose": prose(),
    }
    return {name: list(exchanges)[:count] for name, exchanges in found.items()}
