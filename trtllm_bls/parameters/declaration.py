"""How a model's parameter is declared and how its text is read.

``models`` declares each parameter once, as a field of its model's dataclass: the field's name is
the key in ``config.pbtxt``, and ``parameter`` gives the rest. Configuration files, checks, the
documentation, the environment variables of ``serve`` and the options of ``openai`` follow from it.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from trtllm_bls.errors import SettingsError

GIVEN = "TRTLLM_BLS_GIVEN"  # MODEL.PARAMETER, ...: parameters that no variable overrides
# Triton's own keys, which any model may have.
TRITON_KEYS = frozenset({"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"})

_TRUE = {"true", "1", "t", "y", "yes"}
_FALSE = {"false", "0", "f", "n", "no"}
_Declared = TypeVar("_Declared")


# --- what a value may be --------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """What a value must be, in words, and the function that reads its text.

    ``parse`` raises ``ValueError`` for any other text. ``unset`` is the value of a parameter that
    has neither a text nor a default.
    """

    expected: str
    parse: Callable[[str], Any]
    unset: Any = None


def is_true(text: str) -> bool:
    """Whether a parameter's text means true; any other text, also an empty one, means false."""
    return text.strip().lower() in _TRUE


def _flag(text: str) -> bool:
    if text.strip().lower() not in _TRUE | _FALSE:
        raise ValueError(text)
    return is_true(text)


