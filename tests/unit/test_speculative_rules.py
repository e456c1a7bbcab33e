"""The pure parts of speculation: what a round means, what its requests say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.scripted_pairs import engine_request as ask
from trtllm_bls.speculative.progress import Progress, round_seed
from trtllm_bls.types import (
    Draft,
    EngineCapacity,
    EngineChunk,
    EngineMetrics,
    FinishReason,
    Sampling,
    SpeculationStats,
)

END, STOP, LENGTH = FinishReason.END_ID, FinishReason.STOP, FinishReason.LENGTH
STATS = SpeculationStats()


@pytest.mark.parametrize(
    ("drafted", "answered", "told", "verdict", "finish"),
    [
        ((4, 5), (4, 5, 6), None, (2, 3), None),
        ((4, 5), (4, 9), None, (1, 2), None),
        ((4, 5), (9,), None, (0, 1), None),
        ((4, 5), (4, 5), None, (2, 2), END),
        ((4, 5), (4,), None, (1, 1), END),
        ((4, 5), (), None, (0, 0), END),
        ((), (), None, (0, 0), END),
        ((), (4,), None, (0, 1), None),
        ((4, 5), (4, 9), LENGTH, (1, 2), None),
        ((4, 5), (4, 5), LENGTH, (2, 2), LENGTH),
        ((4, 5), (4, 9), STOP, (1, 2), STOP),
        ((4, 5), (4, 9), END, (1, 2), END),
        ((4, 5), (7, 8, 9), None, (0, 3), None),
        ((4, 5), (7, 8), None, (0, 2), END),
        ((4, 5), (4, 7, 5), None, (1, 2), STOP),
    ],
)
def test_the_ids_tell_whether_the_answer_ended(
    drafted: tuple[int, ...],
    answered: tuple[int, ...],
    told: FinishReason | None,
    verdict: tuple[int, int],
    finish: FinishReason | None,
) -> None:
    """One token of the target's own ends each round; where it is missing, the end was met."""
    progress = Progress(ask((1,), stop_sequences=((4, 7),)))
    assert progress.take_round(drafted, answered, told) == verdict
    assert progress.finish is finish


def test_a_stop_sequence_may_span_rounds_and_waits_for_the_minimum() -> None:
    """The engine sees its first half as prompt; before the minimum it does not count."""
    request = ask((7, 8), stop_sequences=((8, 9),), sampling=Sampling(min_tokens=3))
    progress = Progress(request)
    progress.append((9,))  # with the prompt's last token it would be one
    progress.take_round((8,), (8, 8), None)
    assert progress.finish is None
    assert progress.take_round((9,), (9, 5), None) == (1, 1)
    assert (progress.finish, progress.ids) == (STOP, [7, 8, 9, 8, 8, 9])


def test_there_is_room_for_a_whole_round_or_for_none() -> None:
    """One token of the budget is the target's own; the engine counts draft and answer both."""
    assert Progress(ask((1,), max_tokens=5)).max_draft == 4
    assert Progress(ask((1,), max_tokens=1)).max_draft == 0
    ten = EngineCapacity(max_sequence_tokens=10)
    assert Progress(ask((1,) * 4, max_tokens=50), ten).max_draft == 2
    assert Progress(ask((1,) * 4, max_tokens=50), ten).remaining == 6
    assert Progress(ask((1,) * 12, max_tokens=50), ten).max_draft == 0


def test_no_request_has_a_longer_prompt_than_the_engine_takes() -> None:
    """What follows a round, or a plain request, has the answer so far as its prompt."""
    progress = Progress(ask((1,) * 4, max_tokens=50), EngineCapacity(max_prompt_tokens=8))
    assert (progress.max_draft, progress.plain_tokens(4), progress.plain_tokens(5)) == (3, 4, 50)
    progress.append((5, 6, 7))
    assert (progress.max_draft, progress.plain_tokens(1), progress.plain_tokens(2)) == (0, 1, 47)


def test_a_round_that_shows_its_end_id_ends_there_and_only_there() -> None:
    """Some runtimes draw the token again that they have just rejected: that is no end."""
    progress = Progress(ask((1,), end_id=9))
    assert progress.take_round((4, 5), (4,), None, shows_end=True) == (1, 1)
    assert progress.finish is None
    assert progress.take_round((4, 9), (4, 9), None, shows_end=True) == (2, 1)
    assert (progress.finish, progress.ids) == (END, [1, 4, 4])


def test_what_is_left_of_the_minimum_is_said_aloud() -> None:
    """Absent, an engine may take it for 1 and forbid the end id at the start of every round."""
    progress = Progress(ask((1,), sampling=Sampling(top_k=1, min_tokens=2)))
    silent = Progress(ask((1,)))
    said = [progress.ask_target(1).sampling.min_tokens]
    assert silent.ask_target(1).sampling.min_tokens is None
    for token in (5, 6, 7):
        progress.append((token,))
        silent.append((token,))
        draft = Draft(token_ids=(1,))
        said.append(progress.ask_target(2, draft=draft).sampling.min_tokens)
    assert said == [2, 1, 0, 0]
    assert silent.ask_target(1).sampling.min_tokens == 0
    assert progress.ask_draft((1,), 1).sampling.min_tokens == 0


def test_every_request_of_a_run_has_its_own_id() -> None:
    """Engines want ids that are unique among running requests."""
    progress = Progress(ask())
    made = [progress.ask_target(1, streaming=True), progress.ask_draft((), 1)]
    made.append(progress.ask_target(2, draft=Draft(token_ids=(1,))))
    assert len({request.request_id for request in made}) == 3


def test_seeds_fit_the_wire_and_differ_by_round_and_by_engine() -> None:
    """63 bits, from the caller's seed and the number of generated tokens."""
    seeds = {round_seed(seed, n, who) for seed in (0, 1) for n in (0, 1, 2) for who in "td"}
    assert len(seeds) == 12
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert round_seed(7, 3) == round_seed(7, 3)


def test_sums_run_on_where_an_engine_gives_only_sums() -> None:
    """Each request begins its sum anew; the answer's does not."""
    progress = Progress(ask())
    sums = []
    for parts in ((-1.0, -3.0), (-2.0,)):
        progress.ask_target(2)
        for part in parts:
            chunk = EngineChunk(token_ids=(1,), cum_log_prob=part)
            sums.append(progress.chunk(chunk, 1, STATS).cum_log_prob)
    assert sums == [-1.0, -3.0, -5.0]
    assert progress.chunk(EngineChunk(token_ids=()), 0, STATS).cum_log_prob is None


def test_times_of_an_answer_span_its_requests() -> None:
    """First things from the first request, the last token from the last, counts added up."""
    one = EngineMetrics(arrival_time_ns=1, last_token_time_ns=2, total_draft_tokens=3)
    other = replace(one, arrival_time_ns=8, last_token_time_ns=9)
    progress = Progress(ask())
    progress.ask_target(1)
    early = progress.chunk(EngineChunk(token_ids=(), final=True, metrics=one), 0, STATS)
    progress.ask_target(1)
    # An engine that reports with every response counts from the request's beginning each time.
    progress.chunk(EngineChunk(token_ids=(5,), metrics=other), 1, STATS)
    progress.finish = END
    last = progress.chunk(EngineChunk(token_ids=(), final=True, metrics=other), 0, STATS)
    assert (early.final, early.metrics) == (False, one)
    assert last.metrics == EngineMetrics(
        arrival_time_ns=1, last_token_time_ns=9, total_draft_tokens=6
    )
