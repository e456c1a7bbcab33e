"""Runs the command line as `python -m trtllm_bls`."""

from trtllm_bls.cli import main

if __name__ == "__main__":
    main(prog_name="trtllm-bls")
