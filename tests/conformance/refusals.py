"""What each engine refuses, by asking it: ``python -m tests.conformance.refusals``.

Prints two tables. The first is in docs/engines.md; the second has the engines' own words and is in
README.md beside this.

One request per field, to the engine itself. The C++ backend is not asked but read: it is what its
last release declares in its configuration.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np

from doubles.scripted import ScriptedEngine
from doubles.scripted_tokens import hashed
from tests.conformance.engines import LLM_API
from tests.helpers.scripted_services import EOS, reaching
from tests.helpers.server_settings import DEMO
from tests.helpers.waiting import run_async
from tests.helpers.wire_tensors import LAST_FORM
from trtllm_bls.configure.engine_dir import models_for, parse_version
from trtllm_bls.engines.base import Engine
from trtllm_bls.engines.embedded import EmbeddedEngine
from trtllm_bls.engines.llm_api import LlmApiEngine
from trtllm_bls.engines.triton_model import request_inputs
from trtllm_bls.errors import InvalidRequest, TrtllmBlsError, Unsupported
from trtllm_bls.settings.parameters import EngineParameters
from trtllm_bls.types import (
    Adapter,
    CacheSalt,
    Draft,
    EngineCapacity,
    EngineRequest,
    Guide,
    Sampling,
    Wants,
)

ASK = EngineRequest(request_id="r", input_ids=(5, 6, 7), max_tokens=2, end_id=EOS)
RULE = hashed(100, first=5)
ENGINES = ("C++ backend, last release", "embedded", "`trtllm://`", "`llm_api`")
CAPACITY = EngineCapacity(max_draft_tokens=0, vocab_size=100, tells_top_log_probs=True)


def _extras(**values: Any) -> dict[str, Any]:
    return {"extras": {name: np.array([value]) for name, value in values.items()}}


PROBES: dict[str, dict[str, Any]] = {
    "`runtime_top_k`, `runtime_top_p`, `temperature`, `seed`": {
        "sampling": Sampling(top_k=5, top_p=0.9, temperature=0.5, seed=1)
    },
    "`repetition_penalty`, `presence_penalty`, `frequency_penalty`": {
        "sampling": Sampling(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1)
    },
    "`runtime_top_p_decay`, `runtime_top_p_reset_ids`": {
        "sampling": Sampling(top_p=0.9, top_p_decay=0.9, top_p_reset_id=3)
    },
    "`runtime_top_p_min`": {"sampling": Sampling(top_p=0.9, top_p_decay=0.9, top_p_min=0.1)},
    "`min_p`": {"sampling": Sampling(top_p=0.9, min_p=0.1)},
    "`no_repeat_ngram_size`": {"sampling": Sampling(no_repeat_ngram_size=3)},
    "`min_tokens`": {"sampling": Sampling(min_tokens=2)},
    "`min_tokens` with another `end_id` than the model's": {
        "end_id": EOS + 1,
        "sampling": Sampling(min_tokens=2),
    },
    "`num_return_sequences`, greedy or drawn": {"num_return_sequences": 2},
    "`beam_width` above 1": {"sampling": Sampling(beam_width=2)},
    "`stop_words_list`": {"stop_sequences": ((3,), (4, 5))},
    "`bad_words_list` of one token each": {"bad_sequences": ((3,),)},
    "`bad_words_list` of several tokens": {"bad_sequences": ((3, 4),)},
    "`embedding_bias`": {"embedding_bias": ((3, 1.0),)},
    "`draft_input_ids`": {"draft": Draft(token_ids=(3,))},
    "`return_log_probs`": {"wants": Wants(log_probs=True)},
    "`return_top_log_probs`": {"wants": Wants(log_probs=True, top_log_probs=2)},
    "`return_context_logits`": {"wants": Wants(context_logits=True)},
    "`return_generation_logits`": {"wants": Wants(generation_logits=True)},
    "`return_perf_metrics`": {"wants": Wants(perf_metrics=True)},
    "`guided_decoding_guide`": {"guide": Guide("regex", "[a-z]+")},
    "`lora_task_id`": {"adapter": Adapter(task_id=0)},
    "`lora_name` alone, of the server's `model.yaml`": {"adapter": Adapter(name="sql")},
    "`lora_weights`, `lora_config`": {
        "adapter": Adapter(weights=np.array([0.0]), config=np.array([0]))
    },
    "`prompt_embedding_table`": _extras(prompt_embedding_table=0.0),
    "`retention_…`": _extras(retention_decode_priority=1),
    "`lookahead_…`": _extras(
        lookahead_window_size=1, lookahead_ngram_size=1, lookahead_verification_set_size=1
    ),
    "`cache_salt` (`llm_api`: from 1.1 on)": {"cache_salt": CacheSalt("tenant")},
    "`priority` (`llm_api`: from 1.3 on)": _extras(priority=np.float32(0.5)),
}


async def _answer(engine: Engine, request: EngineRequest) -> str:
    """Empty where the engine answers, else why it does not."""
    try:
        await engine.capacity()
        async with aclosing(engine.generate(request)) as stream:
            async for _ in stream:
                pass
    except Unsupported as error:
        return error.problem.removeprefix("cannot be honoured: ")
    except TrtllmBlsError as error:
        return str(error)
    return ""


def _cpp_backend(request: EngineRequest) -> str:
    last = models_for(parse_version("last"), "FP32")["tensorrt_llm"].input_named
    inputs = {name: kind for name, kind in LAST_FORM.inputs.items() if name in last}
    try:
        request_inputs(request, replace(LAST_FORM, inputs=inputs), 100)
    except InvalidRequest as error:
        return error.problem
    return ""


async def ask_all() -> dict[str, list[str]]:
    """For each probe what each engine says."""
    embedded = EmbeddedEngine(EngineParameters(model_dir=DEMO / "target", threads=1))
    api = _fake_api()
    api.use("1.4.0rc1")
    api.ENGINE = ScriptedEngine(RULE)
    llm = api.LLM("none", guided_decoding_backend="xgrammar")  # as ``open_llm`` has it
    llm_api = LlmApiEngine("llm_api", api, llm, CAPACITY, {"sql": "."})
    told = {}
    async with reaching(RULE) as (service, _):
        for name, more in PROBES.items():
            request = replace(ASK, **more)
            told[name] = [
                _cpp_backend(request),
                await _answer(embedded, request),
                await _answer(service, request),
                await _answer(llm_api, request),
            ]
    await embedded.close()
    api.ENGINE = None
    return told


def _fake_api() -> Any:
    sys.path.insert(0, str(LLM_API))
    try:
        return importlib.import_module("tensorrt_llm")
    finally:
        sys.path.remove(str(LLM_API))


def honoured(told: dict[str, list[str]]) -> Iterator[str]:
    """The lines of the table of what each engine takes."""
    yield f"| input | {' | '.join(ENGINES)} |"
    yield "| --- | --- | --- | --- | --- |"
    for name, answers in told.items():
        cells = " | ".join("no" if answer else "yes" for answer in answers)
        yield f"| {name} | {cells} |"


def refusals(told: dict[str, list[str]]) -> Iterator[str]:
    """The lines of the table of the words with which each engine refuses."""
    yield "| engine | inputs | refusal |"
    yield "| --- | --- | --- |"
    for number, engine in enumerate(ENGINES):
        names: dict[str, list[str]] = {}
        for name, answers in told.items():
            names.setdefault(answers[number], []).append(name)
        names.pop("", None)
        for words, refused in names.items():
            yield f"| {engine} | {', '.join(refused)} | {words} |"


def tables() -> tuple[str, str]:
    """Both tables."""
    told = run_async(ask_all())
    return "\n".join(honoured(told)) + "\n", "\n".join(refusals(told)) + "\n"


if __name__ == "__main__":
    print(*tables(), sep="\n", end="")
