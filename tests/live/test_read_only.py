"""A container whose root is read-only, as the manifests have it; and logs that a machine reads."""

from __future__ import annotations

import json
import shutil
import sys
import urllib.request
from typing import Any

import pytest

from tests.helpers.children import Child
from tests.helpers.ports import serve_ports, unused_ports
from tests.helpers.server_settings import ROOT

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

# Run in a mount namespace of its own: only /tmp and /dev/shm can be written in it. A checkout
# below /tmp is mounted there again.
NAMESPACE = """
exec 9<{root}
mount --make-rprivate / && mount -t tmpfs tmpfs /dev/shm || exit 77
mount -t tmpfs -o mode=1777 tmpfs /tmp && mount -o remount,ro,bind / || exit 77
test -e {root}/setup.cfg || mkdir -p {root} && mount -c --bind /proc/self/fd/9 {root} || exit 77
cd / && ! touch /trtllm-bls 2>/dev/null || exit 77
{further}
exec "$@"
"""


def serve(*words: str, further: str = "") -> Child:
    if shutil.which("unshare") is None:
        pytest.skip("no unshare: `apt-get install util-linux` runs it")
    order = ["unshare", "-m", "sh", "-c", NAMESPACE.format(root=ROOT, further=further), "-"]
    order += [sys.executable, "-m", "trtllm_bls.cli", "serve", *words]
    order += serve_ports()
    return Child(order, name="serve")


@pytest.mark.slow
def test_serve_needs_two_places_to_write_and_every_line_can_be_one_object() -> None:
    """Of tritonserver, of a start and of requests, on both streams, to the end."""
    port = str(*unused_ports(1))
    words = ["--set", "tensorrt_llm_bls.log_format=json", "--verbose", "--openai-port", port]
    with serve(*words) as server:
        first = server.output.next()
        if not first and server.end() == 77:
            pytest.skip("mounts: run it as root with CAP_SYS_ADMIN")
        told = json.loads(first)["message"]
        url = next(line.split()[1] for line in told.splitlines() if line.startswith("OpenAI"))
        body = {"model": "demo", "prompt": "Once upon", "max_tokens": 4}
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(asked, timeout=120) as answer:
            assert json.load(answer)["choices"][0]["text"]
        assert server.terminate(120) == 0
        shown = [first, *server.output, *server.errors]
    lines: list[dict[str, Any]] = [json.loads(line) for line in shown]
    assert all({"time", "level"} <= line.keys() for line in lines)
    assert {"serve", "model_lifecycle.cc"} <= {line.get("source") for line in lines}
    assert any(line.get("api") == "text_completion" for line in lines)


@pytest.mark.parametrize("place", ["/tmp", "/dev/shm"])
def test_what_cannot_be_written_is_named_before_anything_starts(place: str) -> None:
    """tritonserver would end by SIGABRT, or wait."""
    server = serve("--openai-port", "0", further=f"mount -o remount,ro {place}")
    errors = server.errors.rest()
    if server.end() == 77:
        pytest.skip("mounts: run it as root with CAP_SYS_ADMIN")
    *_, last = errors.strip().splitlines()
    assert last.startswith("error: ") and place in last and "mount" in last
    assert "Traceback" not in errors
