"""Can this Python run the package and be embedded in the server? Also a script for ``make``:

    python3 trtllm_bls/launcher/interpreter.py

prints nothing, or one line that says what to do, with exit code 1. It runs before anything is
installed, so it imports only the standard library and must parse on older Pythons.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

OLDEST, NEWEST = (3, 10), (3, 13)
PYTHON = "{}.{}".format(*sys.version_info[:2])
LIBPYTHON = f"libpython{PYTHON}.so.1.0"


def find_libpython(directories: Iterable[Path] | None = None) -> Path | None:
    """The interpreter as a shared library, which the server's models embed.

    Another build of the same version is not good enough: standard modules such as ssl then fail
    to load inside the server. ``None`` if it was built without, or that part is not installed.
    """
    if directories is None:
        configured = sysconfig.get_config_var("LIBDIR")
        directories = [Path(configured or sys.base_prefix), Path(sys.base_prefix, "lib")]
    candidates = (directory / LIBPYTHON for directory in directories)
    return next((library for library in candidates if library.is_file()), None)


def no_libpython() -> str:
    """What to do when it is missing."""
    return (
        f"{LIBPYTHON} of {sys.executable} is missing, and the server's models embed it: "
        f"install it (Debian, Ubuntu: apt install libpython{PYTHON}) or choose an interpreter "
        "built with --enable-shared (make clean, then make demo PYTHON=...)"
    )


def problem(
    version: tuple[int, int] = sys.version_info[:2],
    modules: Iterable[str] = ("ensurepip", "venv"),
    directories: Iterable[Path] | None = None,
) -> str | None:
    """Why this interpreter cannot be used, and what to do; ``None`` if it can."""
    if not OLDEST <= version <= NEWEST:
        return (
            f"{sys.executable} is Python {version[0]}.{version[1]}; "
            "3.10 to 3.13 will do: choose one with PYTHON=..."
        )
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        return (
            f"{sys.executable} cannot create environments, it has no {' and no '.join(missing)}: "
            f"install it (Debian, Ubuntu: apt install python{PYTHON}-venv) "
            "or choose another interpreter with PYTHON=..."
        )
    if find_libpython(directories) is None:
        return no_libpython()
    return None


if __name__ == "__main__":
    found = problem()
    sys.exit("error: " + found if found else 0)
