"""The guard of conversations: one search finds what the walk from text to text finds."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest

from tests.helpers.random_cases import CASES, run_cases
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.text.json_values import MAX_DEPTH, json_texts
from trtllm_bls.text.tokenizer import GUARD, ChatGuard

TOKENS = ("<s>", "<|im_start|>", 'a"b', "x\\y", "\n\n", "é", "🙂", "[", "]]")
PIECES = (*TOKENS, *"<s>|[]ab", "im_", "start", "E\u0301", "É", "\ud83d", " ", GUARD)
NORMALIZERS: tuple[Callable[[str], str] | None, ...] = (None, str.lower, str.strip)


def value(chance: random.Random, room: int) -> Any:
    """A JSON value, now and then of types that no parser makes."""
    kind = chance.random()
    count = chance.randint(0, 3)
    if kind < 0.5 or not room:
        return "".join(chance.choices(PIECES, weights=[1] * (len(PIECES) - 1) + [0.1], k=count))
    if kind < 0.6:
        return chance.choice((None, True, 3, -0.5, 2**70, b"<s>", object))
    items = [value(chance, room - 1) for _ in range(count)]
    if kind < 0.75:
        return tuple(items) if chance.random() < 0.05 else items
    keys = ["".join(chance.choices("<s>ab", k=3)) for _ in items]
    pairs: dict[Any, Any] = dict(zip(keys, items, strict=True))
    if chance.random() < 0.02:
        pairs[3] = "<s>"
    return MappingProxyType(pairs) if chance.random() < 0.02 else pairs


def outcome(guard: Callable[[str, Any], Any], guarded: Any) -> Any:
    try:
        return guard("messages", guarded)
    except InvalidRequest as error:
        return str(error)


def test_the_search_gives_what_the_walk_gives() -> None:
    """Values, their types, and refusals to the letter."""
    unchanged = 0

    def case(chance: random.Random) -> None:
        nonlocal unchanged
        tokens = chance.sample(TOKENS, chance.randint(0, len(TOKENS)))
        guard = ChatGuard(tokens, chance.choice(NORMALIZERS))
        made = value(chance, 4)
        guarded = outcome(guard.guard, made)
        expected = outcome(guard.guard_nested, made)
        assert repr(guarded) == repr(expected)
        unchanged += guarded is made

    assert run_cases(case, CASES // 4) >= CASES // 4
    assert unchanged


@pytest.mark.parametrize("depth", range(MAX_DEPTH - 1, MAX_DEPTH + 3))
@pytest.mark.parametrize("leaf", ["text", [], {}])
@pytest.mark.parametrize("is_list", [True, False])
def test_depth_is_counted_as_by_the_walk(depth: int, leaf: Any, is_list: bool) -> None:
    """Up to the last level that is allowed, and not beyond."""
    made = leaf
    for _ in range(depth):
        made = [made] if is_list else {"key": made}
    guard = ChatGuard(TOKENS, None)
    assert outcome(guard.guard, made) == outcome(guard.guard_nested, made)
    levels = depth + (leaf != "text")
    assert (json_texts(made) is None) is (levels > MAX_DEPTH)


def test_a_request_without_control_tokens_is_searched_once() -> None:
    """However many texts its tools have; nothing is copied."""
    searches = 0

    class Counted:
        """A pattern that counts its searches."""

        def search(self, text: str) -> None:
            nonlocal searches
            searches += 1

    guard = ChatGuard(TOKENS, None)
    guard._pattern = Counted()  # type: ignore[assignment]
    tools = [{"function": {"name": f"tool_{number}", "parameters": {}}} for number in range(128)]
    assert guard.guard("tools", tools) is tools
    assert searches == 1
