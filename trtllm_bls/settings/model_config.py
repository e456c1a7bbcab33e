"""A model's ``config.pbtxt``, as Triton reads it."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trtllm_bls.errors import SettingsError

# Tensors of a pipeline that answers conversations: a request and the events of its answer, as JSON.
CHAT_REQUEST, CHAT_EVENTS = "chat_request", "chat_events"


def read_config(path: Path) -> Any:
    """The file as a ``ModelConfig`` message; raises ``SettingsError``."""
    config = model_config_pb2.ModelConfig()
    try:
        text = path.read_text(encoding="utf-8")
        text_format.Parse(text, config, allow_unknown_field=True)
    except (OSError, UnicodeDecodeError, RecursionError, text_format.ParseError) as error:
        mend = "fill in the template" if "${" in str(error) else "mend it"
        raise SettingsError(f"{path}: cannot be read: {error}; {mend}") from error
    return config


def unknown_field(path: Path) -> str:
    """What a file that ``read_config`` reads sets, and Triton (24.10) refuses; empty if nothing."""
    try:
        text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        return str(error)
    return ""


def values_of(config: Any) -> dict[str, str]:
    """A configuration's parameters, by name in order."""
    return {key: value.string_value for key, value in sorted(config.parameters.items())}


def dtype_of(tensor: Any) -> str:
    """The type of an input or output as the contract spells it, such as ``INT32``."""
    known = model_config_pb2.DataType.DESCRIPTOR.values_by_number.get(tensor.data_type)
    # Any number can be written, and Triton loads it.
    return known.name.removeprefix("TYPE_") if known else str(tensor.data_type)


def instances_of(config: Any) -> int:
    """How many processes the model has, as far as the configuration says."""
    return max((group.count for group in config.instance_group), default=1)


class _Utilities(ModuleType):
    """Stands for Triton's utilities while a model's file is read: any name is a class."""

    def __getattr__(self, name: str) -> type:
        return type(name, (Exception,), {})


def model_class(model_file: str | os.PathLike[str]) -> Any:
    """The class ``TritonPythonModel`` of a ``model.py``, read outside Triton, whose utilities some
    models import. ``None``: there is no such class."""
    name = "triton_python_backend_utils"
    if stands_in := name not in sys.modules:
        sys.modules[name] = _Utilities(name)
    try:
        return runpy.run_path(os.fspath(model_file)).get("TritonPythonModel")
    finally:
        if stands_in:
            del sys.modules[name]


def chat_pipelines(repository: Path) -> tuple[str, ...]:
    """The models of a repository that answer conversations by themselves, in order.

    Raises ``SettingsError``.
    """
    files = sorted(repository.glob("*/config.pbtxt"))
    declared = [(file, {tensor.name for tensor in read_config(file).input}) for file in files]
    return tuple(file.parent.name for file, inputs in declared if CHAT_REQUEST in inputs)


# --- what Triton refuses to load ------------------------------------------------------------

_BACKEND_OF = {
    "tensorrt_plan": "tensorrt",
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
}
_VERSION = re.compile(r"0|[1-9]\d{0,18}")
_BYTES = {"BOOL": 1, "UINT8": 1, "INT8": 1, "UINT16": 2, "INT16": 2, "FP16": 2, "BF16": 2}
_BYTES |= {"UINT32": 4, "INT32": 4, "FP32": 4, "UINT64": 8, "INT64": 8, "FP64": 8}
_Tensor = tuple[Any, bool]  # of an ensemble or a step, and whether that one has a batch


def backend_of(config: Any) -> str:
    """The backend that runs a model; empty where only the model's files say so."""
    return str(config.backend or _BACKEND_OF.get(config.platform, ""))


def served_versions(config: Any, directory: Path) -> list[Path]:
    """The directories of the versions that Triton loads."""
    directories = {int(d.name): d for d in directory.iterdir() if _VERSION.fullmatch(d.name)}
    policy, newest = config.version_policy, sorted(directories, reverse=True)
    if policy.HasField("specific"):
        newest = [number for number in newest if number in policy.specific.versions]
    elif not policy.HasField("all"):
        newest = newest[: policy.latest.num_versions if policy.HasField("latest") else 1]
    return [directories[number] for number in newest]


