"""Stands for a real vocoder: each code is 40 ms of a tone of its own, at 16 kHz."""

import numpy as np
import triton_python_backend_utils as pb_utils

SECONDS = np.arange(640, dtype=np.float32) / 16_000


class TritonPythonModel:
    """A plain Python model; yours may be of any backend."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        codes = pb_utils.get_input_tensor_by_name(request, "codes").as_numpy()
        tones = np.sin(2 * np.pi * (100 + codes[:, None] % 1000) * SECONDS)
        pcm = pb_utils.Tensor("pcm", tones.reshape(-1).astype(np.float32))
        return pb_utils.InferenceResponse([pcm])
