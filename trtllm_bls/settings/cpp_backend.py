"""The parameters of the C++ ``tensorrtllm`` backend: which release reads which, and their values.

The backend ignores a key that it does not know, and treats a value that it cannot read as not set.
So a misspelled key or value is refused here. cpp_backend.csv follows the backend's sources at
its release tags.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from trtllm_bls.errors import SettingsError
from trtllm_bls.settings.model_names import ENGINE_NAME
from trtllm_bls.settings.parameters import (
    COMMON_KEYS,
    EngineFacts,
    check,
    parameters_in,
    suggestion,
)


class Version(NamedTuple):
    """A release of TensorRT-LLM."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


# Without both of them the backend ignores every guide.
GUIDES = ("guided_decoding_backend", "xgrammar_tokenizer_info_path")
OLDEST = Version(0, 9)
LAST = Version(99, 0)


@dataclass(frozen=True)
class Key:
    """A parameter in the releases ``since`` to ``until``, both included.

    ``required_since`` is the first release that does not load without the key; for it an empty
    value is enough.
    """

    name: str
    expected: str  # what a value must be, in words
    pattern: str
    since: Version
    until: Version
    required_since: Version | None

    def is_required(self, version: Version) -> bool:
        """Return True if this release does not load without the key."""
        return self.required_since is not None and self.required_since <= version


_VALUE_KINDS = {
    "flag": ("true or false", r"true|True|TRUE|1|false|False|FALSE|0"),
    "count": ("a whole number, at least 0", r"[0-9]+"),
    "number": ("a whole number, at least 1", r"0*[1-9][0-9]*"),
    "part": ("a number greater than 0 and at most 1", r"0?\.0*[1-9][0-9]*|1(\.0*)?"),
    "share": ("a number from 0 to 1", r"0?\.[0-9]+|0|1(\.0*)?"),
    "policy": (
        "guaranteed_no_evict or max_utilization",
        r"guaranteed_no_evict|max_utilization",
    ),
    "batching": ("inflight_fused_batching", r"inflight_(fused_)?batching"),
    "text": ("not empty", r".+"),
    "mode": (
        "one of top_k, top_p, top_k_top_p, beam_search, medusa, redrafter, lookahead, eagle",
        r"top_k|top_p|top_k_top_p|beam_search|medusa|redrafter|lookahead|eagle",
    ),
    # One list per instance of the model: "0,1;2,3".
    "ids": ("whole numbers such as 0,1", r"[0-9]+(,[0-9]+)*(;[0-9]+(,[0-9]+)*)*"),
    "sizes": ("whole numbers such as 1024,2048", r"0*[1-9][0-9]*(,0*[1-9][0-9]*)*"),
    "tree": (
        "paths through a tree such as {0}, {0, 0}, {1}",
        r"\{[0-9]+(, *[0-9]+)*\}(, *\{[0-9]+(, *[0-9]+)*\})*",
    ),
    "guide": ("xgrammar", r"xgrammar"),
}


def parse_version(text: str, option: str = "--version") -> Version:
    """Read ``0.19``, ``0.20.0rc1``, ``v1.0`` or ``last``.

    Raises ``SettingsError``, which names ``option``.
    """
    if text == "last":
        return LAST
    match = re.match(r"v?(\d+)\.(\d+)(\D|$)", text)
    if match is not None:
        version = Version(int(match[1]), int(match[2]))
        if version >= OLDEST:
            return version
    raise SettingsError(f"{option} {text}: use a release such as 0.19, from 0.9 on, or last")


def _read_keys() -> list[Key]:
    keys = []
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            expected, pattern = _VALUE_KINDS[row["kind"]]
            since = parse_version(row["since"])
            until = LAST  # without "until" the last release reads the key too
            if row["until"]:
                until = parse_version(row["until"])
            required_since = None
            if row["demanded"]:
                required_since = parse_version(row["demanded"])
            keys.append(Key(row["key"], expected, pattern, since, until, required_since))
    return keys


KEYS = _read_keys()
_FACTS = parameters_in(EngineFacts)


def keys_of(version: Version) -> dict[str, Key]:
    """Return the keys that one release reads, by name."""
    return {key.name: key for key in KEYS if key.since <= version <= key.until}


def check_backend(key: str, value: str, version: Version | None = None) -> None:
    """Raise ``SettingsError`` if the backend does not read ``key`` or cannot read ``value``.

    Without a ``version`` it is enough that any release does. The ``EngineFacts``, which the
    orchestrator reads, are allowed too.
    """
    if key in _FACTS or key in COMMON_KEYS:
        check(ENGINE_NAME, key, value, _FACTS)
        return
    keys: Iterable[Key] = KEYS
    if version is not None:
        keys = keys_of(version).values()
    names = [row.name for row in keys]
    if key not in names:
        backend = "the C++ backend"
        if version is not None and any(row.name == key for row in KEYS):
            backend += f" of {version}"
        raise SettingsError(f"{backend} has no parameter {key}; {suggestion(key, names)}")
    rows = [row for row in keys if row.name == key]
    if "${" in value or not any(re.fullmatch(row.pattern, value) for row in rows):
        raise SettingsError(f"{value!r} is not allowed; it must be {rows[-1].expected}")
