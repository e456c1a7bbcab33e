"""The doctor's verdict on a repository is tritonserver's own.

``planted_models.tar.xz`` holds 193 models: most have one planted fault, which the name tells, the
others load. What Triton says of each is not written anywhere: a server with the models themselves,
without any stand-in, is asked.
"""

from __future__ import annotations

import json
import os
import socketserver
import tarfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.server_settings import free_ports
from tests.helpers.small_tokenizers import directory
from tests.helpers.threaded_server import serving_in_a_thread
from tests.helpers.waiting import until
from tests.models.configured import BUILD, PLAIN, Demo, make_engine
from tests.models.doctored import container, findings, only
from trtllm_bls.bundled import REPOSITORY
from trtllm_bls.operate import checks, preparation
from trtllm_bls.operate.findings import Finding, Subject
from trtllm_bls.operate.judge import STUBS, ServerJudgement, judge
from trtllm_bls.operate.ports import Ports, choose
from trtllm_bls.operate.preparation import Scratch
from trtllm_bls.operate.tritonserver import GuardedProcess, ServerFailed, TritonServer
from trtllm_bls.settings.command_options import ServeSettings

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

ARCHIVE = Path(__file__).with_name("planted_models.tar.xz")
# Models that planted ensembles call.
CALLED = ("good", "code_syntax", "decoupled", "optional_in", "ens_two_ok", "nobatch_step")
# One of each kind, which one server loads without a crash.
SAMPLE = (
    *("good", "wrong_name", "unknown_backend", "unknown_field", "bad_enum", "no_dims", "cpu_gpus"),
    *("pref_over", "decoupled", "optional_in", "type_number", "seq_two_start", "warm_type"),
    *("warm_ok", "no_version_dir", "latest_zero", "label_missing", "stray_directory"),
    *("code_syntax", "code_import", "code_no_class", "param_env", "reshape_bad"),
    *("ens_two_ok", "ens_bigger", "ens_self", "ens_missing_model", "ens_dims_mismatch"),
    *("ens_nobatch_ok", "nobatch_step"),
)


def opened(place: Path, names: Sequence[str] | None = None) -> Path:
    """A repository of the planted models, or of those of ``names`` that there are."""
    repository = place / "repository"
    with tarfile.open(ARCHIVE) as archive:
        members = archive.getmembers()
        if names is not None:
            members = [each for each in members if each.name.partition("/")[0] in names]
        archive.extractall(repository, members, filter="data")
    return repository


# --- a server with the models themselves ------------------------------------------------------


def loaded(repository: Path) -> set[str] | None:
    """The models that a server with this repository has loaded; ``None``: it has crashed."""
    settings = free_ports(model_repository=repository, open_control_apis=True)
    ports, lines = choose(settings), list[str]()
    scratch = Scratch()
    process = GuardedProcess(scratch, 1, lines.append)
    try:
        scratch.make()
        server = checks.find_server(None)
        libraries = preparation.links(scratch.workdir / "lib", [checks.libpython()])
        environment = preparation.server_environment(settings, ports, libraries, os.environ)
        backends = preparation.link_backends(scratch.workdir, server)
        order = preparation.server_command(
            server, settings, ports, repository, backends, scratch.region_prefix
        )
        order += ["--model-control-mode=explicit", "--load-model=*", "--exit-on-error=false"]
        process.run([*order, "--strict-readiness=false"], environment)

        def index() -> list[dict[str, str]] | None:
            if not process.running:
                return [{}]
            try:
                url = f"{ports.http_url}/v2/repository/index"
                request = urllib.request.Request(url, data=b"{}", method="POST")
                with urllib.request.urlopen(request, timeout=20) as answer:
                    return list(json.load(answer))
            except OSError:
                return None

        rows = until(index, seconds=300)
        if rows == [{}]:
            return None
        return {row["name"] for row in rows if row.get("state") == "READY"}
    finally:
        process.kill()
        process.close()


