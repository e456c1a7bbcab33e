"""What runs together in a step, what is computed again, and who is disturbed by whom."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.embedded_steps import POISON, Steps, checkpoint, generated, prompt, request
from trtllm_bls.engines.embedded.model import load
from trtllm_bls.engines.embedded.slots import Slots
from trtllm_bls.errors import EngineError, SettingsError
from trtllm_bls.settings.parameters import EngineParameters
from trtllm_bls.types import EngineChunk, FinishReason, Wants


def test_a_step_serves_a_prompt_and_every_running_sequence() -> None:
    """One forward: one row per running sequence, and the newcomer's prompt."""
    steps = Steps()
    first = steps.add(request(prompt(10)))
    assert steps.step() == 10
    second = steps.add(request(prompt(7, start=3)))
    assert steps.step() == 1 + 7
    assert (len(steps.text(first)), len(steps.text(second))) == (2, 1)


def test_a_long_prompt_does_not_stall_running_streams() -> None:
    """Every step of a long prompt still gives each stream its token."""
    steps = Steps(max_tokens_per_step=32)
    stream = steps.add(request(prompt(4), 40))
    steps.step()
    steps.add(request(prompt(150, start=3), 2))
    assert [steps.step() for _ in range(4)] == [32, 32, 32, 32]
    assert len(steps.text(stream)) == 5
    steps.run()
    assert steps.text(stream) == generated(prompt(4), 40)


def test_short_prompts_pass_a_long_one_but_do_not_starve_it() -> None:
    """Short segments take at most half of the rows while a long prompt waits."""
    steps = Steps(max_batch=3, max_tokens_per_step=40)
    steps.add(request(prompt(200, start=3), 1))
    steps.step()
    short = [steps.add(request(prompt(15, start=n), 1)) for n in (6, 7)]
    assert steps.step() == 40
    assert [len(steps.text(s)) for s in short] == [1, 0]  # 15 of 20, and no room for 15 more
    assert steps.step() == 40
    assert [len(steps.text(s)) for s in short] == [1, 1]


def test_requests_start_in_order_of_arrival() -> None:
    """A free slot goes to whoever waits longest."""
    steps = Steps(max_batch=2)
    asked = [steps.add(request(prompt(5, start=n), 3 + n)) for n in range(4)]
    started: list[int] = []
    while steps.batcher.num_present:
        steps.step()
        started += [n for n, s in enumerate(asked) if steps.text(s) and n not in started]
    assert started == [0, 1, 2, 3]


def test_a_sequence_that_waits_for_its_prompt_keeps_its_place() -> None:
    """Others may pass it meanwhile, but the next free slot is its own."""
    steps = Steps(max_batch=2)
    asked = steps.add(request(prompt(9), 9, num_return_sequences=2))
    passing = steps.add(request(prompt(5, start=3), 1))
    last = steps.add(request(prompt(5, start=4), 9))
    steps.step()
    assert steps.text(passing)
    steps.step()
    assert steps.text(asked, 1)
    assert not steps.text(last)


def test_a_prompt_that_was_seen_is_not_computed_again() -> None:
    """The same prompt costs one row; a longer one costs what is new, even across other requests."""
    steps = Steps()
    answer = steps.answer(request(prompt(40), 6))
    steps.answer(request(prompt(20, start=3), 6))
    assert steps.step() == 0
    again = steps.add(request(prompt(40), 6))
    assert steps.step() == 1
    steps.run()
    assert steps.text(again) == answer
    longer = (*prompt(40), *answer, 17, 18, 19)
    steps.add(request(longer, 1))
    assert steps.step() == 4  # the last token of the answer was chosen, but never computed


def test_a_prompt_of_a_running_request_is_copied() -> None:
    """The beginning is taken from a sequence that still runs, and neither notices."""
    steps = Steps()
    first = steps.add(request(prompt(40), 10))
    steps.step(2)
    second = steps.add(request((*prompt(40), 3, 4), 10))
    assert steps.step() == 1 + 2
    steps.run()
    assert steps.text(first) == generated(prompt(40), 10)
    assert steps.text(second) == generated((*prompt(40), 3, 4), 10)


def test_sequences_of_one_request_compute_their_prompt_once() -> None:
    """The second and third sequence wait one step and share the first one's prompt."""
    steps = Steps()
    asked = steps.add(request(prompt(30), 4, num_return_sequences=3))
    assert steps.step() == 30
    assert steps.step() == 3
    steps.run()
    assert all(steps.text(asked, n) == generated(prompt(30), 4) for n in range(3))


