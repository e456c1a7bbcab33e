"""From a Hugging Face checkpoint to an engine: the commands for a preset and a release.

Nothing is run. The first half knows which flags the build tools of each release have: a tool stops
at a flag that it does not know, which may be after an hour of converting the checkpoint.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from trtllm_bls.configure.engine import LOOKAHEAD_SIZES, MANY_STEPS_SINCE, parse_version
from trtllm_bls.errors import SettingsError
from trtllm_bls.parameters.cpp_backend import OLDEST, Version, keys_of, parse_releases
from trtllm_bls.settings import options_of, setting

CONVERT, QUANTIZE, BUILD = "convert_checkpoint.py", "quantize.py", "trtllm-build"
NEWEST = Version(1, 2)  # the last release whose notes speak of engines; they were removed later


# The flags that not every release has: the first and the last that has each, by the release notes
# and the READMEs of the examples. Every other flag that a recipe uses is in all releases.
FLAGS: Mapping[tuple[str, str], tuple[Version, Version]] = {
    (tool, name): parse_releases(releases, NEWEST)
    for tool, name, releases in (
        (CONVERT, "trust_remote_code", "0.14"),
        (BUILD, "max_output_len", "0.9-0.10"),
        (BUILD, "max_seq_len", "0.11"),
        (BUILD, "multiple_profiles", "0.10"),
        (BUILD, "use_fp8_context_fmha", "0.11"),
        (BUILD, "reduce_fusion", "0.11"),
        (BUILD, "low_latency_gemm_plugin", "0.17"),
        (BUILD, "low_latency_gemm_swiglu_plugin", "0.17"),
        (BUILD, "speculative_decoding_mode", "0.10"),
    )
}


def _has(tool: str, flag: str, release: Version) -> bool:
    since, until = FLAGS.get((tool, flag), (OLDEST, NEWEST))
    return since <= release <= until


# --- presets ---------------------------------------------------------------------------------

_EXAMPLES_MOVED = Version(0, 20)  # from examples/llama to examples/models/core/llama
_GEMM_AUTO_SINCE = Version(0, 11)
PRECISIONS = ("bf16", "fp16", "int4_awq", "fp8")
_QUANTIZED = ("int4_awq", "fp8")
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "int4_awq": "float16", "fp8": "bfloat16"}

Step = tuple[str, list[str]]  # what it does, the command
Flags = list[tuple[str, str]]


@dataclass(frozen=True)
class Family:
    """How checkpoints of one ``model_type`` are converted, since ``since``.

    ``directory`` has their convert_checkpoint.py; where it is empty, quantize.py converts them
    without quantizing. ``renamed`` are flags that the script spells in its own way, ``more`` those
    that it has beside them.
    """

    directory: str
    since: Version = OLDEST
    precisions: tuple[str, ...] = PRECISIONS
    moved_to: str = "core"  # below examples/models
    renamed: Mapping[str, str] = field(default_factory=dict)
    more: tuple[tuple[str, str], ...] = ()
    environment: tuple[str, ...] = ()


_LLAMA, _QWEN, _QWEN3 = Family("llama"), Family("qwen"), Family("qwen", Version(1, 0))
_GEMMA = Family(
    "gemma",
    renamed={"model_dir": "model-dir", "output_dir": "output-model-dir", "tp_size": "world-size"},
    more=(("ckpt-type", "hf"),),
)
_WHOLE = ("bf16", "fp16")
_UNIFIED_OFF = ("env", "TRTLLM_DISABLE_UNIFIED_CONVERTER=1")
_GRANITE = Family("llama", Version(0, 16), (*_WHOLE, "fp8"), environment=_UNIFIED_OFF)
_NAS = Family("nemotron_nas", Version(0, 14), (*_WHOLE, "fp8"), more=(("trust_remote_code", ""),))
# By the release notes and the READMEs of the examples.
_FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "mixtral"), _LLAMA),
    **dict.fromkeys(("qwen3", "qwen3_moe"), _QWEN3),
    **dict.fromkeys(("granite", "granitemoe"), _GRANITE),
    "qwen2": _QWEN,
    "qwen2_moe": replace(_QWEN, since=Version(0, 11)),
    "phi": Family("phi"),
    "phi3": Family("phi", Version(0, 10)),
    "gpt2": Family("gpt"),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, since=Version(0, 13)),
    "gemma3_text": replace(_GEMMA, since=Version(0, 19)),
    "nemotron": Family("", Version(0, 15)),
    "nemotron-nas": _NAS,
    "deepseek": Family("deepseek_v1", Version(0, 14), _WHOLE, "contrib"),
    "deepseek_v2": Family("deepseek_v2", Version(0, 15), ("bf16",), "contrib"),
}


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """The options of ``recipe``; ``None`` is the preset's choice. Lengths are tokens."""

    release: Version
    checkpoint: Path = setting("Hugging Face checkpoint.", Path("checkpoint"))
    examples: Path = setting(
        "The directory `examples` in TensorRT-LLM's source tree of that release.",
        Path("TensorRT-LLM/examples"),
    )
    out: Path = setting("Directory for the engines.", Path("engines"))
    precision: str | None = setting(
        "Weights and activations.  [default: the preset's]", type=click.Choice(PRECISIONS)
    )
    tp_size: int = setting("GPUs that share each layer.", 1, type=click.IntRange(1))
    max_batch_size: int | None = setting(
        "Requests at once.  [default: the preset's]", type=click.IntRange(1)
    )
    max_input_len: int | None = setting(
        "Longest prompt, in tokens.  [default: the preset's]", type=click.IntRange(1)
    )
    max_output_len: int | None = setting(
        "Longest answer, in tokens.  [default: the preset's]", type=click.IntRange(1)
    )
    max_draft_len: int = setting(
        "Longest draft of the preset target, in tokens.", 10, type=click.IntRange(1)
    )
    lookahead: tuple[int, int, int] | None  # window, n-gram, verification set


