"""What every ``model.py`` does with Triton's requests: answer each exactly once.

One event loop in a thread of its own runs one task per request (``RequestServer``). Sending is a
round trip to the server that blocks its thread, so a few sender threads do it; at most one send per
request is in flight, and what its task produces meanwhile is answered together (``Call.ready``).
One watcher thread asks Triton which callers have gone and cancels their tasks. The rules that a
response sender must obey (docs/architecture.md names the defects behind them) are kept in ``Call``
and nowhere else:

- every request ends in exactly one FINAL, on every path, also where a send fails;
- an error is the last thing sent and has FINAL in the same send, and where the caller wants it as
  gRPC status it leaves no sooner than a second after its request came;
- only outputs that the caller asked for are sent;
- nobody asks ``is_cancelled`` of a sender that has been closed: both are done under one lock.

``pb_utils`` comes in as an argument. Knows nothing of text, tokens or engines.
"""

from trtllm_bls.python_backend.call import Call
from trtllm_bls.python_backend.request_server import WATCHED_AT_ONCE, RequestServer, answering
from trtllm_bls.python_backend.sender_threads import MAX_QUEUED, SenderThreads

__all__ = [
    "MAX_QUEUED",
    "WATCHED_AT_ONCE",
    "Call",
    "RequestServer",
    "SenderThreads",
    "answering",
]
