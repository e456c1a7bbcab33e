"""Whatever a person has typed or received is there after two events in a row, in a real browser.

The harness of ``test_page_survives`` has one event for each state. These are sequences, and ways to
the page beside a mouse and a message: a keyboard alone, a paste, a drop, a link, a narrow screen.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.openai.conftest import Connect
from tests.openai.test_page import IN_STATES, RESET, Page, speaking
from tests.openai.test_page import browser as browser  # the fixture
from tests.openai.test_page_survives import TOOL, Scene, reload
from tests.openai.test_page_survives import scene as scene  # the fixture

DEFAULT_IS_PREVENTED = """
const [kind, selector, text, hasFile] = arguments;
const data = new DataTransfer();
if (text) data.setData("text/plain", text);
if (hasFile) data.items.add(new File(["from a file"], "a.txt", { type: "text/plain" }));
const options = { bubbles: true, cancelable: true };
const event = kind === "paste"
  ? new ClipboardEvent(kind, { ...options, clipboardData: data })
  : new DragEvent(kind, { ...options, dataTransfer: data });
return !document.querySelector(selector).dispatchEvent(event);
"""
OPEN = """
const [title] = arguments;
openChat([...state.chats.values()].find((chat) => chat.title === title));
"""


def message(scene: Scene) -> Any:
    return scene.page.find("#message").get_property("value")


def system_prompt(scene: Scene) -> Any:
    return scene.page.find("#set-system").get_property("value")


def test_an_undone_deletion_leaves_what_came_meanwhile(scene: Scene) -> None:
    """The question was answered again before the person took the deletion back."""
    scene.answered()
    scene.page.act("Delete", "article.assistant")
    scene.page.act("Answer", "article.user")
    scene.page.rests()
    scene.page.find("#notice button").click()
    assert scene.page.script("return Object.keys(state.chat.turns).length") == 3
    assert scene.page.texts(".alternative") == ["1 / 2"]
    reload(scene)
    assert scene.page.script("return Object.keys(state.chat.turns).length") == 3


def test_sent_results_leave_those_of_another_branch(scene: Scene) -> None:
    """Two answers to one question call a tool, and both wait for their results."""
    scene.page.set("tools", json.dumps([TOOL]))
    scene.send("call")
    scene.page.until(lambda: scene.browser.find_elements(By.CSS_SELECTOR, ".result"))
    scene.page.find(".result").send_keys("of the first call")
    scene.page.act("Answer again")
    scene.page.rests()
    scene.page.find(".result").send_keys("of the second call")
    scene.page.act("Send the results")
    scene.texts.turns.append("of the second call")
    scene.page.rests()
    scene.page.act("Earlier version", "article.assistant")
    scene.texts.fields.append("of the first call")
    scene.keeps()
    reload(scene)


def test_results_wait_for_an_answer_that_comes(scene: Scene) -> None:
    """A second answer in one conversation would take the Stop button from the first."""
    scene.page.set("tools", json.dumps([TOOL]))
    scene.send("call")
    scene.page.until(lambda: scene.browser.find_elements(By.CSS_SELECTOR, ".result"))
    scene.page.find(".result").send_keys("half a res")
    scene.texts.fields.append("half a res")
    scene.send("long")
    scene.page.until(lambda: len(scene.received("content")) > 20)
    assert not scene.page.find("article.assistant .main").is_enabled()
    scene.page.script("stop()")
    scene.page.rests()
    assert scene.page.find("article.assistant .main").is_enabled()
    scene.keeps()


def test_a_message_in_the_address_is_filled_in_once(scene: Scene) -> None:
    """What is typed behind it, attached to it, or has been sent is as it was after a reload."""
    scene.browser.get(f"{scene.url}/?q=Hello")
    scene.page.starts()
    scene.page.find("#message").send_keys(" you")
    scene.texts.fields.append("Hello you")
    scene.page.script("attach([new File(['text'], 'a.txt')])")
    scene.page.until(lambda: scene.page.texts("#files button"))
    for _ in range(2):
        reload(scene)
        assert message(scene) == "Hello you"
    scene.page.find("#message").send_keys(Keys.ENTER)
    scene.page.rests()
    scene.browser.refresh()
    scene.page.starts()
    assert message(scene) == ""


def test_an_attached_file_leaves_the_message_of_the_address(scene: Scene) -> None:
    scene.browser.get(f"{scene.url}/?q=Hello")
    scene.page.starts()
    scene.page.script("attach([new File(['text'], 'a.txt')])")
    scene.page.until(lambda: scene.page.texts("#files button"))
    assert message(scene) == "Hello"


def test_the_skip_link_leaves_the_address_of_the_conversation(scene: Scene) -> None:
    """A reload shows the same conversation."""
    scene.answered()
    scene.type("half a mess")
    scene.page.find(".skip").send_keys(Keys.ENTER)
    scene.page.until(
        lambda: scene.browser.switch_to.active_element.get_attribute("id") == "message"
    )
    reload(scene)


@pytest.mark.parametrize(
    ("text", "has_file", "attached"), [("cells", True, False), ("", True, True)]
)
def test_a_paste_is_its_text_where_it_has_one(
    scene: Scene, text: str, has_file: bool, attached: bool
) -> None:
    """Spreadsheets and word processors add a picture of the text."""
    arguments = ("paste", "#message", text, has_file)
    assert scene.page.script(DEFAULT_IS_PREVENTED, *arguments) is attached


@pytest.mark.parametrize("place", ["#side", "#content", "#settings"])
def test_a_file_dropped_anywhere_is_attached(scene: Scene, place: str) -> None:
    """Elsewhere the browser would open the file in place of the page."""
    for kind in ("dragover", "drop"):
        assert scene.page.script(DEFAULT_IS_PREVENTED, kind, place, "", True)
    scene.page.until(lambda: scene.page.texts("#files button") == ["a.txt"])


def test_each_conversation_keeps_the_system_prompt_that_it_began_with(scene: Scene) -> None:
    """Also one that took the last one's, one that is not yet sent, and a branch."""
    scene.page.set("system", "Be brief")
    scene.page.ask("short one")
    scene.page.script("openChat(newChat())")
    scene.page.ask("short two")
    scene.page.script("branchOff(state.chat, state.chat.turns[state.chat.leaf])")
    scene.page.script("state.chat.title = 'branch'; openChat(newChat())")
    scene.page.find("#message").send_keys("unsent")
    scene.page.script("state.chat.title = 'unsent'; openChat(newChat())")
    scene.page.set("system", "Be kind")
    scene.page.ask("short three")
    prompts = {}
    for title in ("short one", "short two", "branch", "unsent"):
        scene.page.script(OPEN, "short three")
        scene.page.script(OPEN, title)
        prompts[title] = system_prompt(scene)
    assert set(prompts.values()) == {"Be brief"}, prompts


