"""From a checkpoint directory to a ``Runner`` that is known to compute what the model computes.

Loads with transformers, chooses number format and longest sequence, and probes: a few tokens
through our slots must give the logits of the model's own eager attention. An architecture that
does not pass is refused at load, since a silently wrong one would look plausible for ever.
Must not know of requests.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from trtllm_bls.engines.embedded.attention import Segment
from trtllm_bls.engines.embedded.packed import pack_linears
from trtllm_bls.engines.embedded.runner import Runner
from trtllm_bls.engines.embedded.settings import EmbeddedSettings
from trtllm_bls.errors import CheckpointError, SettingsError

_log = logging.getLogger(__name__)

_DEFAULT_LENGTH = 4096  # tokens; longer ones must be asked for, as every slot is that long
_FP32_PARAMETERS = 1_200_000_000  # "about 1B": up to here exactness is worth the memory
_SMALL = 50_000_000  # weights
_PROBE = 12  # tokens
_PROBE_STEPS = ((0, 6), (6, 10), (10, 11), (11, 12))  # a prompt, a chunk, two single tokens


def default_threads(num_weights: int) -> int:
    """Half of the cores that this process may use; one for a model too small to share out.

    Its layers take less than a barrier costs once another process wants the same core.
    """
    return 1 if num_weights < _SMALL else max(1, len(os.sched_getaffinity(0)) // 2)


def load(model_dir: str | Path, settings: EmbeddedSettings) -> tuple[Runner, int]:
    """The model with its slots allocated, and the longest sequence in tokens.

    Raises ``CheckpointError`` naming the directory for anything wrong with the checkpoint, and
    ``SettingsError`` when the sizes asked for cannot be had.
    """
    torch.set_num_threads(settings.threads or default_threads(_SMALL))
    directory = Path(model_dir)
    if not (directory / "config.json").is_file():
        missing = "has no config.json" if directory.is_dir() else "is not a directory"
        raise CheckpointError(f"{directory} {missing}; it must be a Hugging Face checkpoint")
    device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with _quiet():
        runner, config = _load_model(directory, device)
        length = _longest(config, runner, settings)
    runner.allocate(settings.max_batch, length)
    runner.threads = settings.threads or default_threads(runner.num_weights)
    return runner, length


def _load_model(directory: Path, device: torch.device, *, pack: bool = True) -> tuple[Runner, Any]:
    """The probed runner; with packed linears if the model still computes the same with them."""
    model, config = _pretrained(directory, device)
    tokens = [(7919 * i + 1) % int(config.vocab_size) for i in range(_PROBE)]
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens], device=device), use_cache=False).logits
    expected = expected[0].float()
    if not bool(expected.isfinite().all()):
        raise CheckpointError(f"{directory}: its weights give logits that are not finite")
    runner = Runner(model, device)
    if not _computes(runner, tokens, expected):
        runner.close()
        raise CheckpointError(
            f"{directory}: with this engine's attention the model does not give its own logits; "
            "its architecture is not supported"
        )
    if pack and pack_linears(model) and not _computes(runner, tokens, expected):
        runner.close()  # some models look into their layers; those keep the stock ones
        return _load_model(directory, device, pack=False)
    return runner, config


def _pretrained(directory: Path, device: torch.device) -> tuple[Any, Any]:
    """Model and text config as transformers loads them, every weight accounted for."""
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        text_config = config.get_text_config(decoder=True)
        if config.is_encoder_decoder:
            raise CheckpointError(f"{directory} is an encoder-decoder, not a causal language model")
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=_dtype(directory, text_config, device),
            local_files_only=True,
            output_loading_info=True,
        )
    except CheckpointError:
        raise
    except Exception as error:  # transformers and safetensors raise whatever they like
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{directory} cannot be loaded: {reason}") from error
    for what in ("missing_keys", "mismatched_keys"):
        if report.get(what):
            example = sorted(str(key) for key in report[what])[0]
            raise CheckpointError(f"{directory} lacks fitting weights, for one {example}")
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


def _computes(runner: Runner, tokens: list[int], expected: torch.Tensor) -> bool:
    """Whether the tokens, through our slots in several steps, give the expected logits."""
    runner.allocate(1, len(tokens))
    tolerance = 2e-3 if runner.dtype is torch.float32 else 8e-2
    try:
        got = torch.cat(
            [runner.forward([Segment(0, a, tokens[a:b], b - a)]) for a, b in _PROBE_STEPS]
        )
        close = (got - expected).abs() <= tolerance * expected.abs().max()
    except Exception:  # an architecture we do not know may fail in any way
        _log.debug("the probe failed", exc_info=True)
        return False
    return bool(close.all()) and runner.cache.bytes_per_token > 0


def _longest(config: Any, runner: Runner, settings: EmbeddedSettings) -> int:
    """Tokens per slot: what model, memory and settings allow. Logs the KV cache's size."""
    possible = _exact_length(config, runner.cache.windowed)
    asked = settings.max_sequence_tokens
    if asked is not None and asked > possible:
        raise SettingsError(f"max_sequence_tokens is {asked}; the model allows {possible}")
    length = asked or min(possible, _DEFAULT_LENGTH)
    per_token = runner.cache.bytes_per_token * settings.max_batch
    limit = settings.max_kv_bytes or psutil.virtual_memory().available // 2
    if length * per_token > limit:
        fits = int(limit // per_token)
        if asked is not None or fits < 2:
            raise SettingsError(
                f"max_sequence_tokens {length} in {settings.max_batch} slots needs "
                f"{length * per_token} bytes of KV cache; {limit} are allowed: lower max_batch"
            )
        length = fits
    _log.info(
        "KV cache: %d slots of %d tokens, up to %.0f MiB",
        settings.max_batch,
        length,
        length * per_token / 2**20,
    )
    return length


def _exact_length(config: Any, windowed: bool) -> int:
    """The longest sequence that is computed as the model means it."""
    longest = int(getattr(config, "max_position_embeddings", None) or _DEFAULT_LENGTH)
    # A window or chunk that is only told to the model's mask never reaches our attention.
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


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and load reports: ours are one line each."""
    logger = transformers.utils.logging
    level, bars = logger.get_verbosity(), logger.is_progress_bar_enabled()
    logger.set_verbosity_error()
    logger.disable_progress_bar()
    try:
        yield
    finally:
        logger.set_verbosity(level)
        if bars:
            logger.enable_progress_bar()