@dataclass(frozen=True)
class Preset:
    """The precision and the sizes of an engine; ``_own_flags`` has its build flags.

    The help of ``command`` says what each preset is for.
    """

    precision: str
    max_batch_size: int
    max_input_len: int
    max_output_len: int
    precisions: tuple[str, ...] = PRECISIONS
    rounds: bool = False  # each request is one round of speculation: its prompt is all text so far


PRESETS = {
    "throughput": Preset("bf16", 128, 256, 256),
    "latency": Preset("fp8", 4, 2048, 1024, ("fp8",)),
    "target": Preset("bf16", 32, 2048, 1024, rounds=True),
    "draft": Preset("bf16", 32, 2048, 1024, rounds=True),
}


def _own_flags(preset_name: str, options: RecipeOptions) -> Flags:
    """The build flags of a preset beside those that every engine has."""
    gemm = _DTYPES[options.precision or "bf16"]
    if options.release >= _GEMM_AUTO_SINCE:  # before, it must name a type
        gemm = "auto"
    has = partial(_has, BUILD, release=options.release)
    profiles = [("multiple_profiles", "enable")] if has("multiple_profiles") else []
    if preset_name == "throughput":
        return [("gemm_plugin", gemm), *profiles]
    if preset_name == "draft":
        return [("gemm_plugin", gemm), ("gather_generation_logits", "")]
    if preset_name == "target":
        flags = [("gemm_plugin", gemm), ("max_draft_len", str(options.max_draft_len))]
        if has("speculative_decoding_mode"):
            flags.append(("speculative_decoding_mode", "draft_tokens_external"))
        return flags
    flags = [
        ("gemm_plugin", "disable"),
        ("low_latency_gemm_plugin", "fp8"),
        ("low_latency_gemm_swiglu_plugin", "fp8"),
        ("use_fp8_context_fmha", "enable"),
        *profiles,
    ]
    flags += [("reduce_fusion", "enable")] if options.tp_size > 1 else []
    if options.lookahead is not None:
        longest = str(lookahead_draft_len(*options.lookahead))
        flags += [("speculative_decoding_mode", "lookahead_decoding"), ("max_draft_len", longest)]
    return flags


def lookahead_draft_len(window: int, ngram: int, verification_set: int) -> int:
    """The longest draft of lookahead decoding, for which its engine has to be built."""
    return max(0, ngram - 2) + (window - 1 + verification_set) * (ngram - 1)


