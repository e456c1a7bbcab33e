"""Change one place of the package at a time, and see which test fails.

Usage: python -m tests.mutate [MUTATIONS], a text file of paragraphs, by default ``mutations.txt``
beside this file (whose mutations should all be killed, and a test is missing where one survives):

    trtllm_bls/openai/chat.py
    - limit = request.max_completion_tokens
    + limit = None
    tests/openai/test_forms.py -k completion_tokens

The third and fourth line may be left out: then the text is removed, or the tests are those of the
paragraph before. ``⏎`` stands for the end of a line. Works on a copy of what git has or would add.
Slow tests are left out, as in ``make test``.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

_ROOT = Path(__file__).parents[1]
_LIMIT_S = 200


def main(file: Path) -> None:
    """Print a row of a table for each mutation."""
    tests = ""
    with TemporaryDirectory() as directory:
        tree = Path(directory)
        _copy(tree)
        for paragraph in file.read_text(encoding="utf-8").strip().split("\n\n"):
            place, *lines = paragraph.splitlines()
            (before,) = (line[2:].replace("⏎", "\n") for line in lines if line.startswith("- "))
            after = "".join(line[2:].replace("⏎", "\n") for line in lines if line.startswith("+ "))
            tests = next((line for line in lines if line[0] not in "-+"), tests)
            source = tree / place
            text = source.read_text(encoding="utf-8")
            number = text.partition(before)[0].count("\n") + 1
            if text.count(before) == 1:
                source.write_text(text.replace(before, after), encoding="utf-8")
                result = _result(tree, tests)
                source.write_text(text, encoding="utf-8")
            else:
                result = f"NOT APPLIED: the text is there {text.count(before)} times"
            print(f"| {place}:{number} | `{before}` → `{after}` | {result} |", flush=True)


def _copy(tree: Path) -> None:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in subprocess.check_output(listed, cwd=_ROOT, text=True, timeout=120).split("\0"):
        if name and os.path.lexists(_ROOT / name):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(_ROOT / name, tree / name, follow_symlinks=False)


def _result(tree: Path, tests: str) -> str:
    options = ["-qx", "-p", "no:cacheprovider", "-m", "not slow"]
    command = [sys.executable, "-m", "pytest", *options, *shlex.split(tests)]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return "killed: the tests did not end"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if failed is not None:
        return f"killed by {failed[1]}"
    return "SURVIVED" if done.returncode == 0 else f"NO RESULT: pytest ended with {done.returncode}"


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else _ROOT / "tests" / "mutations.txt")
