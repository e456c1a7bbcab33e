"""The contract as Triton model configurations (``config.pbtxt``).

``python -m trtllm_bls.configure.pbtxt`` writes what is generated in the source tree (``make
generate``): the checked-in configurations, docs/parameters.md, the table of docs/security.md, and
the alerts for Prometheus' operator.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trtllm_bls import __version__
from trtllm_bls.http.budgets import table
from trtllm_bls.settings.model_names import ENSEMBLE_PLATFORM
from trtllm_bls.settings.parameters import (
    FORMAT_VERSION,
    WRITTEN_BY,
    EngineFacts,
    Parameter,
    is_true,
    parameters_in,
    parameters_of,
)
from trtllm_bls.wire.contract import (
    BLS,
    ENGINE,
    MODELS,
    POSTPROCESSING,
    PREPROCESSING,
    Model,
    Tensor,
)

MAX_BATCH_SIZE = 64
PREFERRED_BATCH_SIZE = 16  # requests to the orchestrator in one ``execute``, while more wait
TEMPLATES = Path(__file__).with_name("templates")
STEPS = (PREPROCESSING, ENGINE, POSTPROCESSING)  # those of the ensemble

# In every configuration: the version of its form, which ``upgrade`` brings to this one, and the
# version of the package that wrote it.
FORMAT = {FORMAT_VERSION: "1", WRITTEN_BY: f"trtllm-bls {__version__}"}


# The values of the checked-in configurations, by model and key. They work as they stand.
PARAMETERS: Mapping[str, dict[str, str]] = {model.name: {} for model in MODELS}
for _model, _values in PARAMETERS.items():
    for _key, _parameter in parameters_of(_model).items():
        _values[_key] = _parameter.in_file


def model_config(
    model: Model,
    parameters: Mapping[str, str],
    steps: Sequence[Model] = STEPS,
    max_batch_size: int = MAX_BATCH_SIZE,
) -> Any:
    """Make the model's configuration as Triton's own protobuf message (``ModelConfig``).

    A parameter ``decoupled`` becomes the transaction policy, which without it is the model's own.
    ``steps`` are the ensemble's models, where they are not the contract's own.
    """
    config = model_config_pb2.ModelConfig(name=model.name, max_batch_size=max_batch_size)
    is_ensemble = model.backend == ENSEMBLE_PLATFORM
    if is_ensemble:
        config.platform = ENSEMBLE_PLATFORM
    else:
        config.backend = model.backend
    for tensor in model.inputs:
        message = _add_tensor(config.input, tensor)
        message.allow_ragged_batch = tensor.ragged
        message.optional = not tensor.required
        if tensor.scalar:
            message.reshape.SetInParent()
    for tensor in model.outputs:
        _add_tensor(config.output, tensor)
    values = {"decoupled": str(model.decoupled and not is_ensemble), **parameters}
    if is_true(values["decoupled"]):
        config.model_transaction_policy.decoupled = True
    if is_ensemble:
        _add_steps(config, model, steps)
    else:
        config.instance_group.add(count=1, kind=model_config_pb2.ModelInstanceGroup.KIND_CPU)
    if model.name == BLS.name:
        # Requests that arrive while Triton calls ``execute`` come together in the next call, so
        # Triton's thread waits for the interpreter's lock once for all of them. One process gets at
        # most this many in a call; the others go to the model's other processes.
        size = min(PREFERRED_BATCH_SIZE, max_batch_size)
        config.dynamic_batching.preferred_batch_size.append(size)
    for key, value in (values | FORMAT).items():
        if key != "decoupled":
            config.parameters[key].string_value = value
    return config


def _add_tensor(messages: Any, tensor: Tensor) -> Any:
    kind = model_config_pb2.DataType.Value(f"TYPE_{tensor.dtype}")
    return messages.add(name=tensor.name, data_type=kind, dims=tensor.dims)


# --- the ensemble's wiring ------------------------------------------------------------------

# preprocessing output -> tensorrt_llm input; the wire between them is named after the former.
_TO_ENGINE = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
    "STOP_WORDS_IDS": "stop_words_list",
    "BAD_WORDS_IDS": "bad_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
}
_TO_POSTPROCESSING = {"output_ids": "TOKENS_BATCH", "sequence_length": "SEQUENCE_LENGTH"}


def _add_steps(config: Any, ensemble: Model, steps: Sequence[Model]) -> None:
    """Add the three steps; a step's input is joined to the ensemble's input of the same field.

    A step after a decoupled model can read only that model's outputs. So postprocessing cannot know
    the caller's stop words, and it keeps no state between responses. Therefore the ensemble answers
    in one piece: ``stream`` goes to preprocessing, which ignores it.
    """
    preprocessing_model, engine_model, _ = steps
    for model in steps:
        config.ensemble_scheduling.step.add(model_name=model.name, model_version=-1)
    preprocessing, engine, postprocessing = config.ensemble_scheduling.step
    _join(preprocessing.input_map, ensemble, preprocessing_model, skip=frozenset())
    _join(engine.input_map, ensemble, engine_model, skip={*_TO_ENGINE.values(), "streaming"})
    for output, name in _TO_ENGINE.items():
        preprocessing.output_map[output] = engine.input_map[name] = f"_{output}"
    for output, name in _TO_POSTPROCESSING.items():
        engine.output_map[output] = postprocessing.input_map[name] = f"_{output}"
    for tensor in engine_model.outputs:
        if tensor.name in ensemble.output_named:
            engine.output_map[tensor.name] = tensor.name
    postprocessing.output_map["OUTPUT"] = "text_output"


def _join(input_map: Any, ensemble: Model, step: Model, skip: Set[str]) -> None:
    sources = {}
    for tensor in ensemble.inputs:
        sources[tensor.key] = tensor.name
    for tensor in ensemble.inputs:
        sources[tensor.name] = tensor.name
    for tensor in step.inputs:
        source = sources.get(tensor.name.lower()) or sources.get(tensor.key)
        if source and tensor.name not in skip:
            input_map[tensor.name] = source


# --- what is generated in the source tree ----------------------------------------------------

_GENERATED_NOTE = "# Written by `make generate`: edit parameters, not tensors.\n"
_INTRODUCTION = """\
# Parameters

