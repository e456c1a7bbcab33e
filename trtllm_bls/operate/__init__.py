"""A running server: how it is started, watched, checked and ended."""