def test_a_file_of_a_conversation_has_its_settings(scene: Scene) -> None:
    scene.page.set("system", "Be brief")
    scene.page.ask("short")
    script = (
        "const file = JSON.stringify({ kind: FILE_KIND, chats: [state.chat] });"
        "return readChats(file)[0].settings.system"
    )
    assert scene.page.script(script) == "Be brief"


@pytest.mark.parametrize("change", ["setting", "name", "pin"])
def test_a_new_conversation_keeps_what_was_changed_in_it(scene: Scene, change: str) -> None:
    """Its message was emptied, and the person has looked at another conversation."""
    scene.page.ask("short")
    scene.page.script("openChat(newChat())")
    field = scene.page.find("#message")
    if change == "setting":
        scene.page.set("system", "Be brief")
    field.send_keys("x")
    if change == "name":
        scene.page.act("Rename", "#chats .current")
        scene.page.type("A name", Keys.ENTER)
    if change == "pin":
        scene.page.act("Pin", "#chats .current")
    field.send_keys(Keys.BACKSPACE)
    scene.browser.refresh()
    scene.page.starts()
    begun = "return [...state.chats.values()].some((chat) => chat.leaf)"
    scene.page.until(lambda: scene.page.script(begun))
    scene.page.script("openChat([...state.chats.values()].find((chat) => chat.leaf))")
    scene.page.set("system", "Be kind")
    found = "return [...state.chats.values()].find((chat) => !chat.leaf) ?? null"
    scene.page.until(lambda: scene.page.script(found))
    chat = scene.page.script(found)
    values = {
        "setting": (chat.get("settings") or {}).get("system") == "Be brief",
        "name": chat["title"] == "A name",
        "pin": chat.get("pinned"),
    }
    assert values[change]


def test_what_a_full_storage_refused_is_kept_once_there_is_room(scene: Scene) -> None:
    """The person deletes a conversation: nobody has to type again for the rest to be kept."""
    scene.answered()
    scene.page.script(
        "window.storePut = IDBObjectStore.prototype.put;"
        "IDBObjectStore.prototype.put = () => { throw new DOMException('', 'QuotaExceededError') }"
    )
    scene.type("half a mess")
    scene.page.until(lambda: scene.page.script("return state.unkept.size"))
    scene.page.script("const chat = newChat(); state.chats.set(chat.id, chat); drawChats()")
    scene.page.script("IDBObjectStore.prototype.put = window.storePut")
    scene.page.script("deleteChat([...state.chats.values()].find((chat) => !chat.leaf))")
    scene.page.until(lambda: not scene.page.script("return state.unkept.size"))
    reload(scene)


