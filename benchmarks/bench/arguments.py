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
