"""Whatever a person has typed or received is still there after any event, in a real browser.

A state is where a person is with the page, an event is what happens then. Each test brings the page
into a state, lets the event happen, and looks for every text that was there, at once and after a
reload. The real server answers; a wrapper around the browser's `fetch` holds, refuses, ends or cuts
a request where the event concerns the network.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.helpers.tiers import sample
from tests.openai.conftest import Connect
from tests.openai.test_page import BROWSER_S, Page, speaking
from tests.openai.test_page import browser as browser  # the fixture

THOUGHT = "I think about words. "
ANSWER = "many words of an answer "
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "plum"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
# `network.mode` is "on", "held", "away" or the HTTP status of every answer. `network.cut()` breaks
# the requests that are held and the responses that are being read, `network.end()` completes them.
NETWORK = """
{
const { fetch } = window;
const flows = [];
const ending = { choices: [{ index: 0, delta: {}, finish_reason: "stop" }] };
const lastBytes = new TextEncoder().encode(`data: ${JSON.stringify(ending)}\n\ndata: [DONE]\n\n`);
window.network = {
  mode: "on",
  cut() { for (const flow of flows.splice(0)) flow.cut(); },
  end() { for (const flow of flows.splice(0)) flow.end(); },
};
window.fetch = async (path, options) => {
  const { mode } = window.network;
  if (mode === "away") throw new TypeError("Failed to fetch");
  if (typeof mode === "number") {
    const body = JSON.stringify({ error: { message: "refused with " + mode } });
    return new Response(body, { status: mode });
  }
  if (mode === "held") {
    await new Promise((go, fail) => {
      flows.push({ cut: () => fail(new TypeError("Failed to fetch")), end: go });
      options.signal.addEventListener("abort", () => fail(options.signal.reason));
    });
  }
  const reply = await fetch(path, options);
  if (!String(path).includes("chat/completions") || !reply.ok) return reply;
  const flow = {};
  const cutting = new TransformStream({
    start(controller) {
      flow.cut = () => controller.error(new TypeError("network error"));
      flow.end = () => {
        controller.enqueue(lastBytes);
        controller.terminate();
      };
      flows.push(flow);
    },
    flush() {
      const place = flows.indexOf(flow);
      if (place >= 0) flows.splice(place, 1);
    },
  });
  return new Response(reply.body.pipeThrough(cutting), reply);
};
}
"""
# A conversation above QUOTA, of characters that no browser can compress.
TOO_LARGE = """
const chat = newChat();
const numbers = new Uint16Array(4e6).map(() => 0x4e00 + Math.random() * 0x5000);
let content = "";
for (let at = 0; at < 4e6; at += 1e4) {
  content += String.fromCharCode(...numbers.subarray(at, at + 1e4));
}
addTurn(chat, null, "user", { content });
chat.title = "large";
state.chats.set(chat.id, chat);
saveChat(chat);
"""
QUOTA = 3 * 2**20
# Ends once the browser has kept what the page has given it: a read waits for the writes before it.
ALL_IS_KEPT = """
const [end] = arguments;
Promise.all(["chats", "drafts"].map((name) => storage.all(name))).then(() => end(), () => end());
"""
# True where the browser would ask a person who leaves.
IS_ASKED = "return !dispatchEvent(new Event('beforeunload', { cancelable: true }))"
# Returns whether the storage took not all. The next page of such a tab hung in 6 of 32 loads.
LEAVES = "const isFull = state.unkept.size > 0; state.unkept.clear(); stop(); return isFull;"
WITHOUT_STORAGE = "Object.defineProperty(window, 'indexedDB', { value: undefined });"
# Every text on the page and in its fields, of all conversations.
TEXTS = """
const fields = [...document.querySelectorAll("input:not([type=file]), textarea")];
const chats = [...state.chats.values()];
const turns = chats.flatMap((chat) => Object.values(chat.turns));
return {
  fields: fields.map((field) => field.value),
  titles: [...document.querySelectorAll("#chats .open")].map((title) => title.textContent),
  turns: turns.flatMap(({ content, thoughts = "" }) => [content, thoughts]),
};
"""


@dataclass
class Texts:
    """The texts that must survive, by the place where a person looks for them."""

    fields: list[str] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    titles: list[str] = field(default_factory=list)


@dataclass
class Scene:
    """A page of a server, and what is to be found on it."""

    page: Page
    url: str
    files: Path
    texts: Texts = field(default_factory=Texts)

    @property
    def browser(self) -> webdriver.Chrome:
        return self.page.browser

    def send(self, text: str) -> None:
        self.page.find("#message").send_keys(text, Keys.ENTER)
        self.texts.turns.append(text)

    def type(self, text: str) -> None:
        """Type an unsent message, letter by letter."""
        self.page.find("#message").send_keys(text)
        self.texts.fields.append(text)

    def answered(self) -> None:
        """Have a question and its whole answer."""
        self.send("short")
        self.page.rests()
        self.texts.turns.append("A short answer.")

    def received(self, name: str) -> str:
        """Return what the last answer has so far."""
        script = "return state.chat.turns[state.chat.leaf]?.[arguments[0]] ?? ''"
        return str(self.page.script(script, name))

    def network(self, mode: str | int) -> None:
        self.page.script("network.mode = arguments[0]", mode)

    def keeps(self) -> None:
        """Every text is where it belongs, once the page has heard of the change."""
        try:
            self.page.until(lambda: not self.missing())
        except AssertionError:
            assert self.missing() == []

    def shown(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = self.page.script(TEXTS)
        return found

    def missing(self) -> list[str]:
        """The texts that are not on the page, in the place where they belong."""
        shown = self.shown()
        # A field that a person leaves keeps its new name as the title.
        in_fields = shown["fields"] + shown["titles"]
        missing = [text for text in self.texts.fields if text not in in_fields]
        for text in self.texts.turns:
            if not any(text in turn for turn in shown["turns"]):
                missing.append(text)
        return missing + [title for title in self.texts.titles if title not in shown["titles"]]


# --- states: where a person is with the page ----------------------------------------------------


def nothing(scene: Scene) -> None:
    scene.answered()


def typing(scene: Scene) -> None:
    scene.answered()
    scene.type("half a mess")


def typing_the_first(scene: Scene) -> None:
    scene.type("half of the first")


def sent(scene: Scene) -> None:
    scene.network("held")
    scene.send("sent and not answered")
    scene.type("and the next")


def thinking(scene: Scene) -> None:
    scene.send("think")
    scene.page.until(lambda: len(scene.received("thoughts")) > 20)
    kept_a_second_ago(scene, "thoughts")
    scene.type("while it thinks")


def answering(scene: Scene) -> None:
    scene.send("long")
    scene.page.until(lambda: len(scene.received("content")) > 20)
    kept_a_second_ago(scene, "content")
    scene.type("while it answers")


def kept_a_second_ago(scene: Scene, name: str) -> None:
    """Take what has come so far, and wait for the save that each second brings."""
    text = scene.received(name)
    kept = (
        "const [id, name] = arguments; const end = arguments[2];"
        "storage.all('chats').then((chats) => end(chats.flatMap((chat) =>"
        " Object.values(chat.turns)).map((turn) => turn[name] ?? '').join()), () => end(null))"
    )

    def is_kept() -> bool:
        texts = scene.browser.execute_async_script(kept, None, name)
        return texts is None or text in texts  # a browser without storage keeps none

    scene.page.until(is_kept)
    scene.texts.turns.append(text)


def calling(scene: Scene) -> None:
    scene.page.set("tools", json.dumps([TOOL]))
    scene.send("call")
    scene.page.until(lambda: scene.page.browser.find_elements(By.CSS_SELECTOR, ".result"))
    scene.page.find(".result").send_keys("half a res")
    scene.texts.fields.append("half a res")


def editing(scene: Scene) -> None:
    scene.answered()
    scene.page.act("Edit", "article.user")
    scene.page.type(" edited")
    scene.texts.fields.append("short edited")


def renaming(scene: Scene) -> None:
    scene.answered()
    scene.page.act("Rename", "#chats .current")
    scene.page.type("A new na")
    scene.texts.fields.append("A new na")


def searching(scene: Scene) -> None:
    scene.answered()
    scene.page.find("#search").send_keys("sho")
    scene.texts.fields.append("sho")


def setting(scene: Scene) -> None:
    scene.answered()
    scene.page.find("#open-settings").click()
    scene.page.find("#set-system").send_keys("Be bri")
    scene.texts.fields.append("Be bri")


def importing(scene: Scene) -> None:
    """The list shows the conversations of the file: from then on they must survive."""
    scene.type("before the import")
    turns = {"a": {"role": "user", "content": "imported question", "parent": None}}
    chats = []
    for number in range(200):
        chats.append({"title": f"Imported {number}", "leaf": "a", "turns": turns})
        scene.texts.titles.append(f"Imported {number}")
    file = scene.files / "chats.json"
    file.write_text(json.dumps({"kind": "trtllm-bls-chats", "chats": chats}))
    scene.page.find("#import-file").send_keys(str(file))
    scene.page.until(lambda: "Imported 199" in scene.shown()["titles"])


STATES = (
    nothing,
    typing,
    typing_the_first,
    sent,
    thinking,
    answering,
    calling,
    editing,
    renaming,
    searching,
    setting,
    importing,
)


# --- events -------------------------------------------------------------------------------------


def reload(scene: Scene) -> None:
    scene.browser.refresh()
    opened_again(scene)


def opened_again(scene: Scene) -> None:
    """The page has started, and what the browser kept has been read."""
    scene.page.starts()
    scene.keeps()


def reopen(scene: Scene) -> None:
    """Close the tab and open the page in another, by its address alone or as it was."""
    address = scene.browser.current_url
    in_another_tab(scene, lambda: None, comes_back=False)
    scene.browser.get(address)
    opened_again(scene)


def crash(scene: Scene) -> None:
    # Nobody crashes a tab within the milliseconds that the browser needs for the last key.
    scene.browser.execute_async_script(ALL_IS_KEPT)
    address = scene.browser.current_url
    tab = scene.browser.current_window_handle
    scene.browser.switch_to.new_window("tab")
    other = scene.browser.current_window_handle
    scene.browser.switch_to.window(tab)
    scene.browser.set_page_load_timeout(5)
    try:
        scene.browser.get("chrome://crash")
    except WebDriverException:
        pass  # the tab is gone
    finally:
        scene.browser.switch_to.window(other)
        scene.browser.set_page_load_timeout(BROWSER_S)
    scene.browser.get(address)
    opened_again(scene)


def in_another_tab(scene: Scene, work: Callable[[], None], comes_back: bool = True) -> None:
    """Do something on the same conversation in another tab."""
    address = scene.browser.current_url
    tab = scene.browser.current_window_handle
    scene.browser.switch_to.new_window("tab")
    other = scene.browser.current_window_handle
    try:
        scene.browser.get(address)
        scene.page.starts()
        work()
    finally:
        scene.browser.switch_to.window(other if comes_back else tab)
        scene.browser.close()
        scene.browser.switch_to.window(tab if comes_back else other)


def other_tab_saves(scene: Scene) -> None:
    def pin() -> None:
        if scene.page.browser.find_elements(By.CSS_SELECTOR, "#chats .current"):
            scene.page.script("pinChat(state.chat)")

    in_another_tab(scene, pin)


def other_tab_renames(scene: Scene) -> None:
    def rename() -> None:
        script = (
            "state.chat.title = 'Renamed'; if (state.chats.has(state.chat.id)) saveChat(state.chat)"
        )
        scene.page.script(script)

    in_another_tab(scene, rename)


def other_tab_deletes(scene: Scene) -> None:
    """Only what nobody has in use here may go."""

    def delete() -> None:
        scene.page.script("if (state.chats.has(state.chat.id)) deleteChat(state.chat)")

    in_use = scene.page.script("return state.runs.size + state.drafts.size > 0")
    if not in_use:
        scene.texts.turns.clear()  # the person has deleted it
    in_another_tab(scene, delete)


def other_tab_answers(scene: Scene) -> None:
    def answer() -> None:
        if scene.page.script("return !state.runs.has(state.chat.id)"):
            scene.page.script("send('from the other tab')")
            scene.page.rests()

    in_another_tab(scene, answer)
    scene.texts.turns.append("from the other tab")


def full_storage(scene: Scene) -> None:
    """The browser refuses a change: the page says so, and the browser asks before it is left."""
    scene.page.script(TOO_LARGE)
    scene.page.until(lambda: scene.page.script("return state.unkept.size"))
    scene.page.until(lambda: "only until this tab closes" in scene.page.find("#notice").text)
    assert "storage is full" in scene.page.find("#notice").text
    assert scene.page.script(IS_ASKED)


def answer_ends(scene: Scene) -> None:
    scene.network("on")
    scene.page.script("network.end()")
    scene.page.rests()
    assert not scene.page.texts(".error:not([hidden])")


def stop(scene: Scene) -> None:
    scene.page.script("stop()")
    scene.page.rests()


def fails(mode: str | int) -> Callable[[Scene], None]:
    """A request that fails: the one that waits, or the next one that the person sends."""

    def event(scene: Scene) -> None:
        scene.network(mode)
        if scene.page.script("return state.runs.size > 0"):
            scene.page.script("network.cut()")
            scene.page.rests()
            return
        scene.page.script(
            "for (const dialog of document.querySelectorAll('dialog')) dialog.close()"
        )
        buttons = scene.browser.find_elements(By.CSS_SELECTOR, "article button.main")
        if buttons:  # a result or an edited question
            scene.texts.turns.extend(scene.texts.fields)
            scene.texts.fields.clear()
            buttons[0].click()
        else:
            message = scene.page.find("#message")
            before = str(message.get_property("value"))
            message.send_keys("!", Keys.ENTER)
            scene.texts.fields = [text for text in scene.texts.fields if text != before]
            scene.texts.turns.append(before + "!")
        scene.page.rests()
        scene.page.until(lambda: scene.page.texts(".error:not([hidden])"))

    event.__name__ = f"fails_{mode}"
    return event


def cut(scene: Scene) -> None:
    scene.page.script("network.cut()")
    scene.page.rests()


def server_restarts(scene: Scene) -> None:
    """It is away, and then it is back: the failed question can be sent again."""
    fails("away")(scene)
    scene.network("on")
    scene.page.script("findModels()")
    again = scene.page.script(
        "return [...document.querySelectorAll('article button')].some((made) =>"
        " ['Send again', 'Answer', 'Continue', 'Answer again'].includes(made.title))"
    )
    assert again


def prints(scene: Scene) -> None:
    scene.browser.execute_cdp_cmd("Page.printToPDF", {})


def zoom(scene: Scene) -> None:
    scene.browser.execute_cdp_cmd("Emulation.setPageScaleFactor", {"pageScaleFactor": 2})


def rotation(scene: Scene) -> None:
    for width, height in ((375, 667), (667, 375)):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        scene.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scene.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


EVENTS = (
    reload,
    reopen,
    crash,
    other_tab_saves,
    other_tab_renames,
    other_tab_deletes,
    other_tab_answers,
    full_storage,
    answer_ends,
    stop,
    fails(401),
    fails(413),
    fails(429),
    fails(500),
    fails("away"),
    cut,
    server_restarts,
    prints,
    zoom,
    rotation,
)
PAIRS = [(state, event) for state in STATES for event in EVENTS]
# Each kind of event, and each state, stands in one quick test.
KINDS = (
    "reload",
    "crash",
    "other_tab_saves",
    "other_tab_deletes",
    "other_tab_answers",
    "full_storage",
    "answer_ends",
    "stop",
    "fails_500",
    "cut",
    "server_restarts",
    "zoom",
)
QUICK = {(state.__name__, kind) for state, kind in zip(STATES, KINDS, strict=True)}
CASES = [
    pytest.param(
        state,
        event,
        id=f"{state.__name__}-{event.__name__}",
        marks=[] if (state.__name__, event.__name__) in QUICK else [pytest.mark.slow],
    )
    for state, event in PAIRS
]


def words(prompt: str) -> str:
    """The model's answer to the last question of a prompt."""
    question = prompt.rsplit("user", 1)[-1]
    if "think" in question:
        return f"<think>{THOUGHT * 400}</think>{ANSWER * 400}"
    if "long" in question:
        return ANSWER * 800
    if "call" in question:
        return CALL
    return "A short answer."


