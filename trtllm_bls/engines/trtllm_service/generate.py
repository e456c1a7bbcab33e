"""Compile ``trtllm_service.proto`` into the descriptor that ``messages`` reads.

    python -m trtllm_bls.engines.trtllm_service.generate

Nothing happens while the descriptor is that of the file, which a digest beside it tells. Otherwise
protoc comes with grpcio-tools, which is installed into a temporary environment: only who changes
the file needs it.
"""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
import venv
from pathlib import Path

from trtllm_bls.engines.trtllm_service.messages import DESCRIPTOR, PROTO

DIGEST = PROTO.with_suffix(".sha256")  # of the .proto that the descriptor was made of
_PROTOC = "grpcio-tools==1.68.*"


def digest() -> str:
    """The .proto's own, in hexadecimal."""
    return hashlib.sha256(PROTO.read_bytes()).hexdigest()


def main() -> None:
    """Write the descriptor and its digest, unless they are up to date."""
    if DIGEST.read_text(encoding="ascii").strip() == digest():
        return
    with tempfile.TemporaryDirectory() as scratch:
        venv.create(scratch, with_pip=True)
        python = Path(scratch, "bin", "python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", _PROTOC], check=True)
        options = [f"-I{PROTO.parent}", f"--descriptor_set_out={DESCRIPTOR}", PROTO.name]
        subprocess.run([python, "-m", "grpc_tools.protoc", *options], check=True)
    DIGEST.write_text(f"{digest()}\n", encoding="ascii")


if __name__ == "__main__":
    main()
