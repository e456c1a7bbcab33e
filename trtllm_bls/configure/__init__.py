"""Model repositories for TensorRT-LLM: ``trtllm-bls configure``, ``recipe`` and ``new``.

``command`` is the command line of ``configure`` and reads the repository that ``--from`` names.
``repository`` checks the options and writes the files, with ``engine`` for TensorRT-LLM's releases
and one engine, and ``pbtxt`` for the form of a configuration. No process is started here.
"""
