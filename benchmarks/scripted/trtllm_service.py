"""Runs the scripted service until it is ended: a stand-in for ``trtllm-serve --grpc``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[2]))

from doubles.guided import GuidedAnswers
from doubles.scripted import Script
from doubles.trtllm_service import Behaviour, EchoEngine, ScriptedService
from trtllm_bls.text.tokenizer import load_tokenizer


@click.command()
@click.option("--model-dir", required=True, type=click.Path(path_type=Path), help="A tokenizer.")
@click.option("--port", default=50051, show_default=True)
@click.option("--step-ms", default=0.0, show_default=True, help="Time of one step.")
@click.option("--ids-per-chunk", default=1, show_default=True)
@click.option("--max-seq-len", default=0, help="As trtllm-serve's option; 0 = not given.")
def main(model_dir: Path, port: int, step_ms: float, ids_per_chunk: int, max_seq_len: int) -> None:
    """A TrtllmService that says each prompt back, or a text that obeys the request's guide."""
    tokenizer = load_tokenizer(model_dir)
    behaviour = Behaviour(
        model_id=model_dir.name,
        eos_id=tokenizer.eos_id or 0,
        vocab_size=tokenizer.vocab_size,
        max_seq_len=max_seq_len,
        ids_per_chunk=ids_per_chunk,
        stop_ids=lambda text: tokenizer.encode(text, add_special_tokens=False, field="stop"),
    )
    script = Script(
        step_seconds=step_ms / 1000,
        vocab_size=tokenizer.model_vocab_size,
        max_sequence_tokens=max_seq_len or None,
    )

    async def run() -> None:
        guided = GuidedAnswers(model_dir / "tokenizer.json", tokenizer.model_vocab_size)
        service = ScriptedService(EchoEngine(script, guided=guided), behaviour)
        click.echo(f"listening on 127.0.0.1:{await service.start(port)}")
        await service.wait()

    asyncio.run(run())


if __name__ == "__main__":
    main()
