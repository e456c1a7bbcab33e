"""``model.yaml``, in which upstream's ``llmapi`` model keeps the arguments of ``tensorrt_llm.LLM``.

Each key at its top is an argument. Only ``triton_config`` and ``logits_post_processors`` have
another meaning: what concerns Triton's model, and processors by name. Knows neither which arguments
a release has nor what they mean.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from trtllm_bls.errors import SettingsError


@dataclass(frozen=True)
class ModelYaml:
    """``arguments`` of ``LLM``, the directories of ``adapters`` by name, the names of
    ``processors`` with what is imported for each, and whether Triton's model is ``decoupled``."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    processors: Mapping[str, str] = field(default_factory=dict)
    decoupled: bool = False

    @classmethod
    def read(cls, path: Path) -> ModelYaml:
        """Read the file; raises ``SettingsError``."""
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())
            raise SettingsError(f"{path.name}: cannot be read: {reason}") from error
        arguments = _mapping(path, "the file", content)
        triton = _mapping(path, "triton_config", arguments.pop("triton_config", None))
        name = "logits_post_processors"
        return cls(
            arguments,
            _mapping(path, "triton_config.lora_adapters", triton.get("lora_adapters")),
            _mapping(path, name, arguments.pop(name, None)),
            bool(triton.get("decoupled")),
        )

    def load_processors(self) -> dict[str, Any]:
        """Import the processors and call each class once. Raises ``SettingsError``."""
        processors = {}
        for name, spec in self.processors.items():  # "module.path:attribute"
            entry = f"model.yaml: logits_post_processors.{name} = {spec!r}"
            module, _, attributes = str(spec).partition(":")
            if not (module and attributes):
                raise SettingsError(f"{entry}: write module.path:attribute")
            try:
                processor = attrgetter(attributes)(importlib.import_module(module))
                if isinstance(processor, type):
                    processor = processor()
                pickle.dumps(processor)  # as workers get it with a request
            except Exception as error:  # a module may raise anything when it is imported
                raise SettingsError(f"{entry}: cannot be loaded: {error}") from error
            if not callable(processor):
                raise SettingsError(f"{entry}: is not callable; name a class or a function")
            processors[name] = processor
        return processors


def _mapping(path: Path, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value or {}, dict):
        raise SettingsError(f"{path.name}: {name} is {value!r:.80}; write a mapping")
    return dict(value or {})


def gpus_of(gpu_device_ids: str, instance: int, instances: int) -> str:
    """Return the GPUs of one of a model's processes, with commas; empty: all.

    Raises ``SettingsError``.

    ``gpu_device_ids`` has those of each process, with semicolons between them.
    """
    if instances == 1:
        return ""  # as in upstream's model, which reads it only where there are several
    lists = [gpus.strip() for gpus in gpu_device_ids.split(";")]
    if len(lists) != instances or not all(lists):
        problem = f"gpu_device_ids = '{gpu_device_ids}': {instances} instances need a list each"
        raise SettingsError(f"{problem}, such as {';'.join(map(str, range(instances)))}")
    return lists[instance]
