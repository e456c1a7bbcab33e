"""Every text and list of every model at three sizes, each ten times the last, beside a steady user.

    python -m tests.reliability.growth

What takes time with the square of its size shows here: a time a hundred times that before it, or a
steady user who waits.
"""

from __future__ import annotations

import time
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2_grpc

from tests.reliability.fuzz import PATIENCE_S, SteadyUser, serving, valid
from trtllm_bls.wire.contract import MODELS, NUMPY_TYPES, Tensor

SIZES = (9_000, 90_000, 900_000)  # bytes


def sized(tensor: Tensor, size: int, many: bool) -> dict[str, Any]:
    """The tensor with so many bytes: one long text, many short ones, or numbers."""
    if tensor.dtype == "STRING":
        texts = [f"w{number}" for number in range(size // 9)] if many else ["ab " * (size // 3)]
        return {tensor.name: np.array([texts], object)}
    count = size // 4
    dims = [each if each != -1 else 1 for each in tensor.dims]
    dims[-1] = count if tensor.dims[-1] == -1 else dims[-1]
    fields = {tensor.name: np.full((1, *dims), 7, NUMPY_TYPES[tensor.dtype])}
    lengths = {"TOKENS_BATCH": "SEQUENCE_LENGTH", "input_ids": "input_lengths"}
    if tensor.name in lengths:
        fields[lengths[tensor.name]] = np.array([[count]], np.int32)
    return fields


def main() -> None:
    rows = []
    with serving() as server, grpc.insecure_channel(server.grpc_url) as channel:
        ask = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer
        steady = SteadyUser(server.grpc_url)
        steady.start()
        for model in MODELS:
            for tensor in model.inputs:
                if tensor.dtype != "STRING" and -1 not in tensor.dims:
                    continue
                for many in (False, True)[: 1 + (tensor.dtype == "STRING" and -1 in tensor.dims)]:
                    steady.longest, times = 0.0, []
                    for size in SIZES:
                        message = valid(model.name, **sized(tensor, size, many))
                        began = time.monotonic()
                        for _ in ask(iter([message]), timeout=PATIENCE_S):
                            pass
                        times.append(time.monotonic() - began)
                    rows.append((steady.longest, times, f"{model.name} {tensor.name} {many=}"))
        steady.close()
    print(f"{'':50}{'9 kB':>9}{'90 kB':>9}{'900 kB':>9}{'steady user':>13}   (seconds)")
    for longest, times, name in sorted(rows, key=lambda row: -max(row[1]))[:12]:
        print(f"{name:50}" + "".join(f"{each:9.3f}" for each in times) + f"{longest:13.2f}")
    print(f"the steady user's longest wait: {max(row[0] for row in rows):.2f} s", steady.wrong)


if __name__ == "__main__":
    main()
