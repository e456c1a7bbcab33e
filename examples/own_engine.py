"""An engine of your own behind Triton's Python backend: here it says the prompt's tokens back."""

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            inputs = {each.name(): each.as_numpy().ravel() for each in request.inputs()}
            said = inputs["input_ids"][: inputs["request_output_len"][0]]
            # A stream has a response for each token, with what is new; else there is one.
            streams = inputs.get("streaming", [False])[0]
            sender = request.get_response_sender()
            for ids in np.split(said, len(said)) if streams else [said]:
                tensors = [
                    pb_utils.Tensor("output_ids", ids.reshape(1, 1, -1).astype(np.int32)),
                    pb_utils.Tensor("sequence_length", np.array([[len(ids)]], np.int32)),
                ]
                sender.send(pb_utils.InferenceResponse(tensors))
            sender.send(flags=FINAL)
