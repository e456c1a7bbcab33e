"""Engines: everything that runs token ids through a model, behind one small seam (``base``)."""
