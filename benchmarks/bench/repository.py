"""The models of one measured server: a scripted engine and everything that is put before it.

Owns which model stands for which target, and how many processes each has.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "assets" / "demo" / "target"
OWN_MODELS = Path(__file__).parent / "models"
ENGINE, BLS = "tensorrt_llm", "tensorrt_llm_bls"
HELPERS = ("preprocessing", "postprocessing")  # the ensemble's, beside the engine
# perf_analyzer asks for every output that a configuration declares: nothing else is declared.
OUTPUTS = {"output_ids", "sequence_length", "text_output"}


def model_of(target: str) -> str:
    """The model that a target sends its requests to; ``bls_2`` is ``tensorrt_llm_bls_2``, whose
    requests have a ``stream_interval`` of 4 as ``bls_2/4``."""
    target = target.partition("/")[0]
    if target == "direct":
        return ENGINE
    if target in ("generate", "triton_http"):
        return BLS
    return f"tensorrt_llm_{target}" if re.fullmatch(r"bls(_\d+)?", target) else target


def roles_of(target: str) -> dict[str, tuple[str, ...]]:
    """The processes that cost a target CPU: of the server, between it and the engine, the
    engine."""
    if target == "service" or target.startswith(("ours", "smg")):
        return {"model": (target,), "engine": ("double",)}
    models = {"direct": (), "ensemble": HELPERS, "generate": (BLS, target)}
    model = models.get(target, (model_of(target),))
    return {"server": ("tritonserver",), "model": model, "engine": (ENGINE,)}


def write(repository: Path, targets: list[str], engine_instances: int) -> None:
    """A model repository at ``repository`` that serves all ``targets``."""
    repository.mkdir(parents=True)
    _copy(ROOT / "models" / ENGINE, repository / ENGINE, engine_instances)
    shutil.copy(OWN_MODELS / ENGINE / "1" / "model.py", repository / ENGINE / "1" / "model.py")
    for target in dict.fromkeys(model_of(target).removeprefix(f"{ENGINE}_") for target in targets):
        if target in ("empty", "pipeline", "by_hand"):
            shutil.copytree(OWN_MODELS / target, repository / target)
        elif target == "ensemble":
            for model in HELPERS:
                shutil.copytree(ROOT / "models" / model, repository / model)
            _copy(ROOT / "models" / target, repository / target)
        elif target.startswith("bls"):
            count = int(target.partition("_")[2] or 1)
            _copy(ROOT / "models" / BLS, repository / f"{ENGINE}_{target}", count)


def write_scripted_pair(repository: Path) -> None:
    """Our models, whose target and draft are scripts (``benchmarks/scripted``)."""
    shutil.copytree(ROOT / "models", repository)
    for model in (ENGINE, f"{ENGINE}_draft"):
        shutil.rmtree(repository / model, ignore_errors=True)
        shutil.copytree(ROOT / "models" / ENGINE, repository / model)
        scripted = ROOT / "benchmarks" / "scripted" / "1"
        shutil.copytree(scripted, repository / model / "1", dirs_exist_ok=True)


def _copy(source: Path, destination: Path, instances: int | None = None) -> None:
    shutil.copytree(source, destination)
    file = destination / "config.pbtxt"
    config = text_format.Parse(file.read_text(), model_config_pb2.ModelConfig())
    config.name = destination.name
    if instances is not None:
        config.instance_group[0].count = instances
    kept = [output for output in config.output if output.name in OUTPUTS]
    dropped = {output.name for output in config.output} - OUTPUTS
    del config.output[:]
    config.output.extend(kept)
    for step in config.ensemble_scheduling.step:
        for name in [name for name, tensor in step.output_map.items() if tensor in dropped]:
            del step.output_map[name]
    file.write_text(text_format.MessageToString(config))
