"""``tensorrt_llm.llmapi`` as far as it is used."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any


class RequestError(RuntimeError):
    """The request failed; the engine lives."""


@dataclass(kw_only=True)
class GuidedDecodingParams:
    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None


class KvCacheRetentionConfig:
    @dataclass
    class TokenRangeRetentionConfig:
        token_start: int
        token_end: int | None
        priority: int
        duration_ms: timedelta | None = None

    def __init__(
        self,
        token_range_retention_configs: list[Any],
        decode_retention_priority: int = 35,
        decode_duration_ms: timedelta | None = None,
    ) -> None:
        self.ranges = token_range_retention_configs
        self.decode = (decode_retention_priority, decode_duration_ms)
