"""Triton's requests in every ``model.py``: each is answered exactly once.

``RequestServer`` runs one task per request on an event loop in a thread of its own. Sending blocks,
so sender threads do it. A watcher thread asks Triton which callers have left and
cancels their tasks. ``Call`` alone knows Triton's response sender and keeps its rules
(docs/design.md names the defects of Triton behind them):

- Every request ends in exactly one FINAL, on every path, also where a send fails.
- An error is the last thing sent and carries FINAL. If the caller wants errors as gRPC status, it
  leaves no sooner than Triton's thread for streams has gone back to reading.
- Only outputs that the caller asked for are sent.
- ``is_cancelled`` is never called after FINAL, nor during a send: one lock guards both.

``pb_utils`` comes in as an argument, so tests run without Triton. Nothing here knows of text,
tokens or engines.
"""

from trtllm_bls.python_backend.request_server import Call, RequestServer, answering

__all__ = ["Call", "RequestServer", "answering"]
