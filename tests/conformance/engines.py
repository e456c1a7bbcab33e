"""The engines of this machine that the suite runs over, each behind a real tritonserver.

``embedded`` is what ``make serve`` runs. Behind the others the same model makes the tokens, so that
what differs is the way to it: ``trtllm`` is TensorRT-LLM's gRPC service, played; ``llm_api`` its
LLM API, played by a module with its public surface, and ``llm_api-RELEASE`` that of a release.
``cpp-RELEASE`` declares the tensors of that release's C++ backend, their names and shapes, as
``configure`` writes them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trtllm_bls.operate.tritonserver import TritonServer

LLM_API = Path(__file__).parents[1] / "helpers" / "llm_api"


@contextmanager
def declared_as_cpp(release: str, scratch: Path) -> Iterator[TritonServer]:
    """A ``tensorrt_llm`` with the tensors of the C++ backend of a release."""
    from google.protobuf import text_format

    from tests.helpers.server_settings import DEMO, ROOT, free_ports
    from tests.helpers.watched import watched
    from trtllm_bls.configure.engine_dir import models_for
    from trtllm_bls.configure.pbtxt import PARAMETERS, model_config
    from trtllm_bls.settings.command_options import Override
    from trtllm_bls.settings.cpp_backend import parse_version

    repository = scratch / "models"
    shutil.copytree(ROOT / "models" / "tensorrt_llm", repository / "tensorrt_llm")
    declared = models_for(parse_version(release), "FP32")["tensorrt_llm"]
    config = model_config(declared, PARAMETERS["tensorrt_llm"])
    config.backend = "python"
    text = text_format.MessageToString(config)
    (repository / "tensorrt_llm" / "config.pbtxt").write_text(text, encoding="utf-8")
    told = Override("tensorrt_llm", "expose_kv_cache_metrics", "true")
    settings = free_ports(
        model=DEMO / "target", model_repository=repository, threads=1, overrides=(told,)
    )
    with watched(settings, "deployment") as server:
        yield server


@contextmanager
def before_a_service() -> Iterator[TritonServer]:
    """A ``tensorrt_llm`` whose engine is a service."""
    from doubles.trtllm_service import Behaviour
    from tests.helpers.scripted_services import service_in_a_thread
    from tests.helpers.server_settings import DEMO, free_ports
    from tests.helpers.watched import watched
    from trtllm_bls.engines.embedded import EmbeddedEngine
    from trtllm_bls.settings.command_options import Override
    from trtllm_bls.settings.parameters import EngineParameters
    from trtllm_bls.text.tokenizer import load_tokenizer

    model = DEMO / "target"
    tokenizer = load_tokenizer(model)
    engine = EmbeddedEngine(EngineParameters(model_dir=model, threads=1))
    behaviour = Behaviour(
        eos_id=tokenizer.eos_id or 0,
        vocab_size=tokenizer.vocab_size,
        max_seq_len=engine._capacity.max_sequence_tokens or 0,
    )
    with service_in_a_thread(engine, behaviour) as (_, url):
        address = Override("tensorrt_llm", "engine", f"trtllm://{url}")
        with watched(free_ports(model=model, overrides=(address,)), "deployment") as server:
            yield server


@contextmanager
def with_the_llm_api(release: str, scratch: Path) -> Iterator[TritonServer]:
    """A ``tensorrt_llm`` whose engine is the LLM API of a release."""
    from tests.helpers.server_settings import DEMO, ROOT, free_ports
    from tests.helpers.watched import watched
    from trtllm_bls.settings.command_options import Override

    repository = scratch / "models"
    shutil.copytree(ROOT / "models", repository)
    code = repository / "tensorrt_llm" / "1" / "model.py"
    lines = code.read_text().partition("from __future__ import annotations\n")
    found = f"\nimport os\nimport sys\n\nsys.path.insert(0, {str(LLM_API)!r})\n"
    found += f"os.environ['LLM_API_RELEASE'] = {release!r}\n"
    code.write_text("".join((*lines[:2], found, lines[2])))
    settings = free_ports(
        model=DEMO / "target",
        model_repository=repository,
        overrides=(Override("tensorrt_llm", "engine", "llm_api"),),
    )
    with watched(settings, "deployment") as server:
        yield server
