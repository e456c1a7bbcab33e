#!/usr/bin/env python3
"""Text in, text out, as it arrives: a terminal client of ``tensorrt_llm_bls`` and ``ensemble``."""

from trtllm_bls.client.terminal_generate import main

if __name__ == "__main__":
    main()
