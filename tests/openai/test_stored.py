"""Responses that are stored: what later requests get of them, and what is lost, and when."""

from __future__ import annotations

import itertools
import json
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from hashlib import sha256
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import openai
import pytest

from doubles.scripted import Fault, Script
from doubles.speaking import SpeakingEngine
from tests.helpers.openai_server import MODEL, ScriptedBackend, serving
from tests.helpers.scripted_text import tokenizer_with_tools
from tests.helpers.waiting import join, until
from tests.openai.test_agents import Speaking, events
from trtllm_bls.errors import EngineError, SettingsError
from trtllm_bls.openai import responses, stored
from trtllm_bls.openai.api_errors import ApiError
from trtllm_bls.openai.stored import PrivateDirectory, Stored, StoredResponses

CALL = '<tool_call>\n{"name": "look", "arguments": {"q": "x"}}\n</tool_call>'
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
Speak = Callable[..., Speaking]


@pytest.fixture
def speak() -> Iterator[Speak]:
    """Starts a server whose model says the given text; it shows calls and thinks."""
    with ExitStack() as stack:

        def start(text: str = "Done.", script: Script | None = None, **settings: Any) -> Speaking:
            engine = SpeakingEngine(tokenizer_with_tools(), lambda prompt: text, script)
            backend = ScriptedBackend(engine, tokenizer_with_tools())
            formats = {"tool_parser": "hermes", "reasoning_parser": "think"}
            api = stack.enter_context(serving(engine, backend, **formats, **settings))
            return Speaking(api, engine)

        yield start


def respond(model: Speaking, **body: Any) -> dict[str, Any]:
    """A response, streamed or whole."""
    status, told = model.post("/v1/responses", {"input": "Hi", **body})
    assert status == 200, told
    found: dict[str, Any] = events(told)[-1]["response"] if body.get("stream") else json.loads(told)
    return found


def refusal(model: Speaking, **body: Any) -> tuple[int, dict[str, Any]]:
    status, told = model.post("/v1/responses", {"input": "Hi", **body})
    error: dict[str, Any] = json.loads(told)["error"]
    return status, error


# --- chains ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_chain_is_the_whole_conversation(speak: Speak, stream: bool) -> None:
    """Calls and their results too; ``instructions`` are those of the request alone."""
    model = speak("<think>\nWell.\n</think>\n\nI look." + CALL)
    first = respond(model, input="Where?", tools=[LOOK], instructions="Be brief.", stream=stream)
    assert first["store"] is True
    call = first["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "found"}
    second = respond(
        model, input=[result], tools=[LOOK], previous_response_id=first["id"], stream=stream
    )
    assert second["previous_response_id"] == first["id"]
    respond(model, input="And now?", previous_response_id=second["id"], stream=stream)
    *_, prompt = model.engine.prompts
    places = [prompt.index(text) for text in ("Where?", "I look.", '"look"', "found", "And now?")]
    assert places == sorted(places) and prompt.count("I look.") == 2
    assert "Be brief." in model.engine.prompts[0] and "Be brief." not in prompt


@pytest.mark.parametrize("stream", [False, True])
def test_references_stand_for_items_of_earlier_responses(speak: Speak, stream: bool) -> None:
    """The AI SDK sends them in the second step of each loop of calls, and the calls themselves."""
    model = speak("<think>\nWell.\n</think>\n\nI look." + CALL)
    first = respond(model, input="Where?", tools=[LOOK], stream=stream)
    thought, said, call = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "here"}
    user = {"role": "user", "content": [{"type": "input_text", "text": "Where?"}]}
    inline = {key: call[key] for key in ("type", "call_id", "name", "arguments")}
    references = [{"type": "item_reference", "id": thought["id"]}, {"id": said["id"]}]
    body = {"input": [user, *references, inline, result], "tools": [LOOK]}
    second = respond(model, **body)
    assert "I look." in model.engine.prompts[-1] and "here" in model.engine.prompts[-1]
    # The row has the items themselves: it needs the first response no longer.
    model.openai.responses.delete(first["id"])
    respond(model, input="Go on.", previous_response_id=second["id"])
    assert model.engine.prompts[-1].count("I look.") == 2
    status, counted = model.post(
        "/v1/responses/input_tokens", {"previous_response_id": second["id"]}
    )
    assert status == 200 and json.loads(counted)["input_tokens"] > 40