def opened(browser: webdriver.Chrome, url: str, files: Path, *scripts: str) -> Iterator[Scene]:
    added: dict[str, list[dict[str, str]]] = {}  # what names the scripts of a tab

    def add() -> None:
        name = "Page.addScriptToEvaluateOnNewDocument"
        sources = [{"source": script} for script in scripts]
        tab = browser.current_window_handle
        added[tab] = [browser.execute_cdp_cmd(name, source) for source in sources]
        quota = {"origin": url, "quotaSize": QUOTA}
        browser.execute_cdp_cmd("Storage.overrideQuotaForOrigin", quota)

    try:
        page = Page(browser, url, before=add)
        page.starts()
        yield Scene(page, url, files)
    finally:
        # Those of another tab went with it.
        for identifier in added.get(browser.current_window_handle, ()):
            browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", identifier)
        if browser.execute_script(LEAVES):
            full = browser.current_window_handle
            browser.switch_to.new_window("tab")
            fresh = browser.current_window_handle
            browser.switch_to.window(full)
            browser.close()
            browser.switch_to.window(fresh)


@pytest.fixture
def scene(browser: webdriver.Chrome, connect: Connect, tmp_path: Path) -> Iterator[Scene]:
    api, _ = connect(speaking(words, 0.01), reasoning_parser="think", tool_parser="hermes")
    yield from opened(browser, api.url, tmp_path, NETWORK)


