"""What an existing repository of TensorRT-LLM's own models says, as options of ``configure``.

Values are read from each ``config.pbtxt``, after its template was filled in. A value that the new
repository cannot hold, or that had no effect, is left out and named in a note.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtllm_bls.configure.engine import read_engine
from trtllm_bls.configure.repository import DRAFT
from trtllm_bls.configure.versions import parse_version
from trtllm_bls.contract import BLS, ENGINE, ENSEMBLE, MODELS, POSTPROCESSING, PREPROCESSING
from trtllm_bls.errors import SettingsError
from trtllm_bls.parameters import check
from trtllm_bls.parameters.cpp_backend import LAST, Version, check_backend
from trtllm_bls.parameters.model_config import read_config, values_of
from trtllm_bls.settings import Override

# Not copied as they are: `configure` has options for them or sets them itself.
_NOT_COPIED = {
    *("gpt_model_path", "gpt_model_type", "gpu_device_ids", "exclude_input_in_output"),
    *("FORCE_CPU_ONLY_INPUT_TENSORS", "enable_trt_overlap", "worker_path"),
}
_TRUE_BY_DEFAULT_SINCE = Version(0, 11)  # preprocessing's add_special_tokens
_TEXT_PARAMETERS = {  # a parameter of one of their models, and our models that have it too
    (PREPROCESSING.name, "add_special_tokens"): (PREPROCESSING.name, BLS.name),
    (POSTPROCESSING.name, "skip_special_tokens"): (POSTPROCESSING.name, BLS.name),
    (BLS.name, "accumulate_tokens"): (BLS.name,),
}


def read_repository(directory: Path) -> dict[str, Any]:
    """Each model's configuration by name; raises ``SettingsError`` for one that cannot be read."""
    if not directory.is_dir():
        raise SettingsError(f"{directory}: no such directory")
    files = {path.parent.name: path for path in sorted(directory.glob("*/config.pbtxt"))}
    return {name: read_config(path) for name, path in files.items()}


class Existing:
    """``options`` of ``ConfigureOptions`` by name, parameters to set, and notes for the user.

    ``version`` is the container's release; if it is empty, the engine's counts. Raises
    ``SettingsError`` where ``directory`` has no target model.
    """

    def __init__(self, directory: Path, version: str) -> None:
        self.options: dict[str, Any] = {}
        self.overrides: list[Override] = []
        self.notes: list[str] = []
        self._configs = read_repository(directory)
        self._values = {name: self._filled_in(name) for name in self._configs}
        bls = self._values.get(BLS.name, {})
        target = bls.get("tensorrt_llm_model_name", ENGINE.name)
        draft = bls.get("tensorrt_llm_draft_model_name")
        if target not in self._configs:
            there = ", ".join(self._configs) or "none"
            raise SettingsError(f"--from {directory}: it has no model {target}; there are: {there}")
        self._add_directory(target, "gpt_model_path", "engine_dir")
        self._add_directory(PREPROCESSING.name, "tokenizer_dir", "tokenizer_dir")
        engine = self.options.get("engine_dir")
        built = read_engine("--from", engine, check=False) if engine and not version else None
        self._release = (built.release() if built else parse_version(version or "last")) or LAST
        self._add_engine(target, ENGINE.name)
        if draft in self._configs:
            self._add_directory(draft, "gpt_model_path", "draft_engine_dir")
            self._add_engine(draft, DRAFT)
            self.overrides.append(Override(BLS.name, "draft_source", "off"))
            self.notes.append(
                "drafts are made for requests that ask for them (num_draft_tokens), as before; "
                "tensorrt_llm_bls.draft_source=model makes them for all"
            )
        elif draft:
            self.notes.append(f"there is no model {draft}, so no drafts of a model either")
        self._add_batching(self._configs[target])
        self._add_text_parameters()
        others = self._configs.keys() - {model.name for model in MODELS} - {target, draft}
        if others:
            self.notes.append(f"not converted: {', '.join(sorted(others))}")

    def _filled_in(self, model: str) -> dict[str, str]:
        values = values_of(self._configs[model])
        empty = [key for key, value in values.items() if "${" in value]
        if empty:
            self.notes.append(f"{model}: not filled in, so not set: {', '.join(empty)}")
        return {key: value for key, value in values.items() if value and key not in empty}

    def _add_directory(self, model: str, key: str, option: str) -> None:
        if directory := self._values.get(model, {}).get(key):
            self.options[option] = Path(directory)

    def _add_engine(self, old: str, new: str) -> None:
        """The parameters of the engine ``old`` that the release reads, for the model ``new``."""
        values = self._values[old]
        if new != old:
            self.notes.append(f"{old} is called {new} here; requests to it need the new name")
        if self._configs[old].backend == "python":
            self.notes.append(
                f"{old}: its Python backend is replaced by the C++ backend tensorrtllm"
            )
        if "inflight" not in values.get("gpt_model_type", "inflight"):
            self.notes.append(f"{old}: gpt_model_type {values['gpt_model_type']} becomes in-flight")
        if "gpu_device_ids" in values:
            name = "gpu_device_ids" if new == ENGINE.name else "draft_gpu_device_ids"
            self.options[name] = values["gpu_device_ids"]
        for key in [key for key in values if key not in _NOT_COPIED]:
            try:
                check_backend(key, values[key], self._release)
                self.overrides.append(Override(new, key, values[key]))
            except SettingsError as error:
                self.notes.append(
                    f"{old}.{key}={values[key]} is left out, as it had no effect: {error}"
                )

    def _add_batching(self, engine: Any) -> None:
        batching = engine.dynamic_batching
        self.options["max_batch_size"] = engine.max_batch_size or None
        self.options["max_queue_delay_us"] = batching.max_queue_delay_microseconds
        self.options["max_queue_size"] = batching.default_queue_policy.max_queue_size
        if BLS.name in self._configs:
            bls = self._configs[BLS.name]
            self.options["decoupled"] = bls.model_transaction_policy.decoupled
            count = max((group.count for group in bls.instance_group), default=1)
            if count > 1:
                self.notes.append(
                    f"tensorrt_llm_bls had {count} instances, one per request at a time; one "
                    "process serves them all here (--bls-instances for more)"
                )

    def _add_text_parameters(self) -> None:
        """The text models' parameters, with the defaults that the release had."""
        meant_false = self._release < _TRUE_BY_DEFAULT_SINCE
        for (model, key), models in _TEXT_PARAMETERS.items():
            value = self._values.get(model, {}).get(key)
            if value is None and key == "add_special_tokens" and meant_false:
                value = "false"
                self.notes.append("add_special_tokens was not set, which meant false before 0.11")
            if value is not None:
                self.overrides += [Override(name, key, value) for name in models]
        known = {"tokenizer_dir", "tensorrt_llm_model_name", "tensorrt_llm_draft_model_name"}
        for model in (PREPROCESSING.name, POSTPROCESSING.name, ENSEMBLE.name, BLS.name):
            for key, value in self._values.get(model, {}).items():
                try:
                    check(model, key, value)
                except SettingsError as error:
                    if key not in known:
                        self.notes.append(f"{model}.{key} is left out: {error}")
