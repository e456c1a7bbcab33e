"""The page at ``/docs``: ``/openapi.json`` for people, in one file without scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; }
body { max-width: 60rem; margin: 0 auto; padding: 1rem; font: 1rem/1.55 system-ui, sans-serif; }
h2 { margin: 2rem 0 .4rem; font: 600 1.05rem/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid light-dark(#ddd, #444); text-align: left;
  vertical-align: top; overflow-wrap: anywhere; }
code, pre { font: .9em/1.5 ui-monospace, monospace; }
pre { overflow-x: auto; }
summary { cursor: pointer; }
"""


def docs_page(document: Mapping[str, Any]) -> str:
    """Return the page of an OpenAPI document: each operation with its fields and answers."""
    info = document["info"]
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(info['title'])}: API</title><style>{_STYLE}</style>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        '<p>The same for programs: <a href="openapi.json">openapi.json</a>. '
        'To chat: <a href="./">the page</a>.</p>',
    ]
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2>{method.upper()} {escape(path)}</h2>")
            if summary := operation.get("summary"):
                parts.append(f"<p>{escape(summary)}</p>")
            parts.extend(_fields(operation, schemas))
            parts.extend(_answers(operation))
    return "".join(parts)


def _fields(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    body = operation.get("requestBody")
    if body is None:
        return
    content = body["content"]["application/json"]
    if example := content.get("example"):
        yield f"<pre>{escape(json.dumps(example, indent=2, ensure_ascii=False))}</pre>"
    schema = _resolved(content["schema"], schemas)
    required = schema.get("required", ())
    count = len(schema["properties"])
    yield f"<details><summary>{count} fields</summary><table>"
    yield "<tr><th>field</th><th>type</th><th>meaning</th></tr>"
    for name, field in schema["properties"].items():
        meaning = escape(field.get("description", ""))
        kind = escape(_type_of(field))
        if name in required:
            kind += ", required"
        cells = f"<td><code>{escape(name)}</code></td><td>{kind}</td><td>{meaning}</td>"
        yield f"<tr>{cells}</tr>"
    yield "</table></details>"


def _answers(operation: Mapping[str, Any]) -> Iterator[str]:
    yield "<details><summary>answers</summary><table>"
    for status, answer in operation["responses"].items():
        kinds = ", ".join(answer.get("content", {}))
        description = escape(answer["description"])
        yield f"<tr><td>{status}</td><td>{description}</td><td>{escape(kinds)}</td></tr>"
    yield "</table></details>"


def _resolved(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref")
    if reference is None:
        return schema
    resolved: Mapping[str, Any] = schemas[_name_of(reference)]
    return resolved


def _type_of(field: Mapping[str, Any]) -> str:
    """Return the type of a field in words: "integer or null", "list of string"."""
    if "$ref" in field:
        return _name_of(field["$ref"])
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type_of(choice) for choice in field["anyOf"]))
    if "enum" in field:
        return "one of " + ", ".join(str(value) for value in field["enum"])
    if field.get("type") == "array":
        return "list of " + _type_of(field.get("items", {}))
    return str(field.get("type", "any"))


def _name_of(reference: str) -> str:
    return reference.rpartition("/")[2]
