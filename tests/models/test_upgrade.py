"""``trtllm-bls upgrade``: repositories of every earlier version, and what users made of them.

The archives in ``repositories`` were written by the versions that they are named after, without
weights: ``cpp`` by ``configure`` with a draft, ``embedded`` is a copy of ``models``, ``llm_api``
and ``llmapi`` (converted) are for TensorRT-LLM's LLM API. Those that it could set have ``SET``.
"""

from __future__ import annotations

import os
import re
import tarfile
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from click.testing import CliRunner, Result
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2

from tests.helpers.model_configurations import check_wires, parsed
from tests.helpers.server_settings import DEMO, ROOT
from tests.helpers.tiers import sample
from tests.helpers.waiting import exit_code
from tests.models.configured import BUILD, PLAIN, error_of, make_engine
from tests.models.doctored import findings
from trtllm_bls import __version__
from trtllm_bls.cli import main
from trtllm_bls.configure.file_writes import write_files
from trtllm_bls.configure.pbtxt import FORMAT
from trtllm_bls.configure.upgrade import edited
from trtllm_bls.errors import SettingsError, SetupError
from trtllm_bls.operate.findings import Subject
from trtllm_bls.operate.preflight import LOADING, preflight
from trtllm_bls.operate.preparation import prepare_models
from trtllm_bls.settings.command_options import ServeSettings
from trtllm_bls.settings.model_config import values_of

ARCHIVES = Path(__file__).with_name("repositories")
SET = {"max_prompt_bytes": "20000", "max_streams": "64", "request_timeout_seconds": "45"}
YAML = "model: /models/llama\nmax_seq_len: 4096\ntriton_config: {decoupled: true}\n"


def written() -> list[tuple[str, str]]:
    """Each version, with each kind of repository that it could write."""
    found = []
    for file in sorted(ARCHIVES.glob("*.tar.xz")):
        with tarfile.open(file) as archive:
            kinds = {name.split("/")[1] for name in archive.getnames() if name.count("/") == 1}
        found += [(file.name.removesuffix(".tar.xz"), kind) for kind in sorted(kinds)]
    return found


def opened(version: str, kind: str, place: Path) -> Path:
    """The repository, in a directory that has its engines and its tokenizer, too."""
    with tarfile.open(ARCHIVES / f"{version}.tar.xz") as archive:
        archive.extractall(place / version, filter="data")
    (place / "engines").mkdir()
    make_engine(place / "engines" / "llama", BUILD, version="0.16.0")
    make_engine(place / "engines" / "draft", PLAIN, version="0.16.0")
    repository = place / version / kind
    for config in repository.glob("*/config.pbtxt"):
        text = config.read_text().replace('"/engines/', f'"{place}/engines/')
        config.write_text(text.replace('"/models/llama"', f'"{DEMO}/target"'))
    return repository


def upgraded(repository: Path, *more: str) -> Result:
    return CliRunner().invoke(main, ["upgrade", str(repository), *more])


def refusal(repository: Path) -> str:
    """Why ``serve`` would not load a repository; empty where it would."""
    try:
        preflight(LOADING, Subject(repository=repository, ports={}), print, refuses=True)
    except SetupError as error:
        return str(error)
    return ""