def recipe(preset_name: str, options: RecipeOptions) -> list[Step]:
    """The steps from the checkpoint to a model repository; raises ``SettingsError``."""
    preset = PRESETS[preset_name]
    precision = options.precision or preset.precision
    if precision not in preset.precisions:
        allowed = ", ".join(preset.precisions)
        raise SettingsError(f"--precision {precision}: preset {preset_name} is for {allowed}")
    if not OLDEST <= options.release <= NEWEST:
        raise SettingsError(
            f"--release {options.release}: engines are built by {OLDEST} to "
            f"{NEWEST}; serve a later one with `trtllm-serve --grpc` (docs/engines.md)"
        )
    gpu = "Hopper generation" if preset_name == "latency" else "kind that serves it"
    engine = options.out / preset_name
    converted = options.out / f"{preset_name}-checkpoint"
    what = f"TensorRT-LLM's checkpoint to the engine, on a GPU of the {gpu}"
    steps = [
        _conversion(options, precision, converted),
        (what, _build(preset_name, options, converted, engine)),
    ]
    if preset_name != "draft":
        steps.append(_configure(preset_name, options, engine))
    return steps


def as_script(steps: Iterable[Step]) -> str:
    """The steps as lines for a shell, one flag a line."""
    text = ""
    for what, (tool, *words) in steps:
        text += f"# {what}\n{shlex.quote(tool)}"
        for word in words:
            text += (" \\\n    " if word.startswith("--") else " ") + shlex.quote(word)
        text += "\n\n"
    return text.removesuffix("\n")


def _conversion(options: RecipeOptions, precision: str, converted: Path) -> Step:
    family, known = _family(options, precision)
    flags = [
        ("model_dir", str(options.checkpoint)),
        ("output_dir", str(converted)),
        ("dtype", _DTYPES[precision]),
        ("tp_size", str(options.tp_size)),
    ]
    what = "Hugging Face checkpoint to TensorRT-LLM's"
    tool, directory = QUANTIZE, Path("quantization")
    if precision in _QUANTIZED:
        flags += [("qformat", precision), ("calib_size", "512")]
        flags += [("kv_cache_dtype", "fp8")] if precision == "fp8" else [("awq_block_size", "128")]
        newer = " of the Ada or Hopper generation or later" if precision == "fp8" else ""
        what += f", quantized to {precision}, on a GPU{newer}"
    elif not family.directory:
        flags.append(("qformat", "full_prec"))
    else:
        tool = CONVERT
        moved = Path("models", family.moved_to) if options.release >= _EXAMPLES_MOVED else Path()
        directory = moved / family.directory
        flags = [(family.renamed.get(name, name), value) for name, value in flags]
        flags += family.more
        what += "" if known else " (as for Llama: there is no config.json to tell the family)"
    words = ["python3", str(options.examples / directory / tool)]
    environment = family.environment if tool == CONVERT else ()
    return what, [*environment, *words, *_words(tool, flags, options.release)]


def _family(options: RecipeOptions, precision: str) -> tuple[Family, bool]:
    """The checkpoint's family, and whether its config.json tells; raises ``SettingsError`` where
    the release cannot convert it."""
    config = options.checkpoint / "config.json"
    if not config.is_file():
        return _LLAMA, False
    try:
        model_type = json.loads(config.read_text(encoding="utf-8")).get("model_type", "")
    except (OSError, ValueError, AttributeError) as error:
        raise SettingsError(f"--checkpoint: {config} cannot be read: {error}") from error
    family = _FAMILIES.get(model_type)
    if family is None and precision in _QUANTIZED:
        return _LLAMA, True  # quantize.py knows more families than have a recipe
    if family is None:
        raise SettingsError(
            f"--checkpoint {options.checkpoint}: no recipe for model_type {model_type}; there are "
            f"recipes for {', '.join(_FAMILIES)}; trtllm-serve takes others (docs/engines.md)"
        )
    if options.release < family.since:
        raise SettingsError(
            f"--release {options.release}: it cannot convert model_type {model_type}, which "
            f"{family.since} was the first to do"
        )
    if precision not in family.precisions:
        raise SettingsError(
            f"--precision {precision}: model_type {model_type} is converted to "
            f"{', '.join(family.precisions)} only"
        )
    return family, True


