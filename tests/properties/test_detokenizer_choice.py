"""Which detokenizer a tokenizer gets when it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from tests.helpers.loaded_tokenizers import FAMILIES, Counted, loaded, stream
from trtllm_bls.text.detokenizer import ByteTableDetokenizer, WindowDetokenizer, choose_detokenizer

# --- the choice at load ---------------------------------------------------------------------


def test_a_table_that_does_not_fit_is_refused_loudly(caplog: pytest.LogCaptureFixture) -> None:
    """The decoder claims bytes as letters, the texts say otherwise: warn, and take the window."""
    mistaken = Counted(loaded("sentencepiece"), decoder={"type": "ByteLevel"})
    with caplog.at_level(logging.WARNING):
        make = choose_detokenizer(mistaken, True)
    assert isinstance(make(), WindowDetokenizer)
    assert "byte-level table differs" in caplog.text
    assert "ids [" in caplog.text


def test_a_tokenizer_that_cannot_be_streamed_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """A decode that rewrites earlier text fits no stream; it is used, with a warning."""

    class Backwards(Counted):
        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
            return super().decode(token_ids, skip_special_tokens)[::-1]

    with caplog.at_level(logging.WARNING):
        make = choose_detokenizer(Backwards(loaded("byte-level")), True)
    assert isinstance(make(), WindowDetokenizer)
    assert "streamed text may differ" in caplog.text


def test_made_families_load_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    """No family falls back to the window with a warning."""
    with caplog.at_level(logging.WARNING):
        for family in FAMILIES:
            for skip in (True, False):
                choose_detokenizer(loaded(family), skip)
    assert caplog.text == ""


REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
BYTES, FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@pytest.mark.parametrize(
    "steps",
    [
        [REPLACE, BYTES, FUSE, STRIP | {"stop": 1}],
        [REPLACE, BYTES, FUSE, STRIP | {"content": "_"}],
        [REPLACE | {"content": "_"}, BYTES, FUSE],
        [REPLACE | {"pattern": {"Regex": "▁"}}, BYTES, FUSE],
        [BYTES, REPLACE, FUSE],
        [REPLACE, STRIP, FUSE],
        [],
    ],
)
def test_unknown_decoders_get_the_window(steps: list[dict[str, Any]]) -> None:
    """Only decoders that are known step by step are given a table."""
    family = "sentencepiece" if any(step["type"] == "Strip" for step in steps) else "gemma"
    odd = Counted(loaded(family), decoder={"type": "Sequence", "decoders": steps})
    assert isinstance(choose_detokenizer(odd, True)(), WindowDetokenizer)


def test_a_sequence_of_one_step_is_that_step() -> None:
    """Some converters wrap a lone decoder."""
    wrapped = {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}
    make = choose_detokenizer(Counted(loaded("byte-level"), decoder=wrapped), True)
    assert isinstance(make(), ByteTableDetokenizer)


def test_an_empty_table_has_a_detokenizer() -> None:
    """Nothing to test, nothing to show."""
    empty = Counted(loaded("byte-level"))
    empty.vocab_size, empty.added_ids = 0, frozenset()
    assert stream(choose_detokenizer(empty, True)(), []) == [""]
