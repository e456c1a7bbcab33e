"""``trtllm-bls upgrade``: a repository of an earlier version, brought to today's form in place.

Each of this package's models is recognised by its ``model.py``, not by its name. Of its
configuration only inputs, outputs and the ensemble's wires are written anew. The rest stays as the
user has it, comments included.
"""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trtllm_bls.configure import engine_dir as cpp
from trtllm_bls.configure.file_writes import as_written, line_end, write_files
from trtllm_bls.configure.model_programs import (
    changes_of,
    is_ours,
    model_of,
    names_gone,
    new_place,
    program_of,
    todays_program,
)
from trtllm_bls.configure.pbtxt import FORMAT, STEPS, model_config
from trtllm_bls.errors import SettingsError
from trtllm_bls.settings.cpp_backend import Version, check_backend, parse_version
from trtllm_bls.settings.model_config import dtype_of, read_config, values_of
from trtllm_bls.settings.parameters import FORMAT_VERSION, WRITTEN_BY, check
from trtllm_bls.wire.contract import (
    BLS,
    ENGINE,
    ENSEMBLE,
    LLMAPI,
    MODEL_NAMES,
    MODELS,
    Model,
    by_name,
)

_ENSEMBLE_STEPS = [model.name for model in STEPS]
_NEW_SPELLINGS = {  # values that earlier versions wrote, and how they are spelled today
    ("one_core", "true"): "on",
    ("one_core", "false"): "off",
    ("engine_transport", "bls"): "auto",
}
# Parameters that are gone, whose effect nobody misses: nothing is lost without them.
_GONE = {"token_cache_bytes"}
_PATHS = ("tokenizer_dir", "draft_tokenizer_dir", "model_dir", "model_yaml")


@click.command(name="upgrade")
@click.argument("repository", type=click.Path(path_type=Path))
@click.option("--check", is_flag=True, help="Write nothing; exit code 1 unless all is up to date.")
@click.option(
    "--map",
    "names",
    multiple=True,
    metavar="NAME=MODEL",
    help="NAME is this package's MODEL, whatever its model.py holds, which becomes model.py.old.",
)
@click.option(
    "--keep",
    is_flag=True,
    help="Write today's file as model.py.new beside a model.py that no version wrote so.",
)
@click.option(
    "--version",
    "release",
    default="",
    help="TensorRT-LLM release of the container.  [default: the engine's]",
)
def command(
    repository: Path, check: bool, names: tuple[str, ...], keep: bool, release: str
) -> None:
    """Bring a model repository of an earlier version to today's form, in place.

    The difference is shown first. Settings, comments, instances, queue policies, warm-up, caches
    and models that are not this package's stay, and so do owners, modes and line ends. What cannot
    be kept is named, and the exit code is 1 then.

    \b
    Examples:
      trtllm-bls upgrade /repository --check
      trtllm-bls upgrade /repository
      trtllm-bls upgrade /repository --keep
      trtllm-bls upgrade /repository --map my_text=tensorrt_llm_bls
    """
    version = None
    if release:
        version = parse_version(release)
    plan = plan_upgrade(repository, names_of(names), version, keep=keep)
    for path, content in plan.files.items():
        old_text = ""
        if path.is_file():
            old_text = path.read_text(encoding="utf-8", errors="replace")
        old_lines = old_text.splitlines()
        new_lines = content.decode().splitlines()
        name = str(path.relative_to(repository))
        diff = difflib.unified_diff(old_lines, new_lines, name, name, lineterm="")
        click.echo("\n".join(diff))
    for line in plan.changes:
        click.echo(line)
    for note in plan.notes:
        click.echo(f"note: {note}")
    for loss in plan.losses:
        click.echo(f"note: lost: {loss}")
    count = len(plan.files)
    if check:
        verdict = "up to date"
        if count:
            verdict = f"{count} files would change"
        elif plan.losses:  # a model.py of the user's that stays; a note above names it
            verdict = "not up to date, and upgrade cannot mend it"
        click.echo(f"{repository}: {verdict}")
        raise SystemExit(bool(plan.files or plan.losses))
    write_files(plan.files)
    if plan.losses:
        click.echo(f"{repository}: {count} files written; what is lost stands above")
        raise SystemExit(1)
    verdict = "up to date"
    if count:
        verdict = f"{count} files written"
    click.echo(f"{repository}: {verdict}")
    click.echo(f"next: trtllm-bls serve --model-repository {repository}")


def names_of(texts: tuple[str, ...]) -> dict[str, str]:
    """Read ``NAME=MODEL`` of ``--map``; raises ``SettingsError``."""
    names = {}
    for text in texts:
        name, _, model = text.partition("=")
        if not name or model not in MODEL_NAMES:
            models = ", ".join(MODEL_NAMES)
            raise SettingsError(f"--map {text}: write NAME=MODEL; models: {models}")
        names[name] = model
    return names


