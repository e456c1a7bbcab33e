"""HTTP in front of the models.

``limits`` bounds bodies, time and connections of any ASGI program, ``keys`` has API keys,
``browsers`` refuses other pages' requests, and ``generate`` is Triton's HTTP surface (port 8000).

Triton 24.10's own HTTP server ends with a segmentation fault when a browser posts a form of 5 MB,
runs a ``generate`` whose caller has left to its end, answers 400 where it is full, and knows no
TLS, no keys and no limit on a body. No setting of Triton changes that. So Triton's HTTP port
listens on loopback, and clients reach ``generate.TritonHttp`` instead.
"""
