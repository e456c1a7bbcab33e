"""Messages to arrays and back: the only place where tensors are packed or unpacked.

``fields`` reads any model's inputs by the contract table, ``words`` packs word lists, ``engine``
speaks the ``tensorrt_llm`` tensors from both sides, ``text`` those of the text models.
"""
