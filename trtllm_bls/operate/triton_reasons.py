"""Triton's reasons for refusing a model, and the remedies for those that name none.

Most of Triton's sentences are clear as they are. The table has the others, as 24.10 words them.
"""

from __future__ import annotations

import re

# Faults of this machine in a configuration for another one.
NO_GPU = re.compile(r"has kind KIND_GPU but no GPUs are available|invalid or unsupported gpu id")

_UPGRADE = "run trtllm-bls upgrade on the repository"
_REMEDIES = (
    (r"cannot import name .+ from 'trtllm_bls|No module named 'trtllm_bls\.", _UPGRADE),
    (r"No module named '", "install it into the environment whose Python runs the models"),
    (r"for repo agent '", "remove model_repository_agents, or serve it where the agent is"),
    (r"config runtime field|backend library '.*\.so'", "correct runtime, or leave it out"),
    (r"[Uu]nable to find backend", "correct backend, or serve it from the container that has it"),
    (r"unexpected platform type", "set backend in its place"),
    (r"open text file for read \S+/config\.pbtxt", "write one, or move the directory elsewhere"),
    (r"failed to open text file for read", "add the file, or leave out what names it"),
    (r"canonical path for", "pack the environment there, or leave EXECUTION_ENV_PATH out"),
    (r"has no field named", "correct its name, or remove it: a later Triton may know it"),
    (r"failed to read text proto", "mend its form, which is that of Protobuf's texts"),
    (r"Python model file not found", "copy the program there, or correct default_model_filename"),
    (r"directory name must equal model name", "give both one name, or leave name out"),
    (r"at least one version must be available", "make a directory named 1, or mend version_policy"),
    (r"codec can't encode", "name model and directories with ASCII letters, digits and _"),
    (r"not available or ambiguous|is not loaded|no loaded version", "mend or add that model first"),
    (NO_GPU.pattern, "set kind: KIND_CPU, without gpus, or serve it where the GPU is"),
    (r"crashes as it loads", "leave out what was added last; Triton does not say what is wrong"),
)


def remedy_of(reason: str) -> str:
    """Return the remedy for a reason; empty where Triton's own words say it, or it is unknown."""
    for pattern, remedy in _REMEDIES:
        if re.search(pattern, reason):
            return remedy
    return ""
