"""One model with its KV slots: a step's segments in, logits of the wanted rows out.

Registers the slots' attention with transformers under a name of its own, so that engines in one
process do not meet. Owns the forward pass; must not know why a segment is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from trtllm_bls.engines.embedded.attention import Segment, SlotCache

_numbers = itertools.count()


class Runner:
    """Runs steps on the thread that calls; ``close`` forgets the registered name."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model, self._device = model, device
        self.cache = SlotCache(0, 0, device)
        self.vocab_size = 0  # known after the first step
        self.dtype: torch.dtype = model.dtype
        self.num_weights = sum(weight.numel() for weight in model.parameters())
        self.threads = 1
        self._name = f"trtllm_bls_{next(_numbers)}"
        AttentionInterface.register(self._name, self._attend)
        model.set_attn_implementation(self._name)

    def allocate(self, slots: int, length: int) -> None:
        """Drop all slots for ``slots`` new ones of ``length`` tokens."""
        self.cache = SlotCache(slots, length, self._device)

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """Logits [sum of ``keep``, vocab] of the last rows of each segment, in order."""
        positions = self.cache.begin(segments)
        tokens = [token for segment in segments for token in segment.tokens]
        wanted: list[int] = []
        first = 0
        for segment in segments:
            first += len(segment.tokens)
            wanted.extend(range(first - segment.keep, first))
        with torch.inference_mode():
            logits: Tensor = self._model(
                input_ids=torch.tensor([tokens], device=self._device),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=torch.tensor(wanted, dtype=torch.long, device=self._device),
            ).logits[0]
        self.vocab_size = logits.shape[-1]
        return logits.float()

    def close(self) -> None:
        """Free the slots and the model."""
        AttentionInterface._global_mapping.pop(self._name, None)
        self._model = None
        self.allocate(0, 0)

    def _attend(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return self.cache.attend(*args, **kwargs)
