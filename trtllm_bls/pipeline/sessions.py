"""What pipelines remember of a conversation, in one SQLite file that all instances of them open.

A row is one session of one model and one API key; neither another model nor another key sees it.
Where the rows of a key, or all rows together, reach a bound, those go first that were used the
longest time ago. Without a directory the rows are in the memory of one process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trtllm_bls.errors import SettingsError, TrtllmBlsError

KIB = 1024
SESSION_BYTES = 64 * KIB  # of one session's value, as JSON
KEY_BYTES = 1024 * KIB  # of all sessions of a key
STORE_BYTES = 64 * 1024 * KIB  # of all sessions
SESSION_SECONDS = 24 * 3600  # after its last use
_ROW_BYTES = 256  # beside the value, so that the bounds also bound how many rows there are
_FILE = "sessions-1.sqlite3"  # the number is that of this schema
_WAIT_SECONDS = 10.0  # for another process that writes
_SESSIONS_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    model TEXT NOT NULL, key TEXT NOT NULL, id TEXT NOT NULL, used REAL NOT NULL,
    size INTEGER NOT NULL, value TEXT NOT NULL, PRIMARY KEY (model, key, id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON sessions (used);
CREATE INDEX IF NOT EXISTS by_key ON sessions (key, used);
"""


class SessionStore:
    """The sessions in ``directory``; None: those of this process. Any thread may use it.

    Raises ``SettingsError`` for a directory that cannot be used.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        if directory is None:
            return
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            os.close(os.open(directory / _FILE, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600))
        except OSError as error:
            raise SettingsError(f"session_dir {directory}: {error.strerror}") from error

    def get(self, model: str, key: str, session: str) -> str | None:
        """Return what was put last, as JSON; None if there is nothing. Waits for the disk."""
        where = (model, key, session)
        with self._transaction() as rows:
            row = rows.execute(
                "UPDATE sessions SET used = ? WHERE model = ? AND key = ? AND id = ?"
                " RETURNING value",
                (time.time(), *where),
            ).fetchone()
        return None if row is None else str(row[0])

    def put(self, model: str, key: str, session: str, value: str) -> None:
        """Keep a value, as JSON, and drop what is beyond the bounds. Waits for the disk."""
        size = len(value.encode()) + _ROW_BYTES
        with self._transaction() as rows:
            rows.execute(
                "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?, ?)",
                (model, key, session, time.time(), size, value),
            )
            _drop(rows, "WHERE key = ?", (key,), KEY_BYTES)
            _drop(rows, "", (), STORE_BYTES)

    def delete(self, model: str, key: str, session: str) -> None:
        """Drop a session. Waits for the disk."""
        with self._transaction() as rows:
            rows.execute(
                "DELETE FROM sessions WHERE model = ? AND key = ? AND id = ?",
                (model, key, session),
            )

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """The rows, without those that are too old."""
        with self._lock:
            try:
                rows = self._connection = self._connection or self._open()
                with rows:  # commits, or rolls back
                    rows.execute("BEGIN IMMEDIATE")
                    oldest = time.time() - SESSION_SECONDS
                    rows.execute("DELETE FROM sessions WHERE used < ?", (oldest,))
                    yield rows
            except sqlite3.Error as error:
                raise TrtllmBlsError(f"sessions cannot be used: {error}") from error

    def _open(self) -> sqlite3.Connection:
        file = ":memory:" if self._directory is None else self._directory / _FILE
        rows = sqlite3.connect(
            file, timeout=_WAIT_SECONDS, isolation_level=None, check_same_thread=False
        )
        rows.executescript(_SESSIONS_SCHEMA)
        return rows


def _drop(rows: sqlite3.Connection, where: str, values: tuple[str, ...], limit: int) -> None:
    """Drop the least used of some rows until the rest fits into ``limit`` bytes."""
    (size,) = rows.execute(
        f"SELECT coalesce(sum(size), 0) FROM sessions {where}", values
    ).fetchone()
    excess = size - limit
    if excess <= 0:
        return
    oldest = rows.execute(
        f"SELECT model, key, id, size FROM sessions {where} ORDER BY used", values
    ).fetchall()
    for *name, row_size in oldest:
        if excess <= 0:
            return
        rows.execute("DELETE FROM sessions WHERE model = ? AND key = ? AND id = ?", name)
        excess -= row_size


class Session:
    """What a pipeline remembers of one conversation; all instances of the model have the same.

    ``id`` is the same for all requests of the conversation.
    """

    def __init__(self, store: SessionStore, model: str, key: str | None, id: str) -> None:
        self.id = id
        self._store = store
        self._place = (model, key or "", id)

    async def get(self) -> Any:
        """Return the value that was put last; None if there is none any more."""
        text = await asyncio.to_thread(self._store.get, *self._place)
        return None if text is None else json.loads(text)

    async def put(self, value: Any) -> None:
        """Keep a value of JSON. Raises ``TrtllmBlsError`` for one that is none, or too large."""
        try:
            text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise TrtllmBlsError(f"session: the value is not JSON: {error}") from error
        if len(text) > SESSION_BYTES:
            problem = f"the value has {len(text)} bytes; at most {SESSION_BYTES} are kept"
            raise TrtllmBlsError(f"session: {problem}")
        await asyncio.to_thread(self._store.put, *self._place, text)

    async def delete(self) -> None:
        """Forget the value."""
        await asyncio.to_thread(self._store.delete, *self._place)
