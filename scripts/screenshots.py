"""Takes pictures of the page into `build/screenshots/`: apps, starts, an app, the pool, a phone.

    python scripts/screenshots.py [FOLDER]

The apps and starts in them are made up: nagara runs over the fake node of the tests.
"""

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "lib"))

from page_stand import (  # type: ignore[import-not-found]  # noqa: E402
    BROWSER_ARGUMENTS,
    PageStand,
    app_text,
    browser_program,
    page_stand,
    seed,
    until,
)
from playwright.sync_api import sync_playwright  # noqa: E402

_WIDE = {"width": 1280, "height": 860}
_PHONE = {"width": 390, "height": 844}
_SAMPLES = 12


def _busy(stand: PageStand) -> Callable[[], None]:
    """Some apps at work, one that cannot start, one that is starting; ends with what it returns."""
    names = ("chat", "embed", "vision")
    stand.node.scripts["broken"].always_fails = "ModuleNotFoundError: No module named 'flask'"
    stand.node.scripts["slow"].plain_s = 1e6
    for name, size_bytes in zip(names, (612_000_000, 96_000_000, 2_840_000_000), strict=True):
        script = stand.node.scripts[name]
        script.can_snapshot, script.capture_s, script.snapshot_bytes = True, 1.5, size_bytes
        script.plain_s, script.restored_s = size_bytes / 3e8, size_bytes / 3e9
    stand.node.scripts["embed"].failed_restores = ["the canary answered 'x' instead of 'y'"]
    stand.deploy(*map(app_text, (*names, "broken", "slow")))
    is_over = threading.Event()
    body = '{"model": "chat", "prompt": "x", "max_tokens": 24, "stream": true}'

    def work() -> None:
        round_ = 0
        while not is_over.wait(0.02):
            round_ += 1
            for name in names[: 1 + round_ // 20 % 3]:
                stand.call(name, "/v1/completions", body)

    def fail() -> None:
        stand.call("broken")

    threads = [threading.Thread(target=one) for one in (work, fail)]
    slow = threading.Thread(target=stand.call, args=("slow",), daemon=True)
    for thread in (*threads, slow):
        thread.start()

    def end() -> None:
        is_over.set()
        for thread in threads:
            thread.join()

    return end


def _rented(stand: PageStand, state: str) -> list[str]:
    machines = stand.client.pool()["machines"]
    return [one["name"] for one in machines if one["provider"] == "rack" and one["state"] == state]


def _take(
    stand: PageStand, browser: Any, folder: Path, name: str, view: str, **options: Any
) -> None:
    context = browser.new_context(**{"viewport": _WIDE, "device_scale_factor": 1, **options})
    page = context.new_page()
    page.goto(f"{stand.url}/#/{view}")
    page.fill("#token", stand.token)
    page.keyboard.press("Enter")
    page.wait_for_selector("#link.live")
    page.wait_for_selector(".start, tr[data-app], table")
    if view.startswith("app/"):
        page.wait_for_selector(".compare")
    if view == "snapshots":
        page.click("summary >> nth=0")
    if view == "starts":
        page.hover(".seg.files >> nth=3")
    page.wait_for_timeout(1500)
    page.screenshot(path=folder / f"{name}.png", full_page=view != "starts")
    context.close()
    print(folder / f"{name}.png")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    program = browser_program()
    if program is None:
        sys.exit("error: needs Chromium\nhint: apt-get install chromium-headless-shell")
    with tempfile.TemporaryDirectory() as scratch:
        state = Path(scratch) / "state"
        seed(state, 14, 400, name="team")
        with page_stand(state, rented=3) as stand, sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=program, args=list(BROWSER_ARGUMENTS)
            )
            end = _busy(stand)
            until(lambda: stand.client.app("broken")["failures"] > 0)
            until(lambda: len(stand.node.live) >= 3)
            until(lambda: len(_rented(stand, "ready")) == 3)
            stand.client.order_machine(_rented(stand, "ready")[0], "diagnose?kind=heavy")
            for name in ("chat", "embed", "vision"):
                until(lambda: stand.client.app(name)["capture"]["state"] == "done")  # noqa: B023
            for _ in range(3):
                stand.client.fold("embed")
                until(lambda: stand.client.app("embed")["replicas"]["ready"] > 0)
            stand.node.scripts["vision"].quarantined = "the canary answered 'x' instead of 'y'"
            threading.Event().wait(_SAMPLES)  # so that the charts have something to show
            for name, view, options in (
                ("apps", "", {}),
                ("apps-dark", "", {"color_scheme": "dark"}),
                ("starts", "starts", {}),
                ("start", "app/team-0003", {}),
                ("pool", "pool", {}),
                ("pool-dark", "pool", {"color_scheme": "dark"}),
                ("snapshots", "snapshots", {}),
                ("snapshots-dark", "snapshots", {"color_scheme": "dark"}),
                ("app-busy", "app/embed", {}),
                ("phone-apps", "", {"viewport": _PHONE}),
                ("phone-start", "app/team-0003", {"viewport": _PHONE}),
                ("phone-pool", "pool", {"viewport": _PHONE, "color_scheme": "dark"}),
                ("phone-snapshots", "snapshots", {"viewport": _PHONE}),
            ):
                _take(stand, browser, folder, name, view, **options)
            end()
            browser.close()


if __name__ == "__main__":
    main()
