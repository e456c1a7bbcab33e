"""Runs the checks of one program: each prints a line that ``run`` reads."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable

BASE, MODEL = os.environ["BASE_URL"], os.environ["MODEL"]
STEPS = (
    'Find it. [[think I have to look. || say I look. || call look {"q": "a\\"b"}]] '
    "[[say It is 42.]]"
)
PARAMETERS = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}


def check(api: str, did: str) -> Callable[[Callable[[], None]], None]:
    def run(action: Callable[[], None]) -> None:
        try:
            action()
            result = "ok"
        except Exception:
            result = traceback.format_exc()[-600:]
        # Some programs leave their last line without an end.
        print("\nCHECK " + json.dumps({"api": api, "did": did, "result": result}), flush=True)

    return run
