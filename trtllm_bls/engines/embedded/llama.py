"""The forward pass of the Llama family in plain torch: Llama, Mistral, Qwen2, Qwen3.

transformers runs the same layers as some thirty modules each, one small operation after another.
Here the projections that read the same input are one matrix product, and a layer is the dozen
operations that remain. ``load`` compares the logits with transformers' own before it is used.

Shapes: T rows of a step, H hidden size, D size of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trtllm_bls.engines.embedded.attention import AttentionKind

FAMILY = ("llama", "mistral", "qwen2", "qwen3")  # ``model_type`` of a configuration


class Attend(Protocol):
    """Attention over a layer's query [T, heads, D], key and value [T, kv heads, D]."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind
    ) -> Tensor:
        """Return [T, heads, D]."""


@dataclass(frozen=True)
class Linear:
    """A matrix product that makes one or several of a model's projections of an input."""

    weight: Tensor  # [out, in]
    bias: Tensor | None

    @classmethod
    def of(cls, *modules: nn.Linear) -> Linear:
        """Join modules. They become views of the joined weight, so no weight is held twice."""
        weight = torch.cat([module.weight.data for module in modules])
        if weight.device.type == "cpu":
            # A product of few rows reads a weight faster in this order of its numbers.
            weight = weight.t().contiguous().t()
        parts = weight.split([len(module.weight) for module in modules])
        for module, part in zip(modules, parts, strict=True):
            module.weight.data = part
        bias = None
        if modules[0].bias is not None:
            bias = torch.cat([module.bias.data for module in modules])
        return cls(weight, bias)

    def __call__(self, rows: Tensor) -> Tensor:
        """Map rows [T, in] to [T, out]."""
        return F.linear(rows, self.weight, self.bias)


@dataclass(frozen=True)
class Norm:
    """A root mean square norm over the last dimension."""

    weight: Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        """Read one of transformers' norm modules."""
        return cls(module.weight.data, module.variance_epsilon)

    def __call__(self, rows: Tensor) -> Tensor:
        """Norm rows [..., size], which keep their shape."""
        return F.rms_norm(rows, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True)
class Layer:
    """The weights of one layer; ``query_norm`` and ``key_norm`` are Qwen3's."""

    attention_norm: Norm
    qkv: Linear
    out: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear
    query_norm: Norm | None = None
    key_norm: Norm | None = None

    @classmethod
    def of(cls, module: Any) -> Layer:
        """Read one of transformers' decoder layers."""
        attention = module.self_attn
        mlp = module.mlp
        norms = {}
        if hasattr(attention, "q_norm"):
            norms["query_norm"] = Norm.of(attention.q_norm)
            norms["key_norm"] = Norm.of(attention.k_norm)
        return cls(
            attention_norm=Norm.of(module.input_layernorm),
            qkv=Linear.of(attention.q_proj, attention.k_proj, attention.v_proj),
            out=Linear.of(attention.o_proj),
            mlp_norm=Norm.of(module.post_attention_layernorm),
            gate_up=Linear.of(mlp.gate_proj, mlp.up_proj),
            down=Linear.of(mlp.down_proj),
            **norms,
        )


class Llama:
    """A loaded model of transformers, computed by this module.

    ``kinds``: the attention of each layer, as transformers' modules ask for it.
    """

    def __init__(self, model: Any, kinds: Sequence[AttentionKind]) -> None:
        config = model.config
        self._embedding = model.model.embed_tokens.weight
        self._rotary = model.model.rotary_emb
        self._layers = list(map(Layer.of, model.model.layers))
        self._kinds = kinds
        self._norm = Norm.of(model.model.norm)
        self._head = Linear.of(model.lm_head)
        self._activation = model.model.layers[0].mlp.act_fn
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Compute the last layer's normed output [T, H] for tokens and positions [T]."""
        rows = F.embedding(tokens, self._embedding)
        cosine, sine = self._rotation(rows, positions)
        for index, layer in enumerate(self._layers):
            heads = layer.qkv(layer.attention_norm(rows)).unflatten(-1, (-1, cosine.shape[-1]))
            query, key, value = heads.split([self._heads, self._kv_heads, self._kv_heads], dim=1)
            if layer.query_norm is not None and layer.key_norm is not None:
                query = layer.query_norm(query)
                key = layer.key_norm(key)
            query = _rotated(query, cosine, sine)
            key = _rotated(key, cosine, sine)
            attended = attend(index, query, key, value, self._kinds[index])
            rows = rows + layer.out(attended.flatten(1))
            gate, up = layer.gate_up(layer.mlp_norm(rows)).chunk(2, dim=-1)
            rows = rows + layer.down(self._activation(gate) * up)
        return self._norm(rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [T, vocab] of rows [T, H] that ``hidden`` returned."""
        return self._head(hidden)

    def _rotation(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [T, 1, D]; the first half of the sines is negative."""
        cosine, sine = self._rotary(rows, position_ids=positions[None])
        low_half, high_half = sine[0].chunk(2, dim=-1)
        return cosine[0][:, None], torch.cat([-low_half, high_half], dim=-1)[:, None]


def _rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate each pair of numbers that are half a head [T, heads, D] apart."""
    partners = heads.roll(heads.shape[-1] // 2, dims=-1)
    return torch.addcmul(heads * cosine, partners, sine)
