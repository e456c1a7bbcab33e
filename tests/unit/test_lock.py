"""``requirements-dev.lock`` has what ``setup.cfg`` asks for, in one version for each Python."""

from __future__ import annotations

import configparser
import re

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

from tests.helpers.server_settings import ROOT

EXTRAS = ("embedded", "server", "openai", "dev", "docs")
# Its wheel differs by index, so its hashes do: setup.cfg alone pins it.
UNLOCKED = {"torch"}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> list[Requirement]:
    """What the package and its extras ask for."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    texts = setup["options"]["install_requires"].splitlines()
    for extra in EXTRAS:
        texts += setup["options.extras_require"][extra].splitlines()
    return [Requirement(text) for text in texts if text and not text.startswith("#")]


def pins() -> dict[str, list[Requirement]]:
    """The packages of the lock, by name; a package may have a version for each Python."""
    found: dict[str, list[Requirement]] = {}
    text = (ROOT / "requirements-dev.lock").read_text(encoding="utf-8")
    for block in re.split(r"\n(?=\S)", text):
        head, *hashes = block.split("\\\n")
        if not head.startswith("#"):
            pin = Requirement(head.strip())
            assert all(line.strip().startswith("--hash=sha256:") for line in hashes), block
            assert hashes, f"{pin.name} has no hash"
            found.setdefault(normalized(pin.name), []).append(pin)
    return found


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_the_lock_has_every_requirement(python: str) -> None:
    """``make lock`` writes it anew after a change of setup.cfg."""
    environment = {**default_environment(), "python_version": python}
    environment["python_full_version"] = f"{python}.7"
    locked = pins()
    for asked in requirements():
        if asked.name in UNLOCKED or (asked.marker and not asked.marker.evaluate(environment)):
            continue
        versions = [
            str(pin.specifier).removeprefix("==")
            for pin in locked.get(normalized(asked.name), [])
            if pin.marker is None or pin.marker.evaluate(environment)
        ]
        assert len(versions) == 1, f"{asked.name}: run make lock"
        assert asked.specifier.contains(versions[0], prereleases=True), f"{asked}: run make lock"


def test_the_lock_asks_for_no_package_of_cuda() -> None:
    """They are gigabytes, and the CPU build of torch needs none."""
    strays = [name for name in pins() if re.match(r"torch$|cuda-|nvidia-(?!pytriton)", name)]
    assert strays == []