def refusals(config: Any, directory: Path) -> Iterator[str]:
    """Why Triton (24.10) would not load a model, by its configuration and its files alone.

    Each is a fact and what to do about it. An ensemble's steps: ``ensemble_refusals``.
    """
    if config.name not in ("", directory.name) and "${" not in config.name:
        yield f"its configuration is of {config.name}; give directory and configuration one name"
    if config.max_batch_size < 0:
        yield f"max_batch_size is {config.max_batch_size}; set 0 or more"
    if config.platform not in ("", "ensemble", *_BACKEND_OF) and not config.backend:
        yield f"platform is {config.platform}; set backend in its place"
    too_long = [d.name for d in directory.iterdir() if re.fullmatch(r"[1-9]\d{19,}", d.name)]
    if too_long:
        yield f"version {too_long[0]} has more than 63 bits; name it 1"
    if not served_versions(config, directory):
        what = "no version directory that version_policy names"
        yield f"{what}; make one named 1, which may be empty where there is no model.py"
    yield from _tensor_refusals(config, directory)
    yield from _batch_refusals(config)
    yield from _scheduler_refusals(config)
    yield from _control_refusals(config.sequence_batching.control_input)
    yield from _state_refusals(config.sequence_batching.state, directory)
    for group in config.instance_group:
        if group.gpus and group.kind == group.KIND_CPU:
            yield "an instance group of KIND_CPU names gpus; leave them out"
        if group.profile and not config.platform.startswith("tensorrt"):
            yield "an instance group has a profile, which only TensorRT plans have; leave it out"
    decoupled, sequences = config.model_transaction_policy.decoupled, "sequence_batching"
    if config.response_cache.enable and (decoupled or config.HasField(sequences)):
        what = "decoupled" if decoupled else sequences
        yield f"response_cache is enabled in a model with {what}; disable it"
    agents = [agent.name for agent in config.model_repository_agents.agents]
    if agents:
        yield f"wants the repository agent {agents[0]}, which no server has; remove it"
    yield from _warmup_refusals(config, directory)
    if config.platform != "ensemble" and config.backend in ("", "python"):
        yield from _python_refusals(config, directory)


def _tensor_refusals(config: Any, directory: Path) -> Iterator[str]:
    for kind in ("input", "output"):
        for tensor in getattr(config, kind):
            name = f"{kind} {tensor.name}".strip()
            if not tensor.name:
                yield f"an {kind} has no name; name it"
            if dtype_of(tensor) == "INVALID":
                yield f"{name}: no data_type; set one such as TYPE_INT32"
            if not tensor.dims or any(size == 0 or size < -1 for size in tensor.dims):
                yield f"{name}: dims are {list(tensor.dims)}; give sizes, -1 for any"
            elif tensor.HasField("reshape"):
                before, after = list(tensor.dims), list(tensor.reshape.shape)
                if before.count(-1) != after.count(-1) or abs(prod(before)) != abs(prod(after)):
                    yield f"{name}: {before} cannot become {after}; mend reshape"
            for key in ("is_shape_tensor", "is_non_linear_format_io"):
                if getattr(tensor, key, False) and not config.platform.startswith("tensorrt"):
                    yield f"{name}: only TensorRT plans have {key}; leave it out"
            if kind == "input" and tensor.format and len(tensor.dims) != 3:
                yield f"{name}: an image format needs 3 dims; leave format out"
            labels = getattr(tensor, "label_filename", "")
            if labels and not (directory / labels).is_file():
                yield f"{name}: label_filename {labels} is not there; add it or leave it out"


def _batch_refusals(config: Any) -> Iterator[str]:
    names = {tensor.name for tensor in config.input}
    for kind, batches in ("input", config.batch_input), ("output", config.batch_output):
        for batch in batches:
            if missing := sorted(set(batch.source_input) - names):
                yield f"batch_{kind} reads {missing[0]}, which is no input; name one"
            elif len(batch.source_input) != 1:
                yield f"batch_{kind} has {len(batch.source_input)} source_input; name one"
            if kind == "input" and dtype_of(batch) not in ("INT32", "FP32"):
                yield f"batch_input is {dtype_of(batch)}; set TYPE_INT32 or TYPE_FP32"
            unknown = set(batch.target_name) - {tensor.name for tensor in config.output}
            if kind == "output" and unknown:
                yield f"batch_output is {min(unknown)}, which is no output; name one"


