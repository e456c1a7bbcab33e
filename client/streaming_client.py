#!/usr/bin/env python3
"""Text in, text out, as it arrives: a terminal client of ``tensorrt_llm_bls`` and ``ensemble``."""

from trtllm_bls.client.terminal_generate import main
from trtllm_bls.garbage import end_without_collections

if __name__ == "__main__":
    end_without_collections()
    main()
