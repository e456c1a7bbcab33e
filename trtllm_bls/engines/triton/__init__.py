"""Triton models over gRPC (``grpc``), and whose the gRPC port is (``own_port``)."""
