"""Everything that can be set, each setting declared once.

``model_names`` has the names of the models, ``parameters`` their parameters, ``request_limits`` how
large a request may be, ``command_options`` the options of ``serve``. ``cpp_backend``,
``model_config``, ``model_yaml`` and ``engine_tls`` read what TensorRT-LLM and Triton are configured
with.
"""
