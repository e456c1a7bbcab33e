"""The options of ``configure`` and the parameters that they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trtllm_bls.contract import BLS, ENGINE
from trtllm_bls.errors import SettingsError
from trtllm_bls.settings import Override

DRAFT = "tensorrt_llm_draft"
_FRACTION = "kv_cache_free_gpu_mem_fraction"


@dataclass(frozen=True, kw_only=True)
class ConfigureOptions:
    """The options of ``configure``; ``None`` and an empty version leave it to the engine."""

    engine_dir: Path
    tokenizer_dir: Path
    out: Path
    draft_engine_dir: Path | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_queue_size: int = 0
    max_queue_delay_us: int = 0
    kv_cache_free_gpu_mem_fraction: str | None = None
    draft_kv_cache_free_gpu_mem_fraction: str | None = None
    gpu_device_ids: str | None = None
    draft_gpu_device_ids: str | None = None
    chunked_context: bool = False
    batch_scheduler_policy: str = "guaranteed_no_evict"
    version: str = ""
    decoupled: bool = True
    bls_instances: int = 1
    engine_url: str | None = None
    disable_spawn_processes: bool = False
    overrides: tuple[Override, ...] = ()
    check: bool = True
    force: bool = False

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
    draft_fraction = options.draft_kv_cache_free_gpu_mem_fraction
    if options.engine_url is not None and "://" in options.engine_url:
        raise SettingsError(
            f"--engine-url {options.engine_url}: write HOST:PORT; an engine of another kind "
            f"needs no repository: trtllm-bls serve --engine {options.engine_url} --model DIR"
        )
    for option, model, key, value in (
        ("--kv-cache-free-gpu-mem-fraction", ENGINE.name, _FRACTION, fraction),
        ("--gpu-device-ids", ENGINE.name, "gpu_device_ids", options.gpu_device_ids),
        ("--engine-url", BLS.name, "engine_url", options.engine_url),
        ("--draft-kv-cache-free-gpu-mem-fraction", DRAFT, _FRACTION, draft_fraction),
        ("--draft-gpu-device-ids", DRAFT, "gpu_device_ids", options.draft_gpu_device_ids),
    ):
        if value is not None:
            if model == DRAFT and not with_draft:
                raise SettingsError(f"{option} {value}: needs --draft-engine-dir")
            yield Setting(f"{option} {value}", Override(model, key, value))
    if options.chunked_context:
        override = Override(ENGINE.name, "enable_chunked_context", "true")
        yield Setting("--chunked-context", override)
    if with_draft and draft_fraction is None:
        option = f"--kv-cache-free-gpu-mem-fraction {fraction}"
        yield Setting(option, Override(DRAFT, _FRACTION, fraction))
    for override in options.overrides:
        yield Setting(f"--set {override}", override)


def _ids(text: str) -> set[str]:
    return set(text.replace(";", ",").split(","))
