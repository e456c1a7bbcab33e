"""The page at ``/`` in a real browser: headless Chromium, driven by Selenium over a real server."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import tempfile
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import pytest
from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from doubles.scripted import Script, ScriptedEngine
from doubles.speaking import SpeakingEngine
from tests.helpers import children
from tests.helpers.openai_server import MODEL
from tests.helpers.ports import unused_ports
from tests.helpers.published import AXE, npm_install
from tests.helpers.scripted_text import drafted, saying, tokenizer
from tests.helpers.tiers import budget, pairs
from tests.helpers.waiting import until
from tests.openai.conftest import Connect
from tests.openai.test_leaving import endless
from trtllm_bls.types import Adapter

_NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in _NAMES if (found := shutil.which(name))), None)
# The browser without windows, tabs and menus: the same pages for a quarter less CPU time.
SHELL = shutil.which("chromium-headless-shell")
DRIVER = shutil.which("chromedriver") or "/usr/bin/chromedriver"
SCRATCH = "SCRATCH"
BROWSER_S = 110  # for a script; Selenium itself waits for 120 s
PAGE_S = 60
MISSING = "no Chromium or driver: `apt-get install chromium chromium-driver` runs it"
PAGE = Path(__file__).parents[2] / "trtllm_bls" / "openai"
LIBRARIES = (PAGE / "marked.js", PAGE / "purify.js", PAGE / "temml.js")
ANSWER = "article.assistant .formatted"
REPLY = "Hello <b>there</b> & 🙂 you: <img src=x onerror=alert(1)>."
FLAGS = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run"),
    *("disable-background-networking", "disable-component-update", "disable-sync"),
    *("disable-dev-shm-usage", "window-size=1200,900"),
)


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    if BROWSER is None or not Path(DRIVER).exists():
        if os.environ.get("TRTLLM_BLS_BROWSER") == "1":
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    driver = new_browser()
    yield driver
    driver.quit()
    shutil.rmtree(driver.service.env[SCRATCH])


def new_browser() -> webdriver.Chrome:
    """Start a browser. Its driver's variable ``SCRATCH`` names a directory with their files."""
    scratch = Path(tempfile.mkdtemp(prefix="chromium-"))
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    if SHELL is not None:
        # chromedriver waits for a first page, which the shell does not open by itself.
        begins = scratch / "chromium"
        begins.write_text(f'#!/bin/sh\nexec {SHELL} "$@" about:blank\n', encoding="utf-8")
        begins.chmod(0o755)
        options.binary_location = str(begins)
    for flag in (*FLAGS, f"user-data-dir={scratch / 'data'}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(
        DRIVER,
        port=unused_ports(1)[0],  # one of Selenium's choice may be taken before the driver has it
        service_args=["--verbose", f"--log-path={scratch / 'driver.log'}"],
        env={**os.environ, SCRATCH: str(scratch)},
    )
    driver = webdriver.Chrome(options, service)
    driver.set_script_timeout(BROWSER_S)
    driver.set_page_load_timeout(PAGE_S)
    return driver


def load(browser: webdriver.Chrome, url: str, before: Callable[[], None] = lambda: None) -> None:
    """Load a page, in a new browser if this one hangs and the server does not.

    Twice in some 3,000 loads beside other tests the driver waited in vain for Chromium.
    ``before``: what the browser needs to know before the page.
    """
    before()
    try:
        browser.get(url)
    except TimeoutException:
        with urllib.request.urlopen(url, timeout=60) as answer:
            page = f"{answer.status}, {len(answer.read())} bytes"
        log = Path(browser.service.env[SCRATCH], "driver.log")
        remark = f"Chromium hangs at {url}, which gives {page}; see {log}; a new one goes on"
        children.remarks.append(remark)
        for process in psutil.Process(browser.service.process.pid).children(recursive=True):
            process.kill()
        browser.service.process.kill()
        browser.service.process.wait(60)
        with children.kept():  # it is the browser of further tests, too
            vars(browser).update(vars(new_browser()))
        before()
        browser.get(url)