For people who look up what a model can be told at load. `make generate` writes this page from
`trtllm_bls/settings/parameters.py`; do not edit it.

A parameter stands in its model's `config.pbtxt`. There are three ways to set it. The first that
applies wins:

1. `trtllm-bls serve --set MODEL.KEY=VALUE`, for one server
2. the environment variable in the column "variable"; `serve` sets some from its own options
3. the value in `config.pbtxt`, which `trtllm-bls configure --set MODEL.KEY=VALUE` writes
"""
_FACTS_INTRODUCTION = """\
## What an engine tells

`trtllm-bls configure` writes these into the `tensorrt_llm` of the C++ backend, from the engine's
own `config.json`. The backend does not read them; `tensorrt_llm_bls` does.
"""


_BUDGETS_BEGIN = "<!-- `make generate` writes this table from trtllm_bls/http/budgets.py -->\n"
_BUDGETS_END = "<!-- end of the table -->\n"

_RULES = "deploy/kubernetes/components/prometheus-operator/rules.yaml"
_RULES_HEAD = """\
# `make generate` writes this file from deploy/alerts.yaml.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: trtllm-bls
spec:
"""


def generated(root: Path = Path()) -> dict[str, str]:
    """The text of every generated file below ``root``, by its path."""
    files = {}
    for model in MODELS:
        config = model_config(model, PARAMETERS[model.name])
        files[f"models/{model.name}/config.pbtxt"] = _GENERATED_NOTE + text_format.MessageToString(
            config
        )
    parts = [_INTRODUCTION]
    for name in (BLS.name, ENGINE.name, PREPROCESSING.name, POSTPROCESSING.name):
        title = f"`{name}`"
        if name == ENGINE.name:
            title += " (the embedded engine)"
        parts.append(f"## {title}\n\n{_table(parameters_of(name))}")
    parts.append(f"{_FACTS_INTRODUCTION}\n{_table(parameters_in(EngineFacts))}")
    files["docs/parameters.md"] = "\n".join(parts)
    files["docs/security.md"] = _with_budgets(root / "docs" / "security.md")
    files[_RULES] = _operator_rules(root / "deploy" / "alerts.yaml")
    return files


def _with_budgets(page: Path) -> str:
    """Put today's table of budgets into the page; nothing else in it is generated."""
    text = _BUDGETS_BEGIN + _BUDGETS_END
    if page.is_file():
        text = page.read_text(encoding="utf-8")
    head, _, tail = text.partition(_BUDGETS_BEGIN)
    _, _, tail = tail.partition(_BUDGETS_END)
    return f"{head}{_BUDGETS_BEGIN}\n{table()}\n{_BUDGETS_END}{tail}"


def _operator_rules(alerts: Path) -> str:
    """The alerts as an object of Prometheus' operator."""
    text = alerts.read_text(encoding="utf-8") if alerts.is_file() else ""
    return _RULES_HEAD + textwrap.indent(text, "  ")


def _table(parameters: Mapping[str, Parameter]) -> str:
    def code(text: str) -> str:
        return f"`{text}`" if text else ""

    lines = ["| key | value | as shipped | variable | meaning |", "| --- | --- | --- | --- | --- |"]
    for key, parameter in parameters.items():
        expected = parameter.kind.expected
        value = code(parameter.in_file)
        variable = code(parameter.env)
        lines.append(f"| {code(key)} | {expected} | {value} | {variable} | {parameter.help} |")
    return "\n".join(lines) + "\n"


def main(root: Path) -> list[str]:
    """Write the stale files below ``root`` and return their paths."""
    stale = []
    for path, text in generated(root).items():
        file = root / path
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            stale.append(path)
    return stale


if __name__ == "__main__":
    for path in main(Path.cwd()):
        sys.stdout.write(f"wrote {path}\n")
