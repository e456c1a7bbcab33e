"""One model over its KV slots: from a checkpoint directory to the logits of a step's rows.

``load`` chooses number format and longest sequence, and probes: a few tokens through our slots must
give the logits of the model's own eager attention. An architecture that does not pass is refused,
since a silently wrong one would look plausible for ever.

All rows of a step go through the model as one sequence of T tokens. In its attention, which is
ours (registered with transformers under a name of its own, so that engines in one process do not
meet), the rows are parted again into groups, each over the slots it may see. Must not know of
requests, text or sampling.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
import transformers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from trtllm_bls.errors import CheckpointError, SettingsError
from trtllm_bls.settings.parameters import EngineParameters
from trtllm_bls.text.checkpoint_dir import check_checkpoint
from trtllm_bls.types import Array

_log = logging.getLogger(__name__)

_DEFAULT_LENGTH = 4096  # tokens; longer ones must be asked for, as every slot is that long
_FP32_PARAMETERS = 1_200_000_000  # "about 1B": up to here exactness is worth the memory
_SMALL = 50_000_000  # weights
_PROBE = ((0, 6), (6, 10), (10, 11), (11, 12))  # a prompt, a chunk, two single tokens
_numbers = itertools.count()


# --- loading ------------------------------------------------------------------------------------


def load(
    parameters: EngineParameters, device: str | None = None, max_kv_bytes: int | None = None
) -> Runner:
    """The model with its slots allocated.

    ``device``: ``None`` = CUDA if torch can use it, else the CPU. ``max_kv_bytes``: limit of the KV
    cache; ``None`` = half of the memory available at load. Raises ``CheckpointError`` naming the
    directory for anything wrong with the checkpoint, and ``SettingsError`` when the sizes asked for
    cannot be had.
    """
    if not parameters.max_batch:
        raise SettingsError("max_batch is 0; it must be at least 1")
    # Every running sequence gets its row in every step, and the oldest waiting one at least room
    # for its draft: so nothing starves.
    least = parameters.max_batch + parameters.max_draft_len + 1
    if parameters.max_tokens_per_step < least:
        raise SettingsError(
            f"max_tokens_per_step is {parameters.max_tokens_per_step}; "
            f"it must be at least {least} (max_batch + max_draft_len + 1)"
        )
    # Not all cores, since the spinning barriers of torch's pool collapse when another process wants
    # a core. One thread for a small model, of which a layer takes less than a barrier.
    half = max(1, len(os.sched_getaffinity(0)) // 2)
    torch.set_num_threads(parameters.threads or half)
    transformers.utils.logging.set_verbosity_error()  # our reports are one line each
    transformers.utils.logging.disable_progress_bar()
    directory = Path(parameters.model_dir)
    check_checkpoint(directory)
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    runner, config, num_weights = _probed(directory, chosen)
    possible, configured = _exact_length(config, runner.windowed), parameters.max_sequence_tokens
    if configured > possible:
        raise SettingsError(f"max_sequence_tokens is {configured}; the model allows {possible}")
    length = configured or min(possible, _DEFAULT_LENGTH)
    limit = max_kv_bytes or psutil.virtual_memory().available // 2
    per_token = runner.slots.bytes_per_token * parameters.max_batch
    fits = min(length, limit // per_token)
    if fits < (configured or 2):
        raise SettingsError(
            f"max_sequence_tokens {length} in {parameters.max_batch} slots needs "
            f"{length * per_token} bytes of KV cache; {limit} are allowed: lower max_batch"
        )
    size = fits * per_token / 2**20
    _log.info("KV cache: %d slots of %d tokens, up to %.0f MiB", parameters.max_batch, fits, size)
    runner.allocate(parameters.max_batch, fits)
    runner.threads = parameters.threads or (1 if num_weights < _SMALL else half)
    return runner


def _probed(directory: Path, device: torch.device) -> tuple[Runner, Any, int]:
    """Runner, text config and number of weights."""
    model, config = _pretrained(directory, device)
    num_weights = sum(weight.numel() for weight in model.parameters())
    tokens = [(7919 * i + 1) % int(config.vocab_size) for i in range(_PROBE[-1][1])]
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens], device=device), use_cache=False).logits
    if not bool(expected.isfinite().all()):
        raise CheckpointError(f"{directory}: its weights give logits that are not finite")
    tolerance = 2e-3 if model.dtype is torch.float32 else 8e-2
    runner = Runner(model, device)
    runner.allocate(1, len(tokens))
    try:
        got = torch.cat([runner.forward([Segment(0, a, tokens[a:b], b - a)]) for a, b in _PROBE])
        close = (got - expected[0].float()).abs() <= tolerance * expected.abs().max()
        if bool(close.all()) and runner.slots.bytes_per_token > 0:
            return runner, config, num_weights
    except Exception:  # an architecture we do not know may fail in any way
        _log.debug("the probe failed", exc_info=True)
    runner.close()
    raise CheckpointError(
        f"{directory}: with this engine's attention the model does not give its own logits; "
        "its architecture is not supported"
    )


def _pretrained(directory: Path, device: torch.device) -> tuple[Any, Any]:
    """Model and text config as transformers loads them, every weight accounted for."""
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        text_config = config.get_text_config(decoder=True)
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=_dtype(directory, text_config, device),
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers and safetensors raise whatever they like
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{directory} cannot be loaded: {reason}") from error
    if config.is_encoder_decoder:
        raise CheckpointError(f"{directory} is an encoder-decoder, not a causal language model")
    for key in sorted(map(str, (*report["missing_keys"], *report["mismatched_keys"]))):
        raise CheckpointError(f"{directory} lacks fitting weights, for one {key}")
    return model.eval().to(device), text_config


def _dtype(directory: Path, config: Any, device: torch.device) -> torch.dtype:
    """fp32 for small models; else the checkpoint's own half format where the device has it."""
    own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    if device.type == "cuda":
        return own
    weights = [*directory.glob("*.safetensors"), *directory.glob("pytorch_model*.bin")]
    parameters = sum(file.stat().st_size for file in weights) // own.itemsize
    if parameters <= _FP32_PARAMETERS or own.itemsize > 2:
        return torch.float32
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def _exact_length(config: Any, windowed: bool) -> int:
    """The longest sequence that is computed as the model means it."""
    longest = int(getattr(config, "max_position_embeddings", None) or _DEFAULT_LENGTH)
    # A window or chunk that is only given to the model's mask never reaches our attention.
    window = getattr(config, "sliding_window", None)
    if window and not windowed and getattr(config, "use_sliding_window", True):
        longest = min(longest, int(window))
    longest = min(longest, int(getattr(config, "attention_chunk_size", None) or longest))
    # These rotary kinds change with the longest sequence of the batch: stay below the change.
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in [rope, *(v for v in rope.values() if isinstance(v, dict))]:
        if kind.get("rope_type") in ("dynamic", "longrope"):
            own = kind.get("original_max_position_embeddings")
            longest = min(longest, int(own or longest))
    return longest


