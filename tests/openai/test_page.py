"""The page at ``/`` in a real browser: headless Chromium, driven by Selenium over a real server."""

from __future__ import annotations

import os
import re
import shutil
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from doubles.scripted import ScriptedEngine
from tests.helpers.openai_server import MODEL
from tests.helpers.scripted_text import drafted, saying, tokenizer
from tests.helpers.waiting import until
from tests.openai.conftest import Connect
from tests.openai.test_leaving import endless

_NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in _NAMES if (found := shutil.which(name))), None)
DRIVER = shutil.which("chromedriver") or "/usr/bin/chromedriver"
MISSING = "needs Chromium and its driver: apt-get install chromium chromium-driver"
PAGE = Path(__file__).parents[2] / "trtllm_bls" / "openai"
LIBRARIES = (PAGE / "marked.js", PAGE / "purify.js")
REPLY = "Hello <b>there</b> & 🙂 you: <img src=x onerror=alert(1)>."
FLAGS = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run"),
    *("disable-background-networking", "disable-component-update", "disable-sync"),
    *("disable-dev-shm-usage", "window-size=800,900"),
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    if BROWSER is None or not Path(DRIVER).exists():
        if os.environ.get("TRTLLM_BLS_BROWSER") == "1":
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


class Page:
    """What a user does and sees."""

    def __init__(self, browser: webdriver.Chrome, url: str) -> None:
        self.browser = browser
        browser.get_log("browser")  # of the page before
        browser.get(f"{url}/")

    def find(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        found = self.browser.find_elements(By.CSS_SELECTOR, selector)
        return [each.get_property("textContent") for each in found]

    def type(self, *keys: str) -> None:
        """Into whatever has the focus."""
        self.browser.switch_to.active_element.send_keys(*keys)

    def until(self, condition: Callable[[], Any]) -> None:
        WebDriverWait(self.browser, 60, 0.05).until(lambda _: condition())

    def ends(self, said: str) -> None:
        self.until(lambda: said in self.find("#status").text)

    def complaints(self) -> list[str]:
        return [str(line["message"]) for line in self.browser.get_log("browser")]


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
    page.until(lambda: page.find("#model").text == MODEL)
    page.type("Hi", Keys.SHIFT + Keys.ENTER + Keys.NULL, "you", Keys.ENTER)
    page.ends("has ended: stop")
    assert page.texts("article .text:not(.thoughts)") == ["Hi\nyou", REPLY]
    assert not page.browser.find_elements(By.CSS_SELECTOR, "article img, article b")
    coloured = page.texts(".text .drafted")
    assert coloured and all(piece in REPLY for piece in coloured)
    tokens = len(tokenizer().encode_word(REPLY))
    (figures,) = page.texts(".figures")
    assert f"{tokens} tokens" in figures and "first token after" in figures
    assert f"{len(coloured)} accepted from drafts" in figures
    assert page.complaints() == []


MARKDOWN = """# Title
**Bold**, `code`:
```python
def f(x):
    return x < 3
```
| a | b |
|---|---|
| 1 | 2 |

<script>alert(1)</script>

[bad](javascript:alert(1)) [good](https://example.com/)
![picture](https://example.com/x.png)
"""


def test_markdown_is_shown_and_can_be_copied(browser: webdriver.Chrome, connect: Connect) -> None:
    """Code in a fixed width; nothing in the answer runs or is loaded."""
    question = "What is 12 * 9?"
    api, _ = connect(replying([{"role": "user", "content": question}], MARKDOWN))
    page = Page(browser, api.url)
    page.until(lambda: page.find("#model").text == MODEL)
    page.find("#try button").click()
    page.ends("has ended: stop")
    assert not page.find("#try").is_displayed()
    assert page.texts("article.user .text:not(.thoughts)") == [question]
    shown = page.find(".formatted")
    assert [page.texts(f".formatted {tag}") for tag in ("h1", "strong", "td")] == [
        ["Title"],
        ["Bold"],
        ["1", "2"],
    ]
    assert "monospace" in page.find("pre code").value_of_css_property("font-family")
    assert "<script>alert(1)</script>" in shown.text and "![picture](https:" in shown.text
    links = page.browser.find_elements(By.CSS_SELECTOR, ".formatted a")
    assert [each.get_dom_attribute("href") for each in links] == [None, "https://example.com/"]
    loaded = "return performance.getEntriesByType('resource').map(e => e.name)"
    assert all(name.startswith(api.url) for name in page.browser.execute_script(loaded))
    grant = {"permissions": ["clipboardReadWrite"], "origin": api.url}
    page.browser.execute_cdp_cmd("Browser.grantPermissions", grant)
    read = "navigator.clipboard.readText().then(arguments[0])"
    way, copy = page.browser.find_elements(By.CSS_SELECTOR, ".under button")
    copy.click()
    page.until(lambda: copy.text == "Copied")
    assert page.browser.execute_async_script(read).strip() == MARKDOWN.strip()
    page.find("pre button").click()
    page.until(lambda: page.find("pre button").text == "Copied")
    assert page.browser.execute_async_script(read) == "def f(x):\n    return x < 3\n"
    way.click()
    assert (
        not shown.is_displayed() and "**Bold**" in page.find(".assistant .text:not(.thoughts)").text
    )
    page.find("#clear").click()
    assert page.find("#try").is_displayed()
    assert page.complaints() == []


def test_what_was_said_and_set_is_sent(browser: webdriver.Chrome, connect: Connect) -> None:
    """System prompt, settings, and the turns so far; a new chat begins without them."""
    engine = endless(0)
    api, _ = connect(engine)
    page = Page(browser, api.url)
    page.find("summary").send_keys(Keys.ENTER)
    for field, value in (("system", "Be kind."), ("max_tokens", "3"), ("temperature", "0.5")):
        page.find(f"#{field}").clear()
        page.find(f"#{field}").send_keys(value)
    for message in ("one", "two"):
        page.find("#message").send_keys(message, Keys.ENTER)
        page.until(lambda: not page.find("#stop").is_enabled())
        page.ends("has ended: length")
    first, second = (tokenizer().decode(request.input_ids) for request in engine.requests)
    assert "Be kind." in first and "one" in first
    assert second.index("Be kind.") < second.index("one") < second.index("two")
    assert engine.requests[0].max_tokens == 3
    assert engine.requests[0].sampling.temperature == 0.5
    page.find("#clear").click()
    assert page.texts("article") == []
    page.find("#message").send_keys("three", Keys.ENTER)
    page.ends("has ended: length")
    until(lambda: len(engine.requests) == 3)
    assert "one" not in tokenizer().decode(engine.requests[2].input_ids)


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stopping_keeps_the_text_and_frees_the_engine(
    browser: webdriver.Chrome, connect: Connect, way: str
) -> None:
    """And the next message is answered."""
    engine = endless(0.02)
    api, _ = connect(engine)
    page = Page(browser, api.url)
    page.find("#message").send_keys("Hi", Keys.ENTER)
    page.until(lambda: len("".join(page.texts("article.assistant .text:not(.thoughts)"))) > 20)
    assert engine.live == 1
    if way == "button":
        page.find("#stop").click()
    else:
        page.type(Keys.ESCAPE)
    page.ends("has ended: stopped")
    until(lambda: engine.live == 0)
    kept = page.texts("article.assistant .text:not(.thoughts)")[0]
    assert kept
    page.find("#message").send_keys("More", Keys.ENTER)
    page.until(lambda: len(page.texts("article.assistant .text:not(.thoughts)")) == 2)
    page.until(lambda: page.texts("article.assistant .text:not(.thoughts)")[1])
    assert kept in tokenizer().decode(engine.requests[-1].input_ids)
    page.type(Keys.ESCAPE)
    page.ends("has ended: stopped")


def test_a_server_with_keys_is_asked_with_one(browser: webdriver.Chrome, connect: Connect) -> None:
    """The field is there only where it is wanted."""
    api, _ = connect(endless(0), keys=(sha256(b"secret").digest(),))
    page = Page(browser, api.url)
    page.until(lambda: page.find("#key").is_displayed())
    page.type("secret", Keys.TAB)
    page.until(lambda: page.find("#model").text == MODEL)
    open_api, _ = connect(endless(0))
    page = Page(browser, open_api.url)
    page.until(lambda: page.find("#model").text == MODEL)
    assert not page.find("#key").is_displayed()


def test_a_refusal_is_shown_and_the_message_comes_back(
    browser: webdriver.Chrome, connect: Connect
) -> None:
    """In the server's words."""
    api, _ = connect(endless(0))
    page = Page(browser, api.url)
    page.find("summary").click()
    page.browser.execute_script("document.getElementById('temperature').value = 3")
    page.browser.execute_script("document.getElementById('ask').noValidate = true")
    page.find("#message").send_keys("Hi", Keys.ENTER)
    page.ends("failed")
    assert "temperature" in page.texts(".error")[0]
    assert page.find("#message").get_property("value") == "Hi"


def test_every_field_has_a_label_and_both_schemes_can_be_read(
    browser: webdriver.Chrome, connect: Connect
) -> None:
    """Contrast of text and background is at least 4.5, as WCAG AA asks."""
    api, _ = connect(endless(0))
    page = Page(browser, api.url)
    unnamed = "return [...document.querySelectorAll('input, select, textarea')].filter(e => "
    assert page.browser.execute_script(unnamed + "!e.labels.length).map(e => e.id)") == []
    seen = set()
    for scheme in ("light", "dark"):
        feature = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)
        colours = [
            page.find("body").value_of_css_property(name) for name in ("color", "background-color")
        ]
        light, dark = sorted(map(_luminance, colours), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5
        seen.add(tuple(colours))
    assert len(seen) == 2


def _luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


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