def _build(preset_name: str, options: RecipeOptions, converted: Path, engine: Path) -> list[str]:
    preset, own = PRESETS[preset_name], _own_flags(preset_name, options)
    prompt = options.max_input_len or preset.max_input_len
    answer = options.max_output_len or preset.max_output_len
    draft = int(dict(own).get("max_draft_len", 0))
    batch = options.max_batch_size or preset.max_batch_size
    longest = prompt + answer if preset.rounds else prompt
    rows = max(8192, longest + draft, batch * (1 + draft))
    flags = [
        ("checkpoint_dir", str(converted)),
        ("output_dir", str(engine)),
        ("max_batch_size", str(batch)),
        ("max_input_len", str(longest)),
        ("max_seq_len", str(prompt + answer + draft))
        if _has(BUILD, "max_seq_len", options.release)
        else ("max_output_len", str(answer + draft)),
        ("max_num_tokens", str(rows)),
        ("use_paged_context_fmha", "enable"),
        *own,
        ("workers", str(options.tp_size)),
    ]
    return [BUILD, *_words(BUILD, flags, options.release)]


def _configure(preset_name: str, options: RecipeOptions, engine: Path) -> Step:
    words = ["trtllm-bls", "configure", "--engine-dir", str(engine)]
    words += ["--tokenizer-dir", str(options.checkpoint), "--out", "repository"]
    words += ["--version", str(options.release)]
    what = "The engine to a model repository"
    if preset_name == "target":
        words += ["--draft-engine-dir", str(options.out / "draft")]
        if options.release < MANY_STEPS_SINCE:
            what += "; requests without drafts end after one step on this release"
    if preset_name == "latency" and options.lookahead is not None:
        if not keys_of(options.release).keys() >= set(LOOKAHEAD_SIZES):
            problem = "the C++ backend has lookahead decoding since 0.19; add --lookahead off"
            raise SettingsError(f"--release {options.release}: {problem}")
        words += ["--set", "decoding_mode=lookahead"]
        for key, value in zip(LOOKAHEAD_SIZES, options.lookahead, strict=True):
            words += ["--set", f"{key}={value}"]
    return what, words


def _words(tool: str, flags: Flags, release: Version) -> list[str]:
    """The flags as words; raises ``SettingsError`` where the release's tool does not have one."""
    words = []
    for name, value in flags:
        if not _has(tool, name, release):
            since, until = FLAGS[tool, name]
            raise SettingsError(
                f"--release {release}: {tool} has --{name} from {since} to {until} only, as far as "
                "is known; choose another release or preset"
            )
        words += [f"--{name}", value] if value else [f"--{name}"]
    return words


# --- the command line -----------------------------------------------------------------------


def _lookahead(
    ctx: click.Context, param: click.Parameter, value: str
) -> tuple[int, int, int] | None:
    if value == "off":
        return None
    numbers = [int(part) for part in value.split(",") if part.strip().isdecimal()]
    if len(numbers) != 3 or min(numbers) < 1 or value.count(",") != 2:
        raise click.BadParameter(
            f"{value!r}: write window,n-gram,verification set, such as 7,7,7, or off", ctx, param
        )
    return numbers[0], numbers[1], numbers[2]


@click.command(name="recipe")
@click.argument("preset", type=click.Choice(list(PRESETS)))
@click.option("--release", default=str(NEWEST), show_default=True, help="Release of TensorRT-LLM.")
@options_of(RecipeOptions)
@click.option(
    "--lookahead",
    default="7,7,7",
    show_default=True,
    callback=_lookahead,
    help="Lookahead decoding of the preset latency: window,n-gram,verification set; or off.",
)
def command(preset: str, release: str, **options: Any) -> None:
    """Print the commands from a Hugging Face checkpoint to an engine and its repository.

    \b
    Presets:
      throughput  many requests at once
      latency     FP8, plugins for small batches, lookahead decoding
      target      verifies the drafts of a draft engine
      draft       drafts for a target engine

    \b
    Examples:
      trtllm-bls recipe throughput --checkpoint ./llama --precision int4_awq
      trtllm-bls recipe target --release 0.20 --checkpoint ./llama --tp-size 2
    """
    version = NEWEST if release == "last" else parse_version(release, "--release")
    click.echo(as_script(recipe(preset, RecipeOptions(release=version, **options))), nl=False)
