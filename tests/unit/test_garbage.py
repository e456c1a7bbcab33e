"""Imports and the ends of processes without garbage collections."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from tests.helpers.server_settings import DEMO
from trtllm_bls.garbage import no_collections

CYCLE = """
from trtllm_bls import garbage

class Tells:
    def __del__(self):
        print("collected at the end")

cycle = Tells()
cycle.itself = cycle
del cycle
"""
# Prints the full collections during the load, and what it leaves to the collector.
LOAD = f"""
import gc, sys
from trtllm_bls.text.tokenizer import load_tokenizer

full = []
gc.callbacks.append(lambda phase, info: full.append((phase, info["generation"])))
load_tokenizer({str(DEMO / "target")!r}, own_process=sys.argv[1] == "ours")
print(full.count(("start", 2)), gc.get_freeze_count() > 100_000, gc.isenabled())
"""


def output(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@pytest.mark.parametrize(
    ("ending", "said"),
    [("", "collected at the end\n"), ("garbage.end_without_collections()", "")],
)
def test_python_collects_nothing_at_the_end(ending: str, said: str) -> None:
    """It finds the cycle without our call, so this test could fail."""
    assert output(f"{CYCLE}\n{ending}") == said


def test_a_process_of_ours_makes_no_full_collection_while_it_loads_a_tokenizer() -> None:
    assert output(LOAD, "ours") == "0 True True\n"


def test_a_users_process_gets_its_collector_back_as_it_was() -> None:
    _, is_frozen, is_enabled = output(LOAD, "a user's").split()
    assert (is_frozen, is_enabled) == ("False", "True")


@pytest.mark.parametrize("is_enabled", [True, False])
def test_collections_are_on_again_also_after_an_import_that_fails(is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        with pytest.raises(ImportError), no_collections():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
