"""The kinds of text in the demo world, one module each; modules draw `Sample`s, no more."""