def _scheduler_refusals(config: Any) -> Iterator[str]:
    most, batching = config.max_batch_size, config.dynamic_batching
    sizes = [*batching.preferred_batch_size, *config.sequence_batching.oldest.preferred_batch_size]
    if wrong := [size for size in sizes if not 0 < size <= most]:
        yield f"preferred_batch_size is {wrong[0]}, max_batch_size {most}; set at most that"
    levels = batching.priority_levels
    if levels and not 0 < batching.default_priority_level <= levels:
        yield f"default_priority_level is {batching.default_priority_level}; set 1 to {levels}"
    if levels and batching.preserve_ordering:
        yield "preserve_ordering and priority_levels exclude each other; choose one"
    allowed = range(1, levels + 1)
    if levels and (wrong := [key for key in batching.priority_queue_policy if key not in allowed]):
        yield f"priority_queue_policy is of level {wrong[0]}; there are 1 to {levels}, name one"
    if not 0 <= config.sequence_batching.direct.minimum_slot_utilization <= 1:
        yield "minimum_slot_utilization is not within 0 and 1; mend it"


def _control_refusals(controls: Sequence[Any]) -> Iterator[str]:
    kinds, names = list[int](), list[str]()
    for control in controls:
        name = f"control_input {control.name}"
        if control.name in names:
            yield f"{name} is there twice; leave one"
        names.append(control.name)
        if not control.name:
            yield "a control_input has no name; name it"
        for each in control.control:
            kinds.append(each.kind)
            ways = (each.int32_false_true, each.fp32_false_true, each.bool_false_true)
            sizes = [len(way) for way in ways if way]
            if each.kind == each.CONTROL_SEQUENCE_CORRID:
                if dtype_of(each) not in ("UINT64", "INT64", "UINT32", "INT32", "STRING"):
                    yield f"{name}: its data_type is no type of a correlation id; set TYPE_UINT64"
                if sizes:
                    yield f"{name} is a correlation id and has values; leave them out"
            elif sizes != [2]:
                yield f"{name} needs two values of one type; set int32_false_true: [ 0, 1 ]"
    if twice := [kind for kind in kinds if kinds.count(kind) > 1]:
        kind = model_config_pb2.ModelSequenceBatching.Control.Kind.Name(twice[0])
        yield f"two control_inputs are of {kind}; leave one"


def _state_refusals(states: Sequence[Any], directory: Path) -> Iterator[str]:
    for state in states:
        name = f"the initial_state of {state.input_name}"
        if len(state.initial_state) > 1:
            yield f"{name} is there twice; leave one"
        for first in state.initial_state:
            if not first.name:
                yield f"{name} has no name; name it"
            if first.data_type != state.data_type:
                yield f"{name} is {dtype_of(first)}, the state {dtype_of(state)}; set that"
            if min(first.dims, default=1) < 1 or not _alike(first.dims, state.dims):
                yield f"{name} has dims {list(first.dims)}, the state {list(state.dims)}; set those"
            file, size = directory / "initial_state" / first.data_file, prod(first.dims)
            if not first.WhichOneof("state_data"):
                yield f"{name} has no data; set zero_data: true or data_file"
            elif first.data_file and not file.is_file():
                yield f"{name}: {file} is not there; add it"
            elif first.data_file and file.stat().st_size < size * _BYTES.get(dtype_of(first), 0):
                yield f"{name}: {file} is too short; mend it"


