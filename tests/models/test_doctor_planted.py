"""Sixty planted faults: the doctor names each, and says nothing of ten good repositories.

Every repository is made by ``configure`` and then spoilt by one line of the table.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.small_tokenizers import directory
from tests.helpers.tiers import sample
from tests.models.configured import BUILD, NOT_PAGED, PLAIN, Demo, make_engine
from tests.models.doctored import change, container, rewrite
from trtllm_bls.operate.doctor import diagnose
from trtllm_bls.operate.findings import Finding, Subject

BLS, ENGINE, DRAFT = "tensorrt_llm_bls", "tensorrt_llm", "tensorrt_llm_draft"


class Deployment(Demo):
    """A repository with a target and a draft, in a container, with what ``doctor`` is told."""

    def __init__(self, place: Path) -> None:
        self.place = place
        engine = make_engine(place / "engine", BUILD)
        tokenizer = place / "tokenizer"
        shutil.copytree(directory("byte-level"), tokenizer)
        super().__init__(place / "repository", engine, tokenizer)
        self.draft = make_engine(place / "draft", PLAIN)
        self.subject: dict[str, Any] = {
            "repository": self.out,
            "server": container(place / "server"),
            "ports": {},
            "environment": {},
            "is_judged": False,
        }

    def both(self, *more: str) -> None:
        self.write("--draft-engine-dir", str(self.draft), *more)

    def build(self, which: str = "engine", **build: Any) -> None:
        """Another engine than the repository was written for."""
        base = BUILD if which == "engine" else PLAIN
        self.spoil(which, build_config=base | build)

    def spoil(self, which: str = "engine", **config: Any) -> None:
        file = self.place / which / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))

    def set(self, model: str, **values: str | None) -> None:
        change(self, model, **values)

    def edit(self, model: str, edit: Callable[[Any], object]) -> None:
        config = self.config(model)
        edit(config)
        rewrite(self, model, config)

    def remove(self, *path: str) -> None:
        found = self.out.joinpath(*path)
        shutil.rmtree(found) if found.is_dir() else found.unlink()

    def rank(self, count: int) -> None:
        for number in range(1, count):
            (self.engine / f"rank{number}.engine").write_bytes(b"an engine")

    def lose(self, model: str, side: str, name: str) -> None:
        """Remove a tensor."""

        def edit(config: Any) -> None:
            kept = [tensor for tensor in getattr(config, side) if tensor.name != name]
            config.ClearField(side)
            getattr(config, side).extend(kept)

        self.edit(model, edit)

    def findings(self) -> list[Finding]:
        found = [finding for _, finding in diagnose(Subject(**self.subject))]
        return [finding for finding in found if finding.level != "ok"]


def other_tokenizer() -> str:
    return str(directory("unigram"))


def without_template(place: Deployment) -> None:
    base = place.place / "base"
    shutil.move(place.tokenizer, base)
    file = base / "tokenizer_config.json"
    config = json.loads(file.read_text())
    del config["chat_template"]
    file.write_text(json.dumps(config))
    for model in (BLS, "preprocessing", "postprocessing"):
        place.set(model, tokenizer_dir=str(base))


def policy(streams: bool) -> Callable[[Any], object]:
    return lambda config: setattr(config.model_transaction_policy, "decoupled", streams)


def typed(side: str, name: str, kind: int) -> Callable[[Any], object]:
    def edit(config: Any) -> None:
        for tensor in getattr(config, side):
            tensor.data_type = kind if tensor.name == name else tensor.data_type

    return edit


Plant = Callable[[Deployment], object]
XGRAMMAR = {"guided_decoding_backend": "xgrammar"}
INFO = {"xgrammar_tokenizer_info_path": "/nowhere/info.json"}
# What is done, and the words by which the fault is to be named.
FAULTS: dict[str, tuple[Plant, str]] = {
    # files of the engine
    "an engine that was not copied": (
        lambda d: (d.engine / "rank0.engine").write_bytes(b""),
        "rank0.engine is empty",
    ),
    "an engine that Git did not fetch": (
        lambda d: (d.engine / "rank0.engine").write_bytes(b"version https://git-lfs.github.com/"),
        "is a pointer of Git LFS",
    ),
    "a cache below one sequence": (
        lambda d: d.set(ENGINE, max_tokens_in_paged_kv_cache="64"),
        "max_tokens_in_paged_kv_cache is 64",
    ),
    # sizes
    "batch above the engine's": (
        lambda d: d.edit(ENGINE, lambda c: setattr(c, "max_batch_size", 64)),
        "max_batch_size is 64, the engine's is 32",
    ),
    "no batch": (
        lambda d: d.edit(ENGINE, lambda c: setattr(c, "max_batch_size", 0)),
        "tensorrt_llm: max_batch_size is 0",
    ),
    "no batch of the text model": (
        lambda d: d.edit(BLS, lambda c: setattr(c, "max_batch_size", 0)),
        "tensorrt_llm_bls: max_batch_size is 0",
    ),
    "beams": (
        lambda d: (d.build(max_beam_width=1), d.set(ENGINE, max_beam_width="4")),
        "max_beam_width=4",
    ),
    "beams of the draft": (
        lambda d: (d.build("draft", max_beam_width=1), d.set(DRAFT, max_beam_width="2")),
        "tensorrt_llm_draft.max_beam_width=2",
    ),
    # files
    "model.py of an earlier version": (
        lambda d: (d.out / BLS / "1" / "model.py").write_text(
            "from trtllm_bls.errors import SetupError\nfrom trtllm_bls.before import Gone\n"
        ),
        "imports trtllm_bls.before.Gone, which this version does not have",
    ),
    "model.py with a name of an earlier version": (
        lambda d: (d.out / BLS / "1" / "model.py").write_text(
            "from trtllm_bls.errors import SetupError, Gone\n"
        ),
        "imports trtllm_bls.errors.Gone, which",
    ),
    "no target": (lambda d: d.remove(ENGINE), "calls tensorrt_llm, which is not there"),
    "no draft": (lambda d: d.remove(DRAFT), "calls tensorrt_llm_draft, which is not there"),
    "draft without a name": (
        lambda d: d.set(BLS, tensorrt_llm_draft_model_name=""),
        "tensorrt_llm_draft_model_name is empty",
    ),
    "another target's name": (
        lambda d: d.set(BLS, tensorrt_llm_model_name="llama"),
        "calls llama, which is not there",
    ),
    "a configuration that is none": (
        lambda d: (d.out / BLS / "config.pbtxt").write_text("max_batch_size: ${size}"),
        "config.pbtxt: cannot be read",
    ),
    "a backend that is not here": (
        lambda d: shutil.rmtree(d.place / "server" / "backends" / "tensorrtllm"),
        "no backend tensorrtllm",
    ),
    # templates and parameters
    "a placeholder in backend": (
        lambda d: d.edit(ENGINE, lambda c: setattr(c, "backend", "${triton_backend}")),
        "tensorrt_llm: placeholders in backend",
    ),
    "a placeholder in a parameter": (
        lambda d: d.set(ENGINE, decoding_mode="${decoding_mode}"),
        "placeholders in decoding_mode",
    ),
    "no engine named": (
        lambda d: d.set(ENGINE, gpt_model_path=""),
        "tensorrt_llm: gpt_model_path is missing",
    ),
    "no engine at all": (
        lambda d: d.set(ENGINE, gpt_model_path=None),
        "tensorrt_llm: gpt_model_path is missing",
    ),
    "no batching": (lambda d: d.set(ENGINE, gpt_model_type=None), "gpt_model_type is missing"),
    "static batching": (lambda d: d.set(ENGINE, gpt_model_type="V1"), "gpt_model_type"),
    "a misspelt key": (lambda d: d.set(ENGINE, max_beam_with="1"), "max_beam_with"),
    "an older spelling": (lambda d: d.set(ENGINE, multiBlockMode="true"), "multiBlockMode"),
    "a flag that is none": (lambda d: d.set(ENGINE, enable_kv_cache_reuse="yes"), "'yes'"),
    "a share above 1": (
        lambda d: d.set(ENGINE, kv_cache_free_gpu_mem_fraction="90"),
        "kv_cache_free_gpu_mem_fraction",
    ),
    "a scheduler that is none": (
        lambda d: d.set(ENGINE, batch_scheduler_policy="fair"),
        "batch_scheduler_policy",
    ),
    "a key of our own": (lambda d: d.set(BLS, accumulate="true"), "accumulate"),
    "a word that is none of ours": (lambda d: d.set(BLS, draft_source="oracle"), "draft_source"),
    "a demanded key": (
        lambda d: d.set(ENGINE, tokenizer_dir=None),
        "tensorrt_llm: no tokenizer_dir",
    ),
    # engines
    "another directory": (
        lambda d: d.set(ENGINE, gpt_model_path="/nowhere"),
        "tensorrt_llm: engine /nowhere",
    ),
    "no config.json": (lambda d: (d.engine / "config.json").unlink(), "no config.json in it"),
    "no engine file": (lambda d: (d.engine / "rank0.engine").unlink(), "no rank*.engine in it"),
    "a rank that is not there": (
        lambda d: d.spoil(pretrained_config={"mapping": {"world_size": 2}}),
        "it was built for 2 ranks",
    ),
    "another release": (
        lambda d: d.subject.update(version="0.19"),
        "its engine is of 1.0.0, the backend of 0.19",
    ),
    "a draft of another release": (
        lambda d: (d.spoil("draft", version="0.20.0"), d.subject.update(version="1.0.0")),
        "tensorrt_llm_draft: its engine is of 0.20.0",
    ),
    "no paged KV cache": (lambda d: d.build(kv_cache_type="CONTINUOUS"), "no paged KV cache"),
    "no paged context": (lambda d: d.build(**NOT_PAGED), "without paged context attention"),
    "chunks without paged context": (
        lambda d: (d.build("draft", **NOT_PAGED), d.set(DRAFT, enable_chunked_context="true")),
        "tensorrt_llm_draft.enable_chunked_context=true",
    ),
    "ranks without mpirun": (lambda d: d.rank(2), "neither mpirun nor srun here"),
    "one GPU for two ranks": (
        lambda d: (d.rank(2), d.set(ENGINE, gpu_device_ids="0")),
        "the engine has 2 ranks",
    ),
    "two GPUs for one rank": (
        lambda d: d.set(DRAFT, gpu_device_ids="0,1"),
        "tensorrt_llm_draft.gpu_device_ids=0,1",
    ),
    "memory twice": (
        lambda d: [d.set(name, kv_cache_free_gpu_mem_fraction="0.9") for name in (ENGINE, DRAFT)],
        "share GPUs",
    ),
    # guided decoding and drafts
    "guides without their file": (
        lambda d: d.set(ENGINE, **XGRAMMAR),
        "without xgrammar_tokenizer_info_path nothing would be guided",
    ),
    "a file without guides": (
        lambda d: d.set(ENGINE, **INFO),
        "nobody reads it without guided_decoding_backend",
    ),
    "guides whose file is not there": (
        lambda d: d.set(ENGINE, **XGRAMMAR, **INFO),
        "/nowhere/info.json is not there",
    ),
    "a target that verifies nothing": (
        lambda d: d.build(speculative_decoding_mode=4),
        "speculative_decoding_mode medusa",
    ),
    "no cache for drafts": (
        lambda d: d.set(ENGINE, enable_kv_cache_reuse="false"),
        "cannot verify drafts without its KV cache",
    ),
    "tickets for logits": (
        lambda d: d.set(DRAFT, speculative_decoding_fast_logits="true"),
        "speculative_decoding_fast_logits",
    ),
    # transaction policies and tensors
    "an engine that does not stream": (
        lambda d: d.edit(ENGINE, policy(False)),
        "tensorrt_llm: is not decoupled",
    ),
    "a policy against its parameter": (
        lambda d: d.set(BLS, decoupled="false"),
        "is decoupled, whatever its parameter says",
    ),
    "a step that streams": (
        lambda d: d.edit("preprocessing", policy(True)),
        "preprocessing: is decoupled",
    ),
    "no streaming": (lambda d: d.lose(ENGINE, "input", "streaming"), "does not declare streaming"),
    "no lengths": (
        lambda d: d.lose(ENGINE, "output", "sequence_length"),
        "does not declare sequence_length",
    ),
    "no stop words": (lambda d: d.lose(BLS, "input", "stop_words"), "not declare stop_words"),
    "ids of another type": (
        lambda d: d.edit(ENGINE, typed("input", "input_ids", 9)),
        "tensorrt_llm.input_ids is declared INT64",
    ),
    "logits of another type": (
        lambda d: d.edit(ENGINE, typed("output", "generation_logits", 10)),
        "generation_logits is declared FP16",
    ),
    # tokenizers
    "another tokenizer before": (
        lambda d: d.set("preprocessing", tokenizer_dir=other_tokenizer()),
        "preprocessing: the tokenizer",
    ),
    "another tokenizer after": (
        lambda d: d.set("postprocessing", tokenizer_dir=other_tokenizer()),
        "postprocessing: the tokenizer",
    ),
    "no tokenizer": (lambda d: d.set(BLS, tokenizer_dir="/nowhere"), "/nowhere"),
    "more tokens than embeddings": (
        lambda d: d.spoil(pretrained_config={"vocab_size": 100}),
        "the engine 100 embeddings",
    ),
    "no chat template": (without_template, "no chat template"),
    # addresses and limits
    "an address that is none": (
        lambda d: d.set(BLS, engine_url="triton"),
        "engine_url triton: is no address",
    ),
    "an address where nobody is": (
        lambda d: d.set(BLS, engine_url="engine.invalid:8001"),
        "engine_url engine.invalid:8001",
    ),
    "a stall after the time limit": (
        lambda d: d.set(BLS, engine_stall_seconds="700"),
        "is longer than request_timeout_seconds",
    ),
    "a proxy": (
        lambda d: d.subject["environment"].update(http_proxy="http://proxy:3128"),
        "http_proxy without no_proxy",
    ),
}


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return Deployment(tmp_path)


def test_sixty_faults_are_planted() -> None:
    assert len(FAULTS) >= 60


@pytest.mark.parametrize("fault", sample(FAULTS))
def test_a_planted_fault_is_named(deployment: Deployment, fault: str) -> None:
    """In one line that says what to do, among few others."""
    plant, words = FAULTS[fault]
    deployment.both()
    plant(deployment)
    found = deployment.findings()
    named = [finding for finding in found if words in f"{finding.summary}; {finding.remedy}"]
    assert named, found
    assert all(finding.remedy for finding in found)
    assert len(found) <= 6, found


def test_a_placeholder_in_a_backend_is_one_error(deployment: Deployment) -> None:
    """It used to be twelve, none of which named it."""
    deployment.both()
    deployment.edit(ENGINE, lambda config: setattr(config, "backend", "${triton_backend}"))
    assert [finding.summary for finding in deployment.findings()] == [
        "tensorrt_llm: placeholders in backend"
    ]


def test_an_address_where_nobody_is_while_the_server_runs(deployment: Deployment) -> None:
    """``--url`` names the running server; only ``serve`` mends ``engine_url`` by itself."""
    deployment.both()
    deployment.set(BLS, engine_url="127.0.0.1:1")
    deployment.subject["url"] = "127.0.0.1:2"
    told = [each for each in deployment.findings() if "engine_url 127.0.0.1:1" in each.summary]
    assert [each.level for each in told] == ["warn"]


def with_ranks(deployment: Deployment, *options: str) -> None:
    """Two ranks, and the program that starts them."""
    deployment.rank(2)
    (deployment.place / "mpirun").touch(mode=0o755)
    deployment.subject["environment"]["PATH"] = os.fspath(deployment.place)
    deployment.write(*options)


def with_guides(deployment: Deployment) -> None:
    file = deployment.place / "info.json"
    file.touch()
    info = f"xgrammar_tokenizer_info_path={file}"
    deployment.write("--set", "guided_decoding_backend=xgrammar", "--set", info)


def of_release(deployment: Deployment, release: str, build: Any, *options: str) -> None:
    deployment.spoil(version=f"{release}.0", build_config=build)
    deployment.write(*options)
    deployment.subject["version"] = f"{release}.0"


def with_half_logits(deployment: Deployment) -> None:
    for which in ("engine", "draft"):
        deployment.spoil(which, pretrained_config={"logits_dtype": "float16"})
    deployment.both()


GOOD: dict[str, Plant] = {
    "a target": lambda d: d.write(),
    "target and draft": lambda d: d.both(),
    "unary": lambda d: d.both("--decoupled", "false"),
    "GPUs apart": lambda d: d.both("--gpu-device-ids", "0", "--draft-gpu-device-ids", "1"),
    "two instances": lambda d: d.write("--gpu-device-ids", "0;1"),
    "two ranks": with_ranks,
    "guides": with_guides,
    "0.13": lambda d: of_release(d, "0.13", PLAIN),
    "0.20, n-grams": lambda d: of_release(d, "0.20", BUILD, "--set", f"{BLS}.draft_source=ngram"),
    "half logits": with_half_logits,
    "chunks, wide": lambda d: (
        d.build(max_beam_width=4),
        d.write("--chunked-context", "--set", "max_beam_width=4"),
    ),
}


@pytest.mark.parametrize("good", sample(GOOD))
def test_a_good_repository_is_let_alone(deployment: Deployment, good: str) -> None:
    GOOD[good](deployment)
    assert deployment.findings() == []
