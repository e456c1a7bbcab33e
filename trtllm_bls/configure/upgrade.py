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
from trtllm_bls.wire.contract import BLS, ENGINE, ENSEMBLE, LLMAPI, MODELS, Model

_ENSEMBLE_STEPS = [model.name for model in STEPS]
_SPELLED_ANEW = {  # values that earlier versions wrote, and how they are spelled today
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
    version = parse_version(release) if release else None
    plan = plan_upgrade(repository, names_of(names), version, keep=keep)
    for path, content in plan.files.items():
        old = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        name = str(path.relative_to(repository))
        new = content.decode().splitlines()
        click.echo("\n".join(difflib.unified_diff(old.splitlines(), new, name, name, lineterm="")))
    for line in plan.changes:
        click.echo(line)
    for note in (*plan.notes, *(f"lost: {loss}" for loss in plan.losses)):
        click.echo(f"note: {note}")
    count = len(plan.files)
    if check:
        verdict = f"{count} files would change" if count else "up to date"
        if plan.losses and not count:  # a model.py of the user's that stays, and is told above
            verdict = "not up to date, and upgrade cannot mend it"
        click.echo(f"{repository}: {verdict}")
        raise SystemExit(bool(plan.files or plan.losses))
    write_files(plan.files)
    if plan.losses:
        click.echo(f"{repository}: {count} files written; what is lost stands above")
        raise SystemExit(1)
    click.echo(f"{repository}: " + (f"{count} files written" if count else "up to date"))
    click.echo(f"next: trtllm-bls serve --model-repository {repository}")


def names_of(texts: tuple[str, ...]) -> dict[str, str]:
    """``NAME=MODEL`` of ``--map``; raises ``SettingsError``."""
    names = {}
    known = [model.name for model in MODELS]
    for text in texts:
        name, _, model = text.partition("=")
        if not name or model not in known:
            raise SettingsError(f"--map {text}: write NAME=MODEL; models: {', '.join(known)}")
        names[name] = model
    return names


# --- what is to change ------------------------------------------------------------------------


@dataclass
class Upgrade:
    """The files to write, what the user should know, what is lost, and the ``changes`` that the
    user made to programs, as lines."""

    repository: Path
    files: dict[Path, bytes] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)


def plan_upgrade(
    repository: Path, names: Mapping[str, str], release: Version | None, *, keep: bool = False
) -> Upgrade:
    """Plan what brings a repository to today's form. Raises ``SettingsError``.

    ``keep`` puts today's program beside one of the user's.
    """
    plan = Upgrade(repository)
    configs = _read(repository, names)
    roles = _roles(plan, configs, names, keep)
    engines = {}
    for name, config in configs.items():
        if config.backend == cpp.CPP_BACKEND and (place := values_of(config).get("gpt_model_path")):
            engines[name] = cpp.read_engine(f"{name}: gpt_model_path", Path(place), check=False)
    if engines:
        text_values = values_of(configs[BLS.name]) if BLS.name in configs else {}
        target = engines.get(text_values.get("tensorrt_llm_model_name", ENGINE.name))
        release = release or (target.release() if target else None)
        if release is None:
            why = "the engine is not here, so tensors of the C++ backend stay as they are"
            plan.notes.append(f"{why}; --version names TensorRT-LLM's release")
    for name, role in roles.items():
        old, new = configs[name], model_config_pb2.ModelConfig()
        new.CopyFrom(old)
        models = _models(old, bool(engines), release)
        if values_of(old).get("tensors") == "llmapi":
            models[role] = LLMAPI
        if role in models:
            calls = zip(_ENSEMBLE_STEPS, old.ensemble_scheduling.step, strict=False)
            steps = [replace(models[model], name=step.model_name) for model, step in calls]
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
        codes = sorted((repository / name).glob("[0-9]*/model.py"))
        for code in codes if old.backend == "python" else ():
            program = todays_program(role)
            if program_of(code) != program:
                before = code.read_bytes()
                plan.files[code] = as_written(program, before)
                if model_of(code) is None:
                    plan.files[code.with_name("model.py.old")] = before
    return plan