def groups(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Names of models for one server each."""
    for start in range(0, len(names), STUBS):
        yield names[start : start + STUBS]


def loads(place: Path, group: Sequence[str]) -> set[str]:
    """Those of the models that load. Some faults crash the server (24.10), and are told apart."""
    number = len(list(place.iterdir()))  # for the models' letters are no part of the place's name
    repository = opened(place / str(number), [*CALLED, *group])
    ready = loaded(repository)
    if ready is not None:
        return ready & set(group)
    half = len(group) // 2
    return loads(place, group[:half]) | loads(place, group[half:]) if half else set()


# --- the verdict ------------------------------------------------------------------------------


def named(repository: Path) -> tuple[set[str], set[str]]:
    """The models that the doctor finds an error in, and those that it warns of."""
    errors, warnings = set[str](), set[str]()
    for name in ("judged_by_triton", "programs", "backends", "readable"):
        for finding in findings(name, repository=repository):
            what = finding.summary.removeprefix(f"{repository}/")
            model = what.partition(":")[0].partition("/")[0]
            (errors if finding.level == "error" else warnings).add(model)
    return errors, warnings


def test_what_triton_refuses_is_found_and_what_it_loads_is_no_error(tmp_path: Path) -> None:
    """A sample of each kind of fault, and of models that load."""
    repository = opened(tmp_path, SAMPLE)
    names = {path.name for path in repository.iterdir()}
    ready = loaded(repository)
    assert ready is not None and len(ready) >= 6
    errors, warnings = named(repository)
    assert errors - ready == errors
    assert names - ready <= errors | warnings


@pytest.mark.slow
def test_all_planted_models_are_judged_as_triton_does(tmp_path: Path) -> None:
    """All 193, of which some crash the server."""
    repository = opened(tmp_path)
    names = sorted(path.name for path in repository.iterdir())
    errors, warnings = named(repository)
    real = tmp_path / "real"
    real.mkdir()
    ready = {name for group in groups(names) for name in loads(real, group)}
    assert errors & ready == set()
    named_by_its_step = {"ens_broken_model"}
    assert set(names) - ready - errors - warnings == named_by_its_step
    assert len(errors) >= 60 and len(ready) >= 20


def judged(repository: Path) -> list[Finding]:
    return findings("judged_by_triton", repository=repository)


def test_the_shipped_repository_is_sound() -> None:
    assert judged(REPOSITORY) == []


def test_a_repository_for_a_backend_that_is_not_here_is_judged(tmp_path: Path) -> None:
    """A stand-in has the backend's name; no engine is loaded."""
    engine = make_engine(tmp_path / "engine", BUILD)
    demo = Demo(tmp_path / "repository", engine, directory("byte-level"))
    draft = make_engine(tmp_path / "draft", PLAIN)
    demo.write("--draft-engine-dir", str(draft))
    assert judged(demo.out) == []
    (demo.out / "preprocessing").rename(tmp_path / "preprocessing")
    found = only(judged(demo.out))
    assert found.level == "error"
    assert found.summary.startswith(
        "ensemble: ensemble ensemble contains models that are not avail"
    )
    assert found.remedy == "mend or add that model first"


CONFIG = 'backend: "python"\nmax_batch_size: 4\n'
CLASS = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"


def write(place: Path, name: str, program: str = CLASS, config: str = CONFIG) -> Path:
    version = place / "models" / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(program)
    (version.parent / "config.pbtxt").write_text(config)
    return version


def test_a_group_on_gpus_is_a_warning_where_there_is_none(tmp_path: Path) -> None:
    write(tmp_path, "on_gpu", config=CONFIG + "instance_group { kind: KIND_GPU }\n")
    found = only(judged(tmp_path / "models"))
    assert found.level == ("error" if Path("/dev/nvidiactl").exists() else "warn")
    assert "on_gpu" in found.summary


def test_a_model_without_a_program_does_not_hang_the_others(tmp_path: Path) -> None:
    """Triton would wait for it for ever."""
    (write(tmp_path, "empty") / "model.py").unlink()
    write(tmp_path, "fine")
    write(tmp_path, "wrong", config=CONFIG + "input { dims: 1 }\n")
    told = judged(tmp_path / "models")
    assert [finding.summary.partition(":")[0] for finding in told] == ["empty", "wrong"]
    assert "Python model file not found" in told[0].summary and str(tmp_path) in told[0].summary


def test_a_program_of_the_users_is_not_run(tmp_path: Path) -> None:
    """Neither when it is read nor when the model is warmed up."""
    output = 'output { name: "OUT" data_type: TYPE_FP32 dims: [ 2, -1 ] }\n'
    tensor = 'inputs { key: "IN" value { data_type: TYPE_STRING dims: [ 1 ] zero_data: true } }'
    config = f"""{CONFIG}{output}
input {{ name: "IN" data_type: TYPE_STRING dims: [ 1 ] }}
model_transaction_policy {{ decoupled: %s }}
model_warmup {{ name: "w" batch_size: 2 {tensor} }}
"""
    trace = tmp_path / "trace"
    for flag in ("true", "false"):
        program = f"open({str(trace)!r}, 'w')\n{CLASS}"
        write(tmp_path, f"decoupled_{flag}", program, config % flag)
    assert judged(tmp_path / "models") == []
    assert not trace.exists()


# --- where no verdict is to be had ------------------------------------------------------------


def test_without_a_tritonserver_the_doctor_goes_on(tmp_path: Path) -> None:
    """Nor with a program that is none."""
    write(tmp_path, "mine")
    for server in (tmp_path / "none", container(tmp_path / "server")):
        subject = {"repository": tmp_path / "models", "server": server}
        found = only(findings("judged_by_triton", **subject))
        assert found.level == "warn" and found.summary.startswith("not judged by Triton")


def test_models_that_are_not_judged_in_time_are_named(tmp_path: Path) -> None:
    version = write(tmp_path, "mine")
    repository = version.parents[1]
    subject = Subject(repository=repository, ports={})
    verdict = judge(repository, subject.configs, checks.find_server(None), seconds=0)
    assert verdict.unsettled == ["mine"] and verdict.reasons == {}


def http_answer(told: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(told), told)


def another_triton(request: bytes) -> bytes:
    """Answer as a Triton that serves a model of the same name."""
    is_index = b"/v2/repository/index" in request
    return http_answer(
        b'[{"name": "mine", "state": "READY"}]' if is_index else b'{"name": "triton"}'
    )


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(lambda _: bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)), id="the first frame of gRPC"),
        pytest.param(lambda _: http_answer(b"<html>"), id="a page"),
        pytest.param(lambda _: http_answer(b'{"status": "ok"}'), id="other JSON"),
        pytest.param(another_triton, id="another Triton"),
    ],
)
def test_a_port_that_another_program_took_is_no_fault_of_a_model(
    answer: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the choice of a free port and Triton's start; the server is started again."""
    version = write(tmp_path, "mine")
    repository = version.parents[1]
    subject = Subject(repository=repository, ports={})
    chosen: list[Ports] = []

    class Answers(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(answer(self.request.recv(2**16)))

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answers)
    with serving_in_a_thread(server) as other:

        def choose_a_taken_one_first(settings: ServeSettings) -> Ports:
            ports = choose(settings)
            if not chosen:
                ports = replace(ports, http=other.server_address[1])
            chosen.append(ports)
            return ports

        monkeypatch.setattr("trtllm_bls.operate.judge.choose", choose_a_taken_one_first)
        verdict = judge(repository, subject.configs, checks.find_server(None), seconds=60)
    assert len(chosen) == 2
    assert verdict == ServerJudgement()


# --- serve ------------------------------------------------------------------------------------


def test_sound_programs_are_served(tmp_path: Path) -> None:
    """Whatever of them cannot be worked out without running them."""
    far = tmp_path / "far"
    far.mkdir()
    (far / "far_away.py").write_text("")
    write(tmp_path, "backends_own", "import c_python_backend_utils\n" + CLASS)
    write(
        tmp_path,
        "added_path",
        f"import sys\nsys.path.append({str(far)!r})\nimport far_away\n" + CLASS,
    )
    put = 'import sys\nsys.modules["put_there"] = sys\nimport put_there\n'
    write(tmp_path, "put_module", put + CLASS)
    sibling = write(tmp_path, "sibling", "import helper\n" + CLASS)
    (sibling / "helper.py").write_text("")
    with TritonServer(free_ports(model_repository=tmp_path / "models")) as server:
        assert set(server.models) == {"backends_own", "added_path", "put_module", "sibling"}


@pytest.mark.parametrize(
    ("name", "program", "more", "words"),
    [
        ("mine", CLASS, "no_such_field: 1\n", 'has no field named "no_such_field"; correct its'),
        ("mine", "import no_such_module\n" + CLASS, "", "No module named 'no_such_module'; inst"),
        (
            "mine",
            "from trtllm_bls.services.tokens import Preprocessor\n" + CLASS,
            "",
            "No module named 'trtllm_bls.services'; run trtllm-bls upgrade on the repository",
        ),
    ],
)
def test_serve_says_triton_s_reason_and_the_mend(
    tmp_path: Path, name: str, program: str, more: str, words: str
) -> None:
    """The model, what Triton says of it, and what to do where we know it."""
    write(tmp_path, name, program, CONFIG + more)
    server = TritonServer(free_ports(model_repository=tmp_path / "models"))
    with pytest.raises(ServerFailed) as failed:
        server.start()
    assert f"model {name} did not load: " in str(failed.value)
    assert words in str(failed.value)