class Page:
    """What a user does and sees."""

    def __init__(
        self,
        browser: webdriver.Chrome,
        url: str,
        is_first: bool = True,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Open it; ``before``: as for ``load``."""
        self.browser = browser
        browser.get_log("browser")  # of the page before
        if is_first:
            # The port may have been another test's, and the browser has kept what that one did.
            browser.get("about:blank")
            origin = {"origin": url, "storageTypes": "all"}
            browser.execute_cdp_cmd("Storage.clearDataForOrigin", origin)
        load(browser, f"{url}/", before)

    def find(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
        return list(self.browser.execute_script(script, selector))

    def script(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def starts(self) -> None:
        """The models of the server are known."""
        self.until(lambda: self.find("#model").get_property("value"))

    def set(self, name: str, value: str) -> None:
        """A setting, as its field is changed."""
        self.script(
            "const field = document.getElementById('set-' + arguments[0]);"
            "if (field.type === 'checkbox') field.checked = true; else field.value = arguments[1];"
            "field.dispatchEvent(new Event('input'))",
            name,
            value,
        )

    def ask(self, text: str) -> None:
        """Send a message, and wait for the end of the answer."""
        self.find("#message").send_keys(text, Keys.ENTER)
        self.rests()

    def rests(self) -> None:
        """No answer comes any more."""
        self.until(lambda: not self.find("#stop").is_displayed())

    def act(self, label: str, place: str = "article:last-child") -> None:
        """Press a button, which is named by its label."""
        self.script(
            "const named = (each) => each.getAttribute('aria-label') ?? each.textContent;"
            "[...document.querySelectorAll(`${arguments[0]} button`)]"
            ".find((each) => named(each).startsWith(arguments[1])).click()",
            place,
            label,
        )

    def turns(self) -> list[str]:
        return [each.strip() for each in self.texts(f"article.user > .text, {ANSWER}")]

    def type(self, *keys: str) -> None:
        """Into whatever has the focus."""
        self.browser.switch_to.active_element.send_keys(*keys)

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait for a condition. If it does not come, the message tells what the page shows."""
        try:
            WebDriverWait(self.browser, 60, 0.05).until(lambda _: condition())
        except TimeoutException as error:
            shown = self.script("return document.body.innerText")
            complaints = self.complaints()
            raise AssertionError(f"waited 60 s in vain; {complaints}; shown: {shown}") from error

    def notes_texts(self, button: Any) -> None:
        """Keep each text that the button gets: some stay for two seconds, between two looks."""
        self.script(
            "window.noted = [];"
            "const note = () => noted.push(arguments[0].textContent);"
            "new MutationObserver(note).observe(arguments[0], { childList: true })",
            button,
        )

    def has_said(self, text: str) -> None:
        """A button that ``notes_texts`` was told of has got this text."""
        self.until(lambda: text in self.script("return noted"))

    def ends(self, said: str) -> None:
        self.until(lambda: said in self.find("#status").text)

    def complaints(self) -> list[str]:
        return [str(line["message"]) for line in self.browser.get_log("browser")]


def speaking(answer: Callable[[str], str], step_seconds: float = 0) -> SpeakingEngine:
    """Says what the prompt's text asks for."""
    size = tokenizer().model_vocab_size
    return SpeakingEngine(tokenizer(), answer, Script(vocab_size=size, step_seconds=step_seconds))


def replying(messages: list[dict[str, str]], text: str = REPLY) -> ScriptedEngine:
    """Says ``text`` to this conversation."""
    prompt = tokenizer().render_chat(messages)
    ids = tokenizer().encode(prompt, add_special_tokens=False)
    return saying(text, tokenizer().decode(ids[1:], skip_special_tokens=False))


def test_a_chat_by_keyboard_alone(browser: webdriver.Chrome, connect: Connect) -> None:
    """The focus waits in the message; Enter sends; text, drafts and figures are shown as text."""
    asked = [{"role": "user", "content": "Hi\nyou"}]
    engine = replying(asked)
    api, _ = connect(drafted(engine, replying(asked)))
    page = Page(browser, api.url)
    page.starts()
    page.type("Hi", Keys.SHIFT + Keys.ENTER + Keys.NULL, "you", Keys.ENTER)
    page.ends("has ended: stop")
    assert page.turns() == ["Hi\nyou", REPLY]
    assert not page.browser.find_elements(By.CSS_SELECTOR, "article img, article b")
    coloured = page.texts(".drafted")
    assert coloured and all(piece in REPLY for piece in coloured)
    tokens = len(tokenizer().encode_word(REPLY))
    (figures,) = page.texts(".figures")
    assert f"{tokens} tokens" in figures and "first token after" in figures
    assert re.search(r"\d tokens/s", figures)
    drafts = page.script("return Object.values(state.chat.turns)[1].figures.drafted")
    assert (
        0 < drafts <= tokens and f"{drafts} from drafts ({100 * drafts / tokens:.0f} %)" in figures
    )
    page.act("As written")
    assert page.texts(".raw") == [REPLY]
    assert "".join(page.texts(".raw .drafted")) == "".join(coloured)
    assert page.complaints() == []


MARKDOWN = r"""# Title
**Bold**, `code`, \(x^2\) and a \( alone, $5 or $6:
```python
def f(x):
    return x < 3
```
| a | b |
|---|---|
| 1 | 2 |

\[ \frac{1}{2} \]

- [x] done
- [ ] open

<script>alert(1)</script>

[bad](javascript:alert(1)) [good](https://example.com/)
![picture](https://example.com/x.png)
"""


def test_markdown_is_shown_and_can_be_copied(browser: webdriver.Chrome, connect: Connect) -> None:
    """Code, formulas, tables, tasks; nothing in the answer runs or is loaded."""
    question = "What is 12 * 9?"
    api, _ = connect(replying([{"role": "user", "content": question}], MARKDOWN))
    page = Page(browser, api.url)
    page.starts()
    page.find("#try button").click()
    page.ends("has ended: stop")
    assert not page.find("#try").is_displayed()
    assert page.texts("article.user .text") == [question]
    shown = page.find(".formatted")
    tags = ("h3", "strong", "td", "math msup", "math[display=block] mfrac", ".code .word")
    assert [page.texts(f".formatted {tag}") for tag in tags] == [
        ["Title"],
        ["Bold"],
        ["1", "2"],
        ["x2"],
        ["12"],
        ["def", "return"],
    ]
    assert r"a \( alone, $5 or $6" in shown.text
    boxes = page.browser.find_elements(By.CSS_SELECTOR, ".formatted li input")
    assert [each.is_selected() for each in boxes] == [True, False]
    assert all(each.size["width"] < 25 for each in boxes)
    assert "monospace" in page.find("pre code").value_of_css_property("font-family")
    assert "<script>alert(1)</script>" in shown.text and "![picture](https:" in shown.text
    links = page.browser.find_elements(By.CSS_SELECTOR, ".formatted a")
    assert [each.get_dom_attribute("href") for each in links] == [None, "https://example.com/"]
    loaded = "return performance.getEntriesByType('resource').map(e => e.name)"
    assert all(name.startswith(api.url) for name in page.script(loaded))
    grant = {"permissions": ["clipboardReadWrite"], "origin": api.url}
    page.browser.execute_cdp_cmd("Browser.grantPermissions", grant)
    read = "navigator.clipboard.readText().then(arguments[0])"
    page.act("Copy", "article:last-child .under")
    page.until(lambda: page.find("#notice").is_displayed())
    assert page.browser.execute_async_script(read).strip() == MARKDOWN.strip()
    button = page.find(".code button")
    page.notes_texts(button)
    button.click()
    page.has_said("Copied")
    assert page.browser.execute_async_script(read) == "def f(x):\n    return x < 3\n"
    assert page.complaints() == []


SETTINGS = {
    **{"system": "Be kind.", "temperature": "0.75", "top_p": "0,92", "top_k": "17"},
    **{"min_p": "0.05", "seed": "7", "repetition_penalty": "1.08", "frequency_penalty": "0.33"},
    **{"presence_penalty": "-0.25", "logit_bias": '{"5": 1.5}', "bad_words": "foo\nbar baz"},
    **{"max_tokens": "3", "min_tokens": "2", "ignore_eos": "", "stop": "one\ntwo"},
    **{"stop_token_ids": "3\n4", "include_stop_str_in_output": "", "skip_special_tokens": "false"},
    **{"draft_memory": "false", "reasoning_effort": "low", "chat_template_kwargs": '{"a": 1}'},
    **{"logprobs": "", "top_logprobs": "2", "other": '{"user": "it\'s me"}'},
}
SENT = {
    **{"model": MODEL, "temperature": 0.75, "top_p": 0.92, "top_k": 17, "min_p": 0.05, "seed": 7},
    **{"repetition_penalty": 1.08, "frequency_penalty": 0.33, "presence_penalty": -0.25},
    **{"logit_bias": {"5": 1.5}, "bad_words": ["foo", "bar baz"], "max_tokens": 3, "min_tokens": 2},
    **{"ignore_eos": True, "stop": ["one", "two"], "stop_token_ids": [3, 4]},
    **{"include_stop_str_in_output": True, "skip_special_tokens": False, "draft_memory": False},
    **{"reasoning_effort": "low", "chat_template_kwargs": {"a": 1}, "logprobs": True},
    **{"top_logprobs": 2, "user": "it's me", "stream": True},
}


def test_what_was_said_and_set_is_sent(browser: webdriver.Chrome, connect: Connect) -> None:
    """The turns so far and every setting, also by the curl command that the page shows."""
    engine = endless(0)
    api, _ = connect(engine)
    page = Page(browser, api.url)
    page.starts()
    for name, value in SETTINGS.items():
        page.set(name, value)
    for message in ("one", "it's"):
        page.ask(message)
        page.ends("has ended: length")
    first, second = (tokenizer().decode(request.input_ids) for request in engine.requests)
    assert "Be kind." in first and "one" in first
    assert second.index("Be kind.") < second.index("one") < second.index("it's")
    assert engine.requests[0].max_tokens == 3
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p) == (0.75, 0.92)
    assert (sampling.repetition_penalty, sampling.min_tokens) == (1.08, 2)
    page.act("Request as curl")
    words = shlex.split(page.find("#reader-text").get_property("textContent"))
    body = json.loads(words[words.index("-d") + 1])
    roles = [message["role"] for message in body.pop("messages")]
    assert body == SENT and roles == ["system", "user", "assistant", "user"]
    request = urllib.request.Request(
        words[2],
        json.dumps(body | {"messages": [{"role": "user", "content": "a"}]}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.status == 200
    browser.refresh()
    page.starts()
    assert page.find("#set-top_p").get_property("value") == "0,92"
    page.script("$('new').click()")
    assert page.texts("article") == []
    page.ask("three")
    assert "one" not in tokenizer().decode(engine.requests[-1].input_ids)
    page.script("$('reset').click()")
    assert page.find("#set-top_p").get_property("value") == ""
    assert page.find("#set-temperature").get_property("value") == "0.7"
    assert page.complaints() == []


@pytest.mark.parametrize(
    ("form", "text", "field", "value"),
    [
        ("json_object", "", "response_format", {"type": "json_object"}),
        (
            *("json_schema", '{"type": "object"}', "response_format"),
            {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": {"type": "object"}},
            },
        ),
        ("regex", "a+", "structured_outputs", {"regex": "a+"}),
        ("choice", "yes\nno", "structured_outputs", {"choice": ["yes", "no"]}),
        ("grammar", "root ::= 'a'", "structured_outputs", {"grammar": "root ::= 'a'"}),
    ],
)
def test_the_form_of_an_answer(
    browser: webdriver.Chrome, connect: Connect, form: str, text: str, field: str, value: Any
) -> None:
    """As the API takes it."""
    api, _ = connect(endless(0))
    page = Page(browser, api.url)
    page.starts()
    page.set("form", form)
    page.set("form_text", text)
    assert page.script("return requestFields()")[field] == value


def test_a_setting_that_cannot_be_read_is_shown(
    browser: webdriver.Chrome, connect: Connect
) -> None:
    """Sending opens the settings at the field, which says what is wrong; nothing is sent."""
    engine = endless(0)
    api, _ = connect(engine)
    page = Page(browser, api.url)
    page.starts()
    page.set("tools", "[{]")
    page.ask("Hi")
    page.until(lambda: page.find("#settings").is_displayed())
    assert page.browser.switch_to.active_element.get_dom_attribute("id") == "set-tools"
    assert page.find("#set-tools").get_dom_attribute("aria-invalid") == "true"
    assert "not JSON" in page.find("#fields .wrong:not(:empty)").text
    page.set("tools", "")
    for wrong in ("warm", "1,000", "Infinity", "9007199254740993"):
        page.set("temperature", wrong)
        page.type(Keys.ESCAPE)
        page.act("Send again")
        page.until(lambda: page.find("#settings").is_displayed())
        assert f"“{wrong}” is not a number" in page.texts(".error")[-1]
    page.set("temperature", "")
    page.set("other", "[1]")
    page.type(Keys.ESCAPE)
    page.act("Send again")
    page.until(lambda: page.find("#settings").is_displayed())
    assert "not a JSON object" in page.texts(".error")[-1]
    page.set("other", "")
    assert not engine.requests
    page.set("temperature", "3")
    page.type(Keys.ESCAPE)
    page.act("Send again")
    page.ends("failed")
    assert "temperature" in page.texts(".error")[-1] and "2" in page.texts(".error")[-1]
    page.set("temperature", "1")
    page.set("max_tokens", "3")
    page.act("Send again")
    page.ends("has ended: length")
    assert len(page.turns()) == 2 and len(engine.requests) == 1


def test_conversations_are_kept(
    browser: webdriver.Chrome, connect: Connect, tmp_path: Path
) -> None:
    """Over a reload; a list to open, search, rename, delete with a way back, export and import."""
    api, _ = connect(speaking(lambda prompt: "Yes, **" + str(len(prompt)) + "**"))
    page = Page(browser, api.url)
    page.starts()
    page.ask("The first")
    page.find("#new").click()
    page.ask("Another")
    said = page.turns()
    browser.refresh()
    page.until(lambda: page.turns() == said)
    assert page.texts("#chats .open") == ["Another", "The first"]
    page.find("#search").send_keys("FIRST")
    assert page.texts("#chats .open") == ["The first"]
    page.find("#search").send_keys(Keys.CONTROL, "a", Keys.DELETE, Keys.NULL)
    page.act("Rename", "#chats .current")
    page.type("A name <b>", Keys.ENTER)
    assert page.texts("#chats .open") == ["A name <b>", "The first"]
    assert page.find("#title").text == "A name <b>"
    folder = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", folder)
    page.find("#export").click()
    file = tmp_path / "trtllm-bls chats.json"
    until(lambda: file.exists())
    chats = json.loads(file.read_text())["chats"]
    assert {chat["title"] for chat in chats} == {"A name <b>", "The first"}
    page.act("Delete", "#chats .current")
    assert page.texts("#chats .open") == ["The first"] and page.texts("article") == []
    page.find("#notice button").click()
    assert len(page.texts("#chats .open")) == 2 and page.turns() == said
    for _ in range(2):
        page.act("Delete", "#chats li:not(.period)")
    browser.refresh()
    page.starts()
    assert page.texts("#chats .open") == []
    page.find("#import-file").send_keys(str(file))
    page.until(lambda: len(page.texts("#chats .open")) == 2)
    page.act("A name", "#chats")
    assert page.turns() == said
    bad = tmp_path / "bad.json"
    for text in (
        "{",
        "[]",
        '{"kind": "trtllm-bls-chats", "chats": [{"turns": {"a": {"role": "x"}}}]}',
    ):
        bad.write_text(text)
        page.find("#import-file").send_keys(str(bad))
        page.until(lambda: "cannot be imported" in page.find("#notice").text)
        page.find("#notice button").click()
    assert len(page.texts("#chats .open")) == 2
    assert page.complaints() == []


def test_two_tabs_keep_one_conversation(browser: webdriver.Chrome, connect: Connect) -> None:
    """Each shows what the other has asked, renamed or deleted, and neither undoes it."""
    api, _ = connect(speaking(lambda prompt: "Yes"))
    page = Page(browser, api.url)
    page.starts()
    page.ask("The first")
    first, url = browser.current_window_handle, browser.current_url
    browser.switch_to.new_window("tab")
    try:
        browser.get(url)
        page.until(lambda: page.turns() == ["The first", "Yes"])
        page.starts()
        page.ask("The second")
        said = ["The first", "Yes", "The second", "Yes"]
        assert page.turns() == said
        browser.switch_to.window(first)
        page.until(lambda: page.turns() == said)
        page.ask("The third")
        page.act("Rename", "#chats .current")
        page.type("Renamed", Keys.ENTER)
        said += ["The third", "Yes"]
        (second,) = {*browser.window_handles} - {first}
        browser.switch_to.window(second)
        page.until(lambda: page.texts("#chats .open") == ["Renamed"] and page.turns() == said)
        browser.refresh()
        page.until(lambda: page.texts("#chats .open") == ["Renamed"] and page.turns() == said)
        page.act("Delete", "#chats .current")
    finally:
        browser.close()
        browser.switch_to.window(first)
    page.until(lambda: page.texts("#chats .open") == [] and page.turns() == [])
    assert page.complaints() == []


def test_turns_are_edited_answered_again_and_branched(
    browser: webdriver.Chrome, connect: Connect
) -> None:
    """Each version stays, with what followed it; a branch may become a chat of its own."""
    engine = speaking(lambda prompt: f"Answer {len(engine.prompts)}")
    api, _ = connect(engine)
    page = Page(browser, api.url)
    page.starts()
    page.ask("one")
    page.act("Answer again")
    page.rests()
    assert page.turns() == ["one", "Answer 2"]
    assert page.texts(".alternative") == ["2 / 2"]
    page.ask("two")
    page.act("Edit", "article:nth-child(3)")
    page.type(" more", Keys.CONTROL + Keys.ENTER + Keys.NULL)
    page.rests()
    assert page.turns() == ["one", "Answer 2", "two more", "Answer 4"]
    page.act("Earlier version", "article:nth-child(3)")
    assert page.turns() == ["one", "Answer 2", "two", "Answer 3"]
    page.act("Earlier version", "article:nth-child(2)")
    assert page.turns() == ["one", "Answer 1"]
    page.act("Edit", "article:nth-child(2)")
    page.type("!")
    page.act("Save", "article .edit")
    assert page.turns() == ["one", "Answer 1!"] and page.texts(".alternative") == ["3 / 3"]
    page.ask("go on")
    assert "Answer 1!" in engine.prompts[-1] and "two" not in engine.prompts[-1]
    page.act("New chat from here", "article:nth-child(2)")
    assert page.turns() == ["one", "Answer 1!"] and len(page.texts("#chats .open")) == 2
    page.act("Delete", "article:nth-child(2)")
    assert page.turns() == ["one"]
    page.find("#notice button").click()
    assert page.turns() == ["one", "Answer 1!"]
    page.find("#message").send_keys(Keys.ARROW_UP)
    assert page.browser.switch_to.active_element.get_property("value") == "one"
    page.type(Keys.ESCAPE)
    assert page.turns() == ["one", "Answer 1!"]


def test_an_answer_that_was_cut_goes_on(browser: webdriver.Chrome, connect: Connect) -> None:
    """In the same turn, from where it ended; its figures add up."""
    engine = endless(0)
    api, _ = connect(engine)
    page = Page(browser, api.url)
    page.starts()
    page.set("max_tokens", "5")
    page.ask("Hi")
    page.ends("has ended: length")
    (before,) = page.texts(ANSWER)
    page.act("Continue")
    page.until(lambda: "10 tokens" in "".join(page.texts(".figures")))
    page.rests()
    (after,) = page.texts(ANSWER)
    assert after.strip().startswith(before.strip()) and len(after) > len(before)
    prompt = tokenizer().decode(engine.requests[1].input_ids, skip_special_tokens=False)
    assert prompt.endswith(page.script("return arguments[0]", before).strip()[-3:])


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stopping_keeps_the_text_and_frees_the_engine(
    browser: webdriver.Chrome, connect: Connect, way: str
) -> None:
    """And the next message is answered, in another conversation meanwhile."""
    engine = speaking(lambda prompt: "one more word " * 3000, 0.02)
    api, _ = connect(engine)
    page = Page(browser, api.url)
    page.starts()
    page.find("#message").send_keys("Hi", Keys.ENTER)
    page.until(lambda: len("".join(page.texts(ANSWER))) > 20)
    assert engine.live == 1
    page.find("#new").click()
    page.find("#message").send_keys("Aside", Keys.ENTER)
    until(lambda: engine.live == 2)
    page.act("Hi", "#chats")
    page.until(lambda: "Hi" in page.turns()[0])
    if way == "button":
        page.find("#stop").click()
    else:
        page.type(Keys.ESCAPE)
    page.ends("has ended: stopped")
    until(lambda: engine.live == 1)
    kept = page.script("return Object.values(state.chat.turns)[1].content")
    assert kept and kept in page.texts(ANSWER)[0]
    page.find("#message").send_keys("More", Keys.ENTER)
    page.until(lambda: len(page.texts(ANSWER)) == 2 and page.texts(ANSWER)[1])
    assert kept in tokenizer().decode(engine.requests[-1].input_ids)
    page.type(Keys.ESCAPE)
    page.ends("has ended: stopped")
    page.act("Aside", "#chats")
    page.find("#stop").click()
    until(lambda: engine.live == 0)


def test_the_key_is_kept_for_the_tab_alone(browser: webdriver.Chrome, connect: Connect) -> None:
    """The field is there only where it is wanted; a reload keeps the key, another tab has none."""
    api, _ = connect(endless(0), keys=(sha256(b"secret").digest(),))
    page = Page(browser, api.url)
    page.until(lambda: page.find("#key").is_displayed())
    page.type("secret", Keys.TAB)
    page.starts()
    page.until(lambda: not page.find("#key").is_displayed())
    page.set("max_tokens", "3")
    page.ask("Hi")
    page.ends("has ended: length")
    page.act("Request as curl")
    shown = page.find("#reader-text").get_property("textContent")
    assert "secret" not in shown and "Bearer $API_KEY" in shown
    browser.refresh()
    page.starts()
    assert not page.find("#key").is_displayed()
    kept = "return [localStorage, sessionStorage].map(area => JSON.stringify({...area}))"
    local, session = page.script(kept)
    assert "secret" not in local and "secret" in session
    first = browser.current_window_handle
    browser.switch_to.new_window("tab")
    try:
        other = Page(browser, api.url, is_first=False)
        other.until(lambda: other.find("#key").is_displayed())
        assert other.find("#key").get_property("value") == ""
    finally:
        browser.close()
        browser.switch_to.window(first)
    open_api, _ = connect(endless(0))
    page = Page(browser, open_api.url)
    page.starts()
    assert not page.find("#key").is_displayed()


def test_the_model_is_chosen(browser: webdriver.Chrome, connect: Connect) -> None:
    """Also a LoRA adapter; the choice is kept."""
    engine = endless(0)
    api, _ = connect(engine, loras={"poet": "7"})
    page = Page(browser, api.url)
    page.starts()
    assert page.texts("#model option") == [MODEL, "poet"]
    page.script("$('model').value = 'poet'; $('model').dispatchEvent(new Event('change'))")
    page.set("max_tokens", "3")
    page.ask("Hi")
    assert engine.requests[0].adapter == Adapter(task_id=7)
    browser.refresh()
    page.starts()
    assert page.find("#model").get_property("value") == "poet"


CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
TOOL = '{"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}'


def test_a_call_is_answered_by_hand_and_thoughts_are_folded(
    browser: webdriver.Chrome, connect: Connect
) -> None:
    """The results go back to the model, which goes on."""

    def answer(prompt: str) -> str:
        return "It is 21." if "21 degrees" in prompt else f"<think>Look it up.</think>Well. {CALL}"

    engine = speaking(answer)
    api, _ = connect(engine, tool_parser="hermes", reasoning_parser="think")
    page = Page(browser, api.url)
    page.starts()
    page.set("tools", TOOL)
    page.ask("What is the weather?")
    page.ends("has ended: tool_calls")
    assert page.texts(".call h3") == ["weather"]
    assert json.loads(page.texts(".call pre")[0]) == {"city": "Rome"}
    assert not page.find(".thoughts .text").is_displayed()
    page.find(".thoughts summary").click()
    assert page.find(".thoughts .text").text == "Look it up."
    page.find(".call textarea").send_keys("21 degrees")
    page.act("Send the results", "article")
    page.until(lambda: len(page.texts(ANSWER)) == 2)
    page.rests()
    assert page.texts("article.tool .text") == ["21 degrees"]
    assert page.texts(ANSWER)[1].strip() == "It is 21."
    assert "21 degrees" in engine.prompts[1]
    sent = page.script("return branch(state.chat).slice(1, 3).map(messageOf)")
    assert [message["role"] for message in sent] == ["assistant", "tool"]
    (call,) = sent[0]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    assert call["id"] == sent[1]["tool_call_id"] and sent[0]["reasoning_content"] == "Look it up."
    assert not page.browser.find_elements(By.CSS_SELECTOR, ".call textarea")


def test_the_sources_of_an_answer_are_named(browser: webdriver.Chrome, connect: Connect) -> None:
    """Once each, and kept in its file; what has an address is a link."""
    notes: list[dict[str, Any]] = [
        {"type": "file_citation", "file_id": "f1", "filename": "fox.txt", "index": 0},
        {"type": "url_citation", "url_citation": {"url": "https://a.example/", "title": "A"}},
        {"type": "url_citation", "url": "javascript:alert(1)", "title": "B"},
    ]
    api, _ = connect(replying([{"role": "user", "content": "Hi"}]))
    page = Page(browser, api.url)
    page.starts()
    page.ask("Hi")
    grown = """
    const turn = branch(state.chat).at(-1), view = state.views.get(turn.id);
    for (const note of arguments[0]) {
      grow(turn, { delta: { annotations: [note] } }, view);
      view.draw();
    }
    """
    page.script(grown, notes)
    assert page.texts(".sources") == ["Sources: fox.txt, A, B"]
    assert page.script("return document.querySelector('.sources a').href") == "https://a.example/"
    assert len(page.texts(".sources a")) == 1
    file = "JSON.stringify({ kind: FILE_KIND, version: 1, chats: [state.chat] })"
    exported = page.script(f"return readChats({file})[0]")
    (answer,) = [each for each in exported["turns"].values() if each["role"] == "assistant"]
    assert [each["name"] for each in answer["sources"]] == ["fox.txt", "A", "B"]


def test_log_probabilities_are_shown_of_the_token_under_the_pointer(
    browser: webdriver.Chrome, connect: Connect
) -> None:
    """And by the arrow keys, which a screen reader follows."""
    api, _ = connect()
    page = Page(browser, api.url)
    page.starts()
    page.set("logprobs", "")
    page.set("top_logprobs", "3")
    page.ask("Hi")
    page.act("Tokens, as written")
    tokens = page.texts(".raw .token")
    assert len(tokens) > 5
    webdriver.ActionChains(browser).move_to_element(page.find(".raw .token")).perform()
    page.until(lambda: page.find("#likely").is_displayed())
    assert len(page.texts("#likely tr")) == 3 and "log-probability" in page.find("#likely").text
    assert json.dumps(tokens[0], ensure_ascii=False) in page.find("#likely").text
    page.script("document.querySelector('.raw').focus()")
    page.type(Keys.ARROW_RIGHT)
    assert tokens[1].strip() in page.find("#status").get_property("textContent")


def test_text_files_go_with_a_message(
    browser: webdriver.Chrome, connect: Connect, tmp_path: Path
) -> None:
    """And one that is no text does not."""
    engine = speaking(lambda prompt: "Read.")
    api, _ = connect(engine)
    page = Page(browser, api.url)
    page.starts()
    for name, data in (("notes.txt", b"The word is plum."), ("image.png", b"\x89PNG\0")):
        (tmp_path / name).write_bytes(data)
        page.find("#attach-files").send_keys(str(tmp_path / name))
        page.until(lambda: page.texts("#files button") == ["notes.txt"])
    page.until(
        lambda: "image.png is a picture. The model reads text only." in page.find("#notice").text
    )
    page.ask("What is the word?")
    assert page.texts("article.user .file summary") == ["notes.txt"]
    assert "The word is plum." in engine.prompts[0] and page.texts("#files button") == []


SCHEMES = ("light", "dark")
WIDTHS = ((375, 667), (820, 900), (1280, 860))
QUESTION = "How does speculative decoding gain time?"
EXPLAINED = r"""Speculative decoding lets a **small draft model** propose several tokens,
which the large model then checks *in one step*.

### How a round goes

1. The draft proposes `k` tokens.
2. The target computes the probabilities of all of them at once.
3. Accepted tokens are kept; with acceptance rate $\alpha$ a round yields

\[ E = \frac{1 - \alpha^{k+1}}{1 - \alpha} \]

tokens on average.

```python
def accept(draft, target, n=5):
    # Whether each token is kept.
    for token, p, q in zip(draft, target, n):
        if random.random() < min(1, p / q):  # never worse
            yield token
```

| drafted | accepted | speed |
|---|---|---|
| 3 | 2.1 | 1.8 |
| 5 | 2.9 | 2.2 |

- [x] exact: the distribution is the target's
- [ ] faster for *every* text

> A draft that is wrong costs little.
"""
AXE_RUN = """
axe.run(document, { resultTypes: ["violations"] }).then((results) => arguments[0](
  results.violations.flatMap(({ id, nodes }) => nodes.map(({ html }) => `${id}: ${html}`))));
"""
TOO_WIDE = """
return ["#log", "#fields", "html"].map((each) => document.querySelector(each))
  .map(({ scrollWidth, clientWidth }) => scrollWidth - clientWidth);
"""
# A second chat with what the first one does not show; of a turn, its editor too.
OTHER_STATES = """
const chat = { ...newChat(), title: "Other" };
state.chats.set(chat.id, chat);
addTurn(chat, null, "user", { content: "Ask", files: [{ name: "a.txt", text: "text" }] });
const calls = [{ id: "1", name: "weather", arguments: '{"city": "Rome"}' }];
const sources = [{ name: "A", url: "https://a.example/" }, { name: "b.txt", url: "" }];
const made = { content: "Well", thoughts: "Hm", calls, sources, error: "lost", ended: "stop" };
const turn = addTurn(chat, chat.leaf, "assistant", made);
turn.tokens = [{ text: "Well", logprob: -1.5, others: [["Yes", -0.5]] }];
openChat(chat);
const view = state.views.get(turn.id);
view.thoughts.open = true;
notice("Deleted.", "Undo", () => {});
"""
EDITS = "state.views.get(state.chat.leaf).edit()"
SMALL = """
return [...document.querySelectorAll("input:not([type=checkbox]), select, textarea")]
  .filter((each) => parseFloat(getComputedStyle(each).fontSize) < 16).map(({ id }) => id);
"""


def test_everybody_can_use_the_page(
    browser: webdriver.Chrome, connect: Connect, tmp_path: Path
) -> None:
    """axe-core finds nothing, in both schemes, at three widths; everything has its place.

    With a folder in ``TRTLLM_BLS_SCREENSHOTS`` the screenshots of the documents are written.
    """
    npm_install(tmp_path, AXE)
    asked = [{"role": "user", "content": QUESTION}]
    draft = replying(asked, EXPLAINED.replace("model", "modes").replace("one", "two"))
    api, _ = connect(drafted(replying(asked, EXPLAINED), draft), model_names=("demo",))
    page = Page(browser, api.url)
    page.starts()
    page.script((tmp_path / "node_modules" / "axe-core" / "axe.min.js").read_text())
    assert browser.execute_async_script(AXE_RUN) == []
    page.ask(QUESTION)
    images = os.environ.get("TRTLLM_BLS_SCREENSHOTS")
    try:
        for scheme, (width, height) in pairs(SCHEMES, WIDTHS):
            feature = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            page.script("showSide(!narrow.matches)")
            assert browser.execute_async_script(AXE_RUN) == [], (scheme, width)
            for each in ("#message", "#send", "#open-settings", "#menu"):
                box = page.find(each).rect
                assert box["x"] >= 0 and box["x"] + box["width"] <= width, each
                assert box["y"] >= 0 and box["y"] + box["height"] <= height, each
            assert page.find("#log").size["height"] > height * 0.75
            if images:
                page.script("$('log').scrollTop = 0")
                browser.save_screenshot(f"{images}/page-{scheme}-{width}.png")
            page.script("$('settings').showModal()")
            assert browser.execute_async_script(AXE_RUN) == [], (scheme, width)
            assert page.script(TOO_WIDE) == [0, 0, 0] and page.script(SMALL) == []
            page.script("$('settings').close()")
            page.script(f"const first = state.chat; {OTHER_STATES}; window.first = first")
            assert browser.execute_async_script(AXE_RUN) == [], (scheme, width)
            page.act("Tokens, as written")
            page.script("document.querySelector('.raw').focus()")
            page.type(Keys.ARROW_RIGHT)
            assert page.find("#likely").is_displayed()
            assert browser.execute_async_script(AXE_RUN) == [], (scheme, width)
            page.script(EDITS)
            assert browser.execute_async_script(AXE_RUN) == [], (scheme, width)
            page.script("deleteChat(state.chat); $('notice').hidden = true; openChat(first)")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


GROW = """
const chat = newChat();
state.chats.set(chat.id, chat);
openChat(chat);
const turn = addTurn(chat, null, "assistant");
state.runs.set(chat.id, { turn, controller: new AbortController() });
draw();
const pieces = arguments[0].match(/\\s*\\S+/g);
let at = 0;
const isCall = arguments[1];
if (arguments[2]) grow(turn, { delta: { content: arguments[2] } }, state.views.get(turn.id));
window.grown = (count, every) => {
  const view = state.views.get(turn.id);
  for (let left = count; left > 0; left--) {
    const drafted = at % 3 ? [[0, 2]] : undefined;
    const text = pieces[at++ % pieces.length];
    const named = { name: at === 1 ? "write" : undefined, arguments: text };
    const call = { index: 0, id: "1", function: named };
    grow(turn, { delta: isCall ? { tool_calls: [call] } : { content: text }, drafted }, view);
    if (left % every === 0) view.draw();
  }
};
window.work = { lexed: 0, nodes: 0 };
const lex = marked.Lexer.prototype.lex;
marked.Lexer.prototype.lex = function (source) {
  work.lexed += source.length;
  return lex.call(this, source);
};
const size = (node) => 1 + (node.querySelectorAll ? node.querySelectorAll("*").length : 0);
const changes = new MutationObserver(() => {});
const all = { childList: true, characterData: true, subtree: true };
window.worked = (count) => {
  Object.assign(work, { lexed: 0, nodes: 0 });
  changes.observe(state.views.get(turn.id).article, all);
  for (let left = count; left > 0; left--) {
    grown(1, 1);
    for (const record of changes.takeRecords()) {
      work.nodes += 1;
      for (const node of [...record.addedNodes, ...record.removedNodes]) work.nodes += size(node);
    }
  }
  return work;
};
"""


@pytest.mark.parametrize(
    "text, is_call, head",
    [
        (MARKDOWN + "\n\n", False, ""),
        pytest.param("a line without an end ", False, "", marks=pytest.mark.slow),
        pytest.param(
            *("| a cell | another one |\n", False, "| a | b |\n| --- | --- |\n"),
            marks=pytest.mark.slow,
        ),
        ("def f(): ", True, ""),
    ],
    ids=["blocks", "one line", "table", "call"],
)
def test_the_cost_of_a_piece_does_not_grow_with_the_answer(
    browser: webdriver.Chrome, connect: Connect, text: str, is_call: bool, head: str
) -> None:
    """Characters that Markdown is made of and nodes that change, each piece drawn: about as many
    after 3,000 pieces as after 300, in `make test-all` after 8,000. A long block is made anew only
    now and then, so both are counted over more pieces than lie between two of these times."""
    api, _ = connect(endless(0))
    page = Page(browser, api.url)
    page.starts()
    page.script(GROW, text, is_call, head)
    page.script("grown(300, 50)")
    early = page.script("return worked(1200)")
    page.script(f"grown({budget(1500, 6500)}, 50)")
    late = page.script("return worked(1200)")
    assert early["nodes"] > 1200
    assert late["lexed"] <= 2 * early["lexed"]
    assert late["nodes"] <= 2 * early["nodes"]
    # All blocks but the last one have their form for good; a table is one block.
    assert (
        head or page.script("return state.views.values().next().value.writing.open.length") < 6000
    )


def test_the_page_loads_nothing_else(connect: Connect) -> None:
    """No address outside, no script but its own; also without a browser to try it in."""
    api, _ = connect(endless(0))
    with urllib.request.urlopen(f"{api.url}/", timeout=60) as answer:
        policy, text = answer.headers["content-security-policy"], answer.read().decode()
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    for script in re.findall(r"<script>(.*?)</script>", text, re.DOTALL):
        assert b64encode(sha256(script.encode()).digest()).decode() in policy
    for library in LIBRARIES:
        source = library.read_text(encoding="utf-8")
        assert re.search(r"MIT License|@license", source[:400]) and "sourceMappingURL" not in source
        text = text.replace(source, "")
    assert not re.findall(r"https?:|//[a-z]|src=|@import|url\(", text.replace("data:,", ""))
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)


def test_a_refused_question_is_not_sent_again_with_the_next(
    browser: webdriver.Chrome, connect: Connect
) -> None:
    """It stays on the page with "Send again", and the conversation goes on without it."""
    engine = speaking(lambda prompt: "Yes")
    api, _ = connect(engine, max_body_bytes=4000)
    page = Page(browser, api.url)
    page.starts()
    page.ask("one")
    page.script("document.getElementById('message').value = 'large '.repeat(1000)")
    page.find("#send").click()
    page.ends("failed")
    assert "4000 bytes" in page.texts(".error")[-1] or "4000" in page.texts(".error")[-1]
    page.ask("two")
    assert page.turns()[-2:] == ["two", "Yes"]
    assert "one" in engine.prompts[-1] and "large" not in engine.prompts[-1]
    assert "refused" in page.find("article:nth-child(3)").get_dom_attribute("class")


def test_a_question_without_an_answer_has_the_button_for_it(
    browser: webdriver.Chrome, connect: Connect
) -> None:
    """As after its answer was deleted, or where it was edited while another answer came."""
    engine = speaking(lambda prompt: f"Answer {len(engine.prompts)}")
    api, _ = connect(engine)
    page = Page(browser, api.url)
    page.starts()
    page.ask("one")
    page.act("Delete")
    assert page.turns() == ["one"]
    page.act("Answer")
    page.rests()
    assert page.turns() == ["one", "Answer 2"]


def test_the_question_that_waited_for_the_key_is_answered_with_it(
    browser: webdriver.Chrome, connect: Connect
) -> None:
    """Nobody types it again."""
    engine = speaking(lambda prompt: "Yes")
    api, _ = connect(engine, keys=(sha256(b"secret").digest(),))
    page = Page(browser, api.url)
    page.until(lambda: page.find("#key").is_displayed())
    page.find("#message").send_keys("Hi", Keys.ENTER)
    page.ends("failed")
    page.find("#key").send_keys("secret", Keys.TAB)
    page.until(lambda: page.turns() == ["Hi", "Yes"])


def test_a_long_answer_prints_on_several_pages(browser: webdriver.Chrome, connect: Connect) -> None:
    """All of it, without the list of conversations and the buttons."""
    api, _ = connect(speaking(lambda prompt: "A line of the answer.\n\n" * 200))
    page = Page(browser, api.url)
    page.starts()
    page.ask("Hi")
    printed = b64decode(browser.execute_cdp_cmd("Page.printToPDF", {})["data"])
    assert printed.count(b"/Type /Page\n") >= 3
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert not page.find("#side").is_displayed() and not page.find("#ask").is_displayed()
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_escape_clears_the_search_and_leaves_a_composition_alone(
    browser: webdriver.Chrome, connect: Connect
) -> None:
    """It stops the answer only where the person means the answer."""
    engine = speaking(lambda prompt: "one more word " * 3000, 0.02)
    api, _ = connect(engine)
    page = Page(browser, api.url)
    page.starts()
    page.find("#message").send_keys("Hi", Keys.ENTER)
    page.until(lambda: len("".join(page.texts(ANSWER))) > 20)
    page.find("#search").send_keys("Hi", Keys.ESCAPE)
    assert page.find("#search").get_property("value") == ""
    page.script(
        "document.getElementById('message').dispatchEvent(new KeyboardEvent('keydown',"
        " { key: 'Escape', isComposing: true, bubbles: true }))"
    )
    assert page.script("return state.runs.size") == 1
    page.find("#message").send_keys(Keys.ESCAPE)
    page.ends("has ended: stopped")


def test_a_title_in_any_script_names_its_file(
    browser: webdriver.Chrome, connect: Connect, tmp_path: Path
) -> None:
    """Letters of all alphabets stay, signs that paths use do not."""
    api, _ = connect(speaking(lambda prompt: "Yes"))
    page = Page(browser, api.url)
    page.starts()
    page.ask("你好/नमस्ते")
    folder = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", folder)
    page.act("Export", "#chats .current")
    until(lambda: [file.name for file in tmp_path.iterdir()] == ["你好 नमस्ते.json"])


CHATGPT = [
    {
        "title": "From ChatGPT",
        "create_time": 1760000000.5,
        "update_time": 1760000001.5,
        "mapping": {
            "b": {
                "id": "b",
                "parent": "s",
                "children": ["c"],
                "message": {
                    "author": {"role": "user"},
                    "content": {"content_type": "text", "parts": ["Why?"]},
                },
            },
            "c": {
                "id": "c",
                "parent": "b",
                "children": [],
                "message": {
                    "author": {"role": "assistant"},
                    "content": {"content_type": "text", "parts": ["Because."]},
                },
            },
            "r": {"id": "r", "parent": None, "children": ["s"], "message": None},
            "s": {
                "id": "s",
                "parent": "r",
                "children": ["b"],
                "message": {
                    "author": {"role": "system"},
                    "content": {"content_type": "text", "parts": [""]},
                },
            },
        },
        "current_node": "c",
    }
]
OPEN_WEBUI = [
    {
        "id": "1",
        "title": "From Open WebUI",
        "updated_at": 1760000000,
        "chat": {
            "history": {
                "currentId": "2",
                "messages": {
                    "2": {"id": "2", "parentId": "1", "role": "assistant", "content": "Because."},
                    "1": {"id": "1", "parentId": None, "role": "user", "content": "Why?"},
                },
            }
        },
    }
]


@pytest.mark.parametrize("export", [CHATGPT, OPEN_WEBUI], ids=["chatgpt", "open-webui"])
def test_exports_of_other_pages_are_imported(
    browser: webdriver.Chrome, connect: Connect, tmp_path: Path, export: list[dict[str, Any]]
) -> None:
    """In the form that ChatGPT and Open WebUI write."""
    api, _ = connect(speaking(lambda prompt: "Yes"))
    page = Page(browser, api.url)
    page.starts()
    file = tmp_path / "conversations.json"
    file.write_text(json.dumps(export))
    page.find("#import-file").send_keys(str(file))
    page.until(lambda: page.texts("#chats .open") == [export[0]["title"]])
    page.act(export[0]["title"], "#chats")
    assert page.turns() == ["Why?", "Because."]


def test_the_keyboard_keeps_its_place(browser: webdriver.Chrome, connect: Connect) -> None:
    """After an action the focus is on the element, or on the message where the element has gone."""
    api, _ = connect(speaking(lambda prompt: "Yes"))
    page = Page(browser, api.url)
    page.starts()
    page.ask("one")
    focused = "return document.activeElement === document.body"
    for label, place in (
        ("Copy", "article:last-child"),
        ("As written", "article:last-child"),
        ("Pin", "#chats .current"),
        ("Rename", "#chats .current"),
        ("Answer again", "article:last-child"),
        ("Earlier version", "article:last-child"),
        ("New chat from here", "article:last-child"),
        ("Delete", "article:last-child"),
        ("Delete", "#chats .current"),
    ):
        page.script(
            "const name = (made) => made.getAttribute('aria-label') ?? made.textContent;"
            "const made = [...document.querySelectorAll(`${arguments[0]} button`)]"
            ".find((made) => name(made).startsWith(arguments[1]));"
            "made.closest('details')?.setAttribute('open', ''); made.focus(); made.click()",
            place,
            label,
        )
        page.rests()
        assert not page.script(focused), label
        if label == "Rename":
            page.type("A name", Keys.ENTER)
            assert not page.script(focused), "the new name"


def test_a_price_is_no_formula(browser: webdriver.Chrome, connect: Connect) -> None:
    """Dollars around a number and words are money; around mathematics they are a formula."""
    api, _ = connect(speaking(lambda prompt: "It is $5, or 7$, and $5 + x$."))
    page = Page(browser, api.url)
    page.starts()
    page.ask("Hi")
    assert page.texts(".formatted math mrow") and "$5, or 7$" in page.find(".formatted").text


# What has the focus in turn, by the state of the page; "[tabindex]" are places that scroll.
FOCUSED = """
const kinds = "button, summary, input, select, textarea, [tabindex='0']";
const places = document.querySelectorAll(kinds);
const scope = document.querySelector("dialog[open]") ?? document;
const shown = [...places].filter((place) =>
  place.checkVisibility() && !place.disabled && place.type !== "file" && scope.contains(place));
const place = shown[arguments[0]];
place?.focus();
return place ? place.outerHTML.slice(0, 90) : null;
"""
RESET = """
for (const dialog of document.querySelectorAll("dialog")) dialog.close();
for (const { controller } of state.runs.values()) controller.abort();
for (const chat of [...state.chats.values()]) forgetChat(chat);
$("notice").hidden = true;
openChat(newChat());
"""
IN_STATES = {
    "empty": "",
    "turns": OTHER_STATES,
    "menu": f"{OTHER_STATES} document.querySelector('article:last-child .more').open = true;",
    "editor": f"{OTHER_STATES} {EDITS}",
    "name": f"{OTHER_STATES} renameChat(chat);",
    "settings": "$('settings').showModal(); $('advanced').open = true;",
    "reader": f"{OTHER_STATES} showText('A title', 'A text');",
    "file": "attach([new File(['text'], 'a.txt')]);",
    "answer": "send('Hi');",
    "end": f"{OTHER_STATES} $('down').hidden = false;",
}
IS_LOST = """
const end = arguments[0];
setTimeout(() => {
  const { activeElement } = document;
  end(activeElement === document.body || !activeElement.checkVisibility());
}, 50);
"""


@pytest.mark.parametrize("state, width", pairs(list(IN_STATES), [390, 1200]))
def test_no_key_loses_the_focus(
    browser: webdriver.Chrome, connect: Connect, state: str, width: int
) -> None:
    """After Enter, and in `make test-all` after the space bar and Escape, whatever has it. `make
    test` tries each fourth place, and all three of the reader."""
    api, _ = connect(speaking(lambda prompt: "one more word " * 300, 0.02))
    stride = 1 if state == "reader" else budget(4, 1)
    size = {"width": width, "height": 700, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    lost = []
    try:
        page = Page(browser, api.url)
        page.starts()
        for key in (Keys.ENTER, Keys.SPACE, Keys.ESCAPE)[: budget(1, 3)]:
            num_places = 0
            for place in range(0, 100, stride):
                page.script(RESET)
                page.script("showSide(true)" if state == "name" else "")
                page.script(f"{{ {IN_STATES[state]} }}")
                name = page.script(FOCUSED, place)
                if name is None:
                    break
                num_places += 1
                page.type(key)
                if browser.execute_async_script(IS_LOST):
                    lost.append((key, name))
            assert num_places > 1
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert lost == []


def test_a_text_is_copied_over_plain_http_from_another_machine(
    browser: webdriver.Chrome, connect: Connect
) -> None:
    """Such a page has no ``navigator.clipboard``. The focus stays, and a refusal is told."""
    api, _ = connect(speaking(lambda prompt: "```\ndef f(x):\n    return x < 3\n```"))
    page = Page(browser, api.url)
    page.starts()
    page.script("Object.defineProperty(navigator, 'clipboard', { value: undefined });")
    page.ask("Hi")
    page.ends("has ended: stop")
    button = page.find(".code button")
    page.notes_texts(button)
    page.script("arguments[0].focus();", button)
    page.type(Keys.ENTER)
    page.has_said("Copied")
    assert page.browser.switch_to.active_element == button
    page.find("#message").send_keys(Keys.CONTROL, "v")
    page.until(lambda: page.find("#message").get_property("value") != "")
    assert page.find("#message").get_property("value") == "def f(x):\n    return x < 3\n"

    page.script("document.execCommand = () => false; showText('A title', 'A text');")
    page.script("$('reader-copy').focus();")
    page.type(Keys.ENTER)
    page.until(lambda: page.find("#status").get_property("textContent") == "Not copied.")
    assert page.browser.switch_to.active_element == page.find("#reader-copy")
    assert page.complaints() == []


def test_lists_in_lists_are_indented(browser: webdriver.Chrome, connect: Connect) -> None:
    """Each level begins further right than the one that it is in."""
    api, _ = connect(speaking(lambda prompt: "- one\n  - two\n    1. three\n\n- four"))
    page = Page(browser, api.url)
    page.starts()
    page.ask("Hi")
    items = page.browser.find_elements(By.CSS_SELECTOR, ".formatted li")
    one, two, three, four = (item.rect["x"] for item in items)
    assert one == four and one + 10 < two and two + 10 < three


def test_rates_have_three_digits(browser: webdriver.Chrome, connect: Connect) -> None:
    """A rate of tokens is measured no better."""
    api, _ = connect(endless(0))
    page = Page(browser, api.url)
    page.starts()
    rates = {"3.14159": "3.14", "31.4159": "31.4", "314.159": "314", "3141.59": "3,140"}
    for rate, shown in rates.items():
        figures = f"figuresOf({{ figures: {{ tokens: 2, seconds: 1 / {rate}, exact: 1 }} }})"
        assert f"{shown} tokens/s" in page.script(f"return {figures}")


def test_a_long_title_is_cut_and_an_editor_keeps_its_buttons(
    browser: webdriver.Chrome, connect: Connect
) -> None:
    """Also where neither the pointer nor the focus is; the settings open without a risky focus."""
    table = "| a | b |\n| --- | ---: |\n| 1 | 2 |\n\n" + "A line.\n\n" * 80
    question = "word " * 20
    api, _ = connect(replying([{"role": "user", "content": question.strip()}], table))
    page = Page(browser, api.url)
    page.starts()
    page.set("max_tokens", "2000")
    page.ask(question.strip())
    title = page.find("#title").text
    assert title.endswith("word…") and len(title) <= 60
    align = "return getComputedStyle(document.querySelector('td:last-child')).textAlign"
    assert page.script(align) == "right"
    page.script("$('log').scrollTop = 0")
    page.until(lambda: page.find("#down").is_displayed())
    page.script("for (const { id } of branch(state.chat)) state.views.get(id).edit()")
    page.script("$('message').focus()")
    page.script("for (const { style } of document.querySelectorAll('.edit')) style.zoom = 0.2")
    page.until(lambda: not page.find("#down").is_displayed())
    opacity = "return getComputedStyle(document.querySelector('.edit .under')).opacity"
    assert page.script(opacity) == "1"
    page.find("#open-settings").click()
    assert page.script("return document.activeElement.ariaLabel") == "Close"
