"""The flags of TensorRT-LLM's build tools that recipes use: which release has which, and how known.

The builder stops at a flag that it does not know, after a checkpoint was converted for an hour.
``python -m trtllm_bls.configure.build_flags`` prints the table of docs/engines.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trtllm_bls.errors import SettingsError
from trtllm_bls.parameters.cpp_backend import Version, parse_releases, shown

CONVERT, QUANTIZE, BUILD = "convert_checkpoint.py", "quantize.py", "trtllm-build"
NEWEST: Version = (1, 2)  # the last release whose notes speak of engines; they were removed later


@dataclass(frozen=True)
class Flag:
    """One flag of a tool in the releases ``since`` to ``until``, both included."""

    tool: str
    name: str
    since: Version
    until: Version
    meaning: str
    source: str


# By tool: flag, first and perhaps last release, where that is known from, what it does.
_ROWS = """
[convert_checkpoint.py]
model_dir 0.9 | issue 1068 | The Hugging Face checkpoint.
output_dir 0.9 | issue 1068 | TensorRT-LLM's checkpoint.
dtype 0.9 | issue 1068 | Type of weights and activations.
tp_size 0.9 | issue 1353 | GPUs that share each layer.
[quantize.py]
model_dir 0.9 | issue 2125 | The Hugging Face checkpoint.
output_dir 0.9 | issue 2125 | TensorRT-LLM's checkpoint.
dtype 0.9 | issue 2125 | Type of what is not quantized.
qformat 0.9 | issue 2125 | The kind of quantization.
kv_cache_dtype 0.9 | its help in the published tree | Type of the KV cache.
awq_block_size 0.9 | its help in the published tree | Weights per scale of AWQ.
calib_size 0.9 | issue 2125 | Texts to calibrate with.
tp_size 0.9 | issue 2125 | GPUs that share each layer.
[trtllm-build]
checkpoint_dir 0.9 | issue 1433 | TensorRT-LLM's checkpoint.
output_dir 0.9 | issue 1433 | The engine.
gemm_plugin 0.9 | issue 2052 | Matrix products by plugin (`auto` since 0.11).
workers 0.9 | issue 1433 | Ranks that are built at the same time.
max_batch_size 0.9 | release notes of 0.11 | Requests at once.
max_input_len 0.9 | its help in the published tree | Longest prompt, in tokens.
max_output_len 0.9-0.10 | release notes of 0.11, 0.12 | Longest answer, in tokens.
max_seq_len 0.11 | release notes of 0.11 | Longest prompt and answer.
max_num_tokens 0.9 | release notes of 0.11 | Rows of one forward pass.
use_paged_context_fmha 0.9 | issue 2125 | Paged context attention: reuse of the KV cache, chunked
    context, drafts.
multiple_profiles 0.10 | release notes of 0.10 | Kernels for several sizes.
use_fp8_context_fmha 0.11 | issue 2125 | Context attention in FP8.
reduce_fusion 0.11 | release notes of 0.11 | AllReduce and norm in one kernel.
low_latency_gemm_plugin 0.17 | build log in issue 2810 | FP8 products for small batches (Ada,
    Hopper), in place of gemm_plugin.
low_latency_gemm_swiglu_plugin 0.17 | build log in issue 2810 | The same with SwiGLU fused
    (Hopper).
speculative_decoding_mode 0.10 | release notes of 0.10, 0.13 | How the engine speculates
    (`lookahead_decoding` since 0.13).
max_draft_len 0.9 | its help in the published tree | Longest draft, in tokens.
gather_generation_logits 0.9 | its help in the published tree | Keep logits for those who ask.
"""


def _flags() -> Iterator[Flag]:
    tool = ""
    for row in _ROWS.replace("\n    ", " ").strip().splitlines():
        if row.startswith("["):
            tool = row.strip("[]")
            continue
        flag, source, meaning = row.split(" | ")
        name, releases = flag.split()
        yield Flag(tool, name, *parse_releases(releases, NEWEST), meaning, source)


FLAGS = {(flag.tool, flag.name): flag for flag in _flags()}


def check_flag(tool: str, name: str, release: Version) -> None:
    """Raises ``SettingsError`` where the release's tool does not have the flag."""
    flag = FLAGS[tool, name]
    if not flag.since <= release <= flag.until:
        raise SettingsError(
            f"--release {shown(release)}: {tool} has --{name} from {shown(flag.since)} to "
            f"{shown(flag.until)} only, as far as is known; choose another release or preset"
        )


def as_markdown() -> str:
    """The table of docs/engines.md."""
    lines = ["| tool | flag | releases | does | known from |", "| --- | --- | --- | --- | --- |"]
    for flag in FLAGS.values():
        until = "" if flag.until == NEWEST else shown(flag.until)
        releases = f"{shown(flag.since)} – {until}".strip()
        cells = (flag.tool, f"`--{flag.name}`", releases, flag.meaning, flag.source)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
