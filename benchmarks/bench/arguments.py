"""The parser of a program's options."""

from __future__ import annotations

import argparse


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """One whose help is a module's docstring, with its examples last."""
    head, _, examples = (text or "").partition("\nexamples:")
    return argparse.ArgumentParser(
        description=head,
        epilog="examples:" + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def numbers(text: str) -> list[int]:
    """An option's value: whole numbers with commas between them."""
    values = [int(part) for part in text.split(",") if part]
    if any(value < 1 for value in values):
        raise argparse.ArgumentTypeError(f"{text}: whole numbers from 1, with commas between")
    return values
