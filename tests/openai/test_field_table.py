"""The table of docs/openai.md that says what becomes of a field in each API."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.openai_server import MODEL
from trtllm_bls.openai.api_errors import ApiError
from trtllm_bls.openai.messages import MessagesRequest
from trtllm_bls.openai.responses import ResponsesRequest
from trtllm_bls.openai.schema import ChatCompletionRequest, CompletionRequest, Generation, decode

TURN = {"role": "user", "content": "x"}
APIS: tuple[tuple[type[Generation], dict[str, Any]], ...] = (
    (ChatCompletionRequest, {"messages": [TURN]}),
    (CompletionRequest, {"prompt": "x"}),
    (ResponsesRequest, {"input": "x"}),
    (MessagesRequest, {"messages": [TURN], "max_tokens": 9}),
)
PAGE = Path(__file__).parents[2] / "docs" / "openai.md"
ROW = re.compile(
    r"\| `(\w+)` \| `(.*?)` \| (\w[\w ]*) \| (\w[\w ]*) \| (\w[\w ]*) \| (\w[\w ]*) \|"
)
ROWS = ROW.findall(PAGE.read_text())


def verdict(kind: type[Generation], body: dict[str, Any], field: str, value: Any) -> str:
    """What becomes of the field in a request of this API."""
    try:
        decode(json.dumps({"model": MODEL, **body, field: value}).encode(), kind)
    except ApiError as error:
        assert error.param == field and error.status == 400
        return "refused"
    if field in kind.__struct_fields__:
        return "taken"
    return "no effect" if field in kind.no_effect else "unknown"


def test_the_page_has_the_fields_that_clients_send_to_several_apis() -> None:
    assert len(ROWS) > 15


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_api_does_with_a_field_what_the_page_says(row: tuple[str, ...]) -> None:
    """One verdict for each: taken, without effect, unknown, or refused."""
    field, value, *verdicts = row
    found = [verdict(kind, body, field, json.loads(value)) for kind, body in APIS]
    assert found == verdicts
