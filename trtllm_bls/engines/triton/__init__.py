"""Triton models over gRPC: an engine (``grpc``), and any other model (``other_models``)."""