# --- steps --------------------------------------------------------------------------------------


class Slots:
    """``count`` KV slots of ``length`` tokens: which tokens each one holds, their keys and values,
    and who may take it. Layers are made on first use, as only then head counts and sizes are known.

    A finished sequence leaves its tokens in the slot, so that the next request with the same
    beginning computes only what is new. Rejected drafts need no undoing: keys and values fit the
    tokens written here, and the next claim keeps no more of them than it shares. Slots start as
    zeros and never hold anything but finite numbers (``scrub``): a masked NaN would still leak
    through attention's weighted sum.
    """

    def __init__(self, count: int, length: int, device: torch.device) -> None:
        self.length = length
        self._device = device
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._tokens = np.zeros((count, length), dtype=np.int32)
        self._lengths = np.zeros(count, dtype=np.int64)
        self._left_at = np.zeros(count, dtype=np.int64)  # a counter, not a clock
        self._departures = 0
        self.free = set(range(count))

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes over all layers seen so far."""
        return sum(t.shape[1] * t.shape[3] * t.element_size() for t in self._tensors())

    def claim(self, prompt: Sequence[int], *, reuse: bool) -> tuple[int, int]:
        """Take a free slot; returns it, and how many tokens of the prompt it holds already.

        It is the one that shares the longest beginning, else the one idle longest, into which a
        beginning that another slot holds is copied. The last prompt token is never reused, since
        its logits are needed.
        """
        prefix = np.asarray(prompt[:-1], dtype=np.int32)
        differs = np.ones((len(self._tokens), len(prefix) + 1), dtype=np.bool_)
        np.not_equal(self._tokens[:, : len(prefix)], prefix, out=differs[:, :-1])
        shared = np.minimum(differs.argmax(axis=1), self._lengths)  # tokens, by slot
        source = max(
            range(len(shared)),
            key=lambda slot: (shared[slot], slot in self.free, -self._left_at[slot]),
        )
        reused = int(shared[source]) if reuse else 0
        slot = min(self.free, key=lambda slot: (self._left_at[slot], slot))
        # A slot with far more than what is shared serves its own conversation better untouched.
        if reused and source in self.free and 2 * reused >= self._lengths[source]:
            slot = source
        self._lengths[slot] = reused
        if reused and slot != source:
            self._tokens[slot, :reused] = self._tokens[source, :reused]
            with torch.inference_mode():
                for tensor in self._tensors():
                    tensor[slot, :, :reused] = tensor[source, :, :reused]
        self.free.discard(slot)  # last: a copy that fails leaves the slot free
        return slot, reused

    def write(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        """The slot now holds ``tokens`` from ``start`` on, and nothing after them."""
        self._lengths[slot] = start + len(tokens)
        self._tokens[slot, start : self._lengths[slot]] = tokens

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [slots, kv heads, length, size] for rows [1, kv heads, T, size]."""
        if index not in self._layers:
            zeros = []
            for like in (key, value):
                shape = (len(self._tokens), like.shape[1], self.length, like.shape[3])
                if self._device.type == "cpu":
                    # numpy's zeros are the kernel's own: pages never used are never committed.
                    flat = np.zeros(int(np.prod(shape)) * like.element_size(), dtype=np.uint8)
                    zeros.append(torch.from_numpy(flat).view(like.dtype).view(shape))
                else:
                    zeros.append(torch.zeros(shape, dtype=like.dtype, device=self._device))
            self._layers[index] = zeros[0], zeros[1]
        return self._layers[index]

    def scrub(self, slot: int) -> None:
        """Empty a slot that may hold non-finite numbers."""
        self._lengths[slot] = 0
        with torch.inference_mode():
            for tensor in self._tensors():
                tensor[slot].zero_()

    def release(self, slot: int) -> None:
        """The slot is free; what it holds stays for reuse."""
        self._departures += 1
        self._left_at[slot] = self._departures
        self.free.add(slot)

    def _tensors(self) -> list[Tensor]:
        return [tensor for pair in self._layers.values() for tensor in pair]


