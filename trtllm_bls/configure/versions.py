"""The releases of TensorRT-LLM: their containers, and the models as each of them has them.

A tensor that a release does not know is left out, so that a request for it is refused by name
instead of being ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from trtllm_bls.contract import BLS, ENGINE, ENSEMBLE, POSTPROCESSING, PREPROCESSING, Model, Tensor
from trtllm_bls.errors import SettingsError
from trtllm_bls.parameters.cpp_backend import LAST, OLDEST, Version

_NOT_RESHAPED_BEFORE = Version(0, 12)
_NOT_RESHAPED = {"request_output_len", "stop", "streaming"}
_LOGITS_TYPED_SINCE = Version(0, 17)  # FP32 before
_LOGITS = {"draft_logits", "context_logits", "generation_logits"}

# The last tritonserver:…-trtllm-python-py3 with each release, by Triton's published matrix.
_IMAGES: Mapping[str, str] = {
    "0.9": "24.05",
    "0.10": "24.06",
    "0.11": "24.07",
    "0.12": "24.08",
    "0.13": "24.09",
    "0.14": "24.10",
    "0.15": "24.11",
    "0.16": "24.12",
    "0.17": "25.02",
    "0.18": "25.04",
    "0.19": "25.05",
    "0.20": "25.07",
    "0.21": "25.08",
    "1.0": "25.11",
    "1.1": "26.02",
    "1.2": "26.07",
}


def image_of(version: Version) -> str | None:
    """The public image that serves engines of a release; ``None`` where none is known."""
    tag = _IMAGES.get(str(version))
    return f"nvcr.io/nvidia/tritonserver:{tag}-trtllm-python-py3" if tag else None


def parse_version(text: str, option: str = "--version") -> Version:
    """``0.19``, ``0.20.0rc1``, ``v1.0`` or ``last``; raises ``SettingsError`` naming ``option``."""
    if text == "last":
        return LAST
    match = re.match(r"v?(\d+)\.(\d+)(\D|$)", text)
    version = Version(int(match[1]), int(match[2])) if match else Version(0, 0)
    if version < OLDEST:
        raise SettingsError(f"{option} {text}: use a release such as 0.19, from 0.9 on, or last")
    return version


def models_for(version: Version, logits: str) -> dict[str, Model]:
    """The five models by name, the C++ backend among them.

    ``logits`` is the engine's type; the tensors of ``tensorrt_llm_bls`` are FP32 always.
    """
    typed = logits if version >= _LOGITS_TYPED_SINCE else "FP32"
    not_reshaped = _NOT_RESHAPED if version < _NOT_RESHAPED_BEFORE else set()

    def known(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(
            replace(
                tensor,
                dtype=typed if tensor.name in _LOGITS else tensor.dtype,
                scalar=tensor.scalar and tensor.name not in not_reshaped,
            )
            for tensor in tensors
            if tensor.since <= version <= tensor.until
        )

    models = {
        model.name: replace(model, inputs=known(model.inputs), outputs=known(model.outputs))
        for model in (PREPROCESSING, ENGINE, POSTPROCESSING, ENSEMBLE)
    }
    models[ENGINE.name] = replace(models[ENGINE.name], backend="tensorrtllm")
    # It asks the engine which tensors there are, and takes both spellings.
    return {**models, BLS.name: BLS}
