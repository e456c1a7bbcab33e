"""Messages to arrays and back: the only place where tensors are packed or unpacked.

``server`` has the tensors of our models as the models see them. ``engine_client`` has Triton's gRPC
messages, for any caller, and those of ``tensorrt_llm`` from the caller's side. ``words`` has what
both need: lists of words as token ids.
"""
