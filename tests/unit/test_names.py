"""One word has one meaning in the package, and a docstring names what the code has."""

from __future__ import annotations

import ast
import builtins
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import trtllm_bls
from tests.helpers.syntax_trees import tree
from trtllm_bls.settings import model_names

PACKAGE = Path(trtllm_bls.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
# Names that more than one module has, and why.
SHARED = {
    "TritonPythonModel": "Triton looks for a class of this name in each model",
    "Tensor": "`pb_utils.Tensor` of the fake backend has Triton's name",
}
# Words of Triton, TensorRT-LLM, gRPC, HTTP, Python and others, and values that callers send.
FOREIGN = {
    "DecodeStream",
    "GET",
    "GenerateComplete",
    "Host",
    "INT32",
    "ModelConfig",
    "ModelInferResponse",
    "Origin",
    "POST",
    "PanicException",
    "RequestPerfMetrics",
    "TRTLLM_BLS_API_KEYS",
    "Task",
    "aio",
    "deflate",
    "ebnf_grammar",
    "ensemble",
    "getaddrinfo",
    "gzip",
    "ldd",
    "loading",
    "mixed",
    "monotonic",
    "ngram",
    "null",
    "off",
    "pb_utils",
    "preparing",
    "proto",
    "py",
    "python3",
    "sentence",
    "structural_tag",
    "tensorrtllm",
    "tokenizers",
    "triton_python_backend_utils",
    "v1",
    "yaml",
}
QUOTED = re.compile(r"``([A-Za-z_][\w.]*)(?:\(\))?``")


def defined(module: Path) -> Iterator[str]:
    """The classes of a module, and its private constants."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ClassDef):
            yield node.name
    constants: set[str] = set()
    for statement in tree(module).body:
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        else:
            continue
        for target in targets:
            names = {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
            constants |= {name for name in names if re.fullmatch(r"_[A-Z][A-Z0-9_]*", name)}
    yield from constants


def test_no_class_and_no_private_constant_has_a_name_twice() -> None:
    """A reader who searches for one finds one; but for ``SHARED``."""
    homes = defaultdict[str, list[str]](list)
    for module in MODULES:
        for name in defined(module):
            homes[name].append(str(module.relative_to(PACKAGE)))
    twice = {name: files for name, files in homes.items() if len(files) > 1}
    assert {name: files for name, files in twice.items() if name not in SHARED} == {}
    assert twice.keys() >= SHARED.keys(), "no longer shared: take it out of the list"


MODEL_NAMES = "|".join(value for name, value in vars(model_names).items() if name.endswith("_NAME"))
# A name by itself, or before a parameter or a file. Elsewhere ``ensemble`` and the like are words.
SPELLED_NAME = re.compile(
    rf"^({MODEL_NAMES})$|(?<![\w.])({MODEL_NAMES})[./]\w|\btensorrt_llm(_bls|_draft)?\b"
)
# The texts that spell a model's name, and why.
SPELLED = {
    ("configure/pbtxt.py", "## What an engine tells"): "a page of the documents, as Markdown",
    ("engines/llm_api.py", "tensorrt_llm"): "the Python package of TensorRT-LLM",
    ("operate/doctor.py", "tensorrt_llm.llmapi.llm_args"): "the Python package of TensorRT-LLM",
    ("settings/parameters.py", "Arguments of `tensorrt_llm.LLM`"): "a class of that package",
}


def spelled_names(module: Path) -> Iterator[str]:
    """The texts of a module's code, without its docstrings, that spell the name of a model."""
    plain = {id(node.value) for node in ast.walk(tree(module)) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree(module)):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in plain and SPELLED_NAME.search(node.value):
            yield node.value


def test_one_module_spells_the_names_of_models() -> None:
    """Every other takes them from there; but for ``SPELLED``."""
    home = Path("settings/model_names.py")
    places = set()
    for module in MODULES:
        file = module.relative_to(PACKAGE)
        places |= {(str(file), text) for text in spelled_names(module) if file != home}
    strays = []
    unused = set(SPELLED)
    for file, text in sorted(places):
        reasons = {
            (name, begin) for name, begin in SPELLED if name == file and text.startswith(begin)
        }
        unused -= reasons
        if not reasons:
            strays.append((file, text))
    assert strays == []
    assert unused == set(), "no longer spelled: take it out of the list"


def docstrings(module: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree(module)):
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


@cache
def words(module: Path) -> frozenset[str]:
    """The words of a module's code: names, and what its strings hold; not docstrings."""
    found: set[str] = set()
    places = {line for line, _ in docstrings(module)}
    for token in tokenize.generate_tokens(io.StringIO(module.read_text()).readline):
        is_text = token.type == tokenize.STRING and token.start[0] not in places
        if token.type == tokenize.NAME or is_text:
            found |= set(re.findall(r"\w+", token.string))
    return frozenset(found)


@cache
def known_anywhere() -> frozenset[str]:
    """Modules, classes, functions, constants and fields: a docstring may name another module's."""
    found = FOREIGN | set(dir(builtins))
    for module in MODULES:
        found |= {module.stem, module.parent.name}
        for node in ast.walk(tree(module)):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                found.add(node.name)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            if isinstance(node, ast.Name) and node.id.isupper():
                found.add(node.id)
    return frozenset(found)


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_docstring_names_only_what_the_code_has(module: Path) -> None:
    stale = []
    for line, text in docstrings(module):
        for name in QUOTED.findall(text):
            parts = [part for part in name.split(".") if part]
            if not all(part in words(module) or part in known_anywhere() for part in parts):
                stale.append(f"{line}: ``{name}``")
    assert stale == []


def test_the_list_of_foreign_words_has_none_that_no_docstring_uses() -> None:
    """A word that is gone is taken out."""
    used = {
        part
        for module in MODULES
        for _, text in docstrings(module)
        for name in QUOTED.findall(text)
        for part in name.split(".")
    }
    assert used >= FOREIGN