def _number(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ValueError(text)
    return number


def _model(text: str) -> str:
    if "/" in text:
        raise ValueError(text)
    return text


FLAG = Kind("true or false", _flag)
NUMBER = Kind("a number that is not negative", _number)
SECONDS = Kind("a number of seconds that is not negative", _number)
TEXT = Kind("a text", str, unset="")
MODEL = Kind("the name of a model of this server (an address is for `engine`)", _model, unset="")
# They must exist. A relative path starts at the model repository.
DIRECTORY = Kind("a directory", Path)
FILE = Kind("a file", Path)


def count(least: int, unit: str = "") -> Kind:
    """A whole number of at least ``least``; ``unit`` says of what, such as ``tokens``."""

    def parse(text: str) -> int:
        if int(text) < least:
            raise ValueError(text)
        return int(text)

    of = f" of {unit}," if unit else " of"
    return Kind(f"a whole number{of} at least {least}", parse)


def auto_or(kind: Kind) -> Kind:
    """The same, or the word ``auto``, which is read as ``None``."""
    words = f"{kind.expected}, or auto"
    return Kind(words, lambda text: None if text == "auto" else kind.parse(text))


def none_if_zero(kind: Kind) -> Kind:
    """The same, but a zero is read as ``None``."""
    return replace(kind, parse=lambda text: kind.parse(text) or None)


def choice(*words: str, **meanings: Any) -> Kind:
    """One of the words; a word that is given a meaning is read as that."""
    values = {word: word for word in words} | meanings

    def parse(text: str) -> Any:
        if text not in values:
            raise ValueError(text)
        return values[text]

    return Kind(f"one of: {', '.join(values)}", parse)


# --- declaring ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """What is declared of one parameter.

    ``default`` holds where a configuration does not have the key; ``None`` means that the key must
    be given. ``shipped`` is the value in the checked-in ``config.pbtxt`` where that is another
    one. ``env`` names the variable that overrides both, ``draft_env`` the one that does so in its
    place for a draft model (``is_draft``).
    """

    kind: Kind
    help: str
    default: str | None = ""
    env: str = ""
    shipped: str | None = None
    draft_env: str = ""

    @property
    def in_file(self) -> str:
        """The value in the checked-in configuration."""
        return (self.default or "") if self.shipped is None else self.shipped

    def parse(self, model: str, key: str, text: str) -> Any:
        """The value that ``text`` means; an empty text means the default.

        Raises ``SettingsError``. Whether a path exists is not looked at.
        """
        if "${" in text:
            raise refusal(model, key, text, "fill in the template or remove the parameter")
        text = text or self.default or ""
        try:
            return self.kind.parse(text) if text else self.kind.unset
        except ValueError:
            raise refusal(model, key, text, f"use {self.kind.expected}") from None


def parameter(kind: Kind, help: str, default: str | None = "", **more: str) -> Any:
    """A field of a model's dataclass; ``more`` is what else ``Parameter`` has.

    ``default`` is written as in ``config.pbtxt``. The field's own default is what it means.
    """
    declared = Parameter(kind, help, default, **more)
    metadata = {"parameter": declared}
    if default is None:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=declared.parse("", "", ""), metadata=metadata)


def parameters_in(declared: type) -> dict[str, Parameter]:
    """The parameters that a dataclass declares, by key."""
    found = ((each.name, each.metadata.get("parameter")) for each in dataclasses.fields(declared))
    return {key: parameter for key, parameter in found if parameter is not None}


def refusal(model: str, key: str, value: str, mend: str) -> SettingsError:
    """The error for a value that cannot be used."""
    return SettingsError(f"model {model}: parameter {key} = '{value}': {mend}")


def check_in(known: Mapping[str, Parameter], model: str, key: str, value: str) -> None:
    """Raises ``SettingsError`` if ``model`` has no parameter ``key`` or it cannot be ``value``.

    What depends on the machine, such as whether a directory exists, is not checked.
    """
    if key in known:
        known[key].parse(model, key, value)
    elif key not in TRITON_KEYS:
        raise SettingsError(f"{model} has no parameter {key}; {suggestion(key, known)}")


def suggestion(key: str, known: Iterable[str]) -> str:
    """What to write instead of an unknown key: the most similar one, or all that there are."""
    spelled = {name.replace("_", "").lower(): name for name in known}
    close = difflib.get_close_matches(key.replace("_", "").lower(), spelled, n=1, cutoff=0.7)
    if close:
        return f"did you mean {spelled[close[0]]}?"
    return f"there are: {', '.join(sorted(spelled.values())) or 'none'}"


# --- reading a model's own, once, at load ---------------------------------------------------


class Parameters:
    """One model's parameters as Triton hands them to ``initialize``.

    Variables of ``environment`` override them, except those that ``GIVEN`` lists: so the checked-in
    files load as they stand, and ``serve`` still sets paths, addresses and sizes. Every error names
    the model and the key.
    """

    def __init__(
        self, args: Mapping[str, str], environment: Mapping[str, str] = os.environ
    ) -> None:
        config: Mapping[str, Any] = json.loads(args["model_config"])
        self._model = args.get("model_name") or config["name"]
        self._texts = {
            key: value["string_value"] for key, value in config.get("parameters", {}).items()
        }
        decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self._texts["decoupled"] = str(decoupled)
        self._environment = environment
        self._given = environment.get(GIVEN, "").split(",")
        self._repository = Path(args["model_repository"]).parent  # of all models
        # As in "tensorrt_llm_bls_0_3": the third number of Triton's name for this process.
        self.instance = int(re.sub(r".*\D", "", args.get("model_instance_name", "")) or 0)
        groups = config.get("instance_group", [])
        self.instances = max(1, sum(int(group.get("count", 1)) for group in groups))

    def read(self, declared: type[_Declared]) -> _Declared:
        """The dataclass with its parameters' values. Raises ``SettingsError``.

        Its fields ``instance`` and ``instances``, if it has them, are set too.
        """
        known = parameters_in(declared)
        values = {key: self._value(key, parameter) for key, parameter in known.items()}
        others = {each.name for each in dataclasses.fields(declared)} - known.keys()  # type: ignore[arg-type]
        return declared(**values, **{name: getattr(self, name) for name in others})

    def _value(self, key: str, declared: Parameter) -> Any:
        is_draft = bool(declared.draft_env) and is_true(self._texts.get("is_draft", ""))
        variable = declared.draft_env if is_draft else declared.env
        if f"{self._model}.{key}" in self._given:
            variable = ""
        text = self._environment.get(variable) or self._texts.get(key, "")
        value = declared.parse(self._model, key, text)
        if declared.kind not in (DIRECTORY, FILE):
            return value
        if value is None:
            if declared.default is None:
                raise refusal(self._model, key, "", f"name {declared.kind.expected}")
            return None
        # Symbolic links are not resolved: in a repository of links, what is named relative to the
        # repository lies beside the links.
        path = Path(os.path.abspath(self._repository / value))
        if not (path.is_dir() if declared.kind is DIRECTORY else path.is_file()):
            what = declared.kind.expected.removeprefix("a ")
            raise refusal(self._model, key, str(path), f"no such {what}")
        return path