def _read(repository: Path, names: Mapping[str, str]) -> dict[str, Any]:
    """Each model's configuration; raises ``SettingsError`` where nothing can be upgraded."""
    if not repository.is_dir():
        raise SettingsError(f"{repository}: no such directory")
    files = sorted(repository.glob("*/config.pbtxt"))
    configs = {path.parent.name: read_config(path) for path in files}
    if unknown := names.keys() - configs.keys():
        raise SettingsError(f"--map {unknown.pop()}: no such model; there are {', '.join(configs)}")
    if not names and not is_ours(repository):
        mend = f"for TensorRT-LLM's own: trtllm-bls configure --from {repository} --out NEW"
        raise SettingsError(f"{repository}: no version of this package wrote it; {mend}")
    for config in configs.values():
        if int(values_of(config).get(FORMAT_VERSION) or 0) > int(FORMAT[FORMAT_VERSION]):
            writer = values_of(config).get(WRITTEN_BY, "a later version")
            raise SettingsError(f"{repository}: {writer} wrote it; install that version")
    return configs


def _roles(
    plan: Upgrade, configs: Mapping[str, Any], names: Mapping[str, str], keep: bool
) -> dict[str, str]:
    """The model of this package that each model is, by name; others are left out."""
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
        if [
            roles.get(step.model_name) for step in config.ensemble_scheduling.step
        ] == _ENSEMBLE_STEPS:
            roles[name] = ENSEMBLE.name
    return roles


def _keep_program(plan: Upgrade, name: str, code: Path, keep: bool) -> None:
    """Tell what a program of the user's is, which stays: how it differs from what was written, and
    what it needs that has gone."""
    gone = list(names_gone(code))
    is_known = name in {model.name for model in MODELS}
    if not gone and not is_known:
        return
    if is_known:
        plan.changes += changes_of(code, name)
        new_file = code.with_name("model.py.new")
        content = as_written(todays_program(name), code.read_bytes())
        if keep and not (new_file.is_file() and new_file.read_bytes() == content):
            plan.files[new_file] = content
    what = f"{name}: its model.py is not as any version wrote it, so "
    mend = f"--map {name}={name} replaces it, --keep writes today's beside it"
    if not gone:
        plan.notes.append(f"{what}the model stays as it is; {mend}")
        return
    places = []
    for old in gone:
        place = new_place(old)
        places.append(f"{old} ({place} today)" if place else old)
    loss = f"{what}it stays; it imports {', '.join(places)}, not here any more"
    plan.losses.append(f"{loss}; {mend}" if is_known else loss)


def _models(config: Any, has_engines: bool, release: Version | None) -> dict[str, Model]:
    """Tensors as they are today, by model; without those that an unknown release decides."""
    if not has_engines:
        return {model.name: model for model in MODELS}
    if release is None:
        return {BLS.name: BLS}
    types = {tensor.name: dtype_of(tensor) for tensor in config.output}
    return cpp.models_for(release, types.get("generation_logits", "FP32"))


def _add_tensors(plan: Upgrade, config: Any, todays: Any) -> None:
    """Inputs, outputs and an ensemble's wires as they are today."""
    for side in ("input", "output"):
        before = {tensor.name: tensor for tensor in getattr(config, side)}
        known = {tensor.name: tensor for tensor in getattr(todays, side)}
        plan.losses += [f"{config.name}: {side} {name}" for name in before if name not in known]
        for name, tensor in known.items():
            if name in before:
                _keep_changes(plan, f"{config.name}: {side} {name}", before[name], tensor)
        config.ClearField(side)
        getattr(config, side).extend(known.values())
    steps = config.ensemble_scheduling.step
    for step, todays_step in zip(steps, todays.ensemble_scheduling.step, strict=False):
        for side in ("input_map", "output_map"):
            wires, todays_wires = getattr(step, side), getattr(todays_step, side)
            for key, wire in sorted(wires.items()):
                if todays_wires.get(key) != wire:
                    plan.losses.append(f"{config.name}: {step.model_name}.{key} from another")
            wires.clear()
            wires.update(todays_wires)
    is_missing = todays.HasField("dynamic_batching") and not config.HasField("dynamic_batching")
    if is_missing and FORMAT_VERSION not in config.parameters:  # 0.1.0 wrote none
        config.dynamic_batching.CopyFrom(todays.dynamic_batching)


_DECLARED = {"name", "data_type", "dims", "optional"}  # what this package says of a tensor


