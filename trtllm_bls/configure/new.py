"""``trtllm-bls new``: a Triton model of a user's own, written with ``trtllm_bls.pipeline``."""

from __future__ import annotations

import keyword
import os
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

import click
import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trtllm_bls.configure.pbtxt import TEMPLATES, model_config
from trtllm_bls.configure.upgrade import TOKEN, pieces_of
from trtllm_bls.errors import SettingsError
from trtllm_bls.settings.model_config import CHAT_REQUEST, model_class, read_config
from trtllm_bls.settings.model_names import ENGINE_NAME
from trtllm_bls.wire.contract import NUMPY_TYPES, Model, Tensor, by_name

_NEW_NOTE = "# Written by `trtllm-bls new` from 1/model.py: change inputs and outputs there.\n"
# Such a model needs these parameters of ``tensorrt_llm_bls``; the other ones have defaults.
_PARAMETERS = {"tokenizer_dir": "../assets/demo/target", "tensorrt_llm_model_name": ENGINE_NAME}

_RESERVED = {"self", "id", "outputs", CHAT_REQUEST}
_RESERVED_BY = "testing.ask has an argument or chat an input of this name"


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--input", "inputs", multiple=True, metavar="NAME:TYPE", default=("prompt:STRING",))
@click.option("--output", "outputs", multiple=True, metavar="NAME:TYPE", default=("text:STRING",))
@click.option("--tokenizer-dir", default="", help="The language model's tokenizer.")
def command(
    directory: Path, inputs: tuple[str, ...], outputs: tuple[str, ...], tokenizer_dir: str
) -> None:
    """Write a Triton model around a language model into DIRECTORY, in a model repository.

    The first input and the first output are texts (STRING). Where DIRECTORY has a 1/model.py, only
    its config.pbtxt is written, from the inputs and outputs that the model declares.

    \b
    Examples:
      trtllm-bls new models/my_pipeline
      trtllm-bls new models/speech --input text:STRING \\
        --output codes:STRING --output pcm:FP32[-1]
      trtllm-bls new models/speech
    """
    name = Path(os.path.abspath(directory)).name
    if shlex.quote(name) != name:  # Triton passes it through a shell
        raise SettingsError(f"{name}: Triton cannot start it; use ASCII letters, digits and _")
    model = directory / "1" / "model.py"
    if not model.is_file():
        _write_model(name, model, list(map(_tensor, inputs)), list(map(_tensor, outputs)))
    parameters = dict(_PARAMETERS)
    if tokenizer_dir:
        parameters["tokenizer_dir"] = tokenizer_dir
    config = directory / "config.pbtxt"
    config.write_text(config_of(model, parameters), encoding="utf-8")
    click.echo(f"{config}: run this command again when inputs or outputs change")


def _write_model(name: str, model: Path, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """Write the model's program and its test from their templates; raises ``SettingsError``."""
    for tensor in inputs:
        if tensor.name in _RESERVED:
            raise SettingsError(f"input {tensor.name}: {_RESERVED_BY}; choose another name")
    for tensors in (inputs, outputs):
        if len(by_name(tensors)) < len(tensors):
            raise SettingsError("two inputs, or two outputs, have one name; give each its own")
    for tensor in (inputs[0], outputs[0]):
        if (tensor.dtype, tensor.dims) != ("STRING", (1,)):
            raise SettingsError(
                f"{tensor.name}:{tensor.dtype}: the first input and the first output are texts; "
                "write NAME:STRING"
            )
    words = {
        "name": name,
        "arguments": ", ".join(map(_example, inputs)),
        "input": inputs[0].name,
        "inputs": ", ".join(_declaration(tensor, ", required=True") for tensor in inputs),
        "output": outputs[0].name,
        "outputs": ", ".join(_declaration(tensor) for tensor in outputs),
    }
    try:
        model.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"{model.parent}: cannot be made: {error.strerror}") from error
    test = model.parents[1] / f"test_{name}.py"
    for path, template in ((model, "model.py.txt"), (test, "test.py.txt")):
        text = (TEMPLATES / template).read_text(encoding="utf-8")
        path.write_text(text.format(**words), encoding="utf-8")
    click.echo(f"{model}: write your pipeline here\n{test}: test it without Triton")


