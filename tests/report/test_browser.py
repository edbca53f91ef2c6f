"""The page in a real browser, through playwright; skipped where playwright or chromium is missing.

AXE=path/to/axe.min.js (from `npm pack axe-core`) adds the test for accessibility.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api")

from run_folders import many, with_outputs, write  # noqa: E402

from fedvlm.report.page import PageOptions, page  # noqa: E402

pytestmark = pytest.mark.browser
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (390, 768, 1440)
OVERFLOWS = """[...document.querySelectorAll('figure svg')].filter(
    (s) => s.getBoundingClientRect().right > innerWidth || s.scrollWidth > s.clientWidth + 1).length"""
CUT_OFF = """[...document.querySelectorAll('caption span')].filter(
    (s) => s.getBoundingClientRect().right > innerWidth).map((s) => s.textContent)"""
OPEN = "document.querySelectorAll('details').forEach((d) => (d.open = true))"


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    if not CHROMIUM:
        pytest.skip("no chromium")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    runs = many(folder)
    for run in runs:
        with_outputs(run)
    page(runs, folder / "page.html", PageOptions(details=True))
    return folder / "page.html"


@pytest.fixture
def tab(browser, written):
    """The page at 1,440 pixels; what it says to the console or asks of others is in `said`."""
    opened = browser.new_page(viewport={"width": 1440, "height": 900})
    opened.said = []
    opened.on("console", lambda message: opened.said.append(message.text))
    opened.on("pageerror", lambda error: opened.said.append(str(error)))
    opened.on("request", lambda r: opened.said.append(r.url) if not r.url.startswith(("file:", "data:")) else None)
    opened.goto(written.as_uri())
    yield opened
    assert opened.said == []
    opened.close()


def test_three_widths_two_schemes_and_no_overflow(tab, tmp_path) -> None:
    clients = tuple(f"client {k}" for k in range(500))
    big = [write(tmp_path, name, "client 0", rounds=2, domains=clients) for name in ("fedavg", "fedot")]
    page(big, tmp_path / "big.html")
    for address in (tab.url, (tmp_path / "big.html").as_uri()):
        tab.goto(address)
        tab.evaluate(OPEN)
        colours = set()
        for scheme in ("light", "dark"):
            tab.emulate_media(color_scheme=scheme)
            for width in WIDTHS:
                tab.set_viewport_size({"width": width, "height": 900})
                assert tab.evaluate("document.documentElement.scrollWidth") <= width, (address, scheme)
                assert tab.evaluate(OVERFLOWS) == 0, (address, width, scheme)
                assert tab.evaluate(CUT_OFF) == [], (address, width, scheme)
            colours.add(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
            colours.add(tab.evaluate("getComputedStyle(document.querySelector('.axis')).fill"))
        assert len(colours) == 4


def test_sorting_filtering_hovering_and_choosing(tab) -> None:
    table = tab.locator("table.sortable", has=tab.locator("caption", has_text="Means over seeds"))
    names = lambda: table.locator("tbody th").all_inner_texts()  # noqa: E731
    before = names()
    table.locator("thead button", has_text="own clients P").first.focus()
    tab.keyboard.press("Enter")
    head = table.locator("th[aria-sort]")
    assert head.get_attribute("aria-sort") == "descending" and names()[0] == "fedot" and names() != before
    tab.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending" and names()[0] == "zero-shot"

    runs = tab.locator("details", has=tab.locator("summary", has_text="24 finished")).last
    runs.locator("summary").first.click()
    runs.locator("input[type=search]").fill("fedot sketch")
    assert runs.locator("tbody tr:visible").count() == 2 and "2 of 24" in runs.locator("[role=status]").inner_text()

    tab.locator("figure .mark[data-tip^='fedot: new']").first.hover()
    assert tab.locator("#tip").inner_text().startswith("fedot: new clients 76.5")

    chosen = tab.locator(".rank button", has_text="fedot")
    chosen.click()
    number = chosen.get_attribute("data-m")
    assert tab.locator("figure g.off").count() > 0
    assert "off" not in (tab.locator(f"figure g[data-m='{number}']").first.get_attribute("class") or "")


@pytest.mark.parametrize("size", [(1440, 900), (390, 844)])
def test_the_answer_is_on_the_first_screen(tab, size) -> None:
    """The headline, both cards of goals and, on a wide screen, the chart and the ranking."""
    tab.set_viewport_size({"width": size[0], "height": size[1]})
    wanted = [".headline", ".answers > div:nth-child(2)", "figure svg"] + [".rank tbody tr:nth-child(3)"] * (
        size[0] > 1000
    )
    for place in wanted:
        box = tab.locator(place).first.bounding_box()
        assert box and box["y"] + (box["height"] if size[0] > 1000 else 0) <= size[1], place


def test_keyboard_alone(tab) -> None:
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.className") == "skip"
    tab.locator("summary", has_text="24 finished").last.focus()
    tab.keyboard.press("Space")
    assert tab.locator("details", has=tab.locator("summary", has_text="24 finished")).last.get_attribute("open") == ""


def test_print_to_pdf(tab, tmp_path) -> None:
    tab.pdf(path=tmp_path / "page.pdf", format="A4")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF") and (tmp_path / "page.pdf").stat().st_size > 20_000
    tab.emulate_media(media="print")
    assert not tab.locator(".filter").first.is_visible()
    assert (
        tab.evaluate("getComputedStyle(document.querySelector('td')).getPropertyValue('print-color-adjust')") == "exact"
    )


@pytest.mark.skipif(not os.environ.get("AXE"), reason="AXE= is not set")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(scheme, browser, written) -> None:
    context = browser.new_context(bypass_csp=True, color_scheme=scheme)
    tab = context.new_page()
    tab.goto(written.as_uri())
    tab.evaluate(OPEN)
    tab.add_script_tag(path=os.environ["AXE"])
    faults = tab.evaluate("axe.run()")["violations"]
    assert [(f["id"], f["nodes"][0]["html"][:200]) for f in faults if f["impact"] in ("serious", "critical")] == []
    context.close()