def files(repository: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in repository.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("version", "kind"), sample(written()))
def test_every_version_is_brought_to_todays_form(version: str, kind: str, tmp_path: Path) -> None:
    """Its settings stay, its models load, ``doctor`` finds nothing, and once is enough."""
    repository = opened(version, kind, tmp_path)
    todays_form = "format_version" in parsed(repository, "tensorrt_llm_bls").parameters
    if kind == "llmapi" and not todays_form:  # which has its own
        place = Path(
            parsed(repository, "tensorrt_llm_engine").parameters["model_yaml"].string_value
        )
        assert place.is_absolute()
        (tmp_path / "model.yaml").write_text(YAML)
        config = repository / "tensorrt_llm_engine" / "config.pbtxt"
        config.write_text(config.read_text().replace(str(place), str(tmp_path / "model.yaml")))
    before = {
        path.parent.name: values_of(parsed(repository, path.parent.name))
        for path in repository.glob("*/config.pbtxt")
    }
    untouched = files(repository)
    checked = upgraded(repository, "--check")
    assert checked.exit_code == 1 or todays_form
    assert files(repository) == untouched
    result = upgraded(repository)
    assert result.exit_code == 0 and "lost:" not in result.output, result.output
    assert result.output.startswith(checked.output[:200])
    for model, values in before.items():
        config = parsed(repository, model)
        now = values_of(config)
        assert now.pop("format_version") == "1"
        assert now.pop("written_by") == f"trtllm-bls {__version__}" or todays_form
        changed = {key for key in values if now.get(key) != values[key]} - FORMAT.keys()
        assert changed <= {"one_core", "model_yaml", "token_cache_bytes"}, changed
        if config.backend == "python":
            code = (repository / model / "1" / "model.py").read_text()
            role = "tensorrt_llm_bls" if (kind, model) == ("llmapi", "tensorrt_llm") else model
            role = {"tensorrt_llm_engine": "tensorrt_llm"}.get(role, role)
            assert code == (ROOT / "models" / role / "1" / "model.py").read_text()
    text = values_of(parsed(repository, "tensorrt_llm_bls"))
    kept = {key: value for key, value in text.items() if key in SET and kind in ("cpp", "llm_api")}
    assert {**SET, **kept} == SET
    assert refusal(repository) == ""
    checks = (
        "readable",
        "placeholders",
        "parameters",
        "program_versions",
        "fitness",
        "wiring",
        "tensors",
    )
    for name in (*checks, "decoupled"):
        assert findings(name, repository=repository) == []
    if kind in ("cpp", "embedded"):
        check_wires(repository)
    assert parsed(repository, "tensorrt_llm_bls").HasField("dynamic_batching")
    again = upgraded(repository, "--check")
    assert again.exit_code == 0 and "up to date" in again.output


# --- what users made of them ------------------------------------------------------------------

EDITED = """# Ours since May: ask Kim before you change it.
# Twice.
name: "tensorrt_llm_bls"  # as clients call it
backend: "python" max_batch_size: 16
{tensors}
instance_group [ {{ count: 3 kind: KIND_CPU }} ]  # three since June
dynamic_batching {{
    priority_levels: 3 default_priority_level: 2
    default_queue_policy {{ max_queue_size: 7 }}
}}
response_cache {{ enable: true }}
model_warmup [ {{
    name: "short" batch_size: 1
    inputs {{ key: "text_input" value {{ data_type: TYPE_STRING dims: [ 1 ] zero_data: true }} }}
}} ]
version_policy: {{ latest {{ num_versions: 1 }} }}
parameters: {{
  key: "max_streams"  # as many as the load test had
  value: {{ string_value: "64" }}
}}
parameters [ {{ key: "draft_source" value {{ string_value: 'n' 'gram' }} }},
             {{ key: "one_core" value {{ string_value: "true" }} }} ]
"""


def test_what_the_user_wrote_stays_to_the_letter(tmp_path: Path) -> None:
    """Comments, notations, instances, priorities, warm-up, cache; also a model of their own."""
    repository = opened("0.2.0-670dce90", "embedded", tmp_path)
    config = repository / "tensorrt_llm_bls" / "config.pbtxt"
    tensors = "".join(re.findall(r"(?m)^(?:input|output) {\n(?:  .*\n)*}\n", config.read_text()))
    config.write_text(EDITED.format(tensors=tensors))
    own = repository / "own" / "1" / "model.py"
    own.parent.mkdir(parents=True)
    own.write_text("from trtllm_bls.pipeline import StreamingModel\nclass TritonPythonModel: ...\n")
    (repository / "own" / "config.pbtxt").write_text('backend: "python"  # mine')
    foreign = files(repository / "own")
    old = parsed(repository, "tensorrt_llm_bls")
    result = upgraded(repository)
    assert result.exit_code == 0 and "lost" not in result.output
    text = config.read_text()
    for line in EDITED.format(tensors="").splitlines():
        assert line.strip() in text or "one_core" in line or "draft_source" in line, line
    new = parsed(repository, "tensorrt_llm_bls")
    assert values_of(new)["draft_source"] == "ngram" and values_of(new)["one_core"] == "on"
    for field, value in old.ListFields():
        if field.name not in ("input", "output", "parameters"):
            assert getattr(new, field.name) == value
    assert len(new.input) > len(old.input)
    assert files(repository / "own") == foreign


