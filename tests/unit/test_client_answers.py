"""What is made of the events of one answer: figures, text on a terminal, joined ids."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2
from tritonclient.utils import serialize_byte_tensor

from trtllm_bls.client import Event
from trtllm_bls.client.client import read_event
from trtllm_bls.client.terminal import ClientReply
from trtllm_bls.client.terminal_generate import JsonDisplay, TextDisplay
from trtllm_bls.client.terminal_tokens import TokenAnswer, agrees


def said(*texts: str, at: float = 0.0, **more: Any) -> Event:
    return Event(texts=texts, outputs={}, received_at=at, **more)


def brought(beams: list[list[int]], lengths: list[int], **more: Any) -> Event:
    outputs = {"output_ids": np.array([beams]), "sequence_length": np.array([lengths])}
    return Event(outputs=outputs, received_at=0.0, **more)


def reply_of(*events: Event) -> ClientReply:
    reply = ClientReply(max_tokens=8)
    reply.sent_at = 10.0
    for event in events:
        reply.add(event)
    return reply


def shown(capsys: pytest.CaptureFixture[str], display: Any, *events: Event) -> str:
    for event in events:
        display.event(event, at_ms=1.0)
    display.end(reply_of(*events), None)
    return capsys.readouterr().out


# --- responses --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2,), (1, 2), (2, 1)])
def test_text_is_read_with_and_without_a_batch_dimension(shape: tuple[int, ...]) -> None:
    """Servers send one element per beam in either shape; no element is lost."""
    response = service_pb2.ModelInferResponse()
    response.outputs.add(name="text_output", datatype="BYTES", shape=shape)
    beams = np.array(["é".encode(), b"b"], object)
    response.raw_output_contents.append(serialize_byte_tensor(beams).item())
    assert read_event(response, 0.0).texts == ("é", "b")


# --- figures --------------------------------------------------------------------------------


def test_times_run_from_sending_to_text() -> None:
    """Responses without text (held back, or the bare final flag) do not count as arrivals."""
    found = reply_of(
        said("", at=10.5),
        said("a", at=11.0),
        said("b", at=11.1),
        said("c", at=11.3, num_input_tokens=3, num_output_tokens=4),
        said(at=20.0, final=True),
    ).figures()
    assert (found["responses"], found["ttft_ms"]) == (3, 1000.0)
    assert found["gap_p50_ms"] == pytest.approx(150)
    assert found["gap_p99_ms"] == pytest.approx(199)
    assert found["duration_ms"] == pytest.approx(1300)
    assert found["tokens_per_s"] == pytest.approx(4 / 1.3)
    assert (found["num_input_tokens"], found["num_output_tokens"]) == (3, 4)


def test_counts_of_responses_and_of_sequences_both_add_up() -> None:
    """Some servers count each response, some the sequence at its end."""
    assert reply_of(*[said("a", num_output_tokens=n) for n in (1, 2)]).completion_tokens == 3


def test_nothing_received_is_nothing_measured() -> None:
    """And what the server did not count is not claimed to be known."""
    reply = reply_of()
    found = reply.figures()
    assert [found[name] for name in ("ttft_ms", "gap_p50_ms", "tokens_per_s")] == [None] * 3
    assert reply.lines() == [
        "ended: complete",
        "tokens: at least 0 of 8 asked for",
        "responses with text: 0 in 0.00 s",
    ]


def test_the_ending_is_the_server_s_word_unless_this_side_ended_it() -> None:
    """Each sequence's reason, in order; a stop names the string."""
    events = [
        said("b", sequence_index=1, finish_reason="length"),
        said("a", sequence_index=0, finish_reason="stop", stop_reason="\n"),
    ]
    reply = reply_of(*events)
    assert reply.figures()["ended"] == "stop at '\\n', length"
    reply.ended_here = "interrupted"
    assert reply.figures()["ended"] == "interrupted"


def test_several_answers_may_have_more_tokens_than_one_was_asked_for() -> None:
    """The limit is that of each."""
    lines = reply_of(said("a", num_output_tokens=8), said("b", num_output_tokens=8)).lines()
    assert "tokens: 16 of 8 asked for in each answer" in lines


# --- text -----------------------------------------------------------------------------------


def test_one_answer_is_shown_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    """The text alone, the last line ended."""
    display = TextDisplay(shows_at_end=False, accumulates=False)
    display.event(said("Hel"), at_ms=1.0)
    assert capsys.readouterr().out == "Hel"
    assert shown(capsys, display, said("lo"), said(final=True)) == "lo\n"


