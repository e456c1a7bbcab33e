"""Findings, and the list of checks that make them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trtllm_bls.doctor.subject import Subject
from trtllm_bls.errors import TrtllmBlsError

Level = Literal["ok", "warn", "error"]


@dataclass(frozen=True)
class Finding:
    """One line: what holds or does not, and what to do about it (empty where nothing is)."""

    level: Level
    what: str
    mend: str = ""

    @classmethod
    def of(cls, error: TrtllmBlsError, level: Level = "error") -> Finding:
        """Split the error's text: this package's errors end with what to do, after "; " or ": "."""
        text = str(error)
        for mark in ("; ", ": "):
            what, _, mend = text.rpartition(mark)
            if " " in what:  # a name in front of a colon is no sentence yet
                return cls(level, what, mend)
        return cls(level, text)


Findings = Iterator[Finding]


@dataclass(frozen=True)
class Check:
    """``run`` yields what is wrong; ``title`` says what holds where it yields nothing.

    ``applies`` tells whether there is something to look at.
    """

    name: str
    title: str
    applies: Callable[[Subject], Any]
    run: Callable[[Subject], Findings]


CHECKS: list[Check] = []


def check(
    title: str, applies: Callable[[Subject], Any] = lambda subject: True
) -> Callable[[Callable[[Subject], Findings]], Callable[[Subject], Findings]]:
    """Put a function into the list of checks, under its own name."""

    def register(run: Callable[[Subject], Findings]) -> Callable[[Subject], Findings]:
        CHECKS.append(Check(run.__name__, title, applies, run))
        return run

    return register


def examine(
    subject: Subject, checks: Sequence[Check] | None = None
) -> Iterator[tuple[str, Finding]]:
    """Every finding with its check's name, in the order of the list."""
    for each in CHECKS if checks is None else checks:
        if not each.applies(subject):
            continue
        found = list(each.run(subject)) or [Finding("ok", each.title)]
        yield from ((each.name, finding) for finding in found)