class Segment(NamedTuple):
    """Consecutive tokens of one slot, from position ``start``; logits of the last ``keep``."""

    slot: int
    start: int
    tokens: Sequence[int]
    keep: int

    @property
    def end(self) -> int:
        """How many tokens the slot holds after this step."""
        return self.start + len(self.tokens)


class Runner:
    """Runs steps on the thread that calls; ``close`` frees the model.

    ``windowed``: whether any layer ever asked for a sliding window. ``threads``: of torch's pool.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model, self._device = model, device
        self.slots = Slots(0, 0, device)
        self.vocab_size = 0  # known after the first step
        self.windowed = False
        self.threads = 1
        self._groups: list[_Group] = []
        self._places: tuple[Tensor, ...] = ()  # slot and position of each row, [T]
        name = f"trtllm_bls_{next(_numbers)}"
        AttentionInterface.register(name, self._attend)
        model.set_attn_implementation(name)

    def allocate(self, slots: int, length: int) -> None:
        """Drop all slots for ``slots`` new ones of ``length`` tokens."""
        self.slots = Slots(slots, length, self._device)

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """Logits [sum of ``keep``, vocab], fp32, of the last rows of each segment, in order."""
        placed: list[tuple[int, Segment]] = []  # with the row of the step it begins at
        tokens: list[int] = []
        rows: list[int] = []
        for segment in segments:
            placed.append((len(tokens), segment))
            tokens += segment.tokens
            rows += range(len(tokens) - segment.keep, len(tokens))
        self._groups = _grouped(placed, self._device)
        slots = np.repeat([s.slot for s in segments], [len(s.tokens) for s in segments])
        positions = np.concatenate([np.arange(s.start, s.end) for s in segments])
        self._places = tuple(
            torch.from_numpy(indices).to(self._device) for indices in (slots, positions)
        )
        with torch.inference_mode():
            logits: Tensor = self._model(
                input_ids=torch.tensor([tokens], device=self._device),
                position_ids=self._places[1].unsqueeze(0),
                use_cache=False,
                logits_to_keep=torch.tensor(rows, device=self._device),
            ).logits[0]
        for segment in segments:
            self.slots.write(segment.slot, segment.start, segment.tokens)
        self.vocab_size = logits.shape[-1]
        return logits.float()

    def close(self) -> None:
        """Free the slots and the model; transformers keeps the name and this empty object."""
        self._model = None
        self.allocate(0, 0)

    def _attend(
        self,
        module: torch.nn.Module,
        query: Tensor,  # [1, heads, T, size]
        key: Tensor,  # [1, kv heads, T, size]
        value: Tensor,  # [1, kv heads, T, value size]
        attention_mask: Tensor | None,  # None: the groups know better
        **asked: Any,
    ) -> tuple[Tensor, None]:
        """Store the rows' keys and values; returns the attention output [1, T, heads, size]."""
        slots, positions = self._places
        keys, values = self.slots.layer(int(module.layer_idx), key, value)
        keys[slots, :, positions] = key[0].transpose(0, 1)
        values[slots, :, positions] = value[0].transpose(0, 1)
        self.windowed |= asked.get("sliding_window") is not None
        # One row more, for what a padded group computes without need.
        out = query.new_empty(query.shape[2] + 1, query.shape[1], value.shape[-1])
        for group in self._groups:
            out[group.rows] = group.attend(query[0], keys, values, asked)
        return out[:-1].unsqueeze(0), None


