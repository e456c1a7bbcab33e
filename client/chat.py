#!/usr/bin/env python3
"""A conversation in the terminal, with ``tensorrt_llm_bls`` or an OpenAI API."""

from trtllm_bls.client.terminal_chat import main
from trtllm_bls.garbage import end_without_collections

if __name__ == "__main__":
    end_without_collections()
    main()
