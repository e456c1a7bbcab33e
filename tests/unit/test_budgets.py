"""The table of budgets has a row for whatever a client can name, send or repeat."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect as schema_types
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from wsproto.frame_protocol import Opcode

from tests.helpers.syntax_trees import tree
from trtllm_bls.http import infer
from trtllm_bls.http.budgets import BUDGETS, Budget
from trtllm_bls.http.routes import ROUTES
from trtllm_bls.openai import face_requests, messages, responses, schema
from trtllm_bls.wire.contract import MODELS

ROOT = Path(__file__).parents[2]
COVERED = [name for budget in BUDGETS for name in budget.covers]
REQUESTS = (
    schema.ChatCompletionRequest,
    schema.ChatMessage,
    schema.CompletionRequest,
    schema.TokenizeRequest,
    schema.DetokenizeRequest,
    responses.ResponsesRequest,
    responses.CompactRequest,
    responses.Item,
    messages.MessagesRequest,
    messages.CountTokensRequest,
    messages.Block,
    infer.InferBody,
    face_requests.EmbeddingsRequest,
    face_requests.SpeechRequest,
    face_requests.RerankRequest,
)


def test_no_two_rows_count_the_same() -> None:
    """So that one number answers what the bound is."""
    assert len(COVERED) == len({*COVERED})
    assert len(BUDGETS) == len({budget.unit for budget in BUDGETS})


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: budget.unit)
def test_the_test_of_a_row_exists(budget: Budget) -> None:
    """Whoever doubts a bound can run it."""
    path, _, name = budget.test.partition(":")
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)


# --- what a request is made of ------------------------------------------------------------------


def unbounded(place: str, kind: Any, seen: set[type]) -> Iterator[str]:
    """Lists, objects, texts and integers that the request's own types do not bound."""
    if isinstance(kind, schema_types.UnionType):
        for each in kind.types:
            yield from unbounded(place, each, seen)
    elif isinstance(kind, schema_types.ListType):
        if kind.max_length is None:
            yield f"list {place}"
        yield from unbounded(f"{place}[]", kind.item_type, seen)
    elif isinstance(kind, schema_types.DictType):
        if kind.max_length is None:
            yield f"object {place}"
        yield from unbounded(f"{place}{{}}", kind.value_type, seen)
    elif isinstance(kind, schema_types.StrType):
        if kind.max_length is None and kind.pattern is None:
            yield f"text {place}"
    elif isinstance(kind, schema_types.IntType):
        if kind.le is None and kind.lt is None:
            yield f"integer {place}"
    elif isinstance(kind, schema_types.StructType) and kind.cls not in seen:
        seen.add(kind.cls)
        for field in kind.fields:
            yield from unbounded(field.encode_name, field.type, seen)


def test_a_field_of_a_request_has_a_bound_or_a_row() -> None:
    """A new list, text, object or number of any API needs one of them, and no row is of none."""
    seen: set[type] = set()
    found: set[str] = set()
    for request in REQUESTS:
        found.update(unbounded("", schema_types.type_info(request), seen))
    kinds = ("list ", "object ", "text ", "integer ")
    assert found == {name for name in COVERED if name.startswith(kinds)}


def test_a_new_field_would_be_found() -> None:
    """Of any kind, however deep it stands."""

    inner = msgspec.defstruct("Inner", [("words", list[str]), ("count", int)])
    outer = msgspec.defstruct("Outer", [("inner", list[inner]), ("more", dict[str, int])])  # type: ignore[valid-type]
    found = {*unbounded("", schema_types.type_info(outer), set())}
    assert found == {
        *("list inner", "list words", "text words[]", "integer count", "object more"),
        "integer more{}",
    }


def test_every_request_of_the_apis_is_walked() -> None:
    """A ``Struct`` that bodies are decoded as is among those above."""
    decoded: set[str] = set()
    for path in (ROOT / "trtllm_bls" / "openai").glob("*.py"):
        for name in re.findall(r"\b(\w+Request)\b", path.read_text()):
            decoded.add(name)
    known = {cls.__name__ for cls in REQUESTS}
    not_of_clients = {"EngineRequest", "InvalidRequest", "SpeculationRequest", "TextRequest"}
    not_of_clients.add("TurnRequest")  # is made of one
    assert decoded - known <= not_of_clients


# --- routes and protocols -----------------------------------------------------------------------


def test_what_a_route_takes_has_a_row() -> None:
    """Types of bodies, headers that are passed on, and names in a path."""
    found: set[str] = set()
    for route in ROUTES:
        found.update(f"body {kind.decode() or 'unnamed'}" for kind in route.body)
        found.update(f"header {name.decode()}" for name in route.headers)
        found.update(f"place {place}" for place in re.findall(r"\{\w+\}", route.path))
    kinds = ("body ", "header ", "place ")
    assert found == {name for name in COVERED if name.startswith(kinds)}