@pytest.mark.parametrize(("state", "event"), CASES)
def test_nothing_is_lost(
    scene: Scene, state: Callable[[Scene], None], event: Callable[[Scene], None]
) -> None:
    """Every text that was typed or received before the event is there after it."""
    state(scene)
    assert scene.missing() == []
    event(scene)
    scene.keeps()
    if event is not full_storage:
        reload(scene)


@pytest.mark.parametrize("state", sample(STATES), ids=lambda state: state.__name__)
def test_a_browser_without_storage_keeps_all_until_the_tab_closes(
    browser: webdriver.Chrome,
    connect: Connect,
    tmp_path: Path,
    state: Callable[[Scene], None],
) -> None:
    """The page says so, and the browser asks before the tab closes."""
    api, _ = connect(speaking(words, 0.01), reasoning_parser="think", tool_parser="hermes")
    for scene in opened(browser, api.url, tmp_path, NETWORK, WITHOUT_STORAGE):
        scene.page.until(lambda scene=scene: scene.page.find("#notice").is_displayed())
        assert "keeps no conversations" in scene.page.find("#notice").text
        state(scene)
        assert scene.missing() == []
        assert scene.page.script(IS_ASKED)


# --- several tabs on one conversation -----------------------------------------------------------


@contextmanager
def beside(scene: Scene) -> Iterator[Callable[[], None]]:
    """Open a second tab on the same conversation; yield a function that goes to the other tab."""
    address = scene.browser.current_url
    tabs = [scene.browser.current_window_handle]
    scene.browser.switch_to.new_window("tab")
    tabs.append(scene.browser.current_window_handle)
    scene.browser.get(address)
    scene.page.starts()

    def to_the_other() -> None:
        at = tabs.index(scene.browser.current_window_handle)
        scene.browser.switch_to.window(tabs[1 - at])

    try:
        to_the_other()
        yield to_the_other
    finally:
        scene.browser.switch_to.window(tabs[1])
        scene.browser.close()
        scene.browser.switch_to.window(tabs[0])


