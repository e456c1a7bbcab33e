"""The import of ``transformers`` without the names of all its models.

At its import, ``transformers`` reads the source files of all its models to list the names that they
export: 1,700 files in 5.24, none up to 4.51. That takes 0.4 of the 1.0 s in which a process with a
tokenizer starts (docs/measurements.md), and a tokenizer needs none of these names. Here the files
are read when somebody asks for a name that is not known yet.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_log = logging.getLogger(__name__)

# Names, by the packages that they need and by their module: what ``_LazyModule`` is made of.
Structure = dict[frozenset[str], dict[str, set[str]]]

_LISTS = "transformers.utils.import_utils"
# Attributes of a ``_LazyModule`` that are made of its structure.
_NAME_TABLES = (
    "_modules",
    "_class_to_module",
    "_object_missing_backend",
    "_import_structure",
    "__all__",
)


def import_transformers() -> None:
    """Import ``transformers`` for a process that needs a tokenizer and no model.

    Take names from the modules of their models after this: to find one in ``transformers`` itself
    reads all files, also for the automatic tokenizer. If ``transformers`` was imported before, it
    stays as it is.
    """
    if "transformers" in sys.modules:
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    lists = _ListsOfModels()
    sys.meta_path.insert(0, lists)
    try:
        import transformers.models  # noqa: F401

        for name, reader in lists.readers.items():
            _read_when_asked(sys.modules[name], reader)
    except Exception as error:
        # A release that is made in another way. Without its modules the next import is as usual.
        _log.debug("transformers is imported with all names: %r", error)
        for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
            del sys.modules[name]
    finally:
        sys.meta_path.remove(lists)
        lists.restore()


class _ListsOfModels(MetaPathFinder):
    """Postpones the lists of names that ``transformers`` makes at its import.

    ``readers`` has the function that makes each list, by the module whose list it is.
    """

    def __init__(self) -> None:
        self.readers: dict[str, Callable[[], Structure]] = {}
        self.restore: Callable[[], None] = lambda: None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module that makes lists, and no other one."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname == _LISTS else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_replace(module: Any) -> None:
            execute(module)
            names_of = getattr(module, "define_import_structure", None)
            if names_of is not None:
                module.define_import_structure = self._postponement(names_of)
                self.restore = lambda: setattr(module, "define_import_structure", names_of)

        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec

    def _postponement(self, names_of: Callable[..., Structure]) -> Callable[..., Structure]:
        def postpone(place: Any, **prefix: str) -> Structure:
            path = Path(place)
            directory = path.parent if path.name == "__init__.py" else path
            if directory.parts[-2:] != ("transformers", "models"):
                return names_of(place, **prefix)
            module = "transformers" if prefix else "transformers.models"
            self.readers[module] = lambda: names_of(place, **prefix)
            return {frozenset(): {}}

        return postpone


def _read_when_asked(module: Any, reader: Callable[[], Structure]) -> None:
    """Have a lazy module read its list when it is asked for a name that it does not know."""
    lazy = type(module)

    class IncompleteModule(lazy):  # type: ignore[misc, valid-type]
        def __getattr__(self, name: str) -> Any:
            tables = (self._objects, self._modules, self._class_to_module)
            if not any(name in table for table in tables):
                self._complete()
            return lazy.__getattr__(self, name)

        def __dir__(self) -> Iterable[str]:
            self._complete()
            return dir(self)

        def _complete(self) -> None:
            structure = reader()
            own = {key: set(names) for key, names in self._import_structure.items()}
            structure.setdefault(frozenset(), {}).update(own)
            whole = lazy(self._name, self.__file__, structure, self.__spec__, self._objects)
            for table in _NAME_TABLES:
                setattr(self, table, getattr(whole, table))
            self.__class__ = lazy

    del module.__all__  # `import *` asks for it
    module.__class__ = IncompleteModule
