"""The Triton models of this package.

Each model has a module with its name: ``tensorrt_llm_bls``, ``tensorrt_llm``, ``preprocessing`` and
``postprocessing``. Its class ``TritonPythonModel`` is what a ``model.py`` imports; these names are
public and stay. ``request_server`` answers each of Triton's requests exactly once.
"""
