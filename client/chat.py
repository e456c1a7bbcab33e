#!/usr/bin/env python3
"""A conversation in the terminal, with ``tensorrt_llm_bls`` or an OpenAI API."""

from trtllm_bls.client.terminal_chat import main

if __name__ == "__main__":
    main()
