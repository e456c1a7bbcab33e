"""``configure --engine llm_api``, and ``--from`` a repository of upstream's llmapi model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from google.protobuf import text_format

from tests.conformance.engines import LLM_API
from tests.helpers.model_configurations import rows_of_config, rows_of_table
from tests.helpers.server_settings import DEMO
from tests.models.configured import Written, error_of
from tests.models.doctored import findings
from trtllm_bls.configure.pbtxt import model_config
from trtllm_bls.wire.contract import LLMAPI

MODEL = DEMO / "target"
YAML = """
model: {model}
backend: pytorch
tensor_parallel_size: 2
max_seq_len: 4096
triton_config: {{max_batch_size: 0, decoupled: true}}
"""


def upstreams(place: Path, model: Path, instances: int = 1, gpus: str = "") -> Path:
    """A repository laid out as upstream's."""
    version = place / "tensorrt_llm" / "1"
    version.mkdir(parents=True)
    (version / "model.py").touch()
    (version / "model.yaml").write_text(YAML.format(model=model))
    config = model_config(LLMAPI, {"gpu_device_ids": gpus} if gpus else {}, max_batch_size=0)
    config.instance_group[0].count = instances
    config.input.add(name="image_url", data_type="TYPE_STRING", dims=[-1])
    (place / "tensorrt_llm" / "config.pbtxt").write_text(text_format.MessageToString(config))
    return place


@dataclass
class Repository(Written):
    options: tuple[object, ...] = ()

    def places(self) -> list[object]:
        return list(self.options)


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """As for the C++ backend."""
    (tmp_path / "file").touch()
    new = Repository(tmp_path / "file" / "new", ("--from", upstreams(tmp_path / "old", MODEL)))
    assert "cannot be written: Not a directory" in error_of(new.run())


def test_upstreams_clients_are_kept(tmp_path: Path) -> None:
    """Its name has its tensors; the engine has another name; what is lost is named."""
    old = upstreams(tmp_path / "old", MODEL)
    new = Repository(tmp_path / "new", ("--from", old))
    told = new.write().output
    assert new.config("tensorrt_llm").max_batch_size == 0
    assert rows_of_config(new.config("tensorrt_llm").input, inputs=True) == rows_of_table(
        LLMAPI.inputs
    )
    assert new.config("tensorrt_llm").model_transaction_policy.decoupled
    values = new.values("tensorrt_llm")
    assert values["tensors"] == "llmapi" and values["accumulate_tokens"] == "true"
    assert values["exclude_input_in_output"] == "false"
    for model in ("tensorrt_llm", "tensorrt_llm_bls"):
        assert new.values(model)["tensorrt_llm_model_name"] == "tensorrt_llm_engine"
    engine = new.values("tensorrt_llm_engine")
    assert engine["engine"] == "llm_api" and engine["max_sequence_tokens"] == "4096"
    assert engine["model_yaml"] == "tensorrt_llm_engine/1/model.yaml"
    copy = (new.out / engine["model_yaml"]).read_text()
    assert copy == (old / "tensorrt_llm" / "1" / "model.yaml").read_text()
    assert engine["model_dir"] == str(MODEL)
    code = {d.name: (d / "1" / "model.py").read_text() for d in new.out.iterdir()}
    assert code["tensorrt_llm"] == code["tensorrt_llm_bls"] != code["tensorrt_llm_engine"]
    assert "note: lost: tensor image_url" in told
    assert "mpirun --allow-run-as-root -n 2 trtllm-llmapi-launch trtllm-bls serve" in told
    assert "srun -N MACHINES" in told
    assert "image_url" in error_of(new.run("--strict", "--force"))


def test_a_repository_without_an_old_one(tmp_path: Path) -> None:
    """The engine has its own name; each instance has its GPUs."""
    places = ("--engine", "llm_api", "--tokenizer-dir", MODEL, "--gpu-device-ids", "0,1;2,3")
    new = Repository(tmp_path / "new", places)
    told = new.write("--set", "max_sequence_tokens=100", "--set", "tensorrt_llm_bls.max_streams=9")
    assert "mpirun" not in told.output  # upstream: several instances need --no-mpi
    assert new.values("tensorrt_llm")["gpu_device_ids"] == "0,1;2,3"
    assert new.values("tensorrt_llm")["max_sequence_tokens"] == "100"
    assert new.values("tensorrt_llm_bls")["max_streams"] == "9"
    assert new.config("tensorrt_llm").instance_group[0].count == 2
    assert sorted(d.name for d in new.out.iterdir()) == ["tensorrt_llm", "tensorrt_llm_bls"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--draft-engine-dir", "d"), "--draft-engine-dir: has no meaning with the LLM API"),
        (("--model-yaml", "/none"), "none: cannot be read"),
        (("--set", "preprocessing.x=1"), "no such model; there are tensorrt_llm, "),
        (("--set", "max_batch=x"), "max_batch = 'x'"),
    ],
)
def test_what_has_no_meaning_is_refused(tmp_path: Path, more: tuple[str, ...], words: str) -> None:
    places = ("--engine", "llm_api", "--tokenizer-dir", MODEL)
    assert words in error_of(Repository(tmp_path / "new", places).run(*more))


def test_too_few_lists_of_gpus_are_refused(tmp_path: Path) -> None:
    old = upstreams(tmp_path / "old", MODEL, instances=3, gpus="0;1")
    refused = Repository(tmp_path / "new", ("--from", old)).run()
    assert "3 instances need a list each" in error_of(refused)


def test_doctor_finds_nothing_in_it_and_names_what_is_spoilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As configure writes it; then with a processor, an argument and lists that do not load."""
    old = upstreams(tmp_path / "old", MODEL)
    new = Repository(tmp_path / "new", ("--from", old))
    new.write()
    for name in ("llm_api", "parameters", "readable", "programs", "fitness", "decoupled"):
        assert findings(name, repository=new.out) == []
    file = new.out / "tensorrt_llm_engine" / "1" / "model.yaml"
    file.write_text("logits_post_processors: {a: 'none.such:x'}")
    assert "cannot be loaded" in findings("llm_api", repository=new.out)[0].summary
    file.write_text("tensor_parallel: 2")
    monkeypatch.syspath_prepend(LLM_API)
    there = {"tensorrt-llm": "1.2.1"}.get
    ignored, unknown = findings("llm_api", repository=new.out, packages=there)
    assert "1.2.1 may ignore penalties" in ignored.summary and ignored.level == "warn"
    assert "has no argument tensor_parallel" in unknown.summary and "did you mean" in unknown.remedy
    config = new.config("tensorrt_llm_engine")
    config.instance_group[0].count = 2
    text = text_format.MessageToString(config)
    (new.out / "tensorrt_llm_engine" / "config.pbtxt").write_text(text)
    assert "2 instances need a list each" in str(findings("llm_api", repository=new.out)[0])
