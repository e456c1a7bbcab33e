"""The page at ``/``: one document, sent with a policy under which the browser loads nothing else.

Two published libraries are part of it, each in a file that names its licence: marked (MIT) makes
HTML of Markdown, and DOMPurify (Apache-2.0 or MPL-2.0) leaves only harmless elements of that.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_FILE = Path(__file__).with_name("page.html")
_LIBRARIES = ("marked.js", "purify.js")


@cache
def _page() -> tuple[bytes, dict[str, str]]:
    """The page and its headers, which allow its own script and style alone, by their digests."""
    sources = (_FILE.with_name(name).read_text(encoding="utf-8") for name in _LIBRARIES)
    libraries = "".join(f"<script>{source}</script>\n" for source in sources)
    text = _FILE.read_text(encoding="utf-8").replace("<!-- libraries -->", libraries)
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; "
        f"script-src {_digests('script', text)}; style-src {_digests('style', text)}"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return text.encode(), headers


def _digests(tag: str, text: str) -> str:
    found = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(inside.encode()).digest()) for inside in found)
    return " ".join(f"'sha256-{digest.decode()}'" for digest in digests)


async def page(request: Request) -> Response:
    """``GET /``."""
    body, headers = _page()
    return Response(body, media_type="text/html", headers=headers)