def test_more_sequences_than_slots_follow_one_another() -> None:
    """Sequences that find no slot wait for one."""
    steps = Steps(max_batch=1)
    asked = steps.add(request(prompt(9), 3, num_return_sequences=3))
    steps.run()
    assert [steps.text(asked, n) for n in range(3)] == [generated(prompt(9), 3)] * 3


def test_a_cancelled_request_frees_its_slot_within_a_step() -> None:
    """The one who waits gets the slot in the very step after the cancel."""
    steps = Steps(max_batch=1)
    first = steps.add(request(prompt(5), 100))
    waiting = steps.add(request(prompt(5, start=3), 2))
    steps.step(3)
    assert not steps.text(waiting)
    first.cancelled = True
    steps.step()
    assert steps.text(waiting)
    last = steps.chunks(first)[-1]
    assert (last.final, last.finish_reason) == (True, FinishReason.CANCELLED)
    assert len(steps.text(first)) == 3


def test_a_request_cancelled_while_it_waits_never_runs() -> None:
    """It leaves the queue with one final chunk and without a row computed."""
    steps = Steps(max_batch=1)
    steps.add(request(prompt(5), 4))
    steps.step()
    waiting = steps.add(request(prompt(50), 4, streaming=False))
    waiting.cancelled = True
    assert steps.run() == 3
    assert [c.finish_reason for c in steps.chunks(waiting)] == [FinishReason.CANCELLED]


def test_non_finite_logits_end_only_their_own_request() -> None:
    """The neighbour reads what it would read alone."""
    steps = Steps("poisoned", max_batch=2)
    good = steps.add(request(prompt(6), 12))
    bad = steps.add(request((*prompt(6, start=3), POISON, 7), 12))
    steps.run()
    (error,) = steps.events(bad)
    assert isinstance(error, EngineError)
    assert "not finite" in str(error)
    assert steps.text(good) == generated(prompt(6), 12, "poisoned")


def test_a_slot_that_held_non_finite_numbers_serves_again_clean() -> None:
    """What a failed request left behind its successor's last token does not leak into it."""
    steps = Steps("poisoned", max_batch=2)
    steps.add(request((*prompt(40, start=3), POISON, 7), 12))
    steps.run()
    both = {n: steps.add(request(prompt(n, start=4), 5)) for n in (50, 30)}
    steps.run()
    for n, submission in both.items():
        assert steps.text(submission) == generated(prompt(n, start=4), 5, "poisoned")


def test_what_a_failed_request_had_reused_is_forgotten_with_it() -> None:
    """A scrubbed slot is empty, also where it held the tokens of a healthy request before."""
    steps = Steps("poisoned", max_batch=1)
    steps.answer(request(prompt(20), 1))
    steps.add(request((*prompt(20), POISON), 1))
    steps.run()
    again = (*prompt(20), 3)
    assert steps.answer(request(again, 5)) == generated(again, 5, "poisoned")


def test_every_sequence_of_a_failing_request_ends_with_one_error() -> None:
    """Its other sequences leave without being computed."""
    steps = Steps("poisoned")
    bad = steps.add(request((POISON, *prompt(80)), 5, num_return_sequences=3))
    rows = steps.run()
    assert rows <= 64
    assert sum(isinstance(event, EngineError) for event in steps.events(bad)) == 1


def test_a_step_that_raises_fails_its_requests_and_the_next_step_works() -> None:
    """The model breaking once is an error for those it was computing, and for nobody later."""
    steps = Steps()
    forward = steps.runner.forward
    steps.runner.forward = _breaks  # type: ignore[method-assign]
    try:
        asked = [steps.add(request(prompt(5, start=n), 5)) for n in (1, 2)]
        steps.step()
    finally:
        steps.runner.forward = forward  # type: ignore[method-assign]
    for submission in asked:
        assert [type(event) for event in steps.events(submission)] == [EngineError]
    assert not steps.batcher.num_present
    assert steps.answer(request(prompt(5), 5)) == generated(prompt(5), 5)


def test_a_request_cancelled_while_its_step_fails_still_ends() -> None:
    """Whoever reads on after a cancel never waits for nothing."""
    steps = Steps()
    submission = steps.add(request(prompt(5), 5))

    def cancelled_and_broken(segments: object) -> torch.Tensor:
        submission.cancelled = True
        return _breaks(segments)

    forward = steps.runner.forward
    steps.runner.forward = cancelled_and_broken  # type: ignore[method-assign]
    try:
        steps.step()
    finally:
        steps.runner.forward = forward  # type: ignore[method-assign]
    assert [type(event) for event in steps.events(submission)] == [EngineError]


def _breaks(segments: object) -> torch.Tensor:
    raise RuntimeError("out of memory")