# --- the plan ---------------------------------------------------------------------------------


@dataclass
class Upgrade:
    """The files to write, notes for the user, losses, and the user's ``changes`` of programs.

    The changes are the lines of a diff.
    """

    repository: Path
    files: dict[Path, bytes] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)


def plan_upgrade(
    repository: Path, names: Mapping[str, str], release: Version | None, *, keep: bool = False
) -> Upgrade:
    """Plan the changes that bring a repository to today's form. Raises ``SettingsError``.

    ``keep`` puts today's program beside one of the user's.
    """
    plan = Upgrade(repository)
    configs = _read(repository, names)
    roles = _roles(plan, configs, names, keep)
    engines = {}
    for name, config in configs.items():
        if config.backend == cpp.CPP_BACKEND and (place := values_of(config).get("gpt_model_path")):
            engines[name] = cpp.read_engine(f"{name}: gpt_model_path", Path(place), check=False)
    if engines and release is None:
        release = _target_release(configs, engines)
        if release is None:
            plan.notes.append(
                "the engine is not here, so tensors of the C++ backend stay as they are; "
                "--version names TensorRT-LLM's release"
            )
    for name, role in roles.items():
        old = configs[name]
        new = model_config_pb2.ModelConfig()
        new.CopyFrom(old)
        models = _models(old, bool(engines), release)
        if values_of(old).get("tensors") == "llmapi":
            models[role] = LLMAPI
        if role in models:
            steps = []
            for step_role, step in zip(_ENSEMBLE_STEPS, old.ensemble_scheduling.step, strict=False):
                steps.append(replace(models[step_role], name=step.model_name))
            model = replace(models[role], name=name)
            _add_tensors(plan, new, model_config(model, {}, steps, old.max_batch_size))
        _add_parameters(plan, new, role, engines.get(name), release)
        path = repository / name / "config.pbtxt"
        text = path.read_bytes().decode()
        is_todays = values_of(old).get(FORMAT_VERSION) == FORMAT[FORMAT_VERSION]
        if not is_todays or edited(text, new) != text:
            for key, value in FORMAT.items():
                new.parameters[key].string_value = value
            plan.files[path] = edited(text, new).encode()
        if old.backend == "python":
            for code in sorted((repository / name).glob("[0-9]*/model.py")):
                _replace_program(plan, role, code)
    return plan


def _target_release(
    configs: Mapping[str, Any], engines: Mapping[str, cpp.EngineDir]
) -> Version | None:
    """Return the release of the target's engine; ``None`` where the engine is not here."""
    target = ENGINE.name
    if BLS.name in configs:
        target = values_of(configs[BLS.name]).get("tensorrt_llm_model_name", target)
    if target not in engines:
        return None
    return engines[target].release()


def _replace_program(plan: Upgrade, role: str, code: Path) -> None:
    """Put today's program in the place of an older one; one of the user's is kept beside it."""
    program = todays_program(role)
    if program_of(code) == program:
        return
    old_content = code.read_bytes()
    plan.files[code] = as_written(program, old_content)
    if model_of(code) is None:
        plan.files[code.with_name("model.py.old")] = old_content


def _read(repository: Path, names: Mapping[str, str]) -> dict[str, Any]:
    """Read each model's configuration; raises ``SettingsError`` where nothing can be upgraded."""
    if not repository.is_dir():
        raise SettingsError(f"{repository}: no such directory")
    configs = {}
    for path in sorted(repository.glob("*/config.pbtxt")):
        configs[path.parent.name] = read_config(path)
    if unknown := names.keys() - configs.keys():
        raise SettingsError(f"--map {unknown.pop()}: no such model; there are {', '.join(configs)}")
    if not names and not is_ours(repository):
        raise SettingsError(
            f"{repository}: no version of this package wrote it; "
            f"for TensorRT-LLM's own: trtllm-bls configure --from {repository} --out NEW"
        )
    for config in configs.values():
        if int(values_of(config).get(FORMAT_VERSION) or 0) > int(FORMAT[FORMAT_VERSION]):
            writer = values_of(config).get(WRITTEN_BY, "a later version")
            raise SettingsError(f"{repository}: {writer} wrote it; install that version")
    return configs


def _roles(
    plan: Upgrade, configs: Mapping[str, Any], names: Mapping[str, str], keep: bool
) -> dict[str, str]:
    """Tell which model of this package each model is, by name; a foreign one is left out."""
    roles = {}
    for name, config in configs.items():
        codes = sorted((plan.repository / name).glob("[0-9]*/model.py"))
        models = [model_of(code) for code in codes]
        if config.backend == cpp.CPP_BACKEND:
            roles[name] = ENGINE.name
        elif name in names:
            roles[name] = names[name]
            if None in models:
                plan.notes.append(
                    f"{name}: its own model.py, which --map replaces, is model.py.old"
                )
        elif models and None not in models:
            roles[name] = str(models[0])
        elif config.backend == "python":
            for code in codes:
                _keep_program(plan, name, code, keep)
    for name, config in configs.items():
        step_roles = [roles.get(step.model_name) for step in config.ensemble_scheduling.step]
        if step_roles == _ENSEMBLE_STEPS:
            roles[name] = ENSEMBLE.name
    return roles


