"""From a Hugging Face checkpoint to an engine: the commands for a preset and a release.

Nothing is run. A recipe has only flags that the build tools of its release know: a tool stops at
any other, which may be after an hour of converting the checkpoint. recipe.yaml has the facts.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import yaml

from trtllm_bls.configure.engine_dir import EXTERNAL_DRAFTS, LOOKAHEAD_SIZES, MANY_STEPS_SINCE
from trtllm_bls.errors import SettingsError
from trtllm_bls.settings.command_options import Positive, options_of, setting
from trtllm_bls.settings.cpp_backend import OLDEST, Version, keys_of, parse_version

CONVERT = "convert_checkpoint.py"
QUANTIZE = "quantize.py"
BUILD = "trtllm-build"
NEWEST = Version(1, 2)  # the last release whose notes speak of engines; they were removed later
_EXAMPLES_MOVED = Version(0, 20)  # from examples/llama to examples/models/core/llama
_PROFILES_AND_MODES_SINCE = Version(0, 10)  # --multiple_profiles, --speculative_decoding_mode
_SEQUENCES_SINCE = Version(0, 11)  # --max_seq_len; before, --max_output_len
_GEMM_AUTO_SINCE = Version(0, 11)  # before, --gemm_plugin names a type
PRECISIONS = ("bf16", "fp16", "int4_awq", "fp8")
_QUANTIZED = ("int4_awq", "fp8")
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "int4_awq": "float16", "fp8": "bfloat16"}

RecipeStep = tuple[str, list[str]]  # its title, its command


@dataclass(frozen=True, kw_only=True)
class Family:
    """A row of the ``families`` in recipe.yaml; ``flags`` are those that it needs besides."""

    directory: str = ""
    since: str = str(OLDEST)
    precisions: Sequence[str] = PRECISIONS
    renamed: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    environment: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A row of the ``presets`` in recipe.yaml; the help of ``command`` says what each is for."""

    max_batch_size: int
    max_input_len: int
    max_output_len: int
    since: str = str(OLDEST)
    precisions: Sequence[str] = PRECISIONS
    gpu: str = "kind that serves it"
    flags: Mapping[str, str] = field(default_factory=dict)
    rounds: bool = False


_TABLES = yaml.safe_load(Path(__file__).with_name("recipe.yaml").read_text(encoding="utf-8"))
FAMILIES: dict[str, Family] = {}  # by the model type of a checkpoint
for _name, _row in _TABLES["families"].items():
    FAMILIES[_name] = Family(**_row)
PRESETS: dict[str, Preset] = {}
for _name, _row in _TABLES["presets"].items():
    PRESETS[_name] = Preset(**_row)


def _release(text: str) -> Version:
    if text == "last":
        return NEWEST
    return parse_version(text, "--release")


def _lookahead(
    ctx: click.Context, param: click.Parameter, value: str
) -> tuple[int, int, int] | None:
    if value == "off":
        return None
    numbers = [int(part) for part in value.split(",") if part.strip().isdecimal()]
    if len(numbers) != 3 or min(numbers) < 1 or value.count(",") != 2:
        problem = f"{value!r}: write window,n-gram,verification set, such as 7,7,7, or off"
        raise click.BadParameter(problem, ctx, param)
    return numbers[0], numbers[1], numbers[2]


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """The options of ``recipe``; ``None`` is the preset's choice. Lengths are tokens."""

    release: Version = setting(
        "Release of TensorRT-LLM.", str(NEWEST), type=_release, metavar="TEXT"
    )
    checkpoint: Path = setting("Hugging Face checkpoint.", Path("checkpoint"))
    examples: Path = setting(
        "The directory `examples` in TensorRT-LLM's source tree of that release.",
        Path("TensorRT-LLM/examples"),
    )
    out: Path = setting("Directory for the engines.", Path("engines"))
    precision: str | None = setting(
        "Weights and activations.  [default: the preset's]", type=click.Choice(PRECISIONS)
    )
    tp_size: Positive = setting("GPUs that share each layer.", 1)
    max_batch_size: Positive | None = setting("Requests at once.  [default: the preset's]")
    max_input_len: Positive | None = setting("Longest prompt, in tokens.  [default: the preset's]")
    max_output_len: Positive | None = setting("Longest answer, in tokens.  [default: the preset's]")
    max_draft_len: Positive = setting("Longest draft of the preset target, in tokens.", 10)
    lookahead: tuple[int, int, int] | None = setting(
        "Lookahead decoding of the preset latency: window,n-gram,verification set; or off.",
        "7,7,7",
        type=str,
        callback=_lookahead,
    )