def test_a_changed_model_file_stays_and_is_named(tmp_path: Path) -> None:
    """Its changes are shown, with today's places of what it imports; upgrade says so by its exit
    code, too, as long as the file does not load."""
    repository = opened("0.1.0", "embedded", tmp_path)
    code = repository / "preprocessing" / "1" / "model.py"
    code.write_text(code.read_text() + "\nLIMIT = 5  # our own\n")
    for _ in range(2):
        result = upgraded(repository)
        assert result.exit_code == 1 and "next:" not in result.output
        assert "lost: preprocessing: its model.py is not as any version wrote it" in result.output
        changes = [line for line in result.output.splitlines() if line[:1] in ("+", "-")]
        assert changes[-1] == "+LIMIT = 5  # our own" and code.read_text().endswith("# our own\n")
    assert "(trtllm_bls.text.tokenizer.load_tokenizer today)" in result.output
    (found,) = findings("program_versions", repository=repository)[:1]
    assert found.level == "warn" and "run trtllm-bls upgrade" in found.remedy
    checked = upgraded(repository, "--check")  # nothing to write, and it does not load
    assert checked.exit_code == 1 and "cannot mend it" in checked.output


def test_todays_file_is_written_beside_a_changed_one(tmp_path: Path) -> None:
    """With ``--keep``; with ``--map`` in its place, and the changed one beside it."""
    repository = opened("0.1.0", "embedded", tmp_path)
    code = repository / "preprocessing" / "1" / "model.py"
    changed = code.read_text() + "\nLIMIT = 5\n"
    code.write_text(changed)
    todays = (ROOT / "models" / "preprocessing" / "1" / "model.py").read_text()
    assert upgraded(repository, "--keep").exit_code == 1
    assert code.read_text() == changed and code.with_name("model.py.new").read_text() == todays
    result = upgraded(repository, "--map", "preprocessing=preprocessing")
    assert result.exit_code == 0 and "is model.py.old" in result.output
    assert code.read_text() == todays and code.with_name("model.py.old").read_text() == changed
    assert refusal(repository) == ""
    assert upgraded(repository, "--check").exit_code == 0


def test_a_changed_model_file_that_loads_is_named(tmp_path: Path) -> None:
    """Its tensors may be older than those of the models beside it."""
    repository = opened("0.3.0", "embedded", tmp_path)
    code = repository / "preprocessing" / "1" / "model.py"
    code.write_text(code.read_text() + "\n# our own\n")
    result = upgraded(repository, "--check")
    assert result.exit_code == 0 and "note: preprocessing: its model.py is not" in result.output
    assert "+# our own" in result.output


def test_blanks_line_ends_and_a_mark_do_not_make_a_model_file_another(tmp_path: Path) -> None:
    """The new file has the old one's line ends and byte order mark."""
    repository = opened("0.1.0", "embedded", tmp_path)
    code = repository / "preprocessing" / "1" / "model.py"
    code.write_bytes(b"\xef\xbb\xbf" + code.read_bytes().replace(b"\n", b"  \r\n") + b"\r\n \r\n")
    assert upgraded(repository).exit_code == 0
    todays = (ROOT / "models" / "preprocessing" / "1" / "model.py").read_bytes()
    assert code.read_bytes() == b"\xef\xbb\xbf" + todays.replace(b"\n", b"\r\n")
    assert "up to date" in upgraded(repository, "--check").output


def test_line_ends_of_a_configuration_stay(tmp_path: Path) -> None:
    """Of what stays and of what is new; a line that ends otherwise stays so, too."""
    repository = opened("0.1.0", "embedded", tmp_path)
    config = repository / "preprocessing" / "config.pbtxt"
    text = config.read_bytes().replace(b"\n", b"\r\n")
    config.write_bytes(text + b"# ours\n")
    assert upgraded(repository).exit_code == 0
    changed = config.read_bytes()
    assert b"format_version" in changed and b"# ours\n" in changed
    assert changed.count(b"\n") == changed.count(b"\r\n") + 1


@pytest.mark.skipif(os.geteuid() != 0, reason="makes files of another user: run it as root")
def test_owner_group_mode_and_attributes_of_a_file_stay(tmp_path: Path) -> None:
    """The service runs as another user than the one who upgrades."""
    repository = opened("0.1.0", "embedded", tmp_path)
    config = repository / "tensorrt_llm" / "config.pbtxt"
    code = repository / "tensorrt_llm" / "1" / "model.py"
    for file in (config, code):
        os.chown(file, 12345, 23456)
        file.chmod(0o600)
        with suppress(OSError):  # not every file system has attributes
            os.setxattr(file, "user.origin", b"ours")
    attributes = {file: os.listxattr(file) for file in (config, code)}
    before = files(repository)
    assert upgraded(repository).exit_code == 0
    for file in (config, code):
        stat = file.stat()
        assert (stat.st_uid, stat.st_gid, stat.st_mode & 0o7777) == (12345, 23456, 0o600)
        assert os.listxattr(file) == attributes[file]
        assert file.read_bytes() != before[str(file)]


