"""Model repositories for TensorRT-LLM: commands ``configure``, ``upgrade``, ``recipe``, ``new``.

``configure_command`` also reads the repository that ``--from`` names. ``repository`` checks the
options and writes the files, with ``engine_dir`` for TensorRT-LLM's releases and one engine, and
``pbtxt`` for the form of a configuration. No process is started here.
"""