def test_a_chain_that_lacks_a_link_is_refused(speak: Speak) -> None:
    """Never shortened; with the code by which clients send the whole conversation."""
    model = speak()
    first = respond(model)
    second = respond(model, previous_response_id=first["id"])
    third = respond(model, previous_response_id=second["id"])
    assert model.openai.responses.delete(second["id"]) is None
    for missing in (second["id"], third["id"], "resp_none"):
        with pytest.raises(openai.BadRequestError) as told:
            model.openai.responses.create(model=MODEL, input="x", previous_response_id=missing)
        assert told.value.code == "previous_response_not_found"
        assert told.value.param == "previous_response_id"
        assert f"Previous response with id '{missing}' not found." in str(told.value)
    respond(model, previous_response_id=first["id"])


@pytest.mark.parametrize(
    ("text", "references", "is_answered"), [(1_000, 3, True), (1_000, 4, False), (50, 40, False)]
)
def test_references_cost_what_they_stand_for(
    speak: Speak, text: int, references: int, is_answered: bool
) -> None:
    """60 bytes stand for a whole answer, and may be repeated: all of them count."""
    model = speak("w" * text, max_body_bytes=4_000)
    (item,) = respond(model)["output"]
    reference = {"type": "item_reference", "id": item["id"]}
    size = len(json.dumps(item, separators=(",", ":")))
    assert (references * size <= 4_000) == is_answered
    if is_answered:
        respond(model, input=[reference] * references)
        assert model.engine.prompts[-1].count(item["content"][0]["text"]) == references
        return
    status, error = refusal(model, input=[reference] * references)
    assert (status, error["param"]) == (400, "input")
    assert "stored items of more than 4000 bytes (--max-body-bytes)" in error["message"]
    assert len(model.engine.prompts) == 1
    path = "/v1/responses/input_tokens"
    assert model.post(path, {"input": [reference] * references})[0] == 400