@pytest.mark.skipif(os.geteuid() != 0, reason="makes files of another user: run it as root")
def test_a_file_whose_owner_cannot_be_kept_leaves_all_as_it_was() -> None:
    """Another user upgrades, who may write the directory; nothing is half written."""
    with TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o777)
        (place / "theirs").write_bytes(b"old")
        (place / "roots").write_bytes(b"old")
        os.chown(place / "theirs", 12345, 23456)
        before = files(place)
        child = os.fork()
        if not child:  # in which nothing of pytest may go on
            with suppress(BaseException):
                os.setgid(23456)
                os.setuid(12345)
                write_files({place / "theirs": b"new"})
                try:
                    write_files({place / "theirs": b"newer", place / "roots": b"newer"})
                except SettingsError as error:
                    os._exit(7 if "run upgrade as the files' owner" in str(error) else 8)
            os._exit(9)
        assert exit_code(child) == 7
        assert files(place) == {**before, str(place / "theirs"): b"new"}


def test_models_of_other_names_keep_them(tmp_path: Path) -> None:
    """They are known by their files; the ensemble calls them as before."""
    repository = opened("0.1.0", "embedded", tmp_path)
    for old, new in (("preprocessing", "llama_pre"), ("tensorrt_llm_bls", "llama")):
        (repository / old).rename(repository / new)
        for config in repository.glob("*/config.pbtxt"):
            config.write_text(config.read_text().replace(f'name: "{old}"', f'name: "{new}"'))
    assert "lost" not in upgraded(repository).output
    wires = parsed(repository, "ensemble").ensemble_scheduling
    assert wires.step[0].model_name == "llama_pre"
    assert "format_version" in parsed(repository, "llama").parameters
    assert refusal(repository) == ""


@pytest.mark.parametrize(
    ("model", "more", "lost"),
    [
        (
            "tensorrt_llm_bls",
            'parameters { key: "x" value { string_value: "1" } }',
            "tensorrt_llm_bls.x=1: tensorrt_llm_bls has no parameter x",
        ),
        (
            "tensorrt_llm_bls",
            'parameters { key: "log_format" value { string_value: "xml" } }',
            "tensorrt_llm_bls.log_format=xml",
        ),
        (
            "preprocessing",
            'input { name: "IMAGES" data_type: TYPE_INT32 dims: [ 1 ] }',
            "preprocessing: input IMAGES",
        ),
        (
            "tensorrt_llm",
            'parameters { key: "model_yaml" value { string_value: "/none.yaml" } }',
            "tensorrt_llm: model_yaml=/none.yaml cannot be read",
        ),
    ],
)
def test_each_loss_is_named(tmp_path: Path, model: str, more: str, lost: str) -> None:
    repository = opened("0.2.0-687a7d4e", "embedded", tmp_path)
    config = repository / model / "config.pbtxt"
    key = re.search(r'parameters { key: "(\w+)"', more)
    text = config.read_text()
    if key:  # once is enough for Triton
        text = re.sub(rf'parameters {{\n  key: "{key[1]}"(\n  .*)*\n}}\n', "", text)
    config.write_text(f"{text}{more}\n")
    result = upgraded(repository)
    assert f"note: lost: {lost}" in result.output and result.exit_code == 1
    assert upgraded(repository, "--check").exit_code == 0


def test_a_tensor_that_the_user_made_optional_stays_so(tmp_path: Path) -> None:
    """What else a user added to a tensor is named, for the tensor is today's."""
    repository = opened("0.1.0", "embedded", tmp_path)
    config = repository / "postprocessing" / "config.pbtxt"
    text = config.read_text()
    name = '  name: "TOKENS_BATCH"\n'
    assert name in text
    config.write_text(text.replace(name, name + "  optional: true\n  allow_ragged_batch: true\n"))
    result = upgraded(repository)
    lost = "lost: postprocessing: input TOKENS_BATCH: allow_ragged_batch True"
    assert lost in result.output and result.exit_code == 1
    tensors = parsed(repository, "postprocessing").input
    (tensor,) = [tensor for tensor in tensors if tensor.name == "TOKENS_BATCH"]
    assert tensor.optional and not tensor.allow_ragged_batch
    assert upgraded(repository).exit_code == 0


