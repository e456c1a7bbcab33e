"""Linear layers with oneDNN's own weight layout: faster from a few rows on, on a CPU.

The two operators are torch's own but underscored, so nothing here is relied upon: where they are
missing, refuse, or give other numbers than the stock layer, the stock layers stay. For a single
row the better layout depends on processor and shape, so it is measured once per shape and load,
and where stock wins its weights are kept beside the packed ones, if there is memory for both.
"""

from __future__ import annotations

import time

import psutil
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_TRIES = 12  # timings of a layer, of which the shortest counts


class _PackedLinear(nn.Module):  # type: ignore[misc]  # torch is untyped for mypy here
    """``nn.Linear`` for inference, its weight reordered once.

    ``single``: the weight as it was, where that is faster for calls of one row.
    """

    def __init__(self, stock: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = stock.in_features, stock.out_features
        self.single: Tensor | None = None
        weight = stock.weight.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = None if stock.bias is None else stock.bias.detach()

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [..., in features] to [..., out features]."""
        if self.single is not None and rows.numel() == self.in_features:
            return linear(rows, self.single, self._bias)
        result: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            rows, self._packed, self._bias, "none", [], ""
        )
        return result


def pack_linears(model: nn.Module) -> int:
    """Replace the plain linear layers of a CPU model in place; returns how many, maybe 0."""
    packed: list[tuple[_PackedLinear, nn.Linear]] = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # Only the very class: a subclass or a hooked layer does more than multiply.
            if type(child) is nn.Linear and child.weight.device.type == "cpu":
                replacement = _packed_or_none(child)
                if replacement is None:
                    continue
                setattr(parent, name, replacement)
                packed.append((replacement, child))
    _keep_faster_weights(packed)
    return len(packed)


def _packed_or_none(stock: nn.Linear) -> _PackedLinear | None:
    try:
        packed = _PackedLinear(stock)
        with torch.no_grad():
            sample = torch.linspace(-1, 1, 2 * stock.in_features).view(2, -1).to(stock.weight.dtype)
            bound = 1e-4 if sample.dtype is torch.float32 else 2e-2
            same = torch.allclose(packed(sample), stock(sample), rtol=bound, atol=bound)
    except (RuntimeError, AttributeError):
        return None
    return packed if same else None


def _keep_faster_weights(layers: list[tuple[_PackedLinear, nn.Linear]]) -> None:
    """Give one-row calls the stock weights, for each shape with which they are faster."""
    if sum(stock.weight.nbytes for _, stock in layers) > psutil.virtual_memory().available // 4:
        return
    stock_wins: dict[torch.Size, bool] = {}
    for packed, stock in layers:
        shape = stock.weight.shape
        if shape not in stock_wins:
            row = torch.ones(1, stock.in_features, dtype=stock.weight.dtype)
            stock_wins[shape] = _shortest(stock, row) < _shortest(packed, row)
        if stock_wins[shape]:
            packed.single = stock.weight.detach()


def _shortest(layer: nn.Module, row: Tensor) -> float:
    times = []
    with torch.inference_mode():
        for _ in range(_TRIES):
            begun = time.perf_counter()
            layer(row)
            times.append(time.perf_counter() - begun)
    return min(times)
