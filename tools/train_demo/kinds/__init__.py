"""The kinds of text in the demo world, one module each. A module draws `Sample`s and nothing else."""