def _declaration(tensor: Tensor, options: str = "") -> str:
    """Return the Python expression that declares a tensor."""
    dims = ""
    if not tensor.single:
        dims = f", dims={tensor.dims}"
    return f'Tensor("{tensor.name}", "{tensor.dtype}"{dims}{options})'


def config_of(model: Path, parameters: dict[str, str]) -> str:
    """Return the ``config.pbtxt`` of a model file.

    In a file that is there already, only inputs and outputs change. Raises ``SettingsError``.
    """
    directory = model.parents[1]
    name = Path(os.path.abspath(directory)).name
    try:
        model_type: Any = model_class(model)
        if model_type is None:
            raise SettingsError("has no class TritonPythonModel")
        inputs, outputs = model_type.tensors()  # a class method of ``StreamingModel``
        tensors = Model(name, inputs, outputs, decoupled=True)
    except SettingsError as error:
        raise SettingsError(f"{model}: {error}") from error
    except Exception as error:  # a user's file may raise anything
        raise SettingsError(f"{model}: {type(error).__name__}: {error}") from error
    values = dict(parameters)
    for key, value in model_type.parameters.items():
        values[key] = str(value)
    config = model_config(tensors, values, max_batch_size=0)
    file = directory / "config.pbtxt"
    if not file.is_file():
        return _NEW_NOTE + str(text_format.MessageToString(config))
    read_config(file)  # raises where it cannot be read
    old_text = file.read_text(encoding="utf-8")
    remainder, place = _without(old_text, ("input", "output", "name"))
    fields = model_config_pb2.ModelConfig(name=name, input=config.input, output=config.output)
    text = remainder[:place] + str(text_format.MessageToString(fields)) + remainder[place:]
    if old_text.startswith(_NEW_NOTE):
        return text
    return _NEW_NOTE + text


def _without(text: str, fields: Collection[str]) -> tuple[str, int]:
    """Cut fields out of a configuration's text; return the remainder and the place of the cut."""
    remainder = ""
    place = None
    for piece in pieces_of(text):
        tokens = TOKEN.findall(piece)
        words = [n for n, token in enumerate(tokens) if token[0] != "#" and not token.isspace()]
        if words and tokens[words[0]] in fields:
            remainder += "".join(tokens[: words[0]])  # the comments in front of the field
            if place is None:
                place = len(remainder)
            piece = "".join(tokens[words[-1] + 1 :]).removeprefix("\n")
        remainder += piece
    return remainder, place or 0


def _tensor(text: str) -> Tensor:
    """Read ``NAME:TYPE``, or ``NAME:TYPE[DIMS]`` with -1 for any length."""
    name, _, dtype = text.partition(":")
    dtype, _, dims = dtype.partition("[")
    shape: tuple[int, ...] = (1,)
    if dims:
        try:
            shape = tuple(map(int, dims.rstrip("]").split(",")))
        except ValueError:
            shape = ()
    types = [dtype for dtype in NUMPY_TYPES if dtype != "BF16"]
    has_shape = bool(shape) and all(size > 0 or size == -1 for size in shape)
    if dtype == "BF16":
        raise SettingsError(f"{text!r}: Triton gives a Python model no BF16; use FP32")
    if not name.isidentifier() or dtype not in types or not has_shape:
        raise SettingsError(f"{text!r} is not NAME:TYPE[DIMS]; types: {', '.join(types)}")
    if keyword.iskeyword(name):
        raise SettingsError(f"{text!r}: {name} is a word of Python's own; choose another name")
    return Tensor(name, dtype, shape, required=True)


def _example(tensor: Tensor) -> str:
    """Return an argument of a call, with a value of the tensor's type and shape."""
    value: Any = {"STRING": "Hi", "BOOL": True}.get(tensor.dtype, 1)
    if not tensor.single:
        value = np.full(np.abs(tensor.dims), value, np.object_).tolist()
    return f"{tensor.name}={value!r}".replace("'", '"')
