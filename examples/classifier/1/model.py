"""Stands for a real classifier: objects to a text with a word of its list."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A plain Python model; yours may be of any backend."""

    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.words = parameters["words"]["string_value"].split(",")

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()[0].decode()
        score = np.array([any(word in text for word in self.words)], np.float32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("score", score)])