def test_an_ended_line_is_not_ended_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither is a line that never began."""
    assert shown(capsys, TextDisplay(shows_at_end=False, accumulates=False), said("a\n")) == "a\n"
    assert shown(capsys, TextDisplay(shows_at_end=False, accumulates=False)) == ""


def test_several_answers_do_not_run_into_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    """They are shown whole, in the order of their indices."""
    events = [said("b", sequence_index=1), said("a"), said("c", sequence_index=1)]
    out = shown(capsys, TextDisplay(shows_at_end=True, accumulates=False), *events)
    assert out == "--- 0 ---\na\n--- 1 ---\nbc\n"


def test_of_whole_texts_only_the_new_part_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """A server that takes back what it said is believed, on a new line."""
    display = TextDisplay(shows_at_end=False, accumulates=True)
    assert shown(capsys, display, said("a"), said("ab"), said("aé")) == "ab\naé\n"


def test_json_lines_hold_arrays_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Strings are decoded, and what JSON cannot say (infinity) is null."""
    outputs = {
        "output_log_probs": np.array([[[-0.5, -np.inf]]], np.float32),
        "names": np.array([["ä".encode()]], object),
    }
    event = Event(texts=("a", "b"), outputs=outputs, received_at=0.0)
    line = json.loads(shown(capsys, JsonDisplay(), event).splitlines()[0])
    assert (line["text"], line["texts"]) == ("a", ["a", "b"])
    assert line["outputs"] == {"output_log_probs": [[[-0.5, None]]], "names": [["ä"]]}


# --- ids ------------------------------------------------------------------------------------


def answer(**how: Any) -> TokenAnswer:
    defaults = {"streaming": True, "beam_width": 1, "excluded": False}
    return TokenAnswer([1, 2], **(defaults | how))


def test_streamed_ids_follow_each_other() -> None:
    """Padding beyond the length is no id, and a response without ids brings none."""
    ids = answer()
    assert ids.add(brought([[5, 6, -1]], [2])) == {(0, 0): [5, 6]}
    assert ids.add(brought([[7]], [1])) == {(0, 0): [7]}
    assert ids.add(brought([[]], [0])) == {(0, 0): []}
    assert ids.add(said()) == {}
    assert (ids.generated, ids.sequences) == ({(0, 0): [5, 6, 7]}, {(0, 0): [1, 2, 5, 6, 7]})


def test_streamed_logits_are_joined_and_other_outputs_are_the_last() -> None:
    """One step of logits comes with each response."""
    ids = answer()
    for step in (1, 2):
        event = brought([[step]], [1], num_output_tokens=step)
        logits = {"generation_logits": np.full((1, 1, 1, 3), step)}
        ids.add(replace(event, outputs={**event.outputs, **logits}))
    assert ids.outputs["generation_logits"][0, :, 0, 0].tolist() == [1, 2]
    assert ids.outputs["num_output_tokens"] == 2


def test_sequences_are_kept_apart() -> None:
    """By their index, whatever the order of arrival."""
    ids = answer(excluded=True)
    ids.add(brought([[8]], [1], sequence_index=1))
    ids.add(brought([[5]], [1], sequence_index=0))
    assert list(ids.sequences.items()) == [((0, 0), [5]), ((1, 0), [8])]


def test_streamed_beams_come_anew_each_time() -> None:
    """The engine may rewrite a beam, so the last word counts."""
    ids = answer(beam_width=2)
    ids.add(brought([[5, -1], [6, 7]], [1, 2]))
    ids.add(brought([[5, 9], [6, 8]], [2, 2]))
    assert ids.generated == {(0, 0): [5, 9], (0, 1): [6, 8]}


def test_a_whole_answer_repeats_the_prompt_unless_excluded() -> None:
    """Either way the prompt is told from what was generated."""
    with_prompt, without = answer(streaming=False), answer(streaming=False, excluded=True)
    with_prompt.add(brought([[1, 2, 5]], [3]))
    without.add(brought([[1, 2, 5]], [3]))
    assert (with_prompt.generated, with_prompt.sequences) == ({(0, 0): [5]}, {(0, 0): [1, 2, 5]})
    assert (without.generated, without.sequences) == ({(0, 0): [1, 2, 5]},) * 2


@pytest.mark.parametrize(
    ("actual", "threshold", "verdict"),
    [
        ([1, 2, 3, 4], 1.0, True),
        ([1, 2, 3], 1.0, False),
        ([1, 2, 3, 9], 0.7, True),
        ([1, 2, 3, 9], 0.75, False),  # strictly above
        ([1, 2, 3], 0.8, False),
        ([1, 2, 3, 4, 5], 0.79, True),
    ],
)
def test_ids_agree_by_share_of_positions(
    actual: list[int], threshold: float, verdict: bool
) -> None:
    """Missing and surplus ids count against it."""
    assert agrees(actual, [1, 2, 3, 4], threshold) is verdict
