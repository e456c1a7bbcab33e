"""What pipelines remember of conversations: shared by a model's instances, bounded for each key."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trtllm_bls.errors import SettingsError
from trtllm_bls.pipeline import Request, Response, StreamingModel, Tensor
from trtllm_bls.pipeline import sessions as store_module
from trtllm_bls.pipeline.sessions import SessionStore
from trtllm_bls.pipeline.testing import Caller, serving

# Another instance of the model.
ADDS = """
import sys
from pathlib import Path

from trtllm_bls.pipeline.sessions import SessionStore

store = SessionStore(Path(sys.argv[1]))
store.put("model", "key", "s", str(int(store.get("model", "key", "s")) + 1))
"""


class Counts(StreamingModel):
    """Says how many requests of the session there were."""

    inputs = (Tensor("way", "STRING"),)
    outputs = (Tensor("said", "STRING"),)

    async def answer(self, request: Request, response: Response) -> None:
        session = request.session
        if session is None:
            await response.send({"said": "none"})
            return
        way = request.text("way") if "way" in request else ""
        if way == "forget":
            await session.delete()
        elif way:
            values: dict[str, Any] = {"large": "x" * 70_000, "set": {1}, "nan": float("nan")}
            await session.put(values[way])
        count = (await session.get() or 0) + 1
        await session.put(count)
        await response.send({"said": str(count)})


def test_a_session_is_one_conversation_of_one_key(tmp_path: Path) -> None:
    """That of the OpenAI API, or Triton's sequence; neither of them is the other."""
    with serving(Counts, session_dir=tmp_path / "s") as model:

        def said(caller: Caller, sequence: int | str = 0, **inputs: Any) -> str:
            ask = model.triton.ask({}, "said") if sequence else model.ask(caller=caller, **inputs)
            if sequence:
                ask.sequence_id = sequence
                model.model.execute([ask])
            (text,) = ask.wait().said("said")
            return str(text[0], "utf-8")

        ann = Caller(key="ann", session="5")
        assert [said(ann), said(ann)] == ["1", "2"]
        assert said(Caller(key="bob", session="5")) == said(Caller(session="5")) == "1"
        assert said(Caller(key="ann", session="6")) == "1"
        assert [said(Caller(), 5), said(Caller(), 5), said(Caller(), "x")] == ["1", "2", "1"]
        assert said(Caller(key="ann")) == "none"
        assert said(ann, way="forget") == "1"


@pytest.mark.parametrize(
    ("way", "problem"),
    [
        ("large", "session: the value has 70002 bytes; at most 65536 are kept"),
        ("set", "session: the value is not JSON: "),
        ("nan", "session: the value is not JSON: "),
    ],
)
def test_a_value_that_cannot_be_kept_is_an_error(way: str, problem: str) -> None:
    with serving(Counts) as model:
        ask = model.ask(caller=Caller(session="s"), way=way).wait()
    assert ask.error is not None and problem in ask.error.message()


def test_two_processes_have_the_same_sessions(tmp_path: Path) -> None:
    directory = tmp_path / "sessions"
    store = SessionStore(directory)
    store.put("model", "key", "s", "0")
    command = [sys.executable, "-c", ADDS, str(directory)]
    for count in (1, 2):
        subprocess.run(command, check=True, timeout=240)
        assert store.get("model", "key", "s") == str(count)
    store.close()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / "sessions-1.sqlite3").stat().st_mode & 0o777 == 0o600


def test_a_key_pushes_out_its_own_oldest_sessions_alone(tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "sessions")
    store.put("model", "other", "s", "0")
    value = json.dumps("x" * 60_000)
    for number in range(30):
        store.put("model", "key", str(number), value)
        assert store.get("model", "key", "0") is not None  # being used keeps it
    kept = [number for number in range(30) if store.get("model", "key", str(number))]
    assert kept == [0, *range(30 - len(kept) + 1, 30)]
    assert len(kept) * 60_000 <= store_module.KEY_BYTES < (len(kept) + 2) * 61_000
    assert store.get("model", "other", "s") == "0"
    store.close()


def test_all_keys_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small values count, too."""
    monkeypatch.setattr(store_module, "STORE_BYTES", 100 * 256)
    store = SessionStore(None)
    for number in range(150):
        store.put("model", str(number), "s", "")
    kept = [number for number in range(150) if store.get("model", str(number), "s") is not None]
    assert kept == list(range(50, 150))
    store.close()


def test_what_nobody_uses_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SessionStore(None)
    store.put("model", "key", "s", "1")
    monkeypatch.setattr(store_module, "SESSION_SECONDS", -1)
    assert store.get("model", "key", "s") is None
    store.close()


def test_a_directory_that_cannot_be_made_fails_the_load(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"session_dir .*: No such file or directory"):
        SessionStore(tmp_path / "no" / "such")
