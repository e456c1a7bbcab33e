"""How the embedded engine is sized. Free of torch, so that any process may read the defaults.

Every size here is memory or delay: slots and longest sequence multiply into the KV cache, and the
tokens of one step bound how long a long prompt can hold up the streams that already run.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_bls.errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class EmbeddedSettings:
    """Sizes of one engine. Raises ``SettingsError`` when they contradict each other.

    ``max_batch``: sequences that run at once, each in a KV slot of its own.
    ``max_queue_size``: sequences that may wait; one more is refused with ``Overloaded``.
    ``max_tokens_per_step``: rows of one forward pass, prompts and running sequences together.
    ``max_sequence_tokens``: prompt and completion together; ``None`` = what the checkpoint
    allows, at most 4096, or less if the KV cache would not fit ``max_kv_bytes``.
    ``max_kv_bytes``: limit of the KV cache; ``None`` = half of the memory available at load.
    ``threads``: of torch's own pool; ``None`` = half of the cores, since its spinning barriers
    collapse when another process wants the same core; 1 for a model of under 50 M weights.
    ``device``: ``None`` = CUDA if torch can use it, else the CPU.
    """

    name: str = "embedded"
    max_batch: int = 32
    max_queue_size: int = 1024
    max_tokens_per_step: int = 512
    max_sequence_tokens: int | None = None
    max_draft_len: int = 16
    max_kv_bytes: int | None = None
    threads: int | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        least = {"max_batch": 1, "max_queue_size": 1, "max_draft_len": 0}
        least |= {"max_sequence_tokens": 2, "max_kv_bytes": 1, "threads": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise SettingsError(f"{name} is {value}; it must be at least {bound}")
        # Every running sequence gets its row in every step, and the oldest waiting one at least
        # room for its draft: so nothing starves.
        needed = self.max_batch + self.max_draft_len + 1
        if self.max_tokens_per_step < needed:
            raise SettingsError(
                f"max_tokens_per_step is {self.max_tokens_per_step}; with max_batch "
                f"{self.max_batch} and max_draft_len {self.max_draft_len} it must be at least "
                f"{needed}"
            )
