"""HTTP in front of the models: what clients may send, and Triton's own surface.

``guard``         limits on bodies, time, connections, hosts and origins, for any ASGI program
``browsers``      which hosts and origins are refused, without I/O
``triton``        Triton's HTTP surface as an ASGI application
``triton_forms``  the JSON of Triton's ``generate``, without I/O

Triton 24.10's own HTTP server ends with a segmentation fault when a browser posts a form of 5 MB,
runs a ``generate`` whose caller has left to its end, answers 400 where it is full, and knows no
TLS, no keys and no limit on a body. None of that can be mended inside Triton. So Triton's HTTP port
listens on loopback, and clients reach ``triton.TritonHttp`` instead.
"""
