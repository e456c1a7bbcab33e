"""How ``configure`` places engines on GPUs, and the lines that start several ranks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.models.configured import PLAIN, Demo, error_of, make_engine


def draft_of(tmp_path: Path, ranks: int = 1) -> str:
    return str(with_ranks(make_engine(tmp_path / "draft", PLAIN), ranks))


def with_ranks(engine: Path, ranks: int) -> Path:
    for rank in range(1, ranks):
        (engine / f"rank{rank}.engine").touch()
    return engine


def launcher_line(output: str) -> str:
    return output.strip().splitlines()[-1].strip()


def test_engines_of_equal_ranks_are_loaded_by_every_rank(demo: Demo, tmp_path: Path) -> None:
    """Both names: a rank that does not load the draft would leave the first one waiting."""
    with_ranks(demo.engine, 2)
    output = demo.write("--draft-engine-dir", draft_of(tmp_path, 2)).output
    assert launcher_line(output) == (
        f"python3 launch_triton_server.py --world_size 2 --model_repo {demo.out} "
        "--tensorrt_llm_model_name tensorrt_llm,tensorrt_llm_draft"
    )


def test_engines_of_unequal_ranks_need_the_orchestrator(demo: Demo, tmp_path: Path) -> None:
    """Leader mode has one number of ranks for all engines."""
    with_ranks(demo.engine, 4)
    output = demo.write("--draft-engine-dir", draft_of(tmp_path)).output
    assert "--world_size 1 " in launcher_line(output)
    assert launcher_line(output).endswith(
        "--tensorrt_llm_model_name tensorrt_llm,tensorrt_llm_draft --multi-model"
    )


def test_an_orchestrator_that_spawns_nothing_has_a_rank_of_its_own(
    demo: Demo, tmp_path: Path
) -> None:
    """Rank 0; the engines' ranks follow, and each engine is told its own."""
    with_ranks(demo.engine, 2)
    draft = draft_of(tmp_path)
    output = demo.write("--draft-engine-dir", draft, "--disable-spawn-processes").output
    assert "--world_size 4 " in launcher_line(output)
    assert launcher_line(output).endswith("--multi-model --disable-spawn-processes")
    assert demo.values("tensorrt_llm")["participant_ids"] == "1,2"
    assert demo.values("tensorrt_llm_draft")["participant_ids"] == "3"
    line = error_of(demo.run("--version", "0.12", "--disable-spawn-processes"))
    assert "--disable-spawn-processes" in line


def test_engines_on_gpus_of_their_own_share_no_memory(demo: Demo, tmp_path: Path) -> None:
    """Each may have nine tenths of its GPU, and workers of its own; on one GPU they have less than
    half each, and one server."""
    draft = ("--draft-engine-dir", draft_of(tmp_path))
    output = demo.write(*draft, "--gpu-device-ids", "0", "--draft-gpu-device-ids", "2").output
    assert launcher_line(output) == (
        f"python3 launch_triton_server.py --world_size 1 --model_repo {demo.out} "
        "--tensorrt_llm_model_name tensorrt_llm,tensorrt_llm_draft --multi-model"
    )
    for model, ids in (("tensorrt_llm", "0"), ("tensorrt_llm_draft", "2")):
        assert demo.values(model)["gpu_device_ids"] == ids
        assert demo.values(model)["kv_cache_free_gpu_mem_fraction"] == "0.9"
    shared = ("--gpu-device-ids", "1", "--draft-gpu-device-ids", "1")
    output = demo.write(*draft, "--force", *shared).output
    assert launcher_line(output) == f"next: trtllm-bls serve --model-repository {demo.out}"
    assert demo.values("tensorrt_llm")["kv_cache_free_gpu_mem_fraction"] == "0.45"


def test_each_engine_can_have_its_own_share(demo: Demo, tmp_path: Path) -> None:
    """The draft's cache is the smaller one."""
    demo.write(
        *("--draft-engine-dir", draft_of(tmp_path), "--kv-cache-free-gpu-mem-fraction", "0.7"),
        *("--draft-kv-cache-free-gpu-mem-fraction", "0.5"),
    )
    shares = [
        demo.values(model)["kv_cache_free_gpu_mem_fraction"]
        for model in ("tensorrt_llm", "tensorrt_llm_draft")
    ]
    assert shares == ["0.7", "0.5"]