def _keep_program(plan: Upgrade, name: str, code: Path, keep: bool) -> None:
    """Report on a program of the user's, which stays.

    The report has its differences from the program that a version wrote, and the names that it
    imports and that are gone.
    """
    gone = list(names_gone(code))
    has_our_name = name in MODEL_NAMES
    if not gone and not has_our_name:
        return
    if has_our_name:
        plan.changes += changes_of(code, name)
        new_file = code.with_name("model.py.new")
        content = as_written(todays_program(name), code.read_bytes())
        if keep and not (new_file.is_file() and new_file.read_bytes() == content):
            plan.files[new_file] = content
    problem = f"{name}: its model.py is not as any version wrote it, so "
    remedy = f"--map {name}={name} replaces it, --keep writes today's beside it"
    if not gone:
        plan.notes.append(f"{problem}the model stays as it is; {remedy}")
        return
    imports = []
    for old_name in gone:
        if new_name := new_place(old_name):
            imports.append(f"{old_name} ({new_name} today)")
        else:
            imports.append(old_name)
    loss = f"{problem}it stays; it imports {', '.join(imports)}, not here any more"
    if has_our_name:
        loss += f"; {remedy}"
    plan.losses.append(loss)


def _models(config: Any, has_engines: bool, release: Version | None) -> dict[str, Model]:
    """Return today's tensors by model, without those that an unknown release decides."""
    if not has_engines:
        return by_name(MODELS)
    if release is None:
        return {BLS.name: BLS}
    logits = "FP32"
    for tensor in config.output:
        if tensor.name == "generation_logits":
            logits = dtype_of(tensor)
    return cpp.models_for(release, logits)


def _add_tensors(plan: Upgrade, config: Any, todays: Any) -> None:
    """Bring inputs, outputs and an ensemble's wires to today's form."""
    for side in ("input", "output"):
        old_tensors = by_name(getattr(config, side))
        new_tensors = by_name(getattr(todays, side))
        for name in old_tensors:
            if name not in new_tensors:
                plan.losses.append(f"{config.name}: {side} {name}")
        for name, tensor in new_tensors.items():
            if name in old_tensors:
                _keep_changes(plan, f"{config.name}: {side} {name}", old_tensors[name], tensor)
        config.ClearField(side)
        getattr(config, side).extend(new_tensors.values())
    steps = config.ensemble_scheduling.step
    for step, todays_step in zip(steps, todays.ensemble_scheduling.step, strict=False):
        for side in ("input_map", "output_map"):
            wires = getattr(step, side)
            todays_wires = getattr(todays_step, side)
            for key, wire in sorted(wires.items()):
                if todays_wires.get(key) != wire:
                    plan.losses.append(f"{config.name}: {step.model_name}.{key} from another")
            wires.clear()
            wires.update(todays_wires)
    is_missing = todays.HasField("dynamic_batching") and not config.HasField("dynamic_batching")
    if is_missing and FORMAT_VERSION not in config.parameters:  # 0.1.0 wrote none
        config.dynamic_batching.CopyFrom(todays.dynamic_batching)


_TENSOR_FIELDS = {"name", "data_type", "dims", "optional"}  # those that this package sets


def _keep_changes(plan: Upgrade, title: str, old: Any, new: Any) -> None:
    """Leave a tensor optional that the user made so; report all other fields that it loses."""
    if getattr(old, "optional", False):
        new.optional = True
    old_shape = f"{dtype_of(old)} {list(old.dims)}"
    new_shape = f"{dtype_of(new)} {list(new.dims)}"
    if old_shape != new_shape:
        plan.notes.append(f"{title} was {old_shape}, is {new_shape}")
    for descriptor, value in old.ListFields():
        if descriptor.name not in _TENSOR_FIELDS and getattr(new, descriptor.name) != value:
            words = " ".join(str(value).split())
            plan.losses.append(f"{title}: {descriptor.name} {words}")


