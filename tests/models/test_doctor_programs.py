"""Programs of models: what the doctor says of them, and what ``serve`` refuses."""

from __future__ import annotations

import py_compile
import sys
from pathlib import Path

import pytest

from tests.models.doctored import findings, only
from trtllm_bls.errors import SetupError
from trtllm_bls.operate.findings import Finding, Subject
from trtllm_bls.operate.preflight import LOADING, PREPARING, preflight

CONFIG = 'backend: "python"\nmax_batch_size: 1\n'
CLASS = "class TritonPythonModel: ...\n"


def repository(place: Path, program: str, config: str = CONFIG) -> Path:
    """A repository with one model of this program."""
    version = place / "repository" / "mine" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(program)
    (version.parent / "config.pbtxt").write_text(config)
    return version.parents[1]


def of_program(place: Path, program: str, config: str = CONFIG) -> list[Finding]:
    return findings("programs", repository=repository(place, program, config))


@pytest.mark.parametrize(
    "program",
    [
        "import c_python_backend_utils\nimport triton_python_backend_utils as pb_utils\n",
        "try:\n    import no_such_module\nexcept ImportError:\n    pass\n",
        "from . import sibling\n",
        "import json, numpy.linalg\nfrom collections.abc import Mapping\n",
    ],
)
def test_a_program_whose_modules_are_there_is_let_alone(tmp_path: Path, program: str) -> None:
    assert of_program(tmp_path, program + CLASS) == []


@pytest.mark.parametrize("suffix", [".pyc", ".so", ".py", ""])
def test_a_module_beside_the_program_is_found_whatever_its_form(
    tmp_path: Path, suffix: str
) -> None:
    place = repository(tmp_path, "import helper\n" + CLASS)
    helper = place / "mine" / "1" / f"helper{suffix}"
    if suffix == ".pyc":
        source = tmp_path / "helper.py"
        source.touch()
        py_compile.compile(str(source), str(helper))
    elif suffix:
        helper.touch()
    else:
        helper.mkdir()
    assert findings("programs", repository=place) == []


@pytest.mark.parametrize(
    "program",
    [
        'import sys\nsys.path.append("/x")\nimport far_away\n',
        'import sys\nsys.modules["far_away"] = sys\nimport far_away\n',
        "import far_away\n",
    ],
)
def test_a_module_that_is_not_found_is_a_warning_and_serve_goes_on(
    tmp_path: Path, program: str
) -> None:
    """The program may bring it; Triton loads each of the first two where the directory has it."""
    place = repository(tmp_path, program + CLASS)
    found = only(findings("programs", repository=place))
    assert found.level == "warn" and "imports far_away" in found.summary
    warnings: list[str] = []
    subject = Subject(repository=place, ports={})
    preflight(LOADING, subject, warnings.append, refuses=True)
    assert warnings == []


def test_a_program_that_cannot_be_compiled_is_an_error(tmp_path: Path) -> None:
    found = only(of_program(tmp_path, "class TritonPythonModel:\n  def\n"))
    assert found.level == "error" and "is no Python" in found.summary


def test_a_program_without_the_class_is_a_warning(tmp_path: Path) -> None:
    """It may make the class by a call, which nobody can tell without running it."""
    found = only(of_program(tmp_path, "globals()['Triton' + 'PythonModel'] = object\n"))
    assert found.level == "warn" and "no class TritonPythonModel" in found.summary


def test_a_models_own_interpreter_is_asked(tmp_path: Path) -> None:
    """With a directory in ``EXECUTION_ENV_PATH`` the answer is that of its ``bin/python3``."""
    python = tmp_path / "environment" / "bin" / "python3"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    path = f'key: "EXECUTION_ENV_PATH" value {{ string_value: "{tmp_path}/environment" }}'
    config = f"{CONFIG}parameters {{ {path} }}\n"
    found = only(of_program(tmp_path, "import numpy\n" + CLASS, config))
    assert f"imports numpy, which {python} does not find" in found.summary


def test_an_archive_of_an_environment_is_not_asked(tmp_path: Path) -> None:
    (tmp_path / "packed.tar.gz").touch()
    path = f'key: "EXECUTION_ENV_PATH" value {{ string_value: "{tmp_path}/packed.tar.gz" }}'
    config = f"{CONFIG}parameters {{ {path} }}\n"
    assert of_program(tmp_path, "import far_away\n" + CLASS, config) == []


# --- what serve waits for ---------------------------------------------------------------------

OURS = "from trtllm_bls.triton.tensorrt_llm_bls import TritonPythonModel\n"
WRONG = 'parameters { key: "log_format" value { string_value: "xml" } }\n'
UNKNOWN = 'parameters { key: "log_formats" value { string_value: "json" } }\n'


def loading(place: Path, *, refuses: bool, **environment: str) -> list[str]:
    """The warnings of ``serve`` before models load."""
    warnings: list[str] = []
    subject = Subject(repository=place, ports={}, environment=environment)
    preflight(LOADING, subject, warnings.append, refuses=refuses)
    return warnings


def own(place: Path, config: str, program: str = OURS) -> Path:
    models = repository(place, program, CONFIG + config)
    (models / "mine").rename(models / "tensorrt_llm_bls")
    return models


def test_a_value_that_a_model_of_this_package_cannot_read_stops_serve(tmp_path: Path) -> None:
    """Without checks it is a warning, and the model says it again as it loads."""
    place = own(tmp_path, WRONG)
    with pytest.raises(SetupError, match="log_format = 'xml': use one of"):
        loading(place, refuses=True)
    (warning,) = loading(place, refuses=False)
    assert "log_format = 'xml'" in warning


def test_a_value_that_nobody_reads_does_not_stop_serve(tmp_path: Path) -> None:
    """Unknown to the model, or in a model of the user's that has the name of one of ours."""
    assert "no parameter log_formats" in loading(own(tmp_path / "a", UNKNOWN), refuses=True)[0]
    assert loading(own(tmp_path / "b", WRONG, CLASS), refuses=True) != []


def test_a_variable_in_place_of_the_value_does_not_stop_serve(tmp_path: Path) -> None:
    place = own(tmp_path, 'parameters { key: "max_streams" value { string_value: "many" } }\n')
    assert loading(place, refuses=True, TRTLLM_BLS_MAX_STREAMS="4") != []
    with pytest.raises(SetupError, match="max_streams"):
        loading(place, refuses=True)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("file", "is a file"),
        ("circle", "leads nowhere"),
        ("none/deeper", "there is no"),
        ("new", None),
        ("directory", None),
    ],
)
def test_a_directory_for_responses_is_looked_at_before_models_load(
    tmp_path: Path, name: str, problem: str | None
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    found = findings("store_directory", store_dir=tmp_path / name)
    assert bool(found) == bool(problem)
    if problem:
        assert problem in only(found).summary + only(found).remedy
        subject = Subject(store_dir=tmp_path / name, ports={})
        with pytest.raises(SetupError, match="--store-dir"):
            preflight(PREPARING, subject, lambda warning: None, refuses=True)
