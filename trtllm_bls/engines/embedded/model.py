"""Loading a checkpoint directory as a ``Runner`` that is proven to compute the model's own logits.

``load`` chooses number format and longest sequence, and probes: a few tokens through our slots must
give the logits of the model's own eager attention. An architecture that does not pass is refused,
since a silently wrong one would look plausible for ever. The Llama family is then probed once more
with our own forward pass, and keeps transformers' modules if that differs.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from trtllm_bls.engines.embedded.attention import Segment
from trtllm_bls.engines.embedded.llama import FAMILY
from trtllm_bls.engines.embedded.runner import Runner
from trtllm_bls.errors import CheckpointError, SettingsError
from trtllm_bls.settings.parameters import EngineParameters
from trtllm_bls.text.checkpoint_dir import check_checkpoint

_log = logging.getLogger(__name__)

_DEFAULT_LENGTH = 4096  # tokens; more are a parameter, since every slot is that long
_FP32_PARAMETERS = 1_200_000_000  # "about 1B": up to here exactness is worth the memory
_SMALL = 50_000_000  # weights
_PROBE = ((0, 6), (6, 10), (10, 11), (11, 12))  # a prompt, a chunk, two single tokens


def load(
    parameters: EngineParameters, device: str | None = None, max_kv_bytes: int | None = None
) -> Runner:
    """Load the model and allocate its slots.

    ``device``: ``None`` = CUDA if torch can use it, else the CPU. ``max_kv_bytes``: limit of the KV
    cache; ``None`` = half of the device's memory that is available at load. Raises
    ``CheckpointError`` naming the directory for any problem of the checkpoint, and
    ``SettingsError`` for sizes that do not fit.
    """
    if not parameters.max_batch:
        raise SettingsError("max_batch is 0; it must be at least 1")
    # Every running sequence gets its row in every step, and the oldest waiting one at least room
    # for its draft: so nothing starves.
    min_rows = parameters.max_batch + parameters.max_draft_len + 1
    if parameters.max_tokens_per_step < min_rows:
        raise SettingsError(
            f"max_tokens_per_step is {parameters.max_tokens_per_step}; "
            f"it must be at least {min_rows} (max_batch + max_draft_len + 1)"
        )
    # Not all cores, since the spinning barriers of torch's pool collapse when another process wants
    # a core. One thread for a small model, of which a layer takes less than a barrier.
    half_of_cores = max(1, len(os.sched_getaffinity(0)) // 2)
    torch.set_num_threads(parameters.threads or half_of_cores)
    transformers.utils.logging.set_verbosity_error()  # our reports are one line each
    transformers.utils.logging.disable_progress_bar()
    directory = Path(parameters.model_dir)
    check_checkpoint(directory)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    torch_device = torch.device(device)
    # cuDNN's attention plans for a tenth of a second whenever a prompt has a new length.
    torch.backends.cuda.enable_cudnn_sdp(False)
    runner, config, num_weights = _probed(directory, torch_device)
    max_length = _exact_length(config, runner.windowed)
    configured = parameters.max_sequence_tokens
    if configured > max_length:
        raise SettingsError(f"max_sequence_tokens is {configured}; the model allows {max_length}")
    length = configured or min(max_length, _DEFAULT_LENGTH)
    limit = max_kv_bytes or _available_bytes(torch_device) // 2
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
    runner.threads = half_of_cores
    if num_weights < _SMALL:
        runner.threads = 1
    if parameters.threads:
        runner.threads = parameters.threads
    return runner


def _available_bytes(device: torch.device) -> int:
    """Return the bytes that may still be allocated on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def _probed(directory: Path, device: torch.device) -> tuple[Runner, Any, int]:
    """Load and probe the model; return runner, text config and number of weights."""
    model, config = _pretrained(directory, device)
    num_weights = sum(weight.numel() for weight in model.parameters())
    tokens = [(7919 * i + 1) % int(config.vocab_size) for i in range(_PROBE[-1][1])]
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens], device=device), use_cache=False).logits
    if not bool(expected.isfinite().all()):
        raise CheckpointError(f"{directory}: its weights give logits that are not finite")
    runner = Runner(model, device)
    if not _agrees(runner, tokens, expected[0]):
        runner.close()
        raise CheckpointError(
            f"{directory}: with this engine's attention the model does not give its own logits; "
            "its architecture is not supported"
        )
    if config.model_type in FAMILY:
        runner.use_llama()
        if not _agrees(runner, tokens, expected[0]):
            _log.warning("%s: our forward pass differs from transformers', which runs", directory)
            runner.use_transformers()
    return runner, config, num_weights


def _agrees(runner: Runner, tokens: list[int], expected: Tensor) -> bool:
    """Run the probe; true if it gives the logits [tokens, vocab] that are expected."""
    tolerance = 2e-3 if expected.dtype is torch.float32 else 8e-2
    runner.allocate(1, len(tokens))
    steps: list[Tensor] = []
    try:
        for start, end in _PROBE:
            segment = Segment(0, start, tokens[start:end], end - start)
            steps.append(runner.forward([segment]))
    except Exception:  # an architecture we do not know may fail in any way
        _log.debug("the probe failed", exc_info=True)
        return False
    logits = torch.cat(steps)
    close = (logits - expected.float()).abs() <= tolerance * expected.abs().max()
    return bool(close.all()) and runner.slots.bytes_per_token > 0


def _pretrained(directory: Path, device: torch.device) -> tuple[Any, Any]:
    """Load model and text config with transformers, every weight accounted for."""
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
    """Return fp32 for small models; else the checkpoint's half format if the device has it."""
    checkpoint_dtype = torch.float32
    if isinstance(config.dtype, torch.dtype):
        checkpoint_dtype = config.dtype
    weights = [*directory.glob("*.safetensors"), *directory.glob("pytorch_model*.bin")]
    parameters = sum(file.stat().st_size for file in weights) // checkpoint_dtype.itemsize
    if device.type == "cuda":
        return torch.float32 if parameters <= _SMALL else checkpoint_dtype
    is_large = parameters > _FP32_PARAMETERS and checkpoint_dtype.itemsize <= 2
    if is_large and torch.cpu._is_avx512_bf16_supported():
        return torch.bfloat16
    return torch.float32


def _exact_length(config: Any, windowed: bool) -> int:
    """Return the longest sequence that is computed as in the model itself."""
    longest = int(getattr(config, "max_position_embeddings", None) or _DEFAULT_LENGTH)
    # A window or chunk that is only given to the model's mask never reaches our attention.
    window = getattr(config, "sliding_window", None)
    if window and not windowed and getattr(config, "use_sliding_window", True):
        longest = min(longest, int(window))
    longest = min(longest, int(getattr(config, "attention_chunk_size", None) or longest))
    # These rotary kinds change with the longest sequence of the batch: stay below the change.
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope]
    for value in rope.values():
        if isinstance(value, dict):
            kinds.append(value)
    for kind in kinds:
        if kind.get("rope_type") in ("dynamic", "longrope"):
            original_length = kind.get("original_max_position_embeddings")
            longest = min(longest, int(original_length or longest))
    return longest