def test_keys_are_set_on_the_target_the_draft_or_any_model(demo: Demo, tmp_path: Path) -> None:
    """Without a model's name it is the target."""
    demo.write(
        *("--draft-engine-dir", draft_of(tmp_path), "--chunked-context"),
        *("--set", "max_beam_width=2", "--set-draft", "max_beam_width=3"),
        *("--set", "tensorrt_llm_bls.max_draft_len=4", "--engine-url", "gpu-host:9001"),
    )
    assert demo.values("tensorrt_llm")["max_beam_width"] == "2"
    assert demo.values("tensorrt_llm")["enable_chunked_context"] == "true"
    assert demo.values("tensorrt_llm_draft")["max_beam_width"] == "3"
    assert demo.values("tensorrt_llm_bls")["max_draft_len"] == "4"
    assert demo.values("tensorrt_llm_bls")["engine_url"] == "gpu-host:9001"


def test_the_longest_prompt_of_an_engine_elsewhere_can_be_told(demo: Demo) -> None:
    """Where config.json cannot be read, max_num_tokens still limits a prompt."""
    demo.engine = Path("/elsewhere")
    demo.write("--max-num-tokens", "2048")
    assert demo.values("tensorrt_llm")["max_prompt_tokens"] == "2048"
    demo.write("--max-num-tokens", "2048", "--chunked-context", "--force")
    assert "max_prompt_tokens" not in demo.values("tensorrt_llm")


def test_lookahead_needs_its_three_sizes(demo: Demo) -> None:
    """The backend takes decoding_mode=lookahead without them for a mistake of its own."""
    line = error_of(demo.run("--set", "decoding_mode=lookahead", "--set", "lookahead_ngram_size=7"))
    assert "lookahead_window_size, lookahead_verification_set_size" in line


def test_the_keys_of_a_release_can_be_listed(demo: Demo) -> None:
    """Without any other option, in the spelling of that release."""
    output = demo.write("--keys", "0.13").output
    assert "multiBlockMode: true or false" in output
    assert "multi_block_mode" not in output
    assert "gpt_model_type: inflight_fused_batching (always written)" in output


# --- Slurm ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "options", "server_ranks"),
    [(2, [], 2), (2, ["--disable-spawn-processes"], 3)],
)
def test_the_slurm_script_starts_one_server_per_rank(
    demo: Demo, tmp_path: Path, ranks: int, options: list[str], server_ranks: int
) -> None:
    """Run with a stand-in for srun: only the first serves, the others load the engines alone."""
    with_ranks(demo.engine, ranks)
    script = tmp_path / "job.sh"
    demo.write("--slurm", str(script), *options)
    assert f"#SBATCH --ntasks={server_ranks}\n" in script.read_text()
    programs = tmp_path / "bin"
    programs.mkdir()
    srun = 'while [[ $1 == --* ]]; do shift; done; for n in 0 1; do SLURM_PROCID=$n "$@"; done'
    stand_in(programs / "srun", srun)
    printing = r"""echo -n "${TRTLLM_ORCHESTRATOR:-leader} $*" | tr '\n' '~'; echo"""
    stand_in(programs / "server", printing)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "SERVER": str(programs / "server")}
    ran = subprocess.run(
        ["bash", script], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    first, second = ran.stdout.splitlines()
    assert f"--model-repository={demo.out}" in first
    assert "shm-region-prefix-name=prefix0_" in first
    assert "--load-model" not in first
    # Any user of the machine reads a command line: the header is one that nobody can send.
    closed = "shared-memory,model-repository,logging,trace:closed by serve=closed~by serve"
    for option in ("--http-restricted-api", "--grpc-restricted-protocol"):
        assert f"{option}={closed} " in first, "control APIs are open"
    assert second.endswith(
        "shm-region-prefix-name=prefix1_ --model-control-mode=explicit --load-model=tensorrt_llm"
    )
    assert first.startswith("1 " if options else "leader ")


def stand_in(place: Path, program: str) -> None:
    place.write_text(f"#!/bin/bash\n{program}\n")
    place.chmod(0o755)


def test_slurm_cannot_start_what_an_orchestrator_would_spawn(demo: Demo, tmp_path: Path) -> None:
    """The line names the option that is missing, and nothing is written."""
    with_ranks(demo.engine, 2)
    draft = draft_of(tmp_path)
    line = error_of(demo.run("--draft-engine-dir", draft, "--slurm", str(tmp_path / "job.sh")))
    assert "--disable-spawn-processes" in line
    assert not demo.out.exists()
