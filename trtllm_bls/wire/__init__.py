"""Tensors, messages and protocols on the wire. This package knows no engine.

``contract`` declares every tensor of our models once. ``words`` packs lists of words as token ids.
``kserve`` makes and reads the messages of any Triton model. ``grpc_client`` is gRPC on asyncio, and
``http2`` the protocol below it, without I/O.
"""
