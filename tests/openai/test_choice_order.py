"""Choices of a stream begin in order, whichever has text first."""

from __future__ import annotations

import json
from itertools import permutations

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from tests.helpers.openai_server import MODEL
from tests.helpers.scripted_text import tokenizer
from trtllm_bls.openai.chat import ChatResponse
from trtllm_bls.openai.conversation import ChatModel
from trtllm_bls.openai.schema import ChatCompletionRequest, decode
from trtllm_bls.orchestrator.chat_turn import ChatFormats, ChatTurns
from trtllm_bls.types import Ending, FinishReason, TextChunk

END = Ending(finish_reason=FinishReason.END_ID, prompt_tokens=1, completion_tokens=1)


@pytest.mark.parametrize("order", [*permutations(range(3)), (2,), (1, 2)])
def test_openais_stream_helper_reads_choices_in_any_order(order: tuple[int, ...]) -> None:
    """A choice whose beginning could become a stop string has its first text after the others'."""
    fields = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "n": 3}
    request = decode(json.dumps({**fields, "stream": True}).encode(), ChatCompletionRequest)
    model = ChatModel(tokenizer(), ChatTurns(tokenizer(), ChatFormats()))
    response = ChatResponse(request, model)
    sent = [
        response.add(index, TextChunk(text=f"text {index}", sequence_index=index))
        for index in order
    ]
    sent += [
        response.add(index, TextChunk(text="", sequence_index=index, ending=END))
        for index in range(3)
    ]
    lines = b"".join([*sent, response.last_events()]).split(b"\n\n")
    state = ChatCompletionStreamState()
    begun: list[int] = []
    for line in lines:
        if not line.startswith(b"data: {"):
            continue
        chunk = ChatCompletionChunk.model_validate_json(line[6:])
        state.handle_chunk(chunk)
        begun += [choice.index for choice in chunk.choices if choice.delta.role]
    assert begun == [0, 1, 2]
    texts = [choice.message.content for choice in state.get_final_completion().choices]
    assert texts == [f"text {index}" if index in order else "" for index in range(3)]