def test_enter_in_the_key_sends_no_half_message(scene: Scene) -> None:
    scene.page.script("askForKey()")
    scene.type("half a mess")
    scene.page.find("#key").send_keys("secret", Keys.ENTER)
    scene.page.until(lambda: not scene.page.find("#key").is_displayed())
    assert scene.page.texts("article") == []
    scene.keeps()


@pytest.mark.parametrize(("place", "is_closed"), [("#message", True), ("#search", False)])
def test_a_screen_that_gets_narrow_closes_the_list(
    scene: Scene, place: str, is_closed: bool
) -> None:
    """It would cover what a person reads or types. A list that somebody uses stays."""
    closed = "return document.body.classList.contains('side-closed')"
    try:
        resize(scene, 844, 390)
        scene.page.script("showSide(true); document.querySelector(arguments[0]).focus()", place)
        resize(scene, 390, 844)
        scene.page.until(lambda: scene.page.script("return narrow.matches"))
        scene.page.until(lambda: scene.page.script(closed) is is_closed)
    finally:
        scene.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def resize(scene: Scene, width: int, height: int) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    scene.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


COVERED = """
const [name] = arguments;
const place = document.querySelector(name);
const { left, right, top, bottom } = place.getBoundingClientRect();
const covered = [];
for (let y = top + 8; y < bottom; y += 8) {
  const shown = document.elementFromPoint((left + right) / 2, y);
  if (!place.contains(shown)) covered.push([y, shown?.outerHTML.slice(0, 80)]);
}
return covered;
"""


@pytest.mark.parametrize("width", [390, 1200])
def test_nothing_covers_a_long_message_and_the_menu_of_the_first_turn(
    scene: Scene, width: int
) -> None:
    resize(scene, width, 844)
    try:
        scene.answered()
        scene.page.script("showSide(false)")
        scene.page.find("article.user .more summary").send_keys(Keys.ENTER)
        scene.page.until(lambda: not scene.page.script(COVERED, "article.user .menu"))
        scene.page.script("changeDraft(state.chat, (d) => { d.message = 'a\\n'.repeat(99) })")
        scene.page.script("showDraft(); notice('A notice'); $('down').hidden = false")
        assert scene.page.script(COVERED, "#message") == []
    finally:
        scene.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


# Focuses each place in turn and draws the page again; returns those that went or lost the focus.
LOST_BY_A_REDRAW = """
const kinds = "button, summary, input, select, textarea, [tabindex='0']";
const scope = document.querySelector("dialog[open]") ?? document;
const shown = () => [...document.querySelectorAll(kinds)].filter((place) =>
  place.checkVisibility() && !place.disabled && place.type !== "file" && scope.contains(place));
const nameOf = (place) =>
  place.dataset.focus ?? (place.id || place.className + place.textContent);
const lost = [];
const all = shown().map(nameOf);
draw();
lost.push(...all.filter((name) => !shown().map(nameOf).includes(name)));
for (let index = 0; index < shown().length; index++) {
  shown()[index].focus();
  const name = nameOf(document.activeElement);
  draw();
  if (nameOf(document.activeElement) !== name) lost.push(name);
}
return lost;
"""


def test_a_redraw_keeps_the_focus_where_it_is(browser: webdriver.Chrome, connect: Connect) -> None:
    """As when an answer ends in another conversation, or another tab has changed one."""
    api, _ = connect(speaking(lambda prompt: "one more word " * 300, 0.02))
    page = Page(browser, api.url)
    page.starts()
    lost = {}
    for state, script in IN_STATES.items():
        page.script(RESET)
        page.script(f"{{ {script} }}")
        lost[state] = page.script(LOST_BY_A_REDRAW)
    assert not any(lost.values()), lost


def test_a_file_of_conversations_has_what_was_not_sent(scene: Scene) -> None:
    """Who is told that the storage is full exports all, and closes the tab."""
    scene.answered()
    scene.page.act("Edit", "article.user")
    scene.page.type(" edited")
    scene.page.find("#message").send_keys("half a mess")
    scene.page.script("attach([new File(['text'], 'a.txt')])")
    scene.page.until(lambda: scene.page.texts("#files button"))
    export = (
        "const end = arguments[0]; URL.createObjectURL = (blob) => { blob.text().then(end); };"
        "exportAll();"
    )
    exported = scene.browser.execute_async_script(export)
    scene.page.script("for (const chat of [...state.chats.values()]) forgetChat(chat)")
    file = scene.files / "chats.json"
    file.write_text(exported)
    scene.browser.refresh()
    scene.page.starts()
    scene.page.find("#import-file").send_keys(str(file))
    scene.page.until(lambda: scene.page.texts("#chats .open"))
    scene.page.script("openChat([...state.chats.values()][0])")
    assert message(scene) == "half a mess"
    assert scene.page.texts("#files button") == ["a.txt"]
    assert "short edited" in scene.shown()["fields"]
