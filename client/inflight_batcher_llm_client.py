#!/usr/bin/env python3
"""Token ids in, token ids out: a command-line client of the engine model ``tensorrt_llm``."""

from trtllm_bls.client.terminal_tokens import main
from trtllm_bls.garbage import end_without_collections

if __name__ == "__main__":
    end_without_collections()
    main()
