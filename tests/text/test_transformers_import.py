"""``transformers``, imported for a tokenizer alone, beside ``transformers`` as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import Any

import transformers

from tests.helpers.loaded_tokenizers import DEMO
from tests.helpers.small_tokenizers import MAKERS, directory

# Counts the files of models that are opened.
COUNT = """
import json
import sys

opened = []

def see(event, arguments):
    if event == "open" and "/transformers/models/" in str(arguments[0]):
        if "/modeling_" in str(arguments[0]):
            opened.append(arguments[0])

sys.addaudithook(see)
"""
OURS = """
from trtllm_bls.text.tokenizer import load_tokenizer

for place in sys.argv[1:]:
    assert load_tokenizer(place).encode("the fox", False), place
import transformers

assert transformers.__version__ and transformers.PreTrainedTokenizerFast
print(len(opened))
assert "bert" in dir(transformers.models)
from transformers import LlamaConfig

assert LlamaConfig().hidden_size and transformers.models.bert.BertConfig().hidden_size
"""
THEIRS = """
sys.modules["torch"] = None  # as a tokenizer hides it
import transformers
import transformers.models

print(len(opened))
"""
# In place of a release whose lazy modules lack what ours expect.
OTHER_RELEASE = """
from trtllm_bls.text import transformers_import

def fail(module, read):
    raise AttributeError("no such attribute")

transformers_import._read_when_asked = fail
"""
NAMES = """
KEPT = ("_modules", "_class_to_module", "_object_missing_backend", "_import_structure")

def plain(value):
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return sorted(value) if isinstance(value, (set, list)) else value

assert {"AutoTokenizer", "LlamaConfig"} <= set(dir(transformers))
names = {}
for module in (transformers, transformers.models):
    names[module.__name__] = [sorted(getattr(module, "__all__", []))]
    names[module.__name__] += [plain(getattr(module, name, None)) for name in KEPT]
print(json.dumps(names))
"""


@cache
def printed(source: str, *words: str) -> list[Any]:
    """What a Python of its own prints, each line a value in JSON."""
    command = [sys.executable, "-c", source, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_no_tokenizer_reads_the_models_of_transformers() -> None:
    """All names are there when one of a model is asked for. Older ones read some in any case."""
    places = [str(directory(family)) for family in MAKERS]
    num_ours, ours = printed(COUNT + OURS + NAMES, *places, str(DEMO))
    num_theirs, theirs = printed(COUNT + THEIRS + NAMES)
    if tuple(map(int, transformers.__version__.split(".")[:2])) >= (4, 57):
        assert num_theirs > 300
        assert num_ours < 10  # of the packages that load a tokenizer
    assert ours == theirs


def test_a_release_that_is_made_in_another_way_is_imported_as_usual() -> None:
    num_ours, ours = printed(COUNT + OTHER_RELEASE + OURS + NAMES, str(DEMO))
    num_theirs, theirs = printed(COUNT + THEIRS + NAMES)
    assert num_ours >= num_theirs
    assert ours == theirs