def _keep_changes(plan: Upgrade, title: str, before: Any, tensor: Any) -> None:
    """Leave a tensor optional that the user made so; name all else that it had, and loses."""
    if getattr(before, "optional", False):
        tensor.optional = True
    shapes = []
    for declared in (before, tensor):
        shapes.append(f"{dtype_of(declared)} {list(declared.dims)}")
    if shapes[0] != shapes[1]:
        plan.notes.append(f"{title} was {shapes[0]}, is {shapes[1]}")
    for field_, value in before.ListFields():
        if field_.name not in _DECLARED and getattr(tensor, field_.name) != value:
            words = " ".join(str(value).split())
            plan.losses.append(f"{title}: {field_.name} {words}")


def _add_parameters(
    plan: Upgrade, config: Any, role: str, engine: cpp.EngineDir | None, release: Version | None
) -> None:
    """Parameters as they are spelled today; paths inside the repository become relative."""
    for key, value in values_of(config).items():
        new = _SPELLED_ANEW.get((key, value.lower()), value)
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
    """A path of a parameter. ``model.yaml`` is copied in, so that the repository is whole."""
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
        what = f"{name}: {key}={value} cannot be read ({error})"
        plan.losses.append(f"{what}; copy it to {copy.relative_to(plan.repository)}")
    return str(copy.relative_to(plan.repository))


# --- a configuration, edited as text ----------------------------------------------------------

TOKEN = re.compile(
    r"""\s+|#[^\n]*|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?|[][{}<>:;,]|[^][{}<>:;,\s"'#]+"""
)


def edited(text: str, wanted: Any) -> str:
    """A ``config.pbtxt`` that means ``wanted``. What means the same keeps its words and its place,
    and every comment stays."""
    missing = dict(_elements(wanted, Counter()))
    end = line_end(text)
    seen: Counter[str] = Counter()
    pieces = [""]
    last_of_kind: dict[str, int] = {}
    for piece in pieces_of(text):
        part = text_format.Parse(piece, model_config_pb2.ModelConfig(), allow_unknown_field=True)
        elements = dict(_elements(part, seen))
        if any(missing.get(name) != word for name, word in elements.items()):
            comments = [token + "\n" for token in TOKEN.findall(piece) if token[0] == "#"]
            todays = "".join(missing.get(name, "") for name in elements)
            piece = "".join(comments) + todays.replace("\n", end)
        for name in elements:
            missing.pop(name, None)
            last_of_kind[name[0]] = len(pieces)
        pieces.append(piece)
    for (kind, _), words in missing.items():
        place = last_of_kind.get(kind, len(pieces) - 1)
        before = "" if pieces[place][-1:] in ("", "\n") else end
        pieces[place] += before + words.replace("\n", end)
    return "".join(pieces)


def _elements(config: Any, seen: Counter[str]) -> Iterator[tuple[tuple[str, Any], str]]:
    """Each field, or each element of one that repeats, with its words. Tensors and parameters are
    known by their names, other elements by their place; ``seen`` counts them."""
    make = model_config_pb2.ModelConfig
    for descriptor, value in config.ListFields():
        kind = descriptor.name
        if kind == "parameters":
            parts = [(key, make(parameters={key: value[key]})) for key in sorted(value)]
        elif isinstance(value, str) or not hasattr(value, "__len__"):
            parts = [("", make(**{kind: value}))]
        elif kind in ("input", "output"):
            parts = [(item.name, make(**{kind: [item]})) for item in value]
        else:
            parts = [(str(seen[kind] + i), make(**{kind: [item]})) for i, item in enumerate(value)]
            seen[kind] += len(value)
        for name, part in parts:
            yield (kind, name), text_format.MessageToString(part)


def pieces_of(text: str) -> Iterator[str]:
    """The text cut before each field; comments stand with the field that they precede or share a
    line with."""
    cuts, depth = [0], 0
    named, done = False, False  # behind a field's name; behind its value
    for match in TOKEN.finditer(text):
        token = match.group()
        if token[0].isspace() or token[0] == "#":
            if done and "\n" in token:
                cuts.append(match.start() + token.index("\n") + 1)
                done = False
            continue
        if token in "[{<":
            depth += 1
        elif token in "]}>":
            depth -= 1
            done, named = depth == 0, depth > 0
        elif depth or token in ":;,":
            continue
        elif token[0] in "\"'" and not named:  # a text goes on where another one ended
            if not done:
                cuts.pop()
            done = True
        elif named:
            done, named = True, False
        else:
            if done:
                cuts.append(match.start())
            done, named = False, True
    for begin, end in pairwise([*cuts, len(text)]):
        if begin < end:
            yield text[begin:end]
