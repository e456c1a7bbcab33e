"""The context of a call between models of a server, as one signed parameter of the request.

A pipeline that calls a model, and an HTTP worker that calls a pipeline, pass on the client's
identity, the time left and the models that wait for the answer. Any client of Triton may send any
parameter, so this one is signed with a secret of the server's run, which ``serve`` puts into the
environment of its processes. A parameter with another signature counts as absent.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

RUN_SECRET = "TRTLLM_BLS_RUN_SECRET"
CONTEXT_PARAMETER = "trtllm_bls_context"
MAX_CALL_DEPTH = 8
# Without ``serve`` there is no secret of the run, and a process trusts only its own contexts.
_PROCESS_SECRET = secrets.token_bytes(32)


@dataclass(frozen=True, kw_only=True)
class CallContext:
    """The request for which a model is called.

    ``key``: a digest of the client's API key. ``cache_salt``: calls of language models with the
    same salt may share blocks of the KV cache. ``session``: the id of the conversation.
    ``seconds``: the time left when the call is sent; None: it has no limit. ``models``: the
    pipelines that wait for the answer, beginning with the one that the client called.
    """

    key: str | None = None
    cache_salt: str | None = None
    session: str | None = None
    seconds: float | None = None
    models: tuple[str, ...] = ()


NO_CONTEXT = CallContext()


def signed_context(model: str, context: CallContext) -> str:
    """Return the parameter's value for a call of ``model``."""
    text = json.dumps(asdict(context))
    return f"{_signature(model, text)} {text}"


def context_of(model: str, parameters: Mapping[str, Any]) -> CallContext:
    """Return the context that a request to ``model`` has among its parameters."""
    value = parameters.get(CONTEXT_PARAMETER)
    if not isinstance(value, str):
        return NO_CONTEXT
    signature, _, text = value.partition(" ")
    # ``compare_digest`` takes texts of ASCII characters alone.
    if not hmac.compare_digest(signature.encode(), _signature(model, text).encode()):
        return NO_CONTEXT
    fields = json.loads(text)
    return CallContext(**{**fields, "models": tuple(fields["models"])})


def _signature(model: str, text: str) -> str:
    message = f"{model}\n{text}".encode()
    secret = os.environ.get(RUN_SECRET, "").encode() or _PROCESS_SECRET
    return hmac.new(secret, message, hashlib.sha256).hexdigest()
