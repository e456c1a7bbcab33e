"""OpenAI's HTTP API in front of the orchestrator: ``trtllm-bls openai``.

``schema`` says what a request may hold; ``chat`` and ``completions`` make text requests of it and
answers of text chunks; ``streams`` runs them while the client is there; ``app`` has the routes.
Nothing here knows Triton: tokens come from whatever engine the orchestrator has.
"""