def test_context_logits_are_whole_even_where_the_prompt_was_seen() -> None:
    """Who wants the prompt's logits pays for the prompt again, in chunks or not."""
    steps = Steps(max_tokens_per_step=24)
    steps.answer(request(prompt(40), 2))
    asked = steps.add(request(prompt(40), 2, wants=Wants(context_logits=True)))
    assert steps.run() == 40 + 1
    first, second = steps.chunks(asked)
    assert first.context_logits is not None
    assert first.context_logits.shape[0] == 40
    assert second.context_logits is None


def test_what_is_read_once_and_finished_says_so_on_its_last_chunk() -> None:
    """A non-streaming request speaks once per sequence."""
    steps = Steps()
    asked = steps.add(request(prompt(6), 5, streaming=False, num_return_sequences=2))
    steps.run()
    spoken = [(c.sequence_index, len(c.token_ids), c.final) for c in steps.chunks(asked)]
    assert spoken == [(0, 5, True), (1, 5, True)]
    assert all(isinstance(event, EngineChunk) for event in steps.events(asked))


def test_settings_that_could_starve_a_request_are_refused() -> None:
    """A step must hold a row per running sequence and one draft, or somebody never runs."""
    with pytest.raises(SettingsError, match="max_batch is 0"):
        load(EngineParameters(model_dir=checkpoint(), max_batch=0))
    with pytest.raises(SettingsError, match="at least 25"):
        load(
            EngineParameters(
                model_dir=checkpoint(), max_batch=8, max_draft_len=16, max_tokens_per_step=24
            )
        )


# --- slots alone -----------------------------------------------------------------------------

CPU = torch.device("cpu")


def _held(slots: Slots, *tokens: int) -> int:
    """A slot that holds these tokens, each with its own number as its key."""
    slot, _ = slots.claim(tokens, reuse=True)
    slots.write(slot, 0, tokens)
    keys, _ = slots.layer(0, torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))
    keys[slot, 0, : len(tokens), 0] = torch.tensor(tokens, dtype=torch.float32)
    return slot


def _keys(slots: Slots, slot: int, count: int) -> list[float]:
    keys, _ = slots.layer(0, torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))
    found: list[float] = keys[slot, 0, :count, 0].tolist()
    return found


def test_a_slot_with_a_longer_conversation_is_copied_from_rather_than_taken() -> None:
    """Sharing little of what a slot holds does not cost that slot its conversation."""
    slots = Slots(2, 16, CPU)
    long = _held(slots, 1, 2, 3, 4, 5, 6, 7, 8)
    slots.release(long)
    assert slots.claim((1, 2, 9, 9), reuse=True) == (1 - long, 2)
    assert _keys(slots, 1 - long, 3) == [1, 2, 0]
    assert _keys(slots, long, 8) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_of_slots_that_share_as_much_the_one_idle_longest_is_taken() -> None:
    """A beginning that all conversations share does not make the newest one pay."""
    slots = Slots(2, 16, CPU)
    older, newer = _held(slots, 1, 2), _held(slots, 1, 2, 3)
    slots.release(older)
    slots.release(newer)
    assert slots.claim((1, 2, 9), reuse=True) == (older, 2)


def test_a_copy_that_fails_leaves_its_slot_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory, say: nobody else would give it back."""
    slots = Slots(2, 16, CPU)
    _held(slots, 1, 2, 3)

    def out_of_memory() -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setattr(slots, "_tensors", out_of_memory)
        slots.claim((1, 2, 9), reuse=True)
    assert slots.claim((7, 8), reuse=True) == (1, 0)


def test_the_last_token_of_a_prompt_is_never_reused() -> None:
    """Its logits are needed, so it must be computed."""
    slots = Slots(1, 16, CPU)
    slots.release(_held(slots, 1, 2, 3))
    assert slots.claim((1, 2, 3), reuse=True) == (0, 2)


def test_a_scrubbed_slot_shares_nothing() -> None:
    """Its tokens are still written there, but they no longer count, and its keys are gone."""
    slots = Slots(1, 16, CPU)
    slot = _held(slots, 1, 2, 3, 4, 5)
    slots.scrub(slot)
    slots.release(slot)
    assert slots.claim((1, 2, 3, 4, 5), reuse=True) == (slot, 0)
    assert _keys(slots, slot, 5) == [0, 0, 0, 0, 0]


def test_without_reuse_the_slot_idle_longest_is_taken() -> None:
    """A request that computes all of its prompt does not spoil the slot of another."""
    slots = Slots(2, 16, CPU)
    first, second = _held(slots, 1, 2), _held(slots, 3, 4)
    slots.release(second)
    slots.release(first)
    assert slots.claim((1, 2, 3), reuse=False) == (second, 0)
