"""The OpenAI API on Ray Serve (docs/scale.md): ``serve run serve_openai:application``."""

import os

from ray import serve

from trtllm_bls.openai import asgi_app


def api():
    """Called in each replica, so that each has its own connection to the engine."""
    return asgi_app(engine=os.environ["ENGINE"], tokenizer_dir=os.environ["TOKENIZER_DIR"])


@serve.deployment(num_replicas=2, max_ongoing_requests=256, graceful_shutdown_timeout_s=60)
@serve.ingress(api)
class OpenAI: ...


application = OpenAI.bind()
