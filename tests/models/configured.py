"""``trtllm-bls configure`` run on a tokenizer and an engine directory, whose engine is empty."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from tests.helpers.model_configurations import parsed
from trtllm_bls.cli import main
from trtllm_bls.configure.pbtxt import FORMAT

BUILD = {
    "max_batch_size": 32,
    "max_seq_len": 4096,
    "max_num_tokens": 8192,
    "max_draft_len": 10,
    "speculative_decoding_mode": 2,
    "plugin_config": {"use_paged_context_fmha": True},
}
PLAIN = BUILD | {"max_draft_len": 0, "speculative_decoding_mode": 1}
NOT_PAGED = {"plugin_config": {"use_paged_context_fmha": False}}


def make_engine(place: Path, build: dict[str, Any], **more: Any) -> Path:
    place.mkdir()
    config = {"version": "1.0.0", "pretrained_config": {}, "build_config": build} | more
    (place / "config.json").write_text(json.dumps(config))
    (place / "rank0.engine").write_bytes(b"an engine")
    return place


@dataclass
class Written:
    """Where ``configure`` writes a repository, from ``places`` (options)."""

    out: Path

    def places(self) -> list[object]:
        raise NotImplementedError

    def run(self, *more: str) -> Result:
        words = ["configure", *self.places(), "--out", self.out, *more]
        return CliRunner().invoke(main, list(map(str, words)))

    def write(self, *more: str) -> Result:
        """Without loading the tokenizer, for speed."""
        result = self.run("--no-check", *more)
        assert result.exit_code == 0, result.output
        return result

    def config(self, model: str) -> Any:
        return parsed(self.out, model)

    def values(self, model: str) -> dict[str, str]:
        """The parameters, less those that tell of the file itself."""
        parameters = self.config(model).parameters.items()
        return {key: value.string_value for key, value in parameters if key not in FORMAT}


@dataclass
class Demo(Written):
    engine: Path
    tokenizer: Path

    def places(self) -> list[object]:
        return ["--engine-dir", self.engine, "--tokenizer-dir", self.tokenizer]


def error_of(result: Result) -> str:
    """The one line that says what is wrong."""
    assert result.exit_code != 0
    assert "Traceback" not in result.output
    return result.output.strip().splitlines()[-1]
