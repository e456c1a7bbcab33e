"""The flags of TensorRT-LLM's build tools that recipes use: which release has which, and how known.

The builder stops at a flag that it does not know, after a checkpoint was converted for an hour.
``python -m trtllm_bls.configure.build_flags`` prints the table of docs/engines.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_bls.errors import SettingsError
from trtllm_bls.parameters.cpp_backend import Version

CONVERT, QUANTIZE, BUILD = "convert_checkpoint.py", "quantize.py", "trtllm-build"
OLDEST: Version = (0, 9)
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


_NOTES = "release notes"
_HELP = "its help in the published tree"
# tool, flag, first release, last release ("": the newest), what it does, where that is known from.
_ROWS = (
    (CONVERT, "model_dir", "0.9", "", "The Hugging Face checkpoint.", "issue 1068"),
    (CONVERT, "output_dir", "0.9", "", "TensorRT-LLM's checkpoint.", "issue 1068"),
    (CONVERT, "dtype", "0.9", "", "Type of weights and activations.", "issue 1068"),
    (CONVERT, "tp_size", "0.9", "", "GPUs that share each layer.", "issue 1353"),
    (QUANTIZE, "model_dir", "0.9", "", "The Hugging Face checkpoint.", "issue 2125"),
    (QUANTIZE, "output_dir", "0.9", "", "TensorRT-LLM's checkpoint.", "issue 2125"),
    (QUANTIZE, "dtype", "0.9", "", "Type of what is not quantized.", "issue 2125"),
    (QUANTIZE, "qformat", "0.9", "", "The kind of quantization.", "issue 2125"),
    (QUANTIZE, "kv_cache_dtype", "0.9", "", "Type of the KV cache.", _HELP),
    (QUANTIZE, "awq_block_size", "0.9", "", "Weights per scale of AWQ.", _HELP),
    (QUANTIZE, "calib_size", "0.9", "", "Texts to calibrate with.", "issue 2125"),
    (QUANTIZE, "tp_size", "0.9", "", "GPUs that share each layer.", "issue 2125"),
    (BUILD, "checkpoint_dir", "0.9", "", "TensorRT-LLM's checkpoint.", "issue 1433"),
    (BUILD, "output_dir", "0.9", "", "The engine.", "issue 1433"),
    (
        BUILD,
        "gemm_plugin",
        "0.9",
        "",
        "Matrix products by plugin (`auto` since 0.11).",
        "issue 2052",
    ),
    (BUILD, "workers", "0.9", "", "Ranks that are built at the same time.", "issue 1433"),
    (BUILD, "max_batch_size", "0.9", "", "Requests at once.", f"{_NOTES} of 0.11"),
    (BUILD, "max_input_len", "0.9", "", "Longest prompt, in tokens.", _HELP),
    (
        BUILD,
        "max_output_len",
        "0.9",
        "0.10",
        "Longest answer, in tokens.",
        f"{_NOTES} of 0.11, 0.12",
    ),
    (BUILD, "max_seq_len", "0.11", "", "Longest prompt and answer.", f"{_NOTES} of 0.11"),
    (BUILD, "max_num_tokens", "0.9", "", "Rows of one forward pass.", f"{_NOTES} of 0.11"),
    (
        *(BUILD, "use_paged_context_fmha", "0.9", ""),
        "Paged context attention: reuse of the KV cache, chunked context, drafts.",
        "issue 2125",
    ),
    (BUILD, "multiple_profiles", "0.10", "", "Kernels for several sizes.", f"{_NOTES} of 0.10"),
    (BUILD, "use_fp8_context_fmha", "0.11", "", "Context attention in FP8.", "issue 2125"),
    (BUILD, "reduce_fusion", "0.11", "", "AllReduce and norm in one kernel.", f"{_NOTES} of 0.11"),
    (
        *(BUILD, "low_latency_gemm_plugin", "0.17", ""),
        "FP8 products for small batches (Ada, Hopper), in place of gemm_plugin.",
        "build log in issue 2810",
    ),
    (
        *(BUILD, "low_latency_gemm_swiglu_plugin", "0.17", ""),
        "The same with SwiGLU fused (Hopper).",
        "build log in issue 2810",
    ),
    (
        *(BUILD, "speculative_decoding_mode", "0.10", ""),
        "How the engine speculates (`lookahead_decoding` since 0.13).",
        f"{_NOTES} of 0.10, 0.13",
    ),
    (BUILD, "max_draft_len", "0.9", "", "Longest draft, in tokens.", _HELP),
    (BUILD, "gather_generation_logits", "0.9", "", "Keep logits for those who ask.", _HELP),
)


def _release(text: str) -> Version:
    major, _, minor = text.partition(".")
    return int(major), int(minor)


FLAGS = {
    (tool, name): Flag(
        tool, name, _release(since), _release(until) if until else NEWEST, meaning, source
    )
    for tool, name, since, until, meaning, source in _ROWS
}


def check_flag(tool: str, name: str, release: Version) -> None:
    """Raises ``SettingsError`` where the release's tool does not have the flag."""
    flag = FLAGS[tool, name]
    if not flag.since <= release <= flag.until:
        raise SettingsError(
            f"--release {shown(release)}: {tool} has --{name} from {shown(flag.since)} to "
            f"{shown(flag.until)} only, as far as is known; choose another release or preset"
        )


def shown(release: Version) -> str:
    """As it is written."""
    return f"{release[0]}.{release[1]}"


def as_markdown() -> str:
    """The table of docs/engines.md."""
    lines = ["| tool | flag | releases | does | known from |", "| --- | --- | --- | --- | --- |"]
    for flag in FLAGS.values():
        until = "" if flag.until == NEWEST else shown(flag.until)
        cells = (
            flag.tool,
            f"`--{flag.name}`",
            f"{shown(flag.since)} – {until}".strip(),
            flag.meaning,
            flag.source,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
