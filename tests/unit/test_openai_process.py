"""The OpenAI API's process as ``serve`` sees it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from tests.helpers.waiting import until
from trtllm_bls.bundled import REPOSITORY
from trtllm_bls.launcher import TritonServer
from trtllm_bls.launcher.openai_process import OpenAIProcess
from trtllm_bls.launcher.ports import listen
from trtllm_bls.settings import ServeSettings


def test_an_api_is_not_waited_for_when_the_server_has_died(tmp_path: Path) -> None:
    """``serve`` then tells of the server at once, rather than of an API that found no engine."""
    with listen("127.0.0.1", 0, "--openai-port") as held:
        port = held.getsockname()[1]
    server = SimpleNamespace(
        settings=ServeSettings(openai_port=port),
        host="127.0.0.1",
        repository=REPOSITORY,
        environment=dict(os.environ) | {"TRTLLM_BLS_STATUS_DIR": str(tmp_path)},
        stop_requested=False,
        running=True,
    )
    lines: list[str] = []
    api = OpenAIProcess(cast(TritonServer, server), lines.append, lines.append, lines.append)
    try:
        waiting = threading.Thread(target=api.wait_until_ready, daemon=True)
        waiting.start()
        assert waiting.is_alive()
        server.running = False
        until(lambda: not waiting.is_alive())
    finally:
        api.kill()
        api.close()
