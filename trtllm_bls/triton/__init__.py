"""The Triton models of this package.

One module for each model, with the model's name: ``tensorrt_llm_bls``, ``tensorrt_llm``,
``preprocessing`` and ``postprocessing``. Each has the class ``TritonPythonModel`` that a
``model.py`` imports; these names are public and stay. ``request_server`` answers each of Triton's
requests exactly once.
"""
