"""The embedded engine beside transformers: tokens per second, and what a long prompt costs.

Every figure of one row comes from one process and one model of random weights: the embedded
engine, ``generate`` with all requests as one batch, and transformers' own continuous batching.
Every answer must have all of its tokens. Read ratios, not absolute figures: best of ``--rounds``,
taken in turns, since hosts are shared.

examples:
  python benchmarks/engine.py --model tiny --requests 1,8,32 --threads 2
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from bench.arguments import numbers, parser_of
from bench.report import print_conditions
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from trtllm_bls.engines.base import ChunkStream
from trtllm_bls.engines.embedded import EmbeddedEngine
from trtllm_bls.settings.parameters import EngineParameters
from trtllm_bls.types import EngineRequest, Sampling

SIZES = {
    "tiny": {"vocab_size": 16000, "hidden_size": 256, "intermediate_size": 1024}
    | {"num_hidden_layers": 8, "num_attention_heads": 8, "tie_word_embeddings": True},
    "small": {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048}
    | {"num_hidden_layers": 12, "num_attention_heads": 12, "tie_word_embeddings": False},
}
Prompts = list[list[int]]
GREEDY = Sampling(top_k=1)


@dataclass(frozen=True)
class Bench:
    """One model with the engine over it, and how long its prompts and answers are."""

    engine: EmbeddedEngine
    model: Any
    prompt_tokens: int
    new_tokens: int

    def prompts(self, count: int) -> Prompts:
        """Random, so that no run finds the prompts of another in the engine's slots."""
        size = (count, self.prompt_tokens)
        ids: Prompts = torch.randint(3, self.model.config.vocab_size, size).tolist()
        return ids

    def embedded(self, prompts: Prompts, sampling: Sampling = GREEDY) -> list[int]:
        """All requests at once through the engine; how many tokens each answer has."""

        async def answer(place: int, ids: list[int]) -> int:
            request = EngineRequest(
                request_id=str(place),
                input_ids=tuple(ids),
                max_tokens=self.new_tokens,
                sampling=sampling,
            )
            return sum([len(chunk.token_ids) async for chunk in self.engine.generate(request)])

        async def all_of() -> list[int]:
            return await asyncio.gather(*(answer(*numbered) for numbered in enumerate(prompts)))

        return asyncio.run(all_of())

    def sampled(self, prompts: Prompts) -> list[int]:
        """The same with temperature and top-p."""
        return self.embedded(prompts, Sampling(temperature=0.8, top_p=0.95, seed=1))

    def generate(self, prompts: Prompts) -> list[int]:
        """All requests as one static batch of transformers."""
        self.model.set_attn_implementation("sdpa")
        ids = torch.tensor(prompts, device=self.model.device)
        with torch.inference_mode():
            whole = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=self._greedy()
            )
        return [len(row) - len(prompts[0]) for row in whole]

    def continuous(self, prompts: Prompts) -> list[int]:
        """transformers' continuous batching."""
        with torch.inference_mode():
            answers = self.model.generate_batch(
                prompts, generation_config=self._greedy(), warmup=False
            )
        return [len(answer.generated_tokens) for answer in answers.values()]

    def _greedy(self) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=self.new_tokens,
            do_sample=False,
            eos_token_id=self.model.config.vocab_size - 1,
            min_new_tokens=self.new_tokens,
            pad_token_id=0,
        )

    async def stall(self) -> tuple[float, float, float]:
        """Seconds: a stream's usual gap, its worst gap beside a 2,000-token prompt, that prompt."""
        short = tuple(self.prompts(1)[0])
        long = tuple(torch.randint(3, self.model.config.vocab_size, (2000,)).tolist())
        stream = self.engine.generate(
            EngineRequest(request_id="s", input_ids=short, max_tokens=200)
        )
        usual = await _gaps(stream, 30)
        begun = time.perf_counter()
        other = self.engine.generate(EngineRequest(request_id="l", input_ids=long, max_tokens=1))
        worst = max(await _gaps(stream, 30))
        await other.wait()
        whole = time.perf_counter() - begun
        await stream.aclose()
        return statistics.median(usual), worst, whole


async def _gaps(stream: ChunkStream, count: int) -> list[float]:
    gaps = []
    for _ in range(count):
        begun = time.perf_counter()
        await stream.wait()
        stream.take()
        gaps.append(time.perf_counter() - begun)
    return gaps


def measured(bench: Bench, count: int, rounds: int) -> dict[str, float]:
    """Tokens per second of each way, the ways taking turns."""
    ways: dict[str, Callable[[Prompts], list[int]]] = {
        "embedded": bench.embedded,
        "embedded, sampled": bench.sampled,
        "generate": bench.generate,
        "continuous": bench.continuous,
    }
    best = dict.fromkeys(ways, 0.0)
    for _ in range(rounds + 1):  # the first round warms up and is beaten by later ones
        for name, way in ways.items():
            prompts = bench.prompts(count)
            begun = time.perf_counter()
            lengths = way(prompts)
            if lengths != [bench.new_tokens] * count:
                raise SystemExit(f"error: {name}: answers of {lengths} tokens")
            speed = count * bench.new_tokens / (time.perf_counter() - begun)
            best[name] = max(best[name], speed)
    return best


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--model", choices=SIZES, default="tiny", help="default tiny")
    add("--requests", type=numbers, default=[1, 8, 32], help="at once; default 1,8,32")
    add("--prompt-tokens", type=int, default=128, help="default 128")
    add("--new-tokens", type=int, default=64, help="of each answer; default 64")
    add("--rounds", type=int, default=2, help="beside one that warms up; default 2")
    add("--threads", type=int, default=2, help="default 2")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default cpu")
    options = parser.parse_args()
    print_conditions(options)
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    config = LlamaConfig(
        **SIZES[options.model], num_key_value_heads=4, max_position_embeddings=4096
    )
    with tempfile.TemporaryDirectory() as directory:
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(directory)
        parameters = EngineParameters(
            model_dir=Path(directory), threads=options.threads, max_sequence_tokens=2304
        )
        millions = sum(weight.numel() for weight in model.parameters()) / 1e6
        print(f"Llama of {millions:.0f}M random weights, fp32\n")
        print("| requests | embedded tok/s | sampled | generate | continuous batching |")
        print("|---|---|---|---|---|")
        with EmbeddedEngine(parameters, device=options.device) as engine:
            model = model.eval().to(options.device)
            bench = Bench(engine, model, options.prompt_tokens, options.new_tokens)
            for count in options.requests:
                own, sampled, *others = measured(bench, count, options.rounds).values()
                cells = [f"{speed:.0f} ({own / speed:.1f}×)" for speed in others]
                row = [str(count), f"{own:.0f}", f"{sampled:.0f}", *cells]
                print(f"| {' | '.join(row)} |", flush=True)
            usual, worst, whole = asyncio.run(bench.stall())
    print(
        f"\nA stream's token every {usual * 1e3:.0f} ms; beside a 2000-token prompt that takes "
        f"{whole * 1e3:.0f} ms, at worst {worst * 1e3:.0f} ms."
    )


if __name__ == "__main__":
    main()
