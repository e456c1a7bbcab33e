"""Settings of the HTTP server that answers OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtllm_bls.http.limits import ConnectionLimits
from trtllm_bls.openai.exposition import SharedSamples
from trtllm_bls.settings.faces import ServedPipeline


@dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """Settings of one server.

    ``model_names``: names of the language model, at least one; ``/v1/models`` lists them in this
    order. ``keys``: digests of the API keys (``http.keys.read_keys``). Without any, every client is
    answered.
    ``max_body_bytes``, ``body_s``: size of a request's JSON, and seconds in which it has to arrive.
    ``allowed_hosts``: names by which clients reach a server that listens on this machine alone.
    ``None``: the server listens elsewhere too, and names and origins are not checked.
    ``allowed_origins``: web pages that may use the API from a browser (CORS).
    ``shared``: memory in which workers keep their samples for ``/metrics``; ``None``: there is one
    process.
    ``pipelines``: models of the Triton server that answer endpoints by themselves.
    ``pipeline_headers``: names of the request headers that pipelines get, in lower case.
    ``loras``: task ids of LoRA adapters by the names that requests give as ``model``; empty for one
    that the engine knows by its name.
    ``tool_parser``, ``reasoning_parser``: auto, none, or a name in ``text.chat_formats``.
    ``chat_template_kwargs``: variables of the chat template, where a request does not set them.
    ``unreadable``: ``replace`` puts a sentence in the place of images and files, ``refuse`` refuses
    them.
    ``store_dir``: directory of stored responses, which all processes of a server share; ``None``:
    one of this process and its forks, removed at its end. ``store_bytes``, ``store_hours``: the
    limit of all responses, and the time for which one is kept after its last use; 0 bytes: nothing
    is stored. ``lost_items``: ``refuse`` a request that refers to a lost item, or put a
    ``sentence`` in its place.
    ``share_kv_cache``: requests of different keys may share the engine's KV cache. Its response
    times then reveal prompts of other keys.
    ``status_dir``: directory of ``orchestrator.status``, whose file tells the process to drain;
    empty: there is none.
    ``triton_metrics``: the URL of Triton's own metrics, which ``/metrics`` then has too.
    """

    model_names: tuple[str, ...] = ()
    keys: tuple[bytes, ...] = ()
    max_body_bytes: int = 4 * 2**20
    body_s: float = ConnectionLimits.body_s
    allowed_hosts: tuple[str, ...] | None = None
    allowed_origins: tuple[str, ...] = ()
    shared: SharedSamples | None = None
    loras: Mapping[str, str] = field(default_factory=dict)
    pipelines: tuple[ServedPipeline, ...] = ()
    pipeline_headers: tuple[str, ...] = ()
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    unreadable: str = "replace"
    store_dir: Path | None = None
    store_bytes: int = 256 * 2**20
    store_hours: float = 24
    lost_items: str = "refuse"
    share_kv_cache: bool = False
    status_dir: str = ""
    triton_metrics: str = ""
