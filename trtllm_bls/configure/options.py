"""The options of ``configure`` and the parameters that they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

import click

from trtllm_bls.contract import BLS, ENGINE
from trtllm_bls.errors import SettingsError
from trtllm_bls.settings import Override, setting

DRAFT = "tensorrt_llm_draft"
_FRACTION = "kv_cache_free_gpu_mem_fraction"


@dataclass(frozen=True, kw_only=True)
class ConfigureOptions:
    """The options of ``configure``; ``None`` and an empty version leave it to the engine."""

    engine_dir: Path = setting("Engine of the target model.", MISSING)
    tokenizer_dir: Path = setting("Its tokenizer.", MISSING)
    out: Path = setting("The model repository to write.", MISSING, required=True)
    draft_engine_dir: Path | None = setting("Engine of a draft model (speculation).")
    max_batch_size: int | None = setting("[default: the engine's]", type=click.IntRange(1))
    max_num_tokens: int | None = setting(
        "What the engine was built with, where its config.json is elsewhere.",
        type=click.IntRange(1),
    )
    max_queue_size: int = setting(
        "Requests waiting beyond this are refused; 0 = no limit.", 0, type=click.IntRange(0)
    )
    max_queue_delay_us: int = setting(
        "How long a request may wait for others.", 0, type=click.IntRange(0)
    )
    kv_cache_free_gpu_mem_fraction: str | None = setting(
        "Share of free GPU memory per engine.  [default: 0.9; 0.45 each where two share GPUs]"
    )
    draft_kv_cache_free_gpu_mem_fraction: str | None = setting("The draft's own share.")
    gpu_device_ids: str | None = setting("GPUs of the target.  [default: all]", metavar="ID,…")
    draft_gpu_device_ids: str | None = setting("GPUs of the draft.", metavar="ID,…")
    chunked_context: bool = setting("Process long prompts in several steps.", False)
    batch_scheduler_policy: Literal["guaranteed_no_evict", "max_utilization"] = setting(
        "Whether a running request may be paused for want of KV cache.", "guaranteed_no_evict"
    )
    version: str = setting(
        "TensorRT-LLM release of the container, from 0.9 on, or last.  [default: the engine's]", ""
    )
    decoupled: bool = setting(
        "false: tensorrt_llm_bls answers unary infer, one response per request, and no streams.",
        True,
    )
    bls_instances: int = setting("Processes of tensorrt_llm_bls.", 1, type=click.IntRange(1))
    engine_url: str | None = setting("gRPC port behind which the engine is.", metavar="HOST:PORT")
    disable_spawn_processes: bool = setting(
        "Orchestrator mode in which MPI or Slurm starts all ranks.", False
    )
    check: bool = setting("Look into the directories.", True, flag="--check/--no-check")
    force: bool = setting("Replace the models of a repository that is there.", False)
    overrides: tuple[Override, ...] = ()

    @property
    def separate_gpus(self) -> bool:
        """Whether target and draft have GPUs of their own."""
        if self.draft_engine_dir is None or not (self.gpu_device_ids and self.draft_gpu_device_ids):
            return False
        return not _ids(self.gpu_device_ids) & _ids(self.draft_gpu_device_ids)


@dataclass(frozen=True)
class Setting:
    """A parameter to set, and the option that a refusal of it names."""

    option: str
    override: Override


def settings(options: ConfigureOptions) -> Iterator[Setting]:
    """The parameters that options stand for, in the order in which they replace each other.

    Raises ``SettingsError`` for an option about a draft engine that is not there.
    """
    with_draft = options.draft_engine_dir is not None
    # Of the memory that is free when an engine loads, so two that share a GPU must share it.
    share = "0.45" if with_draft and not options.separate_gpus else "0.9"
    fraction = options.kv_cache_free_gpu_mem_fraction or share
    if options.engine_url is not None and "://" in options.engine_url:
        raise SettingsError(
            f"--engine-url {options.engine_url}: write HOST:PORT; an engine of another kind "
            f"needs no repository: trtllm-bls serve --engine {options.engine_url} --model DIR"
        )
    draft_fraction = options.draft_kv_cache_free_gpu_mem_fraction
    chunked = "true" if options.chunked_context else None
    for option, model, key, value in (
        ("--kv-cache-free-gpu-mem-fraction", ENGINE.name, _FRACTION, fraction),
        ("--kv-cache-free-gpu-mem-fraction", DRAFT, _FRACTION, fraction if with_draft else None),
        ("--draft-kv-cache-free-gpu-mem-fraction", DRAFT, _FRACTION, draft_fraction),
        ("--gpu-device-ids", ENGINE.name, "gpu_device_ids", options.gpu_device_ids),
        ("--draft-gpu-device-ids", DRAFT, "gpu_device_ids", options.draft_gpu_device_ids),
        ("--engine-url", BLS.name, "engine_url", options.engine_url),
        ("--chunked-context", ENGINE.name, "enable_chunked_context", chunked),
    ):
        if value is not None:
            if model == DRAFT and not with_draft:
                raise SettingsError(f"{option} {value}: needs --draft-engine-dir")
            yield Setting(f"{option} {value}", Override(model, key, value))
    for override in options.overrides:
        yield Setting(f"--set {override}", override)


def _ids(text: str) -> set[str]:
    return set(text.replace(";", ",").split(","))
