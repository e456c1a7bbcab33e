"""Checks of this machine: shared memory, proxies, Python and packages."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

from packaging.requirements import Requirement
from packaging.version import Version

from trtllm_bls.doctor.findings import Finding, Findings, check
from trtllm_bls.doctor.subject import Subject
from trtllm_bls.errors import SetupError
from trtllm_bls.launcher.checks import (
    check_environment,
    check_numpy,
    check_platform,
    check_shared_memory,
    embedded_numpy,
    find_server,
)
from trtllm_bls.launcher.interpreter import PYTHON

DISTRIBUTION = "trtllm-bls"
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
_LOOPBACK = ("localhost", "127.0.0.1")
# transformers as TensorRT-LLM's own Python package was released with it, by first release.
PINS = (
    ((0, 9), "4.36.1"),
    ((0, 15), "4.45.1"),
    ((0, 18), "4.48.3"),  # from 0.18.1 on
    ((0, 19), "4.51.0"),
    ((1, 0), "4.53.1"),
    ((1, 1), "4.56.0"),
    ((1, 2), "4.57.3"),
)


@check("this machine can run the server's models")
def platform_and_place(subject: Subject) -> Findings:
    """Linux, and an environment whose path the embedded Python can read."""
    try:
        check_platform()
        check_environment(sys.prefix)
    except SetupError as error:
        yield Finding.of(error)


@check("shared memory has room for the models' tensors")
def shared_memory(subject: Subject) -> Findings:
    """Docker's default of 64 MB is filled by a few large answers."""
    try:
        warning = check_shared_memory(subject.shared_memory)
    except SetupError as error:
        yield Finding.of(error)
    else:
        if warning:
            yield Finding.of(SetupError(warning), "warn")


@check("connections to this machine go past any proxy")
def proxies(subject: Subject) -> Findings:
    """gRPC uses a proxy even for localhost, unless no_proxy names it."""
    environment = {name.lower(): value for name, value in subject.environment.items()}
    named = [name for name in _PROXIES if environment.get(name)]
    direct = [host.strip() for host in environment.get("no_proxy", "").split(",")]
    missing = [host for host in _LOOPBACK if host not in direct]
    if named and missing and "*" not in direct:
        what = f"{', '.join(named)} without no_proxy for {' and '.join(missing)}"
        yield Finding("warn", what, f"set no_proxy={','.join([*filter(None, direct), *missing])}")


@check("Python and packages are as this package needs them")
def packages(subject: Subject) -> Findings:
    """`pip install --no-deps` leaves what a container has, which may be too old."""
    for requirement in _requirements(subject.packages):
        version = subject.packages(requirement.name)
        if version is None:
            yield Finding("error", f"no {requirement.name}", f"pip install '{requirement}'")
        elif not requirement.specifier.contains(version, prereleases=True):
            what = f"{requirement.name} {version}, needed is {requirement.specifier}"
            mend = "install trtllm-bls into an environment of its own, or take a newer container"
            yield Finding("error", what, mend)


@check("the server here runs models on this Python and its numpy", lambda s: s.server or _finds())
def server_python(subject: Subject) -> Findings:
    """A stub for this version of Python, which can read the numpy that it will import."""
    try:
        installation = find_server(subject.server)
    except SetupError as error:
        yield Finding.of(error)
        return
    if not installation.stub(PYTHON).is_file():
        what = f"{installation.root} has no Python backend for Python {PYTHON}"
        yield Finding("error", what, "install trtllm-bls with the Python of the container")
    try:
        check_numpy(installation, embedded_numpy())
    except SetupError as error:
        yield Finding.of(error)


def _finds() -> bool:
    with suppress(SetupError):
        return bool(find_server(None))
    return False


def _requirements(packages: Callable[[str], str | None]) -> Iterator[Requirement]:
    try:
        texts = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return  # not installed, so there is no list of requirements
    # `serve` has the OpenAI API wherever uvicorn is installed.
    extra = "openai" if packages("uvicorn") else ""
    for text in texts:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


@check("transformers is as TensorRT-LLM's Python package wants it", lambda s: _trtllm(s))
def pins(subject: Subject) -> Findings:
    """Another one can break `import tensorrt_llm`, which builds engines but does not serve them."""
    installed, release = subject.packages("transformers"), _trtllm(subject)
    if not installed or not release:
        return
    numbers = (Version(release).major, Version(release).minor)
    pinned = [pin for since, pin in PINS if since <= numbers]
    if pinned and Version(installed).release[:2] != Version(pinned[-1]).release[:2]:
        what = f"transformers {installed} beside tensorrt-llm {release}, made with {pinned[-1]}"
        mend = f"pip install transformers=={pinned[-1]} before building engines here"
        yield Finding("warn", what, mend)


def _trtllm(subject: Subject) -> str | None:
    return subject.packages("tensorrt-llm")
