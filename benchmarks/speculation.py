"""What a round of speculation costs, on scripted engines: no model, no GPU.

Parts, of which each prints a line for each setting:

  overhead  CPU of a round in this process, with engines of zero seconds
  idle      CPU per token of engine and orchestrator where speculation is configured, and forbidden
            by the load; with and without by turns
  triton    through the real tritonserver: speed-ups are ratios to plain decoding in the same run.
            Overhead of a round = its wall time less the engines' steps. Beside it stands the least
            that Triton allows: the same two requests, made bare by a gRPC client that does nothing
            else.

The target takes 20 ms for a step, the draft 2 ms. Every answer is compared with the plain one.

examples:
  python benchmarks/speculation.py --only overhead,idle --tokens 200
  python benchmarks/speculation.py --only triton --tokens 300 --overlap off
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import uvloop
from bench.arguments import parser_of
from bench.load import TRITON, triton_message, triton_problem
from bench.processes import child_ids, cpu_seconds
from bench.report import print_conditions
from bench.repository import MODEL, write_scripted_pair

from doubles.scripted import Script, ScriptedEngine
from doubles.scripted_tokens import agreeing, hashed
from trtllm_bls.client import Client, Result
from trtllm_bls.engines.base import Engine
from trtllm_bls.engines.routing import RoutingEngine
from trtllm_bls.operate.tritonserver import TritonServer
from trtllm_bls.orchestrator.orchestrator import Defaults, Orchestrator
from trtllm_bls.settings.command_options import Override, ServeSettings
from trtllm_bls.speculative.options import DraftSource, SpeculationOptions
from trtllm_bls.text.tokenizer import load_tokenizer
from trtllm_bls.types import EngineRequest, Sampling, SpeculationStats, TextChunk, TextRequest
from trtllm_bls.wire.grpc_client import GrpcChannel, ignore

VOCAB = 1000
TARGET_MS, DRAFT_MS = 20, 2
RULE = hashed(VOCAB)
BEST = {0.6: 3, 0.8: 5, 0.9: 8}  # draft length that the formula calls best, near enough


@dataclass(frozen=True)
class Pair:
    """A target and a draft that agree in a share of contexts."""

    target: ScriptedEngine
    draft: ScriptedEngine

    @classmethod
    def of(cls, rate: float, step: float = 1.0) -> Pair:
        target = Script(vocab_size=VOCAB, step_seconds=TARGET_MS / 1000 * step)
        draft = Script(vocab_size=VOCAB, step_seconds=DRAFT_MS / 1000 * step)
        return cls(ScriptedEngine(RULE, target), ScriptedEngine(agreeing(RULE, rate, VOCAB), draft))


class Speculating(RoutingEngine):
    """Speculates on every request; ``stats`` are those of the last one that has ended."""

    def __init__(self, pair: Pair, options: SpeculationOptions) -> None:
        super().__init__(pair.target, pair.draft, options, by_default=True, on_end=self._keep)
        self.stats = SpeculationStats()

    def _keep(self, stats: SpeculationStats) -> None:
        self.stats = stats


def request(tokens: int) -> EngineRequest:
    prompt = tuple((31 + place * 7) % VOCAB for place in range(32))
    return EngineRequest(
        request_id="r", input_ids=prompt, max_tokens=tokens, sampling=Sampling(top_k=1)
    )


async def read(engine: Engine, request: EngineRequest) -> list[int]:
    ids: list[int] = []
    async with aclosing(engine.generate(request)) as stream:
        async for chunk in stream:
            ids += chunk.token_ids
    return ids


async def summary(rate: float = 0.8, tokens: int = 200) -> str:
    """One line: the speed-up of drafts by the draft model."""
    pair = Pair.of(rate)
    begun = time.perf_counter()
    right = await read(pair.target, request(tokens))
    plain = time.perf_counter()
    answer = await read(Speculating(pair, SpeculationOptions()), request(tokens))
    speed_up = (plain - begun) / (time.perf_counter() - plain)
    check(answer, right)
    return (
        f"Drafts of which {rate:.0%} are right: {speed_up:.1f} times the tokens/s, with "
        f"engines of {TARGET_MS} and {DRAFT_MS} ms a step."
    )


def check(answer: object, right: object) -> None:
    if answer != right:
        raise SystemExit(f"error: an answer with drafts differs: {answer}, {right}")


def overhead(options: argparse.Namespace) -> None:
    """Less what the engines cost when asked alone."""

    async def measure(length: int) -> tuple[float, float]:
        pair = Pair.of(0.8, step=0.0)
        engine = Speculating(pair, SpeculationOptions(num_draft_tokens=length))
        right = await read(pair.target, request(options.tokens))
        pair.target.requests.clear()
        begun = time.process_time()
        answer = await read(engine, request(options.tokens))
        whole = time.process_time() - begun
        check(answer, right)
        for scripted in (pair.target, pair.draft):
            for asked in list(scripted.requests):
                await read(scripted, asked)
        alone = time.process_time() - begun - whole
        return (whole - alone) / engine.stats.rounds * 1e6, whole / engine.stats.rounds * 1e6

    for length in (1, 4, 8):
        costs = [asyncio.run(measure(length)) for _ in range(20)]
        own, whole = (statistics.median(column) for column in zip(*costs, strict=True))
        print(f"a round, draft model, k={length}: {own:.0f} us of CPU ({whole:.0f} with engines)")


class Dropping:
    async def ready(self) -> None:
        pass

    def send(self, chunk: TextChunk) -> None:
        pass


def idle(options: argparse.Namespace) -> None:
    streams, tokens, turns = 64, options.tokens // 6, 15
    tokenizer = load_tokenizer(MODEL)

    def plain(engine: Engine, source: str) -> Engine:
        return RoutingEngine(engine)

    def speculating(engine: Engine, source: str) -> Engine:
        drafts = SpeculationOptions(draft_source=DraftSource(source))
        return RoutingEngine(engine, engine, drafts, by_default=True)

    async def cpu(over: Callable[[Engine, str], Engine], source: str) -> float:
        engine = ScriptedEngine(RULE, Script(vocab_size=VOCAB, step_seconds=0.01))
        orchestrator = Orchestrator(tokenizer, over(engine, source), Defaults())
        requests = [
            TextRequest(request_id=str(n), text="x", max_tokens=tokens, stream=True)
            for n in range(streams)
        ]
        began = time.process_time()
        await asyncio.gather(*(orchestrator.run(each, Dropping()) for each in requests))
        return (time.process_time() - began) / streams / tokens * 1e6

    for source in ("ngram", "model", "mixed"):
        costs = [
            [uvloop.run(cpu(over, source)) for over in (plain, speculating)] for _ in range(turns)
        ]
        without, beside = (statistics.median(column) for column in zip(*costs, strict=True))
        print(
            f"idle {source}, {streams} streams: {without:.1f} us per token, "
            f"{beside - without:+.1f}",
            flush=True,
        )


# --- through tritonserver -------------------------------------------------------------------------


def settings(repository: Path, agrees: float, overlap: str) -> ServeSettings:
    """A server whose two engines are scripts."""
    write_scripted_pair(repository)
    return ServeSettings(
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        model=MODEL,
        model_repository=repository,
        overrides=(
            Override("tensorrt_llm", "step_ms", str(TARGET_MS)),
            Override("tensorrt_llm_draft", "step_ms", str(DRAFT_MS)),
            Override("tensorrt_llm_draft", "agrees", str(agrees)),
            Override("tensorrt_llm_bls", "tensorrt_llm_draft_model_name", "tensorrt_llm_draft"),
            Override("tensorrt_llm_bls", "overlap_drafts", overlap),
        ),
    )


def ask(url: str, tokens: int, **speculation: int) -> tuple[Result, float]:
    """The answer, and its seconds."""

    async def generate() -> Result:
        async with Client(url) as client:
            return await client.generate(
                text_input="a b c d e", max_tokens=tokens, end_id=-1, **speculation
            )

    result = asyncio.run(generate())
    return result, result.events[-1].received_at - result.started_at


async def bare_rounds(url: str, length: int, rounds: int = 60) -> float:
    """Milliseconds that a draft and its verification take beyond their steps, median."""
    inputs = {"input_ids": [1] * 150, "input_lengths": [150], "end_id": [-1], "pad_id": [0]}
    inputs |= {"runtime_top_k": [1], "min_tokens": [0]}
    drafting = inputs | {"request_output_len": [length]}
    verifying = inputs | {"request_output_len": [length + 1], "draft_input_ids": [1] * length}
    replies: asyncio.Queue[bytes] = asyncio.Queue()

    def on_messages(messages: list[bytes]) -> None:
        for message in messages:
            replies.put_nowait(message)

    channel, took = GrpcChannel(url), []
    turns = [
        (channel.open(TRITON, on_messages, ignore), triton_message(model, "output_ids", tensors))
        for model, tensors in (("tensorrt_llm_draft", drafting), ("tensorrt_llm", verifying))
    ]
    for _ in range(rounds):
        begun = time.perf_counter()
        for call, message in turns:
            call.send(message)
            check(triton_problem(await replies.get()), "")
        took.append((time.perf_counter() - begun) * 1000 - length * DRAFT_MS - TARGET_MS)
    await channel.close()
    return statistics.median(took)


def triton(options: argparse.Namespace) -> None:
    for rate, length in BEST.items():
        with tempfile.TemporaryDirectory() as scratch:
            chosen = settings(Path(scratch) / "models", rate, options.overlap)
            with TritonServer(chosen) as server:
                measure(server.grpc_url, rate, length, options)


def measure(url: str, rate: float, length: int, options: argparse.Namespace) -> None:
    plain = [ask(url, options.tokens) for _ in range(options.requests)]
    right = plain[0][0].text
    took, overheads, rounds_in_all = [], [], 0
    before = cpu_seconds(child_ids())
    for _ in range(options.requests):
        result, seconds = ask(url, options.tokens, num_draft_tokens=length)
        check(result.text, right)
        outputs = result.events[-1].outputs
        rounds = int(outputs["num_draft_rounds"].item())
        drafted = int(outputs["total_draft_tokens"].item())
        steps = (drafted * DRAFT_MS + (rounds + 1) * TARGET_MS) / 1000
        took.append(seconds)
        overheads.append((seconds - steps) / rounds * 1000)
        rounds_in_all += rounds
    cpu = (cpu_seconds(child_ids()) - before) / rounds_in_all * 1e6
    # The speed-up by the formula, without overhead.
    expected = (1 - rate ** (length + 1)) / (1 - rate) / (length * DRAFT_MS / TARGET_MS + 1)
    gain = statistics.median(seconds for _, seconds in plain) / statistics.median(took)
    bare = asyncio.run(bare_rounds(url, length))
    print(
        f"a={rate} k={length}: {gain:.2f}x of the formula's {expected:.2f}x, "
        f"{gain / expected:.0%}; round overhead p50 {statistics.median(overheads):.2f} ms "
        f"(two bare requests: {bare:.2f} ms), CPU {cpu:.0f} us per round",
        flush=True,
    )


PARTS = {part.__name__: part for part in (overhead, idle, triton)}


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--only", default="overhead,idle", help=f"default overhead,idle; of {', '.join(PARTS)}")
    add("--tokens", type=int, default=300, help="of each answer; default 300")
    add("--requests", type=int, default=3, help="triton: answers of each kind; default 3")
    add("--overlap", choices=("off", "on", "auto"), default="auto", help="triton; default auto")
    options = parser.parse_args()
    print_conditions(options)
    for part in options.only.split(","):
        PARTS[part](options)


if __name__ == "__main__":
    main()
