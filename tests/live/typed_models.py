"""Two models with a tensor of every type: one gives back what it is sent, the other is a pipeline
that sends it a value, and then sends the value itself."""

from __future__ import annotations

import io
import pickle
import runpy
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format

from trtllm_bls.configure.pbtxt import model_config
from trtllm_bls.wire.contract import NUMPY_TYPES, Model, Tensor

MIRROR = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse(request.inputs()) for request in requests]
"""
TYPED = """
import pickle
from trtllm_bls.pipeline import StreamingModel, Tensor

TYPES = "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 STRING".split()

class TritonPythonModel(StreamingModel):
    inputs = (Tensor("case", "STRING", required=True),)
    outputs = (Tensor("seen", "STRING"), *(Tensor(name, name, (-1,)) for name in TYPES))

    async def answer(self, request, response):
        name, value = pickle.loads(request["case"][0])
        try:
            seen = await request.infer("mirror", {name: value})
            seen = seen[name].tolist()
        except Exception as error:
            seen = str(error)
        await response.send({"seen": pickle.dumps(seen)})
        await response.send({name: value})
"""


def mirror_config() -> str:
    """The text of the mirror's ``config.pbtxt``."""
    inputs, outputs = (tuple(Tensor(name, name, (-1,)) for name in NUMPY_TYPES) for _ in range(2))
    config = model_config(Model("mirror", inputs, outputs), {}, max_batch_size=0)
    return str(text_format.MessageToString(config))


def write(repository: Path) -> None:
    """Both models into a repository."""
    for name, text in (("mirror", MIRROR), ("typed", TYPED)):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.py").write_text(text)
    (repository / "mirror" / "config.pbtxt").write_text(mirror_config())
    model = runpy.run_path(str(repository / "typed" / "1" / "model.py"))["TritonPythonModel"]
    declared = Model("typed", model.inputs, model.outputs, decoupled=True)
    config = model_config(declared, {}, max_batch_size=0)
    (repository / "typed" / "config.pbtxt").write_text(text_format.MessageToString(config))


class _Pickler(pickle.Pickler):
    """For ``numpy.bytes_``, whose own reduction loses NULs at the end."""

    def reducer_override(self, obj: Any) -> Any:
        return (np.bytes_, (bytes(obj),)) if isinstance(obj, np.bytes_) else NotImplemented


def case(name: str, value: object) -> bytes:
    """The input of a request for one value."""
    written = io.BytesIO()
    _Pickler(written).dump((name, value))
    return written.getvalue()
