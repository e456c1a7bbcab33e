"""What the judge gives tritonserver to load, and the mends of Triton's reasons."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trtllm_bls.operate.judge import STAND_IN, STUBS, groups_of, write_copy
from trtllm_bls.operate.triton_reasons import remedy_of


def config_of(text: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def test_weights_are_linked_and_programs_stood_for(tmp_path: Path) -> None:
    """Of Python models alone; what lies beside a program is linked."""
    repository = tmp_path / "repository"
    for model, names in (("python", ("model.py", "helper.py")), ("onnx", ("model.onnx",))):
        for name in names:
            file = repository / model / "1" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("mine")
        (repository / model / "config.pbtxt").write_text("# mine")
        (repository / model / "warmup").mkdir()
    circle = repository / "onnx" / "circle"
    circle.symlink_to(circle)
    (repository / "onnx" / "1" / "model.py").write_text("mine")
    configs = {"python": config_of('backend: "python"'), "onnx": config_of('backend: "onnx"')}
    copy = tmp_path / "copy"
    write_copy(repository, copy, ["python", "onnx"], configs)
    stands_in = (copy / "python" / "1" / "model.py").resolve()
    assert stands_in == STAND_IN
    files = [path for path in copy.rglob("*") if not path.is_dir() or path.is_symlink()]
    assert files and all(path.is_symlink() for path in files)
    for path in files:
        target = Path(os.path.realpath(path))
        if target != stands_in:
            assert target == repository / path.relative_to(copy)
    assert sorted(path.name for path in (copy / "onnx").iterdir()) == [
        "1",
        "circle",
        "config.pbtxt",
        "warmup",
    ]


def test_a_server_starts_as_many_processes_as_it_can_watch() -> None:
    """A model of many processes is alone where no other has room."""
    one = config_of("instance_group { count: 1 }")
    many = config_of(f"instance_group {{ count: {STUBS + 5} }}")
    names = [f"m{number:02}" for number in range(STUBS)]
    configs = dict.fromkeys(names, one) | {"m03": many}
    groups = list(groups_of(names, configs))
    assert [len(group) for group in groups] == [3, 1, STUBS - 4]
    assert list(chain.from_iterable(groups)) == names
    assert [len(group) for group in groups_of(names, dict.fromkeys(names, one))] == [STUBS]


@pytest.mark.parametrize(
    ("reason", "mend"),
    [
        ("ImportError: cannot import name 'x' from 'trtllm_bls.errors' (/x.py)", "upgrade"),
        ("ModuleNotFoundError: No module named 'trtllm_bls.services'", "upgrade"),
        ("ModuleNotFoundError: No module named 'yaml'", "install it"),
        ("unable to find 'libtritonrepoagent_x.so' for repo agent 'x', searched: /o", "agent"),
        ("unable to find backend library 'nope.so' for model 'm', searched: '/m'", "runtime"),
        ("unable to find backend library for backend 'pythn', try specifying", "correct backend"),
        ("unexpected platform type 'python' for m", "set backend"),
        ("failed to open text file for read /r/m/config.pbtxt: No such file", "write one"),
        ("failed to open text file for read /r/m/labels.txt: No such file", "add the file"),
        ("Failed to get the canonical path for /nowhere/env.tar.gz", "EXECUTION_ENV_PATH"),
        (
            'failed to read text proto from /c: 7:14: Message type "M" has no field named "x"',
            "name",
        ),
        ("failed to read text proto from /c: 7:14: Expected integer", "Protobuf's texts"),
        (
            "unexpected directory name 'a' for model 'b', directory name must equal model name",
            "one",
        ),
        ("at least one version must be available under the version policy of model 'm'", "named 1"),
        ("UnicodeEncodeError: 'ascii' codec can't encode character", "ASCII"),
        ("ensemble 'e' depends on 'm' which has no loaded version. Model 'm' loading", "first"),
        ("instance group g_0 of model g has kind KIND_GPU but no GPUs are available", "KIND_CPU"),
        ("tritonserver crashes as it loads it: SIGSEGV", "added last"),
        ("model input 'IN' must specify 'dims' for m", ""),
    ],
)
def test_a_reason_that_does_not_say_what_to_do_has_a_mend(reason: str, mend: str) -> None:
    """As 24.10 words it; others speak for themselves."""
    assert mend in remedy_of(reason) and bool(mend) == bool(remedy_of(reason))