def _add_parameters(
    plan: Upgrade, config: Any, role: str, engine: cpp.EngineDir | None, release: Version | None
) -> None:
    """Spell parameters as today; paths inside the repository become relative."""
    for key, value in values_of(config).items():
        new = _NEW_SPELLINGS.get((key, value.lower()), value)
        if key in _PATHS and role != ENSEMBLE.name and new:
            new = _inside(plan, config.name, key, new)
        try:
            if config.backend == cpp.CPP_BACKEND:
                check_backend(key, new, release)
            else:
                check(role, key, new)
            config.parameters[key].string_value = new
        except SettingsError as error:
            if key not in _GONE:
                plan.losses.append(f"{config.name}.{key}={value}: {error}")
            del config.parameters[key]
    values = values_of(config)
    if engine is not None and release is not None and engine.version:
        for key, value in cpp.engine_facts(engine, release, values).items():
            config.parameters[key].string_value = values.get(key, value)


def _inside(plan: Upgrade, name: str, key: str, value: str) -> str:
    """Return the path that a parameter should have.

    A ``model.yaml`` is copied into the repository, so that the repository has all its files.
    """
    root = Path(os.path.abspath(plan.repository))
    path = Path(os.path.abspath(root / value))
    if path.is_relative_to(root):
        return str(path.relative_to(root))
    if key != "model_yaml":
        return value
    copy = plan.repository / name / "1" / "model.yaml"
    try:
        plan.files[copy] = path.read_bytes()
    except OSError as error:
        plan.losses.append(
            f"{name}: {key}={value} cannot be read ({error}); "
            f"copy it to {copy.relative_to(plan.repository)}"
        )
    return str(copy.relative_to(plan.repository))


# --- a configuration, edited as text ----------------------------------------------------------

TOKEN = re.compile(
    r"""\s+|#[^\n]*|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?|[][{}<>:;,]|[^][{}<>:;,\s"'#]+"""
)


def edited(text: str, config: Any) -> str:
    """Edit a ``config.pbtxt`` so that it means ``config``.

    An element with the same meaning keeps its words and its place, and every comment stays.
    """
    missing = dict(_elements(config, Counter()))
    newline = line_end(text)
    counts: Counter[str] = Counter()
    pieces = [""]
    last_places: dict[str, int] = {}  # by kind
    for piece in pieces_of(text):
        part = text_format.Parse(piece, model_config_pb2.ModelConfig(), allow_unknown_field=True)
        elements = dict(_elements(part, counts))
        todays = {}
        for key in elements:
            todays[key] = missing.pop(key, "")
            last_places[key[0]] = len(pieces)
        if todays != elements:
            comments = [token + "\n" for token in TOKEN.findall(piece) if token[0] == "#"]
            piece = "".join(comments) + "".join(todays.values()).replace("\n", newline)
        pieces.append(piece)
    for (kind, _), words in missing.items():
        place = last_places.get(kind, len(pieces) - 1)
        if pieces[place] and not pieces[place].endswith("\n"):
            pieces[place] += newline
        pieces[place] += words.replace("\n", newline)
    return "".join(pieces)


def _elements(config: Any, counts: Counter[str]) -> Iterator[tuple[tuple[str, Any], str]]:
    """Yield each field, or each element of one that repeats, as its key and its words.

    The key has the field's name as kind. Behind it tensors and parameters have their names, other
    elements their place, for which ``counts`` counts the elements of each kind.
    """
    for descriptor, value in config.ListFields():
        kind = descriptor.name
        if kind == "parameters":
            for name in sorted(value):
                yield (kind, name), _words(parameters={name: value[name]})
        elif isinstance(value, str) or not hasattr(value, "__len__"):
            yield (kind, ""), _words(**{kind: value})
        elif kind in ("input", "output"):
            for tensor in value:
                yield (kind, tensor.name), _words(**{kind: [tensor]})
        else:
            for item in value:
                yield (kind, str(counts[kind])), _words(**{kind: [item]})
                counts[kind] += 1


def _words(**fields: Any) -> str:
    """Return a part of a configuration as the text of a ``config.pbtxt``."""
    return str(text_format.MessageToString(model_config_pb2.ModelConfig(**fields)))


def pieces_of(text: str) -> Iterator[str]:
    """Yield the text cut before each field.

    Comments stand with the field that they precede or share a line with.
    """
    cuts = [0]
    depth = 0
    has_name = False  # behind a field's name
    has_value = False  # behind its value
    for match in TOKEN.finditer(text):
        token = match.group()
        if token[0].isspace() or token[0] == "#":
            if has_value and "\n" in token:
                cuts.append(match.start() + token.index("\n") + 1)
                has_value = False
            continue
        if token in "[{<":
            depth += 1
        elif token in "]}>":
            depth -= 1
            has_name = depth > 0
            has_value = depth == 0
        elif depth or token in ":;,":
            continue
        elif token[0] in "\"'" and not has_name:  # a text goes on where another one ended
            if not has_value:
                cuts.pop()
            has_value = True
        elif has_name:
            has_name = False
            has_value = True
        else:
            if has_value:
                cuts.append(match.start())
            has_name = True
            has_value = False
    for begin, end in pairwise([*cuts, len(text)]):
        if begin < end:
            yield text[begin:end]
