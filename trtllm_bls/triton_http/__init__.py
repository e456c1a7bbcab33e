"""Triton's HTTP surface, answered by an ASGI program in front of Triton.

Triton 24.10's own HTTP server ends with a segmentation fault when a browser posts a form of 5 MB,
runs a ``generate`` whose caller has left to its end, answers 400 where it is full, and knows no
TLS, no keys and no limit on a body. None of that can be mended inside Triton. So Triton's HTTP port
listens on loopback, and clients reach this program instead:

- ``generate`` and ``generate_stream`` run over gRPC in the same model, with the same id and
  parameters. The engine's work ends when the caller leaves. ``forms`` turns JSON into tensors and
  back exactly as Triton does, without I/O.
- Everything else (health, metadata, statistics, ``infer``) is passed on to Triton's HTTP port. So
  is a ``generate`` body that Triton would refuse: Triton words the refusal.

``app.TritonHttp`` is the ASGI application. Limits on bodies, hosts and origins are middleware of
whoever serves it.
"""