def test_paths_inside_become_relative(tmp_path: Path) -> None:
    """So the repository may be copied elsewhere."""
    repository = opened("0.2.0-687a7d4e", "embedded", tmp_path)
    (repository / "tokens").mkdir()
    config = repository / "preprocessing" / "config.pbtxt"
    config.write_text(config.read_text().replace("../assets/demo/target", f"{repository}/tokens"))
    upgraded(repository)
    assert values_of(parsed(repository, "preprocessing"))["tokenizer_dir"] == "tokens"


def test_what_cannot_be_upgraded_is_one_line(tmp_path: Path) -> None:
    """Upstream's own repository, one of a later version, none, a file that cannot be read."""
    (tmp_path / "empty").mkdir()
    assert "configure --from" in error_of(upgraded(tmp_path / "empty"))
    assert "no such directory" in error_of(upgraded(tmp_path / "none"))
    repository = opened("0.2.0-687a7d4e", "embedded", tmp_path)
    assert "no such model; there are ensemble" in error_of(
        upgraded(repository, "--map", "a=ensemble")
    )
    assert "write NAME=MODEL" in error_of(upgraded(repository, "--map", "a=b"))
    upgraded(repository)
    config = repository / "ensemble" / "config.pbtxt"
    text = config.read_text()
    config.write_text(text.replace('string_value: "1"', 'string_value: "2"'))
    assert f"trtllm-bls {__version__} wrote it; install that" in error_of(upgraded(repository))
    config.write_text("name: ${name}")
    assert "cannot be read" in error_of(upgraded(repository))


@pytest.mark.parametrize("version", ["0.1.0", "0.2.0-687a7d4e"])
def test_serve_says_which_command_to_run(version: str, tmp_path: Path) -> None:
    """Before anything is loaded; afterwards it goes on."""
    repository = opened(version, "embedded", tmp_path)
    (tmp_path / "work").mkdir()
    assert f"run trtllm-bls upgrade {repository}" in refusal(repository)
    upgraded(repository)
    assert refusal(repository) == ""
    assert prepare_models(tmp_path / "work", repository, ServeSettings(), False) == repository


def test_configure_points_at_it(tmp_path: Path) -> None:
    """``--from`` a repository of this package would lose what only this package has."""
    repository = opened("0.1.0", "cpp", tmp_path)
    words = ["configure", "--from", str(repository), "--out", str(tmp_path / "new")]
    line = error_of(CliRunner().invoke(main, words))
    assert "trtllm-bls upgrade" in line and not (tmp_path / "new").exists()


# --- the edit of a configuration --------------------------------------------------------------

FIELDS = [
    'name: "a"',
    "max_batch_size: 4",
    "instance_group [ { count: 1 }, { count: 2 } ]",
    "instance_group { count: 3 } instance_group < count: 4 >",
    'input { name: "one" data_type: TYPE_INT32 dims: [ 1 ] }',
    'input [ { name: "two" dims: 1 }, { name: "three" dims: [ -1, 2 ] } ]',
    'output: { name: "#no comment { [" dims: 1 };',
    "parameters { key: 'it\\'s' value { string_value: \"a\" 'b'\n \"c\" } }",
    'parameters: [ { key: "x" value: { string_value: "}" } } ],',
    'default_model_filename: "some"\n  # between the parts of a text\n  "where"',
    "model_warmup { name: 'w' # inside\n batch_size: 1 }",
]
BETWEEN = ["\n", "\n\n# a comment\n", "  # behind\n", " "]


@st.composite
def texts(draw: Any) -> str:
    chosen = draw(st.lists(st.sampled_from(range(len(FIELDS))), unique=True))
    return "".join(FIELDS[i] + draw(st.sampled_from(BETWEEN)) for i in chosen)


@given(texts(), texts())
def test_an_edited_configuration_means_what_is_wanted(text: str, other: str) -> None:
    """Whatever the notation, each field has its new value and each comment is still there."""
    wanted = text_format.Parse(other, model_config_pb2.ModelConfig())
    result = edited(text, wanted)
    found = text_format.Parse(result, model_config_pb2.ModelConfig())
    for config in (found, wanted):
        for side in (config.input, config.output):
            side.sort(key=lambda tensor: tensor.name)
    assert found == wanted
    for comment in ("a comment", "behind", "between the parts", "inside"):
        assert result.count(f"# {comment}") == text.count(f"# {comment}")
    assert (
        edited(text, text_format.Parse(text, model_config_pb2.ModelConfig())).strip()
        == text.strip()
    )
