"""A request's guide, LoRA adapter and cache salt as inputs of an engine, and back.

The rest of the package has them as typed values. Only this module knows their inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trtllm_bls.errors import InvalidRequest
from trtllm_bls.types import (
    GUIDE_KIND_INPUT,
    GUIDE_TEXT_INPUT,
    Adapter,
    Array,
    BaseRequest,
    CacheSalt,
    Guide,
)
from trtllm_bls.wire.contract import ENGINE

_SALT_INPUT = "cache_salt"
_ADAPTER_FIELDS = {
    "lora_task_id": "task_id",
    "lora_name": "name",
    "lora_path": "path",
    "lora_ckpt_source": "checkpoint_source",
    "lora_weights": "weights",
    "lora_config": "config",
}
# The inputs that ``typed_fields`` reads.
TYPED_INPUTS = frozenset((GUIDE_KIND_INPUT, GUIDE_TEXT_INPUT, _SALT_INPUT, *_ADAPTER_FIELDS))


def typed_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields ``guide``, ``adapter`` and ``cache_salt`` of a request with these inputs.

    A value is an array, or one text or number. A field without any of its inputs is left out.
    Raises ``InvalidRequest``.
    """
    fields: dict[str, Any] = {}
    kind = _text(values.get(GUIDE_KIND_INPUT))
    text = _text(values.get(GUIDE_TEXT_INPUT))
    if kind is not None:
        fields["guide"] = Guide(kind, text)
    elif text is not None:
        raise InvalidRequest(GUIDE_KIND_INPUT, "is missing beside the guide")
    adapter: dict[str, Any] = {}
    for name, field in _ADAPTER_FIELDS.items():
        value = values.get(name)
        if value is None or np.size(value) == 0:
            continue
        if field == "task_id":
            adapter[field] = int(np.asarray(value).reshape(-1)[0])
        elif field in ("weights", "config"):
            adapter[field] = value
        elif name_or_path := _text(value):
            adapter[field] = name_or_path
    if adapter:
        fields["adapter"] = Adapter(**adapter)
    if salt := _text(values.get(_SALT_INPUT)):
        fields["cache_salt"] = CacheSalt.parsed(salt)
    return fields


def required_inputs(request: BaseRequest) -> dict[str, Any]:
    """Return the values that an engine must honour, by input name.

    An engine may ignore a cache salt that is not ``required``, so that one is left out.
    """
    values: dict[str, Any] = {}
    if request.guide is not None:
        values[GUIDE_KIND_INPUT] = request.guide.kind
        values[GUIDE_TEXT_INPUT] = request.guide.text
    if request.adapter is not None:
        for name, field in _ADAPTER_FIELDS.items():
            values[name] = getattr(request.adapter, field)
    if request.cache_salt is not None and request.cache_salt.required:
        values[_SALT_INPUT] = str(request.cache_salt)
    return {name: value for name, value in values.items() if value is not None}


def input_arrays(request: BaseRequest, *, salted: bool) -> dict[str, Array]:
    """Return the typed fields as arrays without a batch dimension.

    A ``salted`` engine separates KV cache blocks by salt, so it gets every cache salt.
    """
    values = required_inputs(request)
    if salted and request.cache_salt is not None:
        values[_SALT_INPUT] = str(request.cache_salt)
    arrays = {}
    for name, value in values.items():
        if not isinstance(value, np.ndarray):
            value = ENGINE.input_named[name].array(value)
        arrays[name] = value
    return arrays


def _text(value: Any) -> str | None:
    """Return the text of a ``str``, ``bytes`` or array; None for None or an empty array."""
    if isinstance(value, np.ndarray):
        if value.size == 0:
            return None
        value = value.reshape(-1)[0]
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return str(value)