def _warmup_refusals(config: Any, directory: Path) -> Iterator[str]:
    declared = {tensor.name: tensor for tensor in config.input}
    for sample in config.model_warmup:
        if not sample.batch_size:  # which Triton skips
            continue
        name, most = f"model_warmup {sample.name}".strip(), config.max_batch_size
        if config.platform == "ensemble":
            yield f"{name}: an ensemble cannot be warmed up; warm its steps up"
        if most and sample.batch_size > most:
            yield f"{name}: batch_size is {sample.batch_size}, max_batch_size {most}; lower it"
        required = [key for key, tensor in declared.items() if not tensor.optional]
        if missing := [key for key in required if key not in sample.inputs]:
            yield f"{name}: no input {missing[0]}; add it"
        for key, value in sample.inputs.items():
            if key not in declared:
                yield f"{name}: input {key} is none of the model's; remove it"
                continue
            own, title = declared[key], f"{name}, input {key}"
            if value.data_type != own.data_type:
                yield f"{title}: is {dtype_of(value)}; the model's is {dtype_of(own)}, set that"
            pairs = list(zip_longest(value.dims, own.dims))
            if any(size is None or size < 1 or real not in (-1, size) for size, real in pairs):
                yield f"{title}: dims are {list(value.dims)}; the model's are {list(own.dims)}"
            elif not value.WhichOneof("input_data_type"):
                yield f"{title}: no data; set zero_data: true or input_data_file"
            elif file := value.input_data_file:
                path = directory / "warmup" / file
                size = _BYTES.get(dtype_of(value), 0) * prod(value.dims)
                if not path.is_file():
                    yield f"{title}: {path} is not there; add it"
                elif path.stat().st_size < size:
                    yield f"{title}: {file} has less than {size} bytes; mend it"


def _python_refusals(config: Any, directory: Path) -> Iterator[str]:
    if shlex.quote(directory.name) != directory.name:  # it goes through a shell, as ASCII
        yield "its name has letters that Triton cannot start; use ASCII letters, digits and _"
    if config.runtime:
        yield f"runtime is {config.runtime}, which is not where serve has it; leave it out"
    for key in ("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"):
        value = config.parameters[key].string_value if key in config.parameters else ""
        value = value.replace("$$TRITON_MODEL_DIRECTORY", str(directory))
        if value and key == "EXECUTION_ENV_PATH" and not Path(value).exists():
            yield f"{key} {value} is not there; pack the environment, or leave it out"
        if value not in ("", "yes", "no") and key != "EXECUTION_ENV_PATH":
            yield f"{key} is {value}; set yes or no"
    name = config.default_model_filename or "model.py"
    for version in served_versions(config, directory):
        if not (version / name).is_file():
            yield f"no {name} in version {version.name}; copy it from this package's models"


def ensemble_refusals(model: str, configs: Mapping[str, Any], root: Path) -> Iterator[str]:
    """Why Triton would not load an ensemble, by its steps; ``configs``: of all in ``root``."""
    config = configs[model]
    steps = config.ensemble_scheduling.step
    if (config.platform == "ensemble") != config.HasField("ensemble_scheduling"):
        yield "platform: ensemble and ensemble_scheduling belong together; set both or none"
    if config.platform != "ensemble":
        return
    unknown = ("optimization", "default_model_filename")
    for field in ("backend", "instance_group", "dynamic_batching", *unknown):
        if field in {each.name for each, _ in config.ListFields()}:
            yield f"an ensemble has no {field}; leave it out"
    if not steps:
        yield "an ensemble without a step; add one"
    # What each tensor is: of the ensemble's inputs, then of the steps' outputs.
    batched = config.max_batch_size > 0
    tensors = {tensor.name: (tensor, batched) for tensor in config.input}
    yield from _wire_refusals(config)
    known = [configs[step.model_name] for step in steps if step.model_name in configs]
    if config.response_cache.enable and any(c.model_transaction_policy.decoupled for c in known):
        yield "response_cache is enabled, and a step is decoupled; disable it"
    for step in steps:
        name, called = step.model_name, configs.get(step.model_name)
        if called is None:
            yield f"calls {name or 'a model without a name'}, which is not there; add it"
        elif _calls(name, model, configs, set()):
            yield f"calls {name}, which calls it again; leave one of the steps out"
        else:
            if any(ensemble_refusals(name, configs, root)):
                yield f"calls {name}, which does not load; mend that"
            yield from _step_refusals(step, called, config.max_batch_size, tensors, root / name)
    for tensor in config.output:
        if tensor.name in tensors and _differ((tensor, batched), tensors[tensor.name]):
            yield f"output {tensor.name} is another type or shape than its step's; declare it alike"