# --- the steps -------------------------------------------------------------------------------


def lookahead_draft_len(window: int, ngram: int, verification_set: int) -> int:
    """Return the longest draft of lookahead decoding, for which its engine has to be built."""
    return max(0, ngram - 2) + (window - 1 + verification_set) * (ngram - 1)


def recipe(preset_name: str, options: RecipeOptions) -> Iterator[RecipeStep]:
    """Yield the steps from the checkpoint to a model repository; raises ``SettingsError``."""
    preset = PRESETS[preset_name]
    release = options.release
    precision = options.precision or preset.precisions[0]
    if precision not in preset.precisions:
        allowed = ", ".join(preset.precisions)
        raise SettingsError(f"--precision {precision}: preset {preset_name} is for {allowed}")
    if not OLDEST <= release <= NEWEST:
        raise SettingsError(
            f"--release {release}: engines are built by {OLDEST} to {NEWEST}; "
            "serve a later one with `trtllm-serve --grpc` (docs/engines.md)"
        )
    if release < parse_version(preset.since):
        raise SettingsError(
            f"--release {release}: preset {preset_name} needs {preset.since}, the first with its "
            "flags; choose another release or preset"
        )
    engine = options.out / preset_name
    converted_checkpoint = options.out / f"{preset_name}-checkpoint"
    yield _conversion(options, precision, converted_checkpoint)
    title = f"TensorRT-LLM's checkpoint to the engine, on a GPU of the {preset.gpu}"
    yield title, _build(preset_name, options, converted_checkpoint, engine)
    if preset_name == "draft":
        return
    title = "The engine to a model repository"
    flags = {"engine-dir": engine, "tokenizer-dir": options.checkpoint, "out": "repository"}
    words = ["trtllm-bls", "configure", *_words(flags | {"version": release})]
    if preset_name == "target":
        words += ["--draft-engine-dir", str(options.out / "draft")]
        if release < MANY_STEPS_SINCE:
            title += "; requests without drafts end after one step on this release"
    if preset_name == "latency" and options.lookahead is not None:
        if not keys_of(release).keys() >= set(LOOKAHEAD_SIZES):
            problem = "the C++ backend has lookahead decoding since 0.19; add --lookahead off"
            raise SettingsError(f"--release {release}: {problem}")
        words += ["--set", "decoding_mode=lookahead"]
        for key, value in zip(LOOKAHEAD_SIZES, options.lookahead, strict=True):
            words += ["--set", f"{key}={value}"]
    yield title, words


def _conversion(options: RecipeOptions, precision: str, converted_checkpoint: Path) -> RecipeStep:
    family = _family(options, precision)
    flags: dict[str, object] = {
        "model_dir": options.checkpoint,
        "output_dir": converted_checkpoint,
        "dtype": _DTYPES[precision],
        "tp_size": options.tp_size,
    }
    title = "Hugging Face checkpoint to TensorRT-LLM's"
    program = ["python3", str(options.examples / "quantization" / QUANTIZE)]
    if precision in _QUANTIZED:
        title += f", quantized to {precision}, on a GPU"
        flags |= {"qformat": precision, "calib_size": "512"}
        if precision == "fp8":
            title += " of the Ada or Hopper generation or later"
            flags["kv_cache_dtype"] = "fp8"
        else:
            flags["awq_block_size"] = "128"
    elif family and not family.directory:
        flags["qformat"] = "full_prec"
    else:
        if family is None:
            title += " (as for Llama: there is no config.json to tell the family)"
            family = FAMILIES["llama"]
        directory = Path(Path(family.directory).name)
        if options.release >= _EXAMPLES_MOVED:
            directory = Path("models", family.directory)
        program = [*family.environment, "python3", str(options.examples / directory / CONVERT)]
        flags = {family.renamed.get(name, name): value for name, value in flags.items()}
        flags |= family.flags
    return title, [*program, *_words(flags)]


