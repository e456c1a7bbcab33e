"""``tensorrt_llm.llmapi.llm_utils``: how a file's arguments join a program's."""

from __future__ import annotations

from typing import Any

_MERGED = ("kv_cache_config", "telemetry_config")


def update_llm_args_with_extra_dict(
    llm_args: dict[str, Any], llm_args_dict: dict[str, Any], extra_llm_api_options: Any = None
) -> dict[str, Any]:
    """The file wins; some mappings are merged key by key."""
    merged = {
        name: llm_args[name] | llm_args_dict[name]
        for name in _MERGED
        if isinstance(llm_args.get(name), dict) and name in llm_args_dict
    }
    return llm_args | llm_args_dict | merged
