"""A tritonserver that is a short Python program: what the launcher does with it, without Triton."""

from __future__ import annotations

import sys
from pathlib import Path

# ``options`` are the command line's; ``starts`` counts how often this server was started.
_HEAD = """#!{python}
import os, signal, socket, sys, threading, time
from pathlib import Path
if "LD_TRACE_LOADED_OBJECTS" in os.environ:  # the launcher asks which libraries it would load
    sys.exit(0)
counter = Path(__file__).with_name("starts")
starts = int(counter.read_text()) + 1 if counter.exists() else 1
counter.write_text(str(starts))
options = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)

def listen(service, opens=socket.create_server):
    address = options[service + "-address"], int(options[service + "-port"])
    try:
        return opens(address)
    except OSError:  # in Triton's words
        name = service.upper()
        print(f"failed to start {name} service: Unavailable - Socket '{address}' already in use")
        sys.exit(1)

def serve():
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Ready(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    held = [listen("grpc"), listen("metrics")]
    listen("http", lambda address: ThreadingHTTPServer(address, Ready)).serve_forever()

def start_stub():
    import subprocess

    words = ["triton_python_backend_stub", "-c", "import time; time.sleep(1000)"]
    return subprocess.Popen(words, executable=sys.executable)

signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
"""
HANGS = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nstub = start_stub()\nserve()"
LOCKED = """
print("terminate called after throwing an instance of 'boost::interprocess::lock_exception'",
      flush=True)
os.abort()
"""


def installation(root: Path, program: str = "serve()") -> Path:
    """The directory for ``--server``; every model is ready as soon as ``serve()`` is called."""
    stub = root / "backends" / "python" / "triton_python_backend_stub"
    server = root / "bin" / "tritonserver"
    for file, text in (
        (stub, "#!/bin/sh\n"),
        (server, _HEAD.replace("{python}", sys.executable) + program),
    ):
        file.parent.mkdir(parents=True)
        file.write_text(text)
        file.chmod(0o755)
    (root / "TRITON_VERSION").write_text("2.60.0")
    return root


def starts(root: Path) -> int:
    """How often the server was started."""
    return int((root / "bin" / "starts").read_text())
