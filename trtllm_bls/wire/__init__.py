"""What goes over the wire; knows no engine, and of our models only their tensors.

``contract`` names every tensor once; ``words`` lays lists of words out as token ids. ``kserve``
makes and reads the messages of any Triton model. ``grpc_client`` is gRPC on asyncio, and ``http2``
the protocol below it, without I/O.
"""
