"""OpenAI's HTTP API, and Anthropic's, in front of the orchestrator (docs/openai.md).

``schema`` says what a request may hold; ``chat``, ``completions``, ``responses`` and ``messages``
make text requests of it and answers of text chunks; ``exchange`` runs them while the client is
there; ``app`` has the routes. Nothing here knows Triton: tokens come from whatever engine the
orchestrator has. ``asgi_app`` makes the API for another server to host; it is public and stays.
"""

from trtllm_bls.openai.hosting import asgi_app

__all__ = ["asgi_app"]
