"""The report and the site, as somebody sees them: in a headless Chromium."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.browser import (
    LAPTOP,
    PHONE,
    assert_fits,
    assert_keyboard_reaches_everything,
    assert_pictures_loaded,
    assert_readable,
    chromium,
    opened,
    served,
)
from tests.unfinished import as_it_was
from trl_populora.hub.push import make_space
from trl_populora.report.page import write_report


pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def report(finished, tmp_path_factory) -> str:
    return write_report(finished, tmp_path_factory.mktemp("report")).as_uri()


class TestReport:
    @pytest.mark.parametrize("size", [PHONE, LAPTOP], ids=["phone", "laptop"])
    def test_is_whole_and_fits(self, browser, report, size):
        with opened(browser, report, size) as page:
            assert_pictures_loaded(page)
            assert_fits(page)
            for each in page.query_selector_all("summary"):
                each.click()
            assert_fits(page)
            assert_readable(page)

    def test_the_verdict_is_seen_on_a_phone_without_scrolling(self, browser, report):
        with opened(browser, report, PHONE) as page:
            box = page.query_selector(".verdict").bounding_box()
            assert box["y"] + box["height"] < page.viewport_size["height"]

    def test_is_used_by_keyboard(self, browser, report):
        with opened(browser, report) as page:
            assert_keyboard_reaches_everything(page)
            page.focus("summary")
            page.keyboard.press("Enter")
            assert page.evaluate("() => document.activeElement.parentElement.open")


def test_a_space_is_whole_from_disk(browser, finished, tmp_path):
    make_space(finished, tmp_path, "me/report")
    with opened(browser, (tmp_path / "index.html").as_uri(), PHONE) as page:
        assert_pictures_loaded(page)
        assert_fits(page)
        assert_readable(page)


FAULTY = """<!DOCTYPE html><html lang="en"><title>x</title><body><p style="color: #999">faint</p>
<table style="width: 600px"><tr><td>wide</td></tr></table><img alt="lost" src="lost.png">
</body></html>"""


@pytest.mark.parametrize("look", [assert_fits, assert_readable, assert_pictures_loaded])
def test_what_is_looked_for_would_be_seen(browser, tmp_path, look):
    (tmp_path / "page.html").write_text(FAULTY)
    page = browser.new_page(viewport=PHONE)
    page.goto((tmp_path / "page.html").as_uri())
    with pytest.raises(AssertionError):
        look(page)
    page.close()


def test_a_complaint_of_the_browser_would_be_seen(browser, tmp_path):
    (tmp_path / "page.html").write_text(FAULTY)
    with pytest.raises(AssertionError, match="lost.png"), opened(browser, (tmp_path / "page.html").as_uri()):
        pass


@pytest.mark.usefixtures("two_plots")
def test_the_report_of_a_run_in_progress_is_whole_and_is_written_again_in_its_place(browser, finished, tmp_path):
    as_it_was(finished, tmp_path, 3)
    with opened(browser, write_report(tmp_path).as_uri(), PHONE) as page:
        assert "steps: 2 of 4 (in progress or stopped)" in page.inner_text("body")
        assert_pictures_loaded(page)
        assert_fits(page)
        as_it_was(finished, tmp_path, 9)
        write_report(tmp_path)
        page.reload()
        assert "steps: 4 of 4" in page.inner_text("body")
        assert_pictures_loaded(page)


@pytest.fixture(scope="module")
def site():
    """The built site, served; its pages as paths."""
    subprocess.run(["make", "docs"], cwd=ROOT, check=True, capture_output=True)
    with served(ROOT / "build" / "site") as url:
        yield url


def test_every_page_of_the_site_is_whole_and_fits_a_phone(browser, site):
    built = ROOT / "build" / "site"
    paths = sorted(str(path.parent.relative_to(built)) for path in built.rglob("index.html"))
    assert "docs/guides/model" in paths
    with opened(browser, site, PHONE) as page:
        for path in paths:
            page.goto(f"{site}{path}/")
            assert page.query_selector("h1"), path
            assert_pictures_loaded(page)
            assert_fits(page)
            assert_readable(page)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_first_page_of_the_site_reads_by_day_and_by_night(browser, site, dark):
    with opened(browser, site, LAPTOP, dark) as page:
        assert_readable(page)


def test_the_site_is_used_by_keyboard(browser, site):
    with opened(browser, f"{site}docs/guides/model/", LAPTOP) as page:
        assert_keyboard_reaches_everything(page)


def test_the_site_is_searched(browser, site):
    with opened(browser, site, LAPTOP) as page:
        page.wait_for_load_state("networkidle")  # keys pressed before the search has loaded are lost
        page.keyboard.press("/")
        page.keyboard.type("warm start")
        page.wait_for_selector("text=warm_start", timeout=20_000)
