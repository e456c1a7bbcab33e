"""docs/security.md has the program's table of what port 8000 answers, and the table is sound."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from trtllm_bls.http.limits import UNNAMED, Refused
from trtllm_bls.http.routes import ROUTES, Route, match_route

PAGE = Path(__file__).parents[2] / "docs" / "security.md"


def columns(row: Route) -> tuple[str, ...]:
    """What the page says of a row beside its path."""
    types = [f"`{kind.decode()}`" if kind != UNNAMED else "not named" for kind in row.body]
    who = "everybody" if row.keyless else "who has a key, with `--http-keys`"
    who += "; only with `--open-control-apis`" * row.control
    who += "; not with `--triton-infer off`" * row.tensors
    by = "the model, which the worker asks over gRPC" if row.by_grpc else "Triton's own HTTP port"
    headers = ", ".join(f"`{name.decode()}`" for name in row.headers)
    return ", ".join(types) or "it has none", who, by, headers or "none"


def table() -> list[str]:
    lines = []
    for told, rows in groupby(ROUTES, columns):
        paths = ", ".join(f"`{row.method} {row.path}`" for row in rows)
        lines.append(f"| {paths} | {' | '.join(told)} |")
    return lines


def test_the_page_has_the_table() -> None:
    """Row by row; a mistake prints the rows as they have to be."""
    lines = PAGE.read_text().splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith("| request | types of its"))
    found = lines[begin + 2 : begin + 2 + len(table())]
    assert found == table(), "\n".join(table())
    assert lines[begin + 2 + len(table())] == ""


def test_infer_can_be_closed() -> None:
    """It alone: generate and everything else is answered as before."""
    for row in ROUTES:
        if row.tensors:
            with pytest.raises(Refused, match="serve --triton-infer on opens it") as refused:
                match_route(row.method, filled(row), True, True, opens_infer=False)
            assert refused.value.status == 403
        else:
            assert match_route(row.method, filled(row), True, True, opens_infer=False)[0] is row


def filled(row: Route) -> bytes:
    return row.path.replace("{model}", "m.1/versions/2").replace("{name}", "n").encode()


@pytest.mark.parametrize("row", ROUTES, ids=lambda row: f"{row.method} {row.path}")
def test_every_row_answers_its_path(row: Route) -> None:
    """And no other row does, whoever asks; a key and the option open what they are for."""
    assert match_route(row.method, filled(row), True, True)[0] is row
    for has_key, opens in ((True, False), (False, True)):
        if (has_key or row.keyless) and (opens or not row.control):
            assert match_route(row.method, filled(row), has_key, opens)[0] is row
        else:
            with pytest.raises(Refused) as refused:
                match_route(row.method, filled(row), has_key, opens)
            assert refused.value.status == (403 if has_key else 401)


@pytest.mark.parametrize(
    "path",
    [
        *(b"", b"/", b"*", b"/v2/", b"//v2", b"/V2", b"/v2/models/", b"/v2/models//config"),
        *(b"/v2/models/./config", b"/v2/models/../config", b"/v2/models/%6d/config"),
        *(b"/v2/models/m/versions/x", b"/v2/models/m/versions/", b"/v2/models/m/versions/\xd9\xa1"),
        *(b"/v2/models/m\n", b"/v2/models/m\0", b"/v2/models/\xc3\xa4", b"/v2/health/ready/"),
        *(b"/v2/health/../models/m/generate", b"http://h/v2", b"/v2/models/m;x", b"/v2?x"),
    ],
)
def test_no_other_spelling_is_a_path(path: bytes) -> None:
    """By any method."""
    for method in ("GET", "POST", "HEAD", "get"):
        with pytest.raises(Refused, match="nothing is served at this path"):
            match_route(method, path, True, True)
