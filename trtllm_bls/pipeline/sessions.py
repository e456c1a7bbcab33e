"""Sessions: a value that a pipeline keeps for each conversation, in an SQLite file.

All instances of all pipelines open the same file. A row is one session of one model and one API
key; neither another model nor another key sees it. When the rows of a key, or all rows together,
exceed their bound, the least recently used rows are deleted. Without a directory the rows are in
the memory of one process.
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
SESSION_BYTES = 64 * KIB  # limit of one session's value, as JSON
KEY_BYTES = 1024 * KIB  # limit of all sessions of a key
STORE_BYTES = 64 * 1024 * KIB  # limit of all sessions
SESSION_SECONDS = 24 * 3600  # a session's life after its last use
_ROW_BYTES = 256  # counted for each row beside its value, so that the limits bound the rows, too
_FILE = "sessions-1.sqlite3"  # the number is the schema's version
_WAIT_SECONDS = 10.0  # how long to wait while another process writes
_SESSIONS_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    model TEXT NOT NULL, key TEXT NOT NULL, id TEXT NOT NULL, used REAL NOT NULL,
    size INTEGER NOT NULL, value TEXT NOT NULL, PRIMARY KEY (model, key, id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON sessions (used);
CREATE INDEX IF NOT EXISTS by_key ON sessions (key, used);
"""


class SessionStore:
    """The sessions in ``directory``, or in this process's memory if it is None.

    Any thread may use it. Raises ``SettingsError`` for a directory that cannot be used.
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
        """Return the session's value as JSON, or None if there is none. Waits for the disk."""
        with self._transaction() as connection:
            row = connection.execute(
                "UPDATE sessions SET used = ? WHERE model = ? AND key = ? AND id = ?"
                " RETURNING value",
                (time.time(), model, key, session),
            ).fetchone()
        return None if row is None else str(row[0])

    def put(self, model: str, key: str, session: str, value: str) -> None:
        """Store a value as JSON, and delete rows beyond the limits. Waits for the disk."""
        size = len(value.encode()) + _ROW_BYTES
        with self._transaction() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?, ?)",
                (model, key, session, time.time(), size, value),
            )
            _evict(connection, "WHERE key = ?", (key,), KEY_BYTES)
            _evict(connection, "", (), STORE_BYTES)

    def delete(self, model: str, key: str, session: str) -> None:
        """Delete a session. Waits for the disk."""
        with self._transaction() as connection:
            connection.execute(
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
        """Begin a transaction, after the sessions whose life is over were deleted."""
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = self._open()
                connection = self._connection
                with connection:  # commits, or rolls back
                    connection.execute("BEGIN IMMEDIATE")
                    oldest = time.time() - SESSION_SECONDS
                    connection.execute("DELETE FROM sessions WHERE used < ?", (oldest,))
                    yield connection
            except sqlite3.Error as error:
                raise TrtllmBlsError(f"sessions cannot be used: {error}") from error

    def _open(self) -> sqlite3.Connection:
        file = ":memory:" if self._directory is None else self._directory / _FILE
        connection = sqlite3.connect(
            file, timeout=_WAIT_SECONDS, isolation_level=None, check_same_thread=False
        )
        connection.executescript(_SESSIONS_SCHEMA)
        return connection


def _evict(connection: sqlite3.Connection, where: str, values: tuple[str, ...], limit: int) -> None:
    """Delete the least recently used rows until the remaining ones have ``limit`` bytes."""
    (size,) = connection.execute(
        f"SELECT coalesce(sum(size), 0) FROM sessions {where}", values
    ).fetchone()
    excess = size - limit
    if excess <= 0:
        return
    rows = connection.execute(
        f"SELECT model, key, id, size FROM sessions {where} ORDER BY used", values
    ).fetchall()
    for *primary_key, row_size in rows:
        if excess <= 0:
            return
        connection.execute(
            "DELETE FROM sessions WHERE model = ? AND key = ? AND id = ?", primary_key
        )
        excess -= row_size


class Session:
    """A value that a pipeline keeps for one conversation. All instances of the model share it.

    ``id`` is the same for all requests of the conversation.
    """

    def __init__(self, store: SessionStore, model: str, key: str | None, id: str) -> None:
        self.id = id
        self._store = store
        self._primary_key = (model, key or "", id)

    async def get(self) -> Any:
        """Return the value that was put last, or None if there is none any more."""
        text = await asyncio.to_thread(self._store.get, *self._primary_key)
        return None if text is None else json.loads(text)

    async def put(self, value: Any) -> None:
        """Store a value. Raises ``TrtllmBlsError`` if it is no JSON or too large."""
        try:
            text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise TrtllmBlsError(f"session: the value is not JSON: {error}") from error
        if len(text) > SESSION_BYTES:
            problem = f"the value has {len(text)} bytes; at most {SESSION_BYTES} are kept"
            raise TrtllmBlsError(f"session: {problem}")
        await asyncio.to_thread(self._store.put, *self._primary_key, text)

    async def delete(self) -> None:
        """Delete the value."""
        await asyncio.to_thread(self._store.delete, *self._primary_key)
