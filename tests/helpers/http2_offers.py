"""Programs that offer HTTP/2 with each request (``Upgrade: h2c``) and send its body at once."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

# The JDK's own client with its defaults, as Java's frameworks use it.
_JAVA = """
import java.net.URI;
import java.net.http.*;

public class Post {
    public static void main(String[] given) throws Exception {
        var client = HttpClient.newHttpClient();
        var request = HttpRequest.newBuilder(URI.create(given[0]))
            .header("Content-Type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(given[1])).build();
        for (int times = 0; times < 2; times++) {
            System.out.println(client.send(request, HttpResponse.BodyHandlers.ofString()).body());
        }
    }
}
"""
CLIENTS = ("curl", "java")


def post_twice(client: str, url: str, body: Any, folder: Path) -> list[Any]:
    """Both answers' JSON, of one connection if the program keeps it. Skips without the program."""
    if shutil.which(client) is None or (client == "java" and shutil.which("javac") is None):
        pytest.skip(f"no {client}: `apt-get install curl openjdk-17-jdk-headless` runs it")
    text = json.dumps(body)
    if client == "java":
        source = folder / "Post.java"
        source.write_text(_JAVA)
        command = ["java", str(source), url, text]
    else:
        asked = ["-s", "--http2", "-H", "Content-Type: application/json", "-d", text]
        command = ["curl", *asked, "-w", "\n", url, "--next", *asked, "-w", "\n", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line]
