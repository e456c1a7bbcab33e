"""The page at ``/``: one file, sent with a policy under which the browser loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_FILE = Path(__file__).with_name("page.html")


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    """The page and its headers, which allow its own script and style alone, by their digests."""
    text = _FILE.read_text(encoding="utf-8")
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; "
        f"script-src {_digest('script', text)}; style-src {_digest('style', text)}"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return text.encode(), headers


def _digest(tag: str, text: str) -> str:
    (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"


async def page(request: Request) -> Response:
    """``GET /``."""
    body, headers = _page()
    return Response(body, media_type="text/html", headers=headers)
