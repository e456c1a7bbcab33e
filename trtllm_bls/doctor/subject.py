"""What is examined: a repository, a server, an engine, a tokenizer, this machine."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from trtllm_bls.configure.engine import EngineDir, read_engine
from trtllm_bls.configure.versions import parse_version
from trtllm_bls.contract import BLS, ENGINE
from trtllm_bls.errors import SettingsError
from trtllm_bls.parameters.cpp_backend import Version
from trtllm_bls.parameters.model_config import read_config, values_of
from trtllm_bls.settings import ServeSettings, TlsConnection, option, setting

CPP_BACKEND = "tensorrtllm"
_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


def installed(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def serve_ports() -> dict[str, int]:
    """The ports that ``serve`` takes unless told otherwise, by option."""
    named = (each for each in fields(ServeSettings) if each.name.endswith("_port"))
    return {option(each.name): int(getattr(ServeSettings, each.name)) for each in named}


def _release(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
    try:
        return value if value and parse_version(value) else ""
    except SettingsError as error:
        raise click.UsageError(str(error), ctx) from error


@dataclass
class Subject:
    """The options of ``doctor``, and what can be read behind them.

    ``version`` names TensorRT-LLM's release where neither an installed package nor an engine tells.
    """

    repository: Path | None = setting(
        "What is to be served.", flag="--model-repository", type=_DIRECTORY
    )
    url: str | None = setting("gRPC port of a running server.", metavar="HOST:PORT")
    engine_dir: Path | None = setting("Engine of the target model.", type=_DIRECTORY)
    draft_engine_dir: Path | None = setting("Engine of the draft model.", type=_DIRECTORY)
    tokenizer_dir: Path | None = setting("Tokenizer of the target model.", type=_DIRECTORY)
    server: Path | None = setting("As of `serve`.")
    version: str = setting(
        "TensorRT-LLM release of the container.  [default: as installed, or the engine's]",
        "",
        callback=_release,
    )
    tls: TlsConnection = field(default_factory=TlsConnection)  # to ``url``
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    packages: Callable[[str], str | None] = installed
    shared_memory: Path = Path("/dev/shm")
    ports: Mapping[str, int] = field(default_factory=serve_ports)
    # Of configurations and engines, once those have been asked for.
    unreadable: list[SettingsError] = field(default_factory=list, init=False)

    @cached_property
    def configs(self) -> dict[str, Any]:
        """The configuration (Triton's ``ModelConfig``) of each model that can be read."""
        found = {}
        for path in sorted(self.repository.glob("*/config.pbtxt")) if self.repository else ():
            try:
                found[path.parent.name] = read_config(path)
            except SettingsError as error:
                self.unreadable.append(error)
        return found

    def values(self, model: str) -> dict[str, str]:
        """A model's parameters; none where there is no such model."""
        return values_of(self.configs[model]) if model in self.configs else {}

    @property
    def cpp_models(self) -> list[str]:
        """The models that TensorRT-LLM's C++ backend runs."""
        return [name for name, config in self.configs.items() if config.backend == CPP_BACKEND]

    @property
    def target(self) -> str:
        """The name of the target model."""
        return self.values(BLS.name).get("tensorrt_llm_model_name") or ENGINE.name

    @property
    def draft(self) -> str:
        """The name of the draft model; empty where there is none."""
        return self.values(BLS.name).get("tensorrt_llm_draft_model_name", "")

    @cached_property
    def engines(self) -> dict[str, EngineDir]:
        """Engines by model, of the options or of the repository's configurations."""
        draft = self.draft or "the draft"
        directories = {
            name: Path(path)
            for name in self.cpp_models
            if (path := self.values(name).get("gpt_model_path")) and "${" not in path
        }
        directories |= {self.target: self.engine_dir} if self.engine_dir else {}
        directories |= {draft: self.draft_engine_dir} if self.draft_engine_dir else {}
        found = {}
        for name, directory in directories.items():
            try:
                engine = read_engine(f"{name}: engine", directory, check=True)
                engine.release()  # raises where there is no such release
                found[name] = engine
            except SettingsError as error:
                self.unreadable.append(error)
        return found

    @property
    def tokenizer(self) -> Path | None:
        """The directory of the target's tokenizer."""
        return self.tokenizer_dir or self._directory("tokenizer_dir")

    @property
    def draft_tokenizer(self) -> Path | None:
        """The directory of the draft's tokenizer, where the repository names it."""
        return self._directory("draft_tokenizer_dir")

    def _directory(self, key: str) -> Path | None:
        named = self.values(BLS.name).get(key, "")
        if not named or "${" in named:
            return None
        return Path(os.path.abspath((self.repository or Path()) / named))

    @property
    def backend_version(self) -> str:
        """The TensorRT-LLM that runs here: as named, or as installed; empty where unknown."""
        return self.version or self.packages("tensorrt-llm") or ""

    @property
    def release(self) -> Version | None:
        """The release of the backend, or else of the target's engine."""
        if self.backend_version:
            return parse_version(self.backend_version)
        engine = self.engines.get(self.target)
        return engine.release() if engine else None