def _wire_refusals(config: Any) -> Iterator[str]:
    """Why an ensemble's tensors do not reach each step and each output."""
    steps, inputs = config.ensemble_scheduling.step, {tensor.name for tensor in config.input}
    read = {name for step in steps for name in step.input_map.values()}
    produced = [*inputs, *(name for step in steps for name in step.output_map.values())]
    for name in sorted({name for name in produced if produced.count(name) > 1}):
        yield f"{name} is written twice; give each step's output a name of its own"
    for name in sorted(read - set(produced)):
        yield f"reads {name}, which nothing writes; mend the maps"
    for name in sorted(set(produced) - inputs - read - {tensor.name for tensor in config.output}):
        yield f"{name} is written, and nothing reads it; take it out of output_map"
    runnable, waiting = set(inputs), list(steps)
    while ready := [step for step in waiting if runnable.issuperset(step.input_map.values())]:
        waiting = [step for step in waiting if step not in ready]
        runnable.update(name for step in ready for name in step.output_map.values())
    if waiting and read <= set(produced):  # tensors that nothing writes are reported above
        yield f"{waiting[0].model_name} waits for what comes of it; mend the maps"
    for name in sorted(inputs - read):
        yield f"no step reads input {name}; leave it out"
    for name in sorted({tensor.name for tensor in config.output} - set(produced)):
        yield f"no step writes output {name}; mend output_map"


def _step_refusals(
    step: Any, called: Any, max_batch_size: int, tensors: dict[str, _Tensor], directory: Path
) -> Iterator[str]:
    """Why a step cannot be taken; puts what it writes into ``tensors``."""
    name = step.model_name
    if any(refusals(called, directory)):
        yield f"calls {name}, which does not load; mend that"
    versions = {int(version.name) for version in served_versions(called, directory)}
    if step.model_version not in {-1, *versions}:
        yield f"calls version {step.model_version} of {name}, which is not there; write -1"
    if called.max_batch_size and max_batch_size > called.max_batch_size:
        what = f"max_batch_size is {max_batch_size}, {name} has {called.max_batch_size}"
        yield f"{what}; set at most that"
    inputs = {tensor.name: tensor for tensor in called.input}
    outputs = {tensor.name: tensor for tensor in called.output}
    unmapped = [*(set(step.input_map) - set(inputs)), *(set(step.output_map) - set(outputs))]
    for key in sorted(unmapped):
        yield f"maps {key}, which {name} does not have; name one of its tensors"
    for key in sorted({key for key in inputs if not inputs[key].optional} - set(step.input_map)):
        yield f"maps nothing to input {key} of {name}; map a tensor to it"
    if not step.output_map:
        yield f"maps no output of {name}; map one"
    batched = called.max_batch_size > 0
    for key, tensor in step.input_map.items():
        own = inputs.get(key), batched
        if own[0] and tensor in tensors and _differ(tensors[tensor], own):
            yield f"{tensor} is another type or shape than {key} of {name}; declare them alike"
    tensors |= {v: (outputs[k], batched) for k, v in step.output_map.items() if k in outputs}


def _calls(model: str, other: str, configs: Mapping[str, Any], seen: set[str]) -> bool:
    """Whether ``model`` is ``other`` or an ensemble that calls it, also through others."""
    if model == other or model in seen or model not in configs:
        return model == other
    seen.add(model)
    steps = configs[model].ensemble_scheduling.step
    return any(_calls(step.model_name, other, configs, seen) for step in steps)


def _differ(one: _Tensor, other: _Tensor) -> bool:
    """By type or shape; Triton compares shapes as they are written, and with the batch's size."""
    (a, a_batched), (b, b_batched) = one, other
    whole = [-1] * a_batched + list(a.dims), [-1] * b_batched + list(b.dims)
    return a.data_type != b.data_type or not (_alike(a.dims, b.dims) or _alike(*whole))


def _alike(one: Sequence[int], other: Sequence[int]) -> bool:
    pairs = zip_longest(one, other)
    return all(a is not None and b is not None and (-1 in (a, b) or a == b) for a, b in pairs)