def test_items_are_counted_with_those_before_them(
    speak: Speak, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain of short requests is no way to have more items than one request may bring."""
    monkeypatch.setattr(responses, "MAX_ITEMS", 5)
    model = speak()
    said = [{"role": "user", "content": "Hi"}] * 2
    first = respond(model, input=said)
    second = respond(model, input=said[:1], previous_response_id=first["id"])
    status, error = refusal(model, input=said[:1], previous_response_id=second["id"])
    assert status == 400
    assert error["message"] == "input: has 6 items with those before it; at most 5 are allowed"


def test_references_read_a_bounded_number_of_bytes(tmp_path: Path) -> None:
    """Small items of large responses: their bodies are read, and count too."""
    with closing(store_in(tmp_path, max_chain_bytes=1000)) as store:
        for number in range(20):
            large = row(f"a{number}")
            body = json.loads(large.body) | {"instructions": "x" * 900}
            store.save("", replace(large, body=json.dumps(body).encode()))
        assert len(store.items("", [f"msg_a{number}" for number in range(5)])) == 5
        with pytest.raises(ApiError, match="stored items of more than 1000 bytes"):
            store.items("", [f"msg_a{number}" for number in range(20)])
        with pytest.raises(ApiError, match="stored items of more than 1000 bytes"):
            store.save("", row("b", size=2000))
            store.items("", ["msg_b"])


@pytest.mark.parametrize(("settings", "mend"), [({}, "set to true"), ({"store_bytes": 0}, "false")])
def test_a_lost_item_is_named(speak: Speak, settings: Any, mend: str) -> None:
    """In OpenAI's words, and with what helps here."""
    model = speak(**settings)
    asked = [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": "msg_none"}]
    status, error = refusal(model, input=asked)
    assert (status, error["param"], error["code"]) == (404, "input", None)
    assert error["message"].startswith("Item with id 'msg_none' not found. Items are not persisted")
    assert mend in error["message"]
    assert not model.engine.requests


def test_a_sentence_may_stand_for_lost_items(speak: Speak) -> None:
    """So that conversations of the AI SDK go on; a chain is refused all the same."""
    model = speak(lost_items="sentence")
    asked = [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": "msg_none"}]
    respond(model, input=[*asked, {"role": "user", "content": "Go on."}])
    assert "[This part of the conversation is no longer stored.]" in model.engine.prompts[-1]
    assert refusal(model, previous_response_id="resp_none")[0] == 400


def test_an_output_needs_a_call_of_the_chain(speak: Speak) -> None:
    """OpenAI refuses it, too; a conversation that is sent whole may have been cut by its client."""
    model = speak()
    first = respond(model)
    orphan = [{"type": "function_call_output", "call_id": "call_none", "output": "x"}]
    status, error = refusal(model, input=orphan, previous_response_id=first["id"])
    assert status == 400 and "call_none" in error["message"]
    respond(model, input=orphan)


def test_nothing_is_stored_unless_that_was_told(
    speak: Speak, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``store: false``, in a server without a store, and for inputs above the bound."""
    monkeypatch.setattr(responses, "STORED_RESPONSE_BYTES", 1000)
    for body, settings in (
        ({"store": False}, {}),
        ({}, {"store_bytes": 0}),
        ({"input": "x" * 1000}, {}),
    ):
        model = speak(**settings)
        made = respond(model, **body)
        assert made["store"] is False
        status, error = refusal(model, previous_response_id=made["id"])
        assert (status, error["code"]) == (400, "previous_response_not_found")
        with pytest.raises(openai.NotFoundError):
            model.openai.responses.retrieve(made["id"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_grew_too_large_says_at_its_end_that_it_is_not_stored(
    speak: Speak, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The output counts, and what is repeated of the request."""
    monkeypatch.setattr(responses, "STORED_RESPONSE_BYTES", 1500)
    large, small = speak("word " * 800), speak()
    _, told = large.post("/v1/responses", {"input": "Hi", "stream": True})
    assert events(told)[0]["response"]["store"] is True
    repeated = {"metadata": {"a": "x" * 1400}}
    for model, body in ((large, {}), (small, repeated)):
        made = respond(model, stream=stream, **body)
        assert made["store"] is False
        with pytest.raises(openai.NotFoundError):
            model.openai.responses.retrieve(made["id"])
    assert respond(small, stream=stream)["store"] is True


# --- answers that did not end well ------------------------------------------------------------


def test_an_answer_that_was_cut_is_stored(speak: Speak) -> None:
    """As far as it went; the next turn sees it."""
    model = speak("one two three four five six")
    for stream in (False, True):
        cut = respond(model, max_output_tokens=4, stream=stream)
        assert cut["status"] == "incomplete"
        respond(model, input="Go on.", previous_response_id=cut["id"])
        assert "assistant: one t" in model.engine.prompts[-1]


def test_an_answer_that_failed_or_was_left_is_stored(speak: Speak) -> None:
    """Its client knows its id since the stream began."""
    model = speak("one two three four five six")
    model.engine.fault = Fault(error=EngineError("the engine is lost"), after_tokens=3)
    failed = respond(model, stream=True)
    assert failed["status"] == "failed"
    kept = model.openai.responses.retrieve(failed["id"])
    assert (kept.status, kept.error.code, kept.error.message) == (
        *("failed", "server_error"),
        "the engine is lost",
    )
    assert kept.output[0].content[0].text.startswith("one")
    model.engine.fault = Fault(after_tokens=2)  # it stalls
    with closing(HTTPConnection(model.api.host, model.api.port, timeout=60)) as connection:
        sent = json.dumps({"input": "Hi", "stream": True})
        connection.request("POST", "/v1/responses", sent, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.readline()
        left = json.loads(answer.readline().removeprefix(b"data: "))["response"]["id"]
        answer.close()
    until(lambda: not model.engine.live)
    until(lambda: found(model, left))
    assert model.openai.responses.retrieve(left).status == "cancelled"
    model.engine.fault = None
    respond(model, input="Go on.", previous_response_id=left)


def found(model: Speaking, response_id: str) -> bool:
    try:
        model.openai.responses.retrieve(response_id)
    except openai.NotFoundError:
        return False
    return True


# --- what is asked of the store ----------------------------------------------------------------


def test_a_stored_response_is_given_back(speak: Speak) -> None:
    """As it was sent, streamed or not; and what it was made from, page by page."""
    model = speak("I look." + CALL)
    for stream in (False, True):
        first = respond(model, input="Where?", tools=[LOOK], metadata={"a": "b"}, stream=stream)
        kept = model.openai.responses.retrieve(first["id"])
        assert kept.model_dump(exclude_unset=True) == first
    call_id = first["output"][-1]["call_id"]
    result = {"type": "function_call_output", "call_id": call_id, "output": "here"}
    second = respond(model, input=[result], previous_response_id=first["id"])
    items = model.openai.responses.input_items.list(second["id"], order="asc")
    assert [item.type for item in items] == [
        *("message", "message", "function_call"),
        "function_call_output",
    ]
    assert items.data[0].content[0].text == "Where?" and items.data[0].id.startswith("msg_")
    newest = model.openai.responses.input_items.list(second["id"], limit=2)
    assert [item.type for item in newest.data] == ["function_call_output", "function_call"]
    assert newest.has_more and len(list(newest)) == 4  # page after page
    assert model.post(f"/v1/responses/{second['id']}/cancel", {}) == (
        400,
        '{"error":{"message":"Cannot cancel a synchronous response.",'
        '"type":"invalid_request_error","param":null,"code":null}}',
    )
    for ask in (
        lambda: model.openai.responses.retrieve("resp_none"),
        lambda: model.openai.responses.delete("resp_none"),
        lambda: model.openai.responses.cancel("resp_none"),
        lambda: model.openai.responses.input_items.list("resp_none"),
    ):
        with pytest.raises(openai.NotFoundError, match="Response with id 'resp_none' not found"):
            ask()


def test_a_key_sees_its_own_responses(speak: Speak) -> None:
    """For another key they are not there, nor their items; not even by the same id."""
    model = speak(keys=tuple(sha256(key).digest() for key in (b"first", b"second")))
    first, second = (
        openai.OpenAI(base_url=f"{model.api.url}/v1", api_key=key, max_retries=0)
        for key in ("first", "second")
    )
    named = {"extra_body": {"request_id": "named"}}
    made = first.responses.create(model=MODEL, input="mine", **named)
    reference: Any = {"type": "item_reference", "id": made.output[0].id}
    for lost in (
        lambda: second.responses.retrieve(made.id),
        lambda: second.responses.delete(made.id),
        lambda: second.responses.create(model=MODEL, input=[reference]),
        lambda: second.responses.create(model=MODEL, input="x", previous_response_id=made.id),
    ):
        with pytest.raises((openai.NotFoundError, openai.BadRequestError)):
            lost()
    second.responses.create(model=MODEL, input="theirs", **named)
    assert first.responses.input_items.list(made.id).data[0].content[0].text == "mine"
    assert first.responses.create(model=MODEL, input=[reference]).output_text == "Done."
    first.close(), second.close()


def test_a_store_that_cannot_be_written_costs_no_answer(
    speak: Speak, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log and the answer say so; requests that refer to it are to come again."""
    model = speak(store_dir=tmp_path)
    (tmp_path / stored._STORE_FILE).write_bytes(b"no database" * 1000)
    answer = respond(model)
    assert (answer["status"], answer["store"]) == ("completed", False)
    *_, last = model.openai.responses.create(model=MODEL, input="x", stream=True)
    assert (last.type, last.response.store) == ("response.completed", False)
    assert "is not stored: stored responses cannot be used: file is not a database" in caplog.text
    status, error = refusal(model, previous_response_id="resp_a")
    assert (status, error["code"]) == (503, "store_unavailable")


# --- the file -----------------------------------------------------------------------------------


def store_in(directory: Path, **bounds: Any) -> StoredResponses:
    bounds = {"max_bytes": 10**6, "max_s": 3600.0, "max_chain_bytes": 10**6, **bounds}
    return StoredResponses(directory, **bounds)


def row(name: str, parent: str | None = None, size: int = 100) -> Stored:
    """A response of about ``size`` bytes."""
    body = {"id": name, "output": [{"id": f"msg_{name}", "type": "message", "text": "x" * size}]}
    text = json.dumps(body).encode()
    return Stored(id=name, parent=parent, input=b'[{"a":1}]', body=text, items=[f"msg_{name}"])


SIZE = len(row("a", None, 200).body + row("a").input) + 4  # a longer name takes some more


numbers = itertools.count()


def names(store: StoredResponses, *asked: str) -> list[str]:
    """Which of them are there. Unlike other questions, this one is no use of theirs."""
    with store._transaction() as rows:
        kept = {name for (name,) in rows.execute("SELECT id FROM responses")}
        (total,) = rows.execute("SELECT bytes FROM total").fetchone()
        assert total == (rows.execute("SELECT sum(size) FROM responses").fetchone()[0] or 0)
        items = {name for (name,) in rows.execute("SELECT id FROM items")}
        assert items == {f"msg_{name}" for name in kept}
    return [name for name in asked if name in kept]


def test_the_least_used_goes_first(tmp_path: Path) -> None:
    """Of a chain its end, since using a response is a use of all before it."""
    with closing(store_in(tmp_path, max_bytes=5 * SIZE)) as store:
        for name, parent in (("a", None), ("b", "a"), ("c", "b"), ("d", None), ("e", None)):
            store.save("", row(name, parent, 200))
        assert store.conversation("", "b") is not None
        store.save("", row("f", None, 200))
        assert names(store, *"abcdef") == list("abdef")
        store.items("", ["msg_d"])
        store.save("", row("g", None, 200))
        assert names(store, *"abdefg") == list("abdfg")
        store.save("", row("h", None, 10_000))  # more than all
        assert names(store, *"abdfgh") == []


def test_a_chain_loses_its_end_first(tmp_path: Path) -> None:
    """Whatever is used in between: what is left of it can be continued."""
    with closing(store_in(tmp_path, max_bytes=10 * SIZE)) as store:
        for number in range(10):
            store.save("", row(f"a{number}", f"a{number - 1}" if number else None, 200))
        for number in range(6):
            store.save("", row(f"b{number}", None, 200))
            left = names(store, *(f"a{n}" for n in range(10)))
            assert left == [f"a{n}" for n in range(len(left))]
            assert not left or store.conversation("", left[-1]) is not None


def test_a_key_pushes_out_its_own_responses(tmp_path: Path) -> None:
    """One may have all of the room, and leaves half of it to others that need it."""

    def counts(store: StoredResponses) -> dict[str, int]:
        with store._transaction() as rows:
            totals = dict(rows.execute("SELECT owner, sum(size) FROM responses GROUP BY owner"))
            assert totals == dict(rows.execute("SELECT owner, bytes FROM owners"))
            return dict(rows.execute("SELECT owner, count(*) FROM responses GROUP BY owner"))

    with closing(store_in(tmp_path, max_bytes=10 * SIZE)) as store:
        for owner, number, expected in (
            *(("a", 12, {"a": 10}), ("b", 3, {"a": 7, "b": 3}), ("a", 9, {"a": 7, "b": 3})),
            *(("b", 9, {"a": 5, "b": 5}), ("c", 1, {"a": 4, "b": 5, "c": 1})),
        ):
            for _ in range(number):
                store.save(owner, row(f"{next(numbers):03}", None, 200))
            assert counts(store) == expected
        for owner in "abc":
            for name in names(store, *(f"{number:03}" for number in range(50))):
                store.delete(owner, name)
        assert counts(store) == {}


def test_a_file_of_an_earlier_version_gets_the_sums_of_its_keys(tmp_path: Path) -> None:
    """It has no table of them; its rows count from the first use on."""
    with closing(store_in(tmp_path)) as store:
        store.save("a", row("x"))
        with store._transaction() as rows:
            for kind, name in (("TRIGGER", "owner_added"), ("TRIGGER", "owner_removed")):
                rows.execute(f"DROP {kind} {name}")
            rows.execute("DROP TABLE owners")
    with closing(store_in(tmp_path)) as store:
        store.save("b", row("y"))
        with store._transaction() as rows:
            assert dict(rows.execute("SELECT owner, bytes FROM owners")) == dict(
                rows.execute("SELECT owner, size FROM responses")
            )


def test_bounds_of_age_and_of_chains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Age counts from the last use. A chain may have a thousand links, and the bytes of a body."""
    now = 1000.0
    monkeypatch.setattr(stored.time, "time", lambda: now)
    with closing(store_in(tmp_path, max_s=100.0, max_chain_bytes=900)) as store:
        store.save("", row("a"))
        store.save("", row("b"))
        now += 90
        assert store.body("", "a") is not None
        now += 90
        assert names(store, "a", "b") == ["a"]
        store.save("", row("long", "a", 800))
        assert store.conversation("", "a") and store.conversation("", "long") is None
        store.save("", row("c", "c"))  # a client chose an id that it refers to itself
        assert store.conversation("", "c") is None
        now -= 500  # a clock that is set back loses no parent before its child
        store.save("", row("d", "a"))
        assert names(store, "a", "d") == ["a", "d"]
        now = 1200
        assert names(store, "a", "long", "d") == ["a", "long"]
    monkeypatch.setattr(stored, "STORED_CHAIN", 3)
    with closing(store_in(tmp_path / "other")) as store:
        for number in range(5):
            store.save("", row(str(number), str(number - 1) if number else None))
        assert store.conversation("", "2") and store.conversation("", "3") is None


def test_references_to_one_chain_cost_it_once(tmp_path: Path) -> None:
    """A request may bring thousands, and others wait for the file meanwhile."""
    chain, asked = 40, 400
    with closing(store_in(tmp_path)) as store:
        for number in range(chain):
            store.save("", row(f"a{number}", f"a{number - 1}" if number else None))
        statements: list[str] = []
        with store._transaction() as rows:
            rows.set_trace_callback(statements.append)
        found = store.items("", [f"msg_a{chain - 1 - number % chain}" for number in range(asked)])
        assert len(found) == chain
        writes = [each for each in statements if each.startswith("UPDATE responses")]
        bodies = [each for each in statements if each.startswith("SELECT body")]
        assert len(writes) == len(bodies) == chain


def test_all_workers_see_all_rows(tmp_path: Path) -> None:
    """While they write at the same time; and after a restart, in a directory that was named."""
    stores = [store_in(tmp_path) for _ in range(4)]

    def fill(number: int) -> None:
        for turn in range(25):
            stores[number].save(
                "", row(f"{number}-{turn}", f"{number}-{turn - 1}" if turn else None)
            )

    threads = [threading.Thread(target=fill, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    for each in stores:
        assert all(len(each.conversation("", f"{n}-24") or ()) == 50 for n in range(4))
        each.close()
    with closing(store_in(tmp_path)) as again:
        assert again.conversation("", "0-24")


def test_workers_may_make_the_file_at_the_same_time(tmp_path: Path) -> None:
    """None of them is told that it is locked."""
    errors: list[Exception] = []

    def save(store: StoredResponses, at_once: threading.Barrier) -> None:
        at_once.wait(30)
        try:
            store.save("", row("x"))
        except ApiError as error:
            errors.append(error)

    for number in range(20):
        stores = [store_in(tmp_path / f"{number}") for _ in range(4)]
        at_once = threading.Barrier(len(stores))
        threads = [
            threading.Thread(target=save, args=(store, at_once), daemon=True) for store in stores
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            join(thread)
        for store in stores:
            store.close()
    assert errors == []


def test_the_files_are_private(tmp_path: Path) -> None:
    """The write-ahead log and its index too; and no link leads elsewhere."""
    with closing(store_in(tmp_path / "new")) as store:
        store.save("", row("a"))
        modes = {
            file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "new").iterdir()
        }
        assert len(modes) == 3 and set(modes.values()) == {0o600}
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / stored._STORE_FILE).symlink_to(tmp_path / "target")
    for wrong in (tmp_path / "linked", tmp_path / "none" / "none", Path("/proc")):
        with pytest.raises(SettingsError, match="--store-dir"):
            store_in(wrong)


def test_a_deleted_conversation_is_not_in_the_file(tmp_path: Path) -> None:
    """Its bytes are overwritten."""
    with closing(store_in(tmp_path)) as store:
        store.save("", row("secretname", None, 5000))
        assert store.delete("", "secretname") and not store.delete("", "secretname")
    assert b"secretname" not in (tmp_path / stored._STORE_FILE).read_bytes()


def test_directories_of_killed_servers_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next one; those of running ones stay."""
    monkeypatch.setattr(stored.tempfile, "tempdir", str(tmp_path))
    running, killed = PrivateDirectory(), PrivateDirectory()
    killed._lock.close()  # as the kernel does
    with closing(PrivateDirectory()) as third:
        assert set(tmp_path.iterdir()) == {running.path, third.path}
    running.close()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_an_error_of_the_server(tmp_path: Path) -> None:
    """Which the next request does not meet."""
    with closing(store_in(tmp_path)) as store:
        store.save("", row("a"))
        assert store._connection is not None
        (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
        store._connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(ApiError) as told:
            store.save("", row("b", None, 100_000))
        assert told.value.status == 503 and "full" in told.value.message
        assert names(store, "a", "b") == ["a"]
