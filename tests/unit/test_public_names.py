"""The names that users' files import: they stay, and nothing that users copy imports others."""

from __future__ import annotations

import ast
import importlib
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MODELS = ("postprocessing", "preprocessing", "tensorrt_llm", "tensorrt_llm_bls")
PUBLIC = {
    "trtllm_bls.client": {"BLS", "ENGINE", "Client", "Event", "Model", "Result", "Stream", "Tls"},
    "trtllm_bls.openai": {"asgi_app"},
    "trtllm_bls.pipeline": {
        "LLM",
        "BatchedStage",
        "ContentPart",
        "Speech",
        "batched",
        "EngineError",
        "InvalidRequest",
        "ChatRequest",
        "PipelineDeployment",
        "Request",
        "Response",
        "Session",
        "Step",
        "Steps",
        "StreamingModel",
        "Tensor",
        "connect",
        "testing",
    },
    "trtllm_bls.errors": {
        "CallChainTooLong",
        "CycleWithoutPlace",
        "Defect",
        "EngineRefusal",
        "EngineTimeout",
        "CheckpointError",
        "ClientError",
        "ConnectionFailed",
        "DeadlineExceeded",
        "EngineError",
        "EngineStalled",
        "EngineUnavailable",
        "InvalidRequest",
        "Overloaded",
        "PromptTooLong",
        "SettingsError",
        "SetupError",
        "ShuttingDown",
        "Stopped",
        "TokenizerError",
        "TrtllmBlsError",
        "Unsupported",
    },
    **{f"trtllm_bls.triton.{model}": {"TritonPythonModel"} for model in MODELS},
}
COPIED = sorted(
    path
    for pattern in ("models/*/1/model.py", "examples/**/*.py", "trtllm_bls/configure/templates/*")
    for path in ROOT.glob(pattern)
    if path.suffix == ".py" or path.name.endswith(".py.txt")
)
# From 0.3.0 on, a repository that ``configure`` wrote loads without ``upgrade``.
RELEASED = sorted((ROOT / "tests" / "models" / "repositories").glob("0.[3-9]*.tar.xz"))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])


def imports_of(source: str) -> Iterator[tuple[str, str]]:
    """Module and name of each import of ours."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("trtllm_bls"):
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("trtllm_bls")]
            yield from ((name, "") for name in names)


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_names_are_there(module: str) -> None:
    """``__all__`` of a door names them, and no others."""
    loaded = importlib.import_module(module)
    assert all(hasattr(loaded, name) for name in PUBLIC[module])
    if module in ("trtllm_bls.client", "trtllm_bls.openai", "trtllm_bls.pipeline"):
        assert set(loaded.__all__) == PUBLIC[module]
    elif module == "trtllm_bls.errors":
        kinds = [value for value in vars(loaded).values() if isinstance(value, type)]
        raised = {kind.__name__ for kind in kinds if issubclass(kind, loaded.TrtllmBlsError)}
        assert raised == PUBLIC[module]


@pytest.mark.parametrize("file", COPIED, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_users_copy_imports_public_names_alone(file: Path) -> None:
    """Models, examples and the templates of ``trtllm-bls new``."""
    source = file.read_text(encoding="utf-8")
    if file.suffix == ".txt":  # a template of ``str.format``
        lines = [line for line in source.splitlines() if re.match("(from|import) ", line)]
        source = "\n".join(lines)
        assert lines
    for module, name in imports_of(source):
        assert name in PUBLIC.get(module, ()) or f"{module}.{name}" in PUBLIC, (module, name)


@pytest.mark.parametrize("archive", RELEASED, ids=lambda path: path.stem)
def test_the_model_files_of_each_release_still_load(archive: Path) -> None:
    """As they were written: Triton executes them, and looks for ``TritonPythonModel``."""
    with tarfile.open(archive) as files:
        members = [each for each in files.getmembers() if each.name.endswith("/1/model.py")]
        assert len(members) > 5
        for member in members:
            content = files.extractfile(member)
            assert content is not None
            loaded: dict[str, Any] = {}
            exec(compile(content.read(), member.name, "exec"), loaded)
            assert isinstance(loaded["TritonPythonModel"], type), member.name


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_pages_import_public_names_alone(page: Path) -> None:
    """Each line of an import in a page's code blocks."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    for line in lines:
        if re.match(r"(from|import) trtllm_bls\b.*[^(]$", line):
            for module, name in imports_of(line):
                public = name in PUBLIC.get(module, ()) or f"{module}.{name}" in PUBLIC
                assert public or (module in PUBLIC and not name), line


@pytest.mark.parametrize("model", MODELS)
def test_a_model_file_is_a_docstring_and_one_import(model: str) -> None:
    """An editor and mypy can follow it, and no rename inside the package reaches it."""
    source = (ROOT / "models" / model / "1" / "model.py").read_text(encoding="utf-8")
    docstring, load = ast.parse(source).body
    assert isinstance(docstring, ast.Expr)
    assert f"trtllm_bls/triton/{model}.py" in ast.unparse(docstring)
    assert ast.unparse(load) == f"from trtllm_bls.triton.{model} import TritonPythonModel"