@dataclass
class _Group:
    """Rows that are attended together: as many of each slot, of consecutive slots."""

    rows: slice | Tensor  # of the step, slot by slot; -1 where a slot has no row and one is due
    seen: tuple[slice, slice, slice]  # of a layer: slots, all heads, tokens
    positions: Array  # [slots, rows per slot]; 0 for rows that are not there
    masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, asked: Mapping[str, Any]
    ) -> Tensor:
        """Query [heads, T, size] over whole layers to [rows of the group, heads, value size].

        The query heads that share a kv head are further rows of it.
        """
        (slots, count), kv_heads, heads = self.positions.shape, keys.shape[1], query.shape[0]
        shared, window = heads // kv_heads, asked.get("sliding_window")
        mask = self.masks.get((window, shared))
        if mask is None:  # additive [slots, 1, shared * rows per slot, tokens], for the whole step
            own, seen = self.positions[:, :, None], np.arange(self.positions.max() + 1)
            allowed = seen <= own
            if window is not None:
                allowed &= seen > own - window
            mask = torch.from_numpy(np.where(allowed, np.float32(0), np.float32(-np.inf)))
            mask = mask[:, None, None].expand(-1, -1, shared, -1, -1).flatten(2, 3).to(query)
            self.masks[window, shared] = mask
        parted = query[:, self.rows].reshape(kv_heads, shared, slots, count, -1)
        packed = parted.permute(2, 0, 1, 3, 4).reshape(slots, kv_heads, shared * count, -1)
        got = _attention(packed, keys[self.seen], values[self.seen], mask, asked)
        parted = got.reshape(slots, kv_heads, shared, count, -1).permute(0, 3, 1, 2, 4)
        return parted.reshape(slots * count, heads, -1)


def _grouped(placed: list[tuple[int, Segment]], device: torch.device) -> list[_Group]:
    """One group for all one-row segments where that pays, and one for each other segment.

    ``placed``: segments, each after its first row of the step.
    """
    single = [(first, segment) for first, segment in placed if len(segment.tokens) == 1]
    slots, ends = [s.slot for _, s in single], [s.end for _, s in single]
    together = [[part] for part in placed]
    # One padded view of the slots, unless it reads several times what the rows need.
    if len(single) > 1 and (max(slots) + 1 - min(slots)) * max(ends) <= 4 * sum(ends):
        together = [single, *([part] for part in placed if len(part[1].tokens) > 1)]
    groups = []
    for parts in together:
        low, high = min(s.slot for _, s in parts), max(s.slot + 1 for _, s in parts)
        count = len(parts[0][1].tokens)
        rows, positions = np.full((high - low, count), -1), np.zeros((high - low, count), np.int64)
        for first, segment in parts:
            rows[segment.slot - low] = np.arange(first, first + count)
            positions[segment.slot - low] = np.arange(segment.start, segment.end)
        first, flat = int(rows[0, 0]), rows.ravel()
        dense = bool((np.diff(flat) == 1).all())  # then a view does, instead of a copy
        where = slice(first, first + len(flat)) if dense else torch.from_numpy(flat).to(device)
        seen = slice(low, high), slice(None), slice(max(segment.end for _, segment in parts))
        groups.append(_Group(where, seen, positions))
    return groups


def _attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, asked: Mapping[str, Any]
) -> Tensor:
    """Attention of [slots, kv heads, rows, size] over [slots, kv heads, tokens, size].

    ``asked``: what the layer wants beside plain causal attention, in transformers' names.
    """
    scale, softcap, sinks = (asked.get(name) for name in ("scaling", "softcap", "s_aux"))
    if softcap is None and sinks is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    scores = torch.matmul(query, keys.transpose(2, 3)) * (scale or query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = (scores + mask).float()
    if sinks is not None:  # [heads]; one more place to look at, which holds no value
        slots, kv_heads, rows, _ = scores.shape
        sinks = sinks.to(scores).view(1, kv_heads, -1, 1)
        sinks = sinks.repeat_interleave(rows // sinks.shape[2], dim=2)
        scores = torch.cat([scores, sinks.expand(slots, -1, -1, -1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[2]]
    return torch.matmul(weights.to(values.dtype), values)
