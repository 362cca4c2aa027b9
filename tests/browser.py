"""A headless Chromium, and what every page of ours has to hold in one."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


PHONE, LAPTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}

# What is wider than the window and not in a part that scrolls by itself.
TOO_WIDE = """() => {
  const scrolls = each => each && (["auto", "scroll", "hidden"].includes(getComputedStyle(each).overflowX)
    ? true : scrolls(each.parentElement === document.body ? null : each.parentElement));
  const found = [...document.querySelectorAll("body *")].filter(each => {
    const box = each.getBoundingClientRect();
    return box.width && box.height && box.right > innerWidth + 1 && box.left < innerWidth && !scrolls(each);
  });
  return found.slice(0, 5).map(each => each.tagName + " " + (each.innerText ?? "").slice(0, 60));
}"""

# Text whose colour is too near its ground's: WCAG 2.2 AA asks for 4.5, or 3 where letters are large.
TOO_FAINT = """() => {
  const channels = text => text.match(/[\\d.]+/g).map(Number);
  const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1}).getContext("2d",
    {willReadFrequently: true});
  const rgba = color => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, under) => [0, 1, 2].map(i => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const ground = each => {
    const layers = [];
    for (let at = each; at; at = at.parentElement) layers.push(rgba(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]);
  };
  const light = color => {
    const [r, g, b] = color.map(c => c / 255).map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const found = new Map();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const each = walker.currentNode.parentElement, style = getComputedStyle(each);
    const text = walker.currentNode.data.trim(), box = each.getBoundingClientRect();
    if (!text || !each.checkVisibility({opacityProperty: true, visibilityProperty: true}) || !box.width) continue;
    if (["SCRIPT", "STYLE"].includes(each.tagName) || each.closest("svg")) continue;
    const under = ground(each), [a, b] = [over(rgba(style.color), under), under].map(light);
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05), size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) found.set(`${style.color} on ${under.map(Math.round).slice(0, 3)}`,
      `${ratio.toFixed(2)}: ${each.tagName} ${text.slice(0, 40)}`);
  }
  return [...found].map(([colors, what]) => `${colors}, ${what}`);
}"""

# What can be acted upon and is seen; of radio buttons of one name a single one is on the keyboard's way.
STOPS = """() => {
  window.stops = [...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex]")]
    .filter(each => each.tabIndex >= 0 && !each.disabled && each.checkVisibility({visibilityProperty: true})
      && each.getClientRects().length && each.getBoundingClientRect().width > 1);
  window.met = new Set();
  return window.stops.length;
}"""
# What has gone since, as the way back to the top does at the top, need not be met.
MISSED = """() => window.stops.filter(each => !window.met.has(each) && each.tabIndex >= 0 && each.checkVisibility())
  .map(each => each.outerHTML.slice(0, 90))"""


def failures_of(request) -> list[str]:
    """Why a request failed; a page that is left cancels the loading of search and icon, which is no failure."""
    late = r"/workers/search|/search\.json$|/favicon\.png$"
    is_left = request.failure == "net::ERR_ABORTED" and re.search(late, request.url)
    return [] if is_left else [f"{request.url}: {request.failure}"]


@contextmanager
def chromium() -> Iterator:
    """Chromium of the system, or playwright's own; skips the test where there is none."""
    driver = pytest.importorskip("playwright.sync_api", exc_type=ImportError)
    with driver.sync_playwright() as running:
        path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        try:
            started = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except driver.Error as error:
            pytest.skip(f"no Chromium: {str(error).splitlines()[0]}")
        yield started
        started.close()


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """Serves a folder on this machine."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(directory)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@contextmanager
def opened(browser, url: str, size: dict[str, int] = LAPTOP, dark: bool = False):
    """A page; at its end nothing may have gone to the console or failed to load."""
    complaints: list[str] = []
    context = browser.new_context(viewport=size, color_scheme="dark" if dark else "light", reduced_motion="reduce")
    context.set_default_timeout(60_000)  # on a busy machine
    page = context.new_page()
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda request: complaints.extend(failures_of(request)))
    page.on("response", lambda answer: complaints.append(answer.url) if answer.status >= 400 else None)
    page.goto(url)
    try:
        yield page
    finally:
        context.close()
    assert not complaints, complaints


def assert_pictures_loaded(page) -> None:
    page.evaluate("() => document.querySelectorAll('img').forEach(each => each.loading = 'eager')")
    page.wait_for_function("() => [...document.images].every(each => each.complete)")
    found = page.evaluate("() => [...document.images].filter(each => !each.naturalWidth).map(each => each.alt)")
    assert not found, found


def assert_fits(page) -> None:
    found = page.evaluate(TOO_WIDE)
    assert not found, found
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


def assert_readable(page) -> None:
    found = page.evaluate(TOO_FAINT)
    assert not found, found


def assert_keyboard_reaches_everything(page) -> None:
    """Tab, from the top of the page, comes by all that can be acted upon."""
    count = page.evaluate(STOPS)
    page.evaluate("() => { document.activeElement?.blur(); window.scrollTo(0, 0); }")
    for _ in range(2 * count + 20):  # parts that scroll are stops, too
        page.keyboard.press("Tab")
        if page.evaluate("() => { window.met.add(document.activeElement); return window.met.size; }") > count + 15:
            break
    found = page.evaluate(MISSED)
    assert not found, found