def test_what_http_and_websockets_repeat_has_a_row() -> None:
    """Each callback of the HTTP parser, and each kind of frame of a WebSocket."""
    parsed = {name for name in dir(HttpToolsProtocol) if name.startswith("on_")}
    parsed |= {"on_chunk_header", "on_chunk_complete"}  # httptools has these, too
    callbacks = {name.partition(" ")[2] for name in COVERED if name.startswith("callback ")}
    assert parsed == callbacks
    frames = {name.partition(" ")[2] for name in COVERED if name.startswith("frame ")}
    assert frames == {opcode.name for opcode in Opcode}


def test_an_input_of_a_model_has_a_range_or_a_row() -> None:
    """Texts, lists, and numbers that the contract does not bound."""
    found = {
        f"tensor {tensor.name}"
        for model in MODELS
        for tensor in model.inputs
        if not (tensor.single and (tensor.dtype == "BOOL" or tensor.bounds is not None))
    }
    assert found == {name for name in COVERED if name.startswith("tensor ")}


# --- what outlives a request --------------------------------------------------------------------

FOLDERS = ("http", "openai")
# Their objects end with the request, the connection or the call that they are made for, whose
# own size bounds them; or they are made once, from what the operator wrote.
OF_ONE_REQUEST = {
    *("builder", "chat", "completions", "responses", "messages", "conversation"),
    *("schema", "infer", "client_tools", "exchange.Reply"),
}
CONSTANT = {
    "accepting.WorkerServer._acceptors",
    "limits.Refused.headers",
    "values.numpy_type",
    "document.document",
    "document._page",
    "api_settings.ApiSettings.loras",
    "api_settings.ApiSettings.chat_template_kwargs",
}
_CONTAINERS = {"dict", "list", "set", "deque", "OrderedDict", "defaultdict", "Counter"}


def is_container(value: ast.expr | None) -> bool:
    """True for an empty container, which something will be put into."""
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.List):
        return not value.elts
    if not isinstance(value, ast.Call):
        return False
    function = value.func.value if isinstance(value.func, ast.Subscript) else value.func
    name = getattr(function, "id", getattr(function, "attr", ""))
    if name == "field":
        factories = [item.value for item in value.keywords if item.arg == "default_factory"]
        return any(getattr(factory, "id", "") in _CONTAINERS for factory in factories)
    return name in _CONTAINERS


def kept(tree: ast.Module, module: str) -> Iterator[str]:
    """Containers of a module and of its objects, and functions whose results are cached."""
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and is_container(node.value):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            yield f"{module}.{ast.unparse(target)}"
        elif isinstance(node, ast.FunctionDef):
            if any("cache" in ast.unparse(each) for each in node.decorator_list):
                yield f"{module}.{node.name}"
        elif isinstance(node, ast.ClassDef):
            for inner in ast.walk(node):
                if not isinstance(inner, (ast.Assign, ast.AnnAssign)):
                    continue
                target = inner.targets[0] if isinstance(inner, ast.Assign) else inner.target
                name = ast.unparse(target)
                is_kept = name.startswith("self.") or inner in node.body
                if is_kept and is_container(inner.value):
                    yield f"{module}.{node.name}.{name.removeprefix('self.')}"


def test_a_container_that_outlives_a_request_has_a_row() -> None:
    """A new ``dict``, ``list``, ``set`` or cache needs a row, or is a part of one request."""
    found: set[str] = set()
    for folder in FOLDERS:
        for path in (ROOT / "trtllm_bls" / folder).glob("*.py"):
            found.update(kept(tree(path), path.stem))
    of_requests = {
        name for name in found if any(name.startswith(f"{part}.") for part in OF_ONE_REQUEST)
    }
    rows = {name.partition(" ")[2] for name in COVERED if name.startswith("kept ")}
    ours = {name for name in rows if (name.partition(".")[0]) in modules()}
    assert found - of_requests - CONSTANT == ours


def modules() -> set[str]:
    """The modules of the folders that are walked."""
    return {path.stem for folder in FOLDERS for path in (ROOT / "trtllm_bls" / folder).glob("*.py")}


def test_a_new_container_would_be_found() -> None:
    """Of a module, of an object, of a dataclass, and a cache."""
    source = (
        "a = {}\nb: set[str] = set()\nc = [1]\n"
        "@lru_cache(maxsize=None)\ndef d(): x = {}\n"
        "class E:\n    f: dict[str, str] = field(default_factory=dict)\n"
        "    def __init__(self):\n        self.g = deque()\n        h = []\n"
    )
    assert {*kept(ast.parse(source), "m")} == {"m.a", "m.b", "m.d", "m.E.f", "m.E.g"}
