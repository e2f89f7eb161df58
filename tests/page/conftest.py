"""The page in a real browser: the system's Chromium, driven by Playwright."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from page_stand import BROWSER_ARGUMENTS, PageStand, browser_program, page_stand

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")

WIDE = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
# A host name's worth of patience for a busy machine.
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = browser_program()
    if program is None:
        pytest.skip("needs Chromium: apt-get install chromium-headless-shell")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=list(BROWSER_ARGUMENTS), timeout=PATIENCE_MS
        )
        yield browser
        browser.close()


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[PageStand]:
    with page_stand(tmp_path / "state") as stand:
        yield stand


@pytest.fixture
def faults() -> Iterator[list[str]]:
    """What the browser complained about; at the end of a test it must be nothing."""
    faults: list[str] = []
    yield faults
    assert faults == []


@pytest.fixture
def open_page(browser: Any, faults: list[str]) -> Iterator[Callable[..., Any]]:
    """Opens the page, signed in unless told otherwise."""
    contexts = []

    def act(stand: PageStand, path: str = "/", *, signed_in: bool = True, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": WIDE, **options})
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        page = context.new_page()
        page.on(
            "console", lambda said: said.type in ("error", "warning") and faults.append(said.text)
        )
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(f"{stand.url}{path}")
        if signed_in:
            page.fill("#token", stand.token)
            page.keyboard.press("Enter")
            page.wait_for_selector("#link.live")
        return page

    yield act
    for context in contexts:
        context.close()
