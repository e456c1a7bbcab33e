"""Files of the user's, written anew: with all that they had but their text.

Owner, group, mode and extended attributes stay, a link stays a link. Every new file is made before
the first one takes its place, so a file whose attributes cannot be kept leaves all as they were.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from trtllm_bls.errors import SettingsError

BYTE_ORDER_MARK = "\ufeff"


def line_end(text: str) -> str:
    """Return the line end that most lines of a text have."""
    if 2 * text.count("\r\n") > text.count("\n"):
        return "\r\n"
    return "\n"


def as_written(text: str, old_content: bytes) -> bytes:
    """Encode a text with the line ends and the byte order mark of a file's old content."""
    old_text = old_content.decode("utf-8", "replace")
    if old_text.startswith(BYTE_ORDER_MARK):
        text = BYTE_ORDER_MARK + text
    return text.replace("\n", line_end(old_text)).encode()


def write_files(files: Mapping[Path, bytes]) -> None:
    """Write all files, or none where one cannot be written. Raises ``SettingsError``."""
    new_files = {}
    try:
        for path, content in files.items():
            target = Path(os.path.realpath(path))
            target.parent.mkdir(parents=True, exist_ok=True)
            new_file = target.with_name(f".{target.name}.new")
            new_files[new_file] = target
            new_file.unlink(missing_ok=True)
            new_file.write_bytes(content)
            _take_attributes(new_file, target)
        for new_file, target in new_files.items():
            new_file.replace(target)
    except OSError as error:
        for new_file in new_files:
            with suppress(OSError):
                new_file.unlink(missing_ok=True)
        raise SettingsError(
            f"{path}: cannot be written with the owner, group, mode and attributes that it has: "
            f"{error.strerror}; run upgrade as the files' owner, or as root"
        ) from error


def _take_attributes(new_file: Path, target: Path) -> None:
    """Give a file all that ``target`` has; where that is not there yet, its directory's owner."""
    exists = target.exists()
    old = target.stat() if exists else target.parent.stat()
    new = new_file.stat()
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        os.chown(new_file, old.st_uid, old.st_gid)
    if not exists:
        return
    new_file.chmod(old.st_mode & 0o7777)
    for name, value in _extended_attributes(target).items():
        if _extended_attributes(new_file).get(name) != value:
            os.setxattr(new_file, name, value)


def _extended_attributes(path: Path) -> dict[str, bytes]:
    try:
        return {name: os.getxattr(path, name) for name in os.listxattr(path)}
    except OSError as error:
        if error.errno == errno.ENOTSUP:  # a file system that has none
            return {}
        raise
