"""The page in a real browser: `pytest -m browser`, with playwright and chromium (skipped where one of them is missing).

AXE=path/to/axe.min.js (from `npm pack axe-core`) adds the test for accessibility.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api")

from test_page import with_outputs  # noqa: E402
from test_report import many  # noqa: E402

from fedvlm.report.page import Options, page  # noqa: E402

pytestmark = pytest.mark.browser
WIDTHS = (390, 768, 1440)


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if not found:
        pytest.skip("no chromium")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    runs = many(folder)
    for run in runs:
        with_outputs(run)
    page(runs, folder / "page.html", Options(details=True))
    return folder / "page.html"


@pytest.fixture(params=[(w, scheme) for w in WIDTHS for scheme in ("light", "dark")], ids=lambda p: f"{p[0]}-{p[1]}")
def opened(browser, written, request):
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, has_touch=width == 390)
    tab = context.new_page()
    tab.said = []
    tab.on("console", lambda message: tab.said.append(message.text))
    tab.on("pageerror", lambda error: tab.said.append(str(error)))
    tab.on("request", lambda r: tab.said.append(r.url) if not r.url.startswith(("file:", "data:")) else None)
    tab.goto(written.as_uri())
    yield tab
    context.close()


def test_no_message_no_request_and_no_overflow(opened) -> None:
    opened.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    assert opened.said == []
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
    outside = """[...document.querySelectorAll('figure svg')].filter(
        (s) => s.getBoundingClientRect().right > innerWidth || s.scrollWidth > s.clientWidth + 1).length"""
    assert opened.evaluate(outside) == 0


def test_colours_follow_the_scheme(browser, written) -> None:
    seen = set()
    for scheme in ("light", "dark"):
        tab = browser.new_page(color_scheme=scheme)
        tab.goto(written.as_uri())
        seen.add(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
        seen.add(tab.evaluate("getComputedStyle(document.querySelector('.mark')).fill"))
        tab.close()
    assert len(seen) == 4


def test_sorting_filtering_hovering_and_choosing(browser, written) -> None:
    tab = browser.new_page(viewport={"width": 1440, "height": 900})
    tab.goto(written.as_uri())
    table = tab.locator("table.sortable").first
    names = lambda: table.locator("tbody th").all_inner_texts()  # noqa: E731
    before = names()
    table.locator("thead button", has_text="P").first.focus()
    tab.keyboard.press("Enter")
    head = table.locator("th[aria-sort]")
    assert head.get_attribute("aria-sort") == "descending" and names()[0] == "fedot" and names() != before
    tab.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending" and names()[0] == "zero-shot"

    runs = tab.locator("details", has=tab.locator("summary", has_text="24 finished")).last
    runs.locator("summary").first.click()
    runs.locator("input[type=search]").fill("fedot sketch")
    assert runs.locator("tbody tr:visible").count() == 2 and "2 of 24" in runs.locator("[role=status]").inner_text()

    tab.locator("figure .mark[data-tip^='fedot: G']").first.hover()
    assert tab.locator("#tip").inner_text().startswith("fedot: G 76.5")

    tab.locator(".legend button", has_text="fedot").click()
    assert tab.locator("figure g.off").count() > 0
    assert "off" not in (tab.locator("figure g[data-m='1']").first.get_attribute("class") or "")
    tab.close()


def test_print_to_pdf(browser, written, tmp_path) -> None:
    tab = browser.new_page()
    tab.goto(written.as_uri())
    tab.pdf(path=tmp_path / "page.pdf", format="A4")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF") and (tmp_path / "page.pdf").stat().st_size > 20_000
    tab.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(scheme, browser, written) -> None:
    if not os.environ.get("AXE"):
        pytest.skip("AXE= is not set")
    context = browser.new_context(bypass_csp=True, color_scheme=scheme)
    tab = context.new_page()
    tab.goto(written.as_uri())
    tab.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    tab.add_script_tag(path=os.environ["AXE"])
    faults = tab.evaluate("axe.run()")["violations"]
    assert [(f["id"], f["nodes"][0]["html"][:200]) for f in faults if f["impact"] in ("serious", "critical")] == []
    context.close()
