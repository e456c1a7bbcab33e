"""Stands for a real reward model: prefers texts of many different words."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A plain Python model; yours may be of any backend."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()[0].decode()
        score = np.array([len(set(text.split()))], np.float32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("score", score)])