def is_kept(scene: Scene, text: str) -> bool:
    """Read the browser's storage."""
    script = (
        "const end = arguments[0];"
        "Promise.all([storage.all('chats'), storage.all('drafts')])"
        ".then((all) => end(JSON.stringify(all)))"
    )
    return text in scene.browser.execute_async_script(script)


WITHOUT_COMMITS = "storage.run = () => new Promise(() => {})"


def test_a_message_sent_in_another_tab_leaves_what_is_typed_here(scene: Scene) -> None:
    """Both tabs were open before: they share the draft, so the message is sent beside it."""
    scene.answered()
    with beside(scene) as to_the_other:
        scene.type("half a mess")
        to_the_other()
        scene.keeps()
        scene.page.script("send('from the other tab')")
        scene.page.rests()
        to_the_other()
        scene.texts.turns.append("from the other tab")
        reload(scene)


def test_a_conversation_in_use_survives_its_removal_in_another_tab(scene: Scene) -> None:
    """Its turns and its draft are kept again."""
    scene.answered()
    with beside(scene) as to_the_other:
        scene.type("half a mess")
        to_the_other()
        scene.page.script("deleteChat(state.chat)")
        to_the_other()
        scene.page.until(lambda: "is kept, since it is in use" in scene.page.find("#notice").text)
        scene.page.until(lambda: is_kept(scene, "half a mess") and is_kept(scene, "A short answer"))
        reload(scene)


