"""Starting a tritonserver and keeping it in order: find, check, prepare, run, wait, clean up.

Knows options and processes, nothing of tensors or tokens. ``server`` has the order of the steps for
one tritonserver; ``serve`` restarts it, and has the OpenAI API and the health endpoint beside it.
"""

from trtllm_bls.launcher.server import Listener, ServerFailed, Stopped, TritonServer

__all__ = ["Listener", "ServerFailed", "Stopped", "TritonServer"]
