"""Runs steps: the rows of many sequences through one model, over its KV slots.

All rows of a step go through the model as one sequence of T tokens; only in its attention they are
parted again. transformers' modules do that for any architecture whose attention can be replaced;
for the Llama family ``llama`` does it faster, and on CUDA ``graphs`` replays it. Must not know of
requests, text or sampling.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from trtllm_bls.engines.embedded.attention import AttentionKind, Segment, flat_step
from trtllm_bls.engines.embedded.graphs import Graphs
from trtllm_bls.engines.embedded.llama import Attend, Llama
from trtllm_bls.engines.embedded.slots import Slots

_numbers = itertools.count()


class TransformersModel:
    """transformers' own modules with the step's attention in place of theirs.

    The attention is registered with transformers under a name of its own, so that engines in one
    process do not meet. ``kinds``: the attention of each layer that has run.
    """

    def __init__(self, model: Any) -> None:
        self.kinds: dict[int, AttentionKind] = {}
        self.model = model
        self._attend: Attend | None = None
        name = f"trtllm_bls_{next(_numbers)}"
        AttentionInterface.register(name, self._replacement)
        model.set_attn_implementation(name)

    def logits(self, tokens: Tensor, positions: Tensor, rows: Tensor, attend: Attend) -> Tensor:
        """Compute logits [len(rows), vocab] of some rows of the tokens at the positions [T]."""
        self._attend = attend
        output = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=rows,
        )
        logits: Tensor = output.logits[0]
        return logits

    def close(self) -> None:
        """Free the model; transformers keeps the attention's name and this empty object."""
        self.model = None
        self._attend = None

    def _replacement(
        self,
        module: torch.nn.Module,
        query: Tensor,  # [1, heads, T, size]
        key: Tensor,  # [1, kv heads, T, size]
        value: Tensor,  # [1, kv heads, T, value size]
        attention_mask: Tensor | None,  # None: the groups know better
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        assert self._attend is not None
        index = int(module.layer_idx)
        kind = AttentionKind.of(arguments)
        self.kinds[index] = kind
        rows = query[0].transpose(0, 1)
        keys = key[0].transpose(0, 1)
        values = value[0].transpose(0, 1)
        return self._attend(index, rows, keys, values, kind)[None], None


class Runner:
    """Runs steps on the thread that calls; ``close`` frees the model. ``threads``: torch's pool.

    ``is_async``: ``forward`` returns before the device has computed the logits, as with a GPU.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self.slots = Slots(0, 0, device)
        self.vocab_size = 0  # known after the first step
        self.threads = 1
        self.is_async = device.type == "cuda"
        self._device = device
        self._modules = TransformersModel(model)
        self._llama: Llama | None = None
        self._graphs: Graphs | None = None

    @property
    def windowed(self) -> bool:
        """True if a layer has asked for a sliding window."""
        return any(kind.window is not None for kind in self._modules.kinds.values())

    def allocate(self, count: int, length: int) -> None:
        """Drop all slots for ``count`` new ones of ``length`` tokens."""
        self._graphs = None
        self.slots = Slots(count, length, self._device)
        if self._llama is not None and self._device.type == "cuda":
            self._graphs = Graphs(self._llama, self.slots, self._device)

    def use_llama(self) -> None:
        """Compute with our own forward pass from now on. All layers must have run before."""
        kinds = self._modules.kinds
        self._llama = Llama(self._modules.model, [kinds[index] for index in sorted(kinds)])

    def use_transformers(self) -> None:
        """Compute with transformers' modules from now on."""
        self._llama = None

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """Compute logits [sum of ``keep``, vocab], fp32, of each segment's last rows, in order."""
        with torch.inference_mode():
            if self._graphs is not None:
                logits = self._graphs.logits(segments)
            else:
                logits = self._eager(segments)
        for segment in segments:
            self.slots.write(segment.slot, segment.start, segment.tokens)
        self.vocab_size = logits.shape[-1]
        return logits.float()

    def close(self) -> None:
        """Free the slots and the model."""
        self._modules.close()
        self._llama = None
        self.allocate(0, 0)

    def _eager(self, segments: Sequence[Segment]) -> Tensor:
        """Compute the logits of the kept rows, one operation after the other."""
        kept_rows: list[int] = []
        end = 0
        for segment in segments:
            end += len(segment.tokens)
            kept_rows += range(end - segment.keep, end)
        rows = torch.tensor(kept_rows, device=self._device)
        tokens, positions, attend = flat_step(self.slots, segments, self._device)
        if self._llama is None:
            return self._modules.logits(tokens, positions, rows, attend)
        return self._llama.logits(self._llama.hidden(tokens, positions, attend)[rows])