def test_two_tabs_that_close_together_both_hand_over(scene: Scene) -> None:
    """The browser has committed the text of neither."""
    scene.answered()
    with beside(scene) as to_the_other:
        scene.page.script(WITHOUT_COMMITS)
        scene.type("half a mess")
        to_the_other()
        scene.page.script(WITHOUT_COMMITS)
        scene.page.script("openChat(newChat())")
        scene.page.find("#message").send_keys("another begun")
        scene.browser.get("about:blank")
        to_the_other()
        reload(scene)
        drafts = "return [...state.drafts.values()].map(({ message }) => message)"
        assert set(scene.page.script(drafts)) == {"half a mess", "another begun"}


def test_what_was_handed_over_does_not_replace_what_is_newer(scene: Scene) -> None:
    """The page that handed it over may have stayed in the background while another went on."""
    scene.answered()
    with beside(scene) as to_the_other:
        scene.page.script(WITHOUT_COMMITS)
        scene.type("half a mess")
        scene.page.script("storage.handOver()")
        to_the_other()
        scene.keeps()
        scene.page.find("#message").send_keys("age and more")
        scene.texts.fields = ["half a message and more"]
        scene.page.until(lambda: is_kept(scene, "half a message and more"))
        reload(scene)


def test_two_tabs_answer_in_one_conversation(scene: Scene) -> None:
    """Each saves the conversation as a whole: neither may undo what the other has received."""
    answering(scene)
    with beside(scene) as to_the_other:
        to_the_other()
        scene.page.script("send('long, from the other tab')")
        scene.page.until(lambda: len(scene.received("content")) > 20)
        to_the_other()
        scene.texts.turns.extend(["long, from the other tab", scene.received("content")])
        reload(scene)
        to_the_other()
        kept_a_second_ago(scene, "content")
        scene.page.script("stop()")
        scene.page.rests()
        to_the_other()
        reload(scene)


# --- actions that a person may take by mistake ---------------------------------------------------


def test_a_discarded_edit_can_be_taken_back(scene: Scene) -> None:
    """Escape leaves the editor; the notice has the way back."""
    editing(scene)
    scene.page.type(Keys.ESCAPE)
    assert scene.missing() == ["short edited"]
    scene.page.find("#notice button").click()
    scene.keeps()
    assert scene.browser.switch_to.active_element.get_property("value") == "short edited"
    reload(scene)


def test_a_reset_of_the_settings_can_be_taken_back(scene: Scene) -> None:
    """By the same button, as long as the settings are open."""
    setting(scene)
    scene.page.find("#reset").click()
    assert scene.missing() == ["Be bri"]
    scene.page.find("#reset").click()
    assert scene.missing() == []
    reload(scene)