def _family(options: RecipeOptions, precision: str) -> Family | None:
    """Return the checkpoint's family; ``None`` where nothing tells or quantize.py knows it.

    Raises ``SettingsError`` where the release cannot convert it.
    """
    config = options.checkpoint / "config.json"
    if not config.is_file():
        return None
    try:
        model_type = str(json.loads(config.read_text(encoding="utf-8")).get("model_type", ""))
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise SettingsError(f"--checkpoint: {config} cannot be read: {error}") from error
    family = FAMILIES.get(model_type)
    if family is None and precision in _QUANTIZED:
        return None  # quantize.py knows more families than have a recipe
    if family is None:
        raise SettingsError(
            f"--checkpoint {options.checkpoint}: no recipe for model_type {model_type}; there are "
            f"recipes for {', '.join(FAMILIES)}; trtllm-serve takes others (docs/engines.md)"
        )
    if options.release < parse_version(family.since):
        raise SettingsError(
            f"--release {options.release}: it cannot convert model_type {model_type}, which "
            f"{family.since} was the first to do"
        )
    if precision not in family.precisions:
        precisions = ", ".join(family.precisions)
        raise SettingsError(
            f"--precision {precision}: model_type {model_type} is converted to {precisions} only"
        )
    return family


def _build(
    preset_name: str, options: RecipeOptions, converted_checkpoint: Path, engine: Path
) -> list[str]:
    preset = PRESETS[preset_name]
    release = options.release
    draft_len = 0
    mode = ""
    if preset_name == "target":
        draft_len = options.max_draft_len
        mode = EXTERNAL_DRAFTS
    elif preset_name == "latency" and options.lookahead is not None:
        draft_len = lookahead_draft_len(*options.lookahead)
        mode = "lookahead_decoding"
    input_len = options.max_input_len or preset.max_input_len
    output_len = options.max_output_len or preset.max_output_len
    batch_size = options.max_batch_size or preset.max_batch_size
    prompt_len = input_len
    if preset.rounds:  # each round's prompt has the answer so far
        prompt_len += output_len
    flags: dict[str, object] = {
        "checkpoint_dir": converted_checkpoint,
        "output_dir": engine,
        "max_batch_size": batch_size,
        "max_input_len": prompt_len,
        "max_seq_len": input_len + output_len + draft_len,
        "max_num_tokens": max(8192, prompt_len + draft_len, batch_size * (1 + draft_len)),
        "use_paged_context_fmha": "enable",
        "gemm_plugin": "auto",
        **preset.flags,
    }
    if preset_name == "latency" and options.tp_size > 1:
        flags["reduce_fusion"] = "enable"
    if mode:
        flags |= {"max_draft_len": draft_len, "speculative_decoding_mode": mode}
    flags["workers"] = options.tp_size
    if release < _SEQUENCES_SINCE:
        del flags["max_seq_len"]
        flags["max_output_len"] = output_len + draft_len
    if release < _GEMM_AUTO_SINCE:
        flags["gemm_plugin"] = _DTYPES[options.precision or "bf16"]
    if release < _PROFILES_AND_MODES_SINCE:
        flags.pop("multiple_profiles", None)
        flags.pop("speculative_decoding_mode", None)
    return [BUILD, *_words(flags)]


def _words(flags: Mapping[str, object]) -> Iterator[str]:
    for name, value in flags.items():
        yield f"--{name}"
        if value != "":
            yield str(value)


@click.command(name="recipe")
@click.argument("preset", type=click.Choice(list(PRESETS)))
@options_of(RecipeOptions)
def command(preset: str, **options: Any) -> None:
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
    scripts = []
    for title, (program, *words) in recipe(preset, RecipeOptions(**options)):
        script = f"# {title}\n{shlex.quote(program)}"
        for word in words:
            if word.startswith("--"):
                script += " \\\n   "  # each flag has a line
            script += f" {shlex.quote(word)}"
        scripts.append(script)
    click.echo("\n\n".join(scripts))
