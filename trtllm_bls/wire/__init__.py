"""Messages to arrays and back: the only place where tensors are packed or unpacked.

``fields`` reads any model's inputs by the contract table, ``words`` packs stop and bad words as
token ids. ``text`` has the tensors of the text models. ``engine_client`` and ``engine_server`` have
those of ``tensorrt_llm`` from either side, ``scores`` the outputs that both share. Triton's gRPC
messages, also for clients of the text models, are in ``engine_client``.
"""
