"""A Llama in plain PyTorch, with the parameter names of transformers, so that a checkpoint is
saved without renaming.

It exists for speed of training and of batched sampling; the shipped files are read by
`LlamaForCausalLM` like any other.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Cache = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; field names as in a Llama `config.json`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 32
    vocab_size: int = 4096
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


TARGET = Shape(256, 704, 8, 8, 4)
DRAFT = Shape(96, 288, 2, 3, 3)


def rotations(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, head_dim], both halves alike, as transformers rotates."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32)
    places = torch.arange(shape.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(places, shape.rope_theta ** (-steps / shape.head_dim))
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-right, left), dim=-1) * sin).to(x.dtype)


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight).to(
            x.dtype
        )


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.num_attention_heads * shape.head_dim
        kv_width = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        turn: tuple[Tensor, Tensor],
        mask: Tensor | None,
        past: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        rows, length, _ = x.shape
        q, k, v = (
            projection(x).view(rows, length, -1, self.shape.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotate(q, *turn).to(v.dtype), _rotate(k, *turn).to(v.dtype)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1)), (k, v)


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def forward(
        self,
        x: Tensor,
        turn: tuple[Tensor, Tensor],
        mask: Tensor | None,
        past: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        mixed, present = self.self_attn(self.input_layernorm(x), turn, mask, past)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), present


class Stack(nn.Module):
    """What transformers calls `model`: everything but the head, which is the embedding again."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)


class Llama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Stack(shape)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = "down_proj" in name or "o_proj" in name
                scale = 0.02 / (2 * shape.num_hidden_layers) ** 0.5 if last else 0.02
                nn.init.normal_(parameter, std=scale)
        cos, sin = rotations(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [rows, length, vocabulary] for whole rows that begin at position 0."""
        turn = (self.cos[: ids.shape[1]], self.sin[: ids.shape[1]])
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x, _ = layer(x, turn, None, None)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    @torch.no_grad()
    def complete(self, ids: Tensor, real: Tensor, end: int, limit: int) -> Tensor:
        """Greedy answers [rows, up to limit] of left-padded prompts; `real` is False at padding."""
        length = ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        # Padding rows may look at themselves, otherwise their softmax has nothing to divide.
        mask = (causal & real[:, None, None, :]) | torch.eye(
            length, dtype=torch.bool, device=ids.device
        )
        past: Cache | None = None
        written: list[Tensor] = []
        done = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
        step_ids, position = ids, 0
        while len(written) < limit and not (len(written) % 16 == 0 and bool(done.all())):
            now = slice(position, position + step_ids.shape[1])
            turn = (self.cos[now], self.sin[now])
            x, present = self.model.embed_tokens(step_ids), []
            for index, layer in enumerate(self.model.layers):
                x, kept = layer(x, turn, mask, past[index] if past else None)
                present.append(kept)
            past, position = present, now.stop
            logits = F.linear(self.model.norm(x[:, -1]), self.model.embed_tokens.weight)
            token = torch.where(done, end, logits.argmax(-1))
            done = done | (token == end)
            written.append(token)
            step_ids = token[:, None]
            real = torch.cat((real, torch.ones_like(real[:, :1])), dim=1)
            mask = real[:, None, None, :]
        return torch.stack(written, dim=1)


def config_json(shape: Shape, specials: dict[str, int]) -> dict[str, object]:
    """A `config.json` for transformers 4.57 and 5: old names beside new where they differ."""
    fields = asdict(shape)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **fields,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "pretraining_tp": 1,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        **specials,
    }
