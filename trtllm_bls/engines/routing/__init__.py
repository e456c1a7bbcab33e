"""Which engine runs which request.

``engine``: a target, with what may draft for it. ``replicas``: several engines of one model as one.
``speculative`` performs the rounds that ``trtllm_bls.speculative`` decides on.
"""

from trtllm_bls.engines.routing.engine import RoutingEngine
from trtllm_bls.engines.routing.replicas import ReplicatedEngine

__all__ = ["ReplicatedEngine", "RoutingEngine"]
