"""Responses that later requests refer to, in one SQLite file that all workers of a server open.

A row is one response: its own input, its body, and the response that it follows. A conversation is
a chain of rows. A row belongs to the key that made it; no other key sees it.

Where all rows together are above a bound, the least recently used go first. If one key has more
than half of all bytes, its rows go first, so that no key pushes out the responses of others. Using
a row counts for the whole chain before it, so a chain loses its last link first: it is whole, or
refused.

Every method waits for the disk: call them in threads.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trtllm_bls.errors import SettingsError
from trtllm_bls.http.budgets import REFERENCE_BYTES, STORED_CHAIN
from trtllm_bls.http.limits import RETRY
from trtllm_bls.openai.api_errors import ApiError, invalid

_STORE_FILE = "responses-1.sqlite3"  # with the version of the schema
_PREFIX = "trtllm-bls-responses-"
_SCHEMA = """
PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA foreign_keys = ON;
PRAGMA secure_delete = ON; PRAGMA journal_size_limit = 16777216;
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY, owner TEXT NOT NULL, id TEXT NOT NULL, parent TEXT,
    used REAL NOT NULL, size INTEGER NOT NULL, input TEXT NOT NULL, body TEXT NOT NULL,
    UNIQUE (owner, id));
CREATE INDEX IF NOT EXISTS by_use ON responses (used, number DESC);
CREATE TABLE IF NOT EXISTS items (
    owner TEXT NOT NULL, id TEXT NOT NULL, place INTEGER NOT NULL,
    response INTEGER NOT NULL REFERENCES responses ON DELETE CASCADE,
    PRIMARY KEY (owner, id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_response ON items (response);
CREATE TABLE IF NOT EXISTS total (bytes INTEGER NOT NULL);
INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM total);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN
    UPDATE total SET bytes = bytes + new.size; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses BEGIN
    UPDATE total SET bytes = bytes - old.size; END;
CREATE TABLE IF NOT EXISTS owners (owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO owners SELECT owner, sum(size) FROM responses
    WHERE NOT EXISTS (SELECT 1 FROM owners) GROUP BY owner;
CREATE TRIGGER IF NOT EXISTS owner_added AFTER INSERT ON responses BEGIN
    INSERT INTO owners VALUES (new.owner, new.size)
        ON CONFLICT (owner) DO UPDATE SET bytes = bytes + new.size; END;
CREATE TRIGGER IF NOT EXISTS owner_removed AFTER DELETE ON responses BEGIN
    UPDATE owners SET bytes = bytes - old.size WHERE owner = old.owner;
    DELETE FROM owners WHERE owner = old.owner AND bytes <= 0; END;
COMMIT;
"""


class PrivateDirectory:
    """A new directory for this process and its forks, removed when this process ends.

    A fork removes it if this process was killed. Where all were killed, the next server does so.
    """

    def __init__(self) -> None:
        for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/lock"):
            with suppress(OSError), lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = (self.path / "lock").open("w")  # held until the last fork has ended
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._owner = os.getpid()
        atexit.register(self.close)

    def close(self) -> None:
        """Remove the directory, unless this is a fork and the process that made it runs."""
        if self._owner == os.getppid():
            return
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
        atexit.unregister(self.close)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A response to store.

    ``input``: the items of its request, as JSON; ``items``: the ids of its output, in order.
    """

    id: str
    parent: str | None
    input: bytes
    body: bytes
    items: Sequence[str]


class _Output(msgspec.Struct):
    """The ``output`` of a response's body, each item as JSON."""

    output: list[msgspec.Raw]


class StoredResponses:
    """The rows in ``directory``. Methods raise ``ApiError`` where the file cannot be used.

    ``max_bytes``: the limit of all rows. ``max_s``: the time that a row is kept after its last use.
    ``max_chain_bytes``: the limit of the rows that one request refers to. Raises ``SettingsError``
    for a directory that cannot be used.
    """

    def __init__(
        self, directory: Path, *, max_bytes: int, max_s: float, max_chain_bytes: int
    ) -> None:
        self._file = directory / _STORE_FILE
        self._max_bytes = max_bytes
        self._max_s = max_s
        self.max_chain_bytes = max_chain_bytes
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None  # opened in the worker, after the fork
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            os.close(os.open(self._file, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600))
        except OSError as error:
            raise SettingsError(f"--store-dir {directory}: {error.strerror}") from error

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def save(self, owner: str, stored: Stored) -> None:
        """Add the response, in place of one with its id, and remove rows above the bounds."""
        size = len(stored.input) + len(stored.body)
        with self._transaction() as rows:
            rows.execute("DELETE FROM responses WHERE owner = ? AND id = ?", (owner, stored.id))
            row = (
                owner,
                stored.id,
                stored.parent,
                size,
                stored.input.decode(),
                stored.body.decode(),
            )
            number = rows.execute(
                "INSERT INTO responses (owner, id, parent, used, size, input, body)"
                " VALUES (?, ?, ?, 0, ?, ?, ?)",
                row,
            ).lastrowid
            rows.executemany(
                "INSERT OR REPLACE INTO items (owner, id, place, response) VALUES (?, ?, ?, ?)",
                [(owner, item, place, number) for place, item in enumerate(stored.items)],
            )
            self._use(rows, owner, stored.id)
            while rows.execute("SELECT bytes FROM total").fetchone()[0] > self._max_bytes:
                self._remove_least_used(rows)

    def _remove_least_used(self, rows: sqlite3.Connection) -> None:
        largest = rows.execute(
            "SELECT owner FROM owners WHERE bytes > ? ORDER BY bytes DESC LIMIT 1",
            (self._max_bytes // 2,),
        ).fetchone()
        condition = ""
        if largest is not None:
            condition = "WHERE owner = ?"
        rows.execute(
            "DELETE FROM responses WHERE number ="
            f" (SELECT number FROM responses {condition} ORDER BY used, number DESC LIMIT 1)",
            largest or (),
        )

    def body(self, owner: str, response_id: str) -> dict[str, Any] | None:
        """Return the response; ``None`` if there is none."""
        with self._transaction() as rows:
            numbers, _ = self._use(rows, owner, response_id)
            texts = _texts(rows, numbers[:1])
        if not texts:
            return None
        _, body = texts[0]
        return body

    def conversation(self, owner: str, response_id: str) -> list[dict[str, Any]] | None:
        """Return all items up to the end of a response; ``None`` if its chain is not whole."""
        with self._transaction() as rows:
            numbers, is_whole = self._use(rows, owner, response_id)
            if not is_whole:
                return None
            texts = _texts(rows, numbers)
        return _items(texts) or None

    def first(self, owner: str, response_id: str) -> str:
        """Return the id of the first response of the chain that ends with this one."""
        with self._transaction() as rows:
            for _ in range(STORED_CHAIN):
                row = rows.execute(
                    "SELECT parent FROM responses WHERE owner = ? AND id = ?", (owner, response_id)
                ).fetchone()
                if row is None or row[0] is None:
                    break
                response_id = row[0]
        return response_id

    def input(self, owner: str, response_id: str) -> list[dict[str, Any]] | None:
        """Return the items before a response's output, as far as they are stored."""
        with self._transaction() as rows:
            numbers, _ = self._use(rows, owner, response_id)
            texts = _texts(rows, numbers)
        if not texts:
            return None
        request_input, _ = texts[-1]
        return _items(texts[:-1]) + request_input

    def items(self, owner: str, ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return items of responses by their ids, without those that are not stored.

        Raises ``ApiError`` for more bytes than one request may refer to.
        """
        items: dict[str, dict[str, Any]] = {}
        seen: set[int] = set()
        places: dict[tuple[int, str], dict[str, int]] = {}  # by response, which is read once
        with self._transaction() as rows:
            for item_id in dict.fromkeys(ids):
                row = rows.execute(
                    "SELECT number, responses.id, place FROM items"
                    " JOIN responses ON number = response"
                    " WHERE items.owner = ? AND items.id = ?",
                    (owner, item_id),
                ).fetchone()
                if row is not None:
                    places.setdefault(row[:2], {})[item_id] = row[2]
            read_bytes = 0
            item_bytes = 0
            for (number, response_id), item_places in places.items():
                self._use(rows, owner, response_id, seen)
                row = rows.execute("SELECT body FROM responses WHERE number = ?", (number,))
                body = row.fetchone()[0].encode()
                read_bytes += len(body)
                if read_bytes > REFERENCE_BYTES * self.max_chain_bytes:
                    raise self.too_large()
                output = msgspec.json.decode(body, type=_Output).output
                for item_id, place in item_places.items():
                    item_bytes += len(output[place])
                    if item_bytes > self.max_chain_bytes:
                        raise self.too_large()
                    items[item_id] = msgspec.json.decode(output[place])
        return items

    def too_large(self) -> ApiError:
        """Return the refusal of a request that refers to too many bytes."""
        limit = f"{self.max_chain_bytes} bytes (--max-body-bytes)"
        return invalid("input", f"refers to stored items of more than {limit}; refer to fewer")

    def delete(self, owner: str, response_id: str) -> bool:
        """Remove a response; false if there is none. Responses after it cannot be continued."""
        with self._transaction() as rows:
            key = (owner, response_id)
            cursor = rows.execute("DELETE FROM responses WHERE owner = ? AND id = ?", key)
            return cursor.rowcount > 0

    def _use(
        self,
        rows: sqlite3.Connection,
        owner: str,
        response_id: str | None,
        seen: set[int] | None = None,
    ) -> tuple[list[int], bool]:
        """Mark a response and all before it as used.

        Return their rows, and true where the chain is whole and within its limits. The walk ends at
        rows that are ``seen``, and after ``STORED_CHAIN`` rows; it adds its rows to ``seen``.
        """
        numbers: list[int] = []
        if seen is None:
            seen = set()
        size = 0
        while response_id is not None and len(seen) < STORED_CHAIN:
            row = rows.execute(
                "SELECT number, parent, size FROM responses WHERE owner = ? AND id = ?",
                (owner, response_id),
            ).fetchone()
            if row is None or row[0] in seen:
                break
            number, response_id, row_bytes = row
            numbers.append(number)
            seen.add(number)
            size += row_bytes
        now = time.time()
        uses = [(now, number) for number in numbers]
        rows.executemany("UPDATE responses SET used = max(used, ?) WHERE number = ?", uses)
        return numbers, response_id is None and size <= self.max_chain_bytes

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction on the rows, without those that are too old."""
        with self._lock:
            try:
                rows = self._connection = self._connection or self._open()
                with rows:  # commits, or rolls back
                    rows.execute("BEGIN IMMEDIATE")
                    oldest = time.time() - self._max_s
                    rows.execute("DELETE FROM responses WHERE used < ?", (oldest,))
                    yield rows
            except sqlite3.Error as error:
                problem = f"stored responses cannot be used: {error}"
                raise ApiError(503, problem, RETRY, code="store_unavailable") from error

    def _open(self) -> sqlite3.Connection:
        rows = sqlite3.connect(self._file, isolation_level=None, check_same_thread=False)
        # SQLite does not wait where two processes switch a new file to its write-ahead log.
        directory = os.open(self._file.parent, os.O_RDONLY)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            rows.executescript(_SCHEMA)
        finally:
            os.close(directory)
        # Twice the rows' bytes, and some pages more. Beyond that SQLite refuses, as on a full disk.
        rows.execute(f"PRAGMA max_page_count = {2 * self._max_bytes // 4096 + 4096}")
        return rows


def _texts(
    rows: sqlite3.Connection, numbers: Sequence[int]
) -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Return the input and the body of each row, the oldest first."""
    texts: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
    for number in reversed(numbers):
        row = rows.execute("SELECT input, body FROM responses WHERE number = ?", (number,))
        request_input, body = map(msgspec.json.decode, row.fetchone())
        texts.append((request_input, body))
    return texts


def _items(texts: Sequence[tuple[list[dict[str, Any]], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the items of responses in order: the input of each, then its output."""
    items: list[dict[str, Any]] = []
    for request_input, body in texts:
        items += [*request_input, *body["output"]]
    return items
