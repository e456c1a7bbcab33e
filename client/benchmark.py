#!/usr/bin/env python3
"""How fast servers answer: a batch of requests at once, and one after the other."""

from trtllm_bls.commands.benchmark import main

if __name__ == "__main__":
    main()
