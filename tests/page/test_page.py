"""What a person sees, in Chromium: live, complete, operable, and nothing unescaped."""

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from page_stand import PageStand, app_text, page_stand, seed, until

from nagara.control.web_page import WebPage

PHONE = {"width": 390, "height": 844}
AXE = Path(__file__).parent / "vendor" / "axe.min.js"
OpenPage = Callable[..., Any]
_SAVED_TEXTS = ("app", "snapshot", "machine", "key", "state", "misfit", "reason")
_SAVED_NUMBERS = (
    "memory_bytes", "layer_bytes", "stored_bytes", "shared_bytes", "here_bytes", "created_at_s",
    "failures", "restores", "failed_restores", "restored_s", "elapsed_s", "finished_s",
)  # fmt: skip
HOSTILE = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>\x1b[31m\u202e'


def test_a_wrong_token_is_refused_and_the_right_one_signs_in(
    stand: PageStand, open_page: OpenPage, faults: list[str]
) -> None:
    page = open_page(stand, signed_in=False)
    page.fill("#token", "nga-wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=That is not the admin token")
    assert [fault for fault in faults if "401" not in fault] == []
    faults.clear()  # the browser tells of the refusal, as it should
    page.fill("#token", stand.token)
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Nothing is deployed yet")
    page.reload()
    page.wait_for_selector("#link.live")  # still signed in
    page.click("#leave")
    page.wait_for_selector("#token")
    page.reload()
    page.wait_for_selector("#token")


def test_a_start_is_shown_while_it_happens_and_when_it_has_ended(
    stand: PageStand, open_page: OpenPage
) -> None:
    stand.deploy(app_text("smol"))
    page = open_page(stand)
    page.wait_for_selector("tr[data-app=smol] >> text=at zero")
    hold = threading.Event()
    stand.node.scripts["smol"].plain_s = 1e6  # until it is let go
    started = threading.Thread(target=lambda: (stand.call("smol"), hold.set()))
    started.start()
    page.wait_for_selector("tr[data-app=smol] >> text=1 starting")
    page.click("nav >> text=Starts")
    page.wait_for_selector(".start >> text=starting")
    assert not hold.is_set()

    # The start under way fails with its app's new definition; the next one is quick.
    stand.node.scripts["smol"].plain_s = 0.0
    stand.deploy(app_text("smol", env='{A = "2"}'))
    page.wait_for_selector(".start >> text=plain")
    started.join(60)
    segments = page.locator(".start:has-text('plain') .seg")
    assert segments.count() >= 1
    page.locator(".start:has-text('plain') > button").first.press("Enter")
    page.wait_for_selector(".details >> text=unaccounted")
    page.click("nav >> text=Apps")
    page.wait_for_selector("tr[data-app=smol] >> text=1 ready")


def test_plain_and_restored_starts_are_compared_with_their_bytes_and_tiers(
    tmp_path: Path, open_page: OpenPage
) -> None:
    seed(tmp_path / "state", 1, 40)
    with page_stand(tmp_path / "state") as stand:
        page = open_page(stand, "/#/app/app-0000")
        page.wait_for_selector(".compare >> text=restored")
        page.wait_for_selector(".compare >> text=plain")
        widths = page.eval_on_selector_all(
            ".compare .stack", "all => all.map((each) => parseFloat(each.style.width))"
        )
        assert widths[0] == 100
        assert widths[1] < widths[0]
        filled = page.eval_on_selector_all(
            ".compare .stack",
            "all => all.map((bar) => [...bar.children].reduce("
            "(sum, part) => sum + part.offsetWidth, 0) / bar.clientWidth)",
        )
        assert all(share > 0.9 for share in filled)  # also a bar of less than a second
        page.hover(".compare .seg.files >> nth=0")
        shown = page.inner_text("#tip")
        assert "900 objects, 212 MB" in shown
        assert "from zone: 400 objects, 112 MB" in shown
        page.hover(".compare .stack >> nth=1 >> .seg.host")
        assert "from snapshot 2f6c01" in page.inner_text("#tip")
        assert "hooks" in page.inner_text("#tip")


def test_a_snapshot_is_shown_with_its_needs_uses_and_failures(
    stand: PageStand, open_page: OpenPage
) -> None:
    script = stand.node.scripts["smol"]
    script.can_snapshot = True
    stand.deploy(app_text("smol"), app_text("other"))
    assert stand.call("smol") == 200
    until(lambda: bool(stand.node.captured))
    page = open_page(stand, "/#/snapshots")
    page.wait_for_selector("tr[data-snapshot] >> text=good")
    page.wait_for_selector("section:has-text('Apps without a usable one') >> text=other not yet")
    script.failed_restores = ["the canary failed"]
    for _ in range(3):  # the first one is plain
        stand.client.fold("smol")
        assert stand.call("smol") == 200
    row = page.locator("tr[data-snapshot=fake-snapshot]")
    page.wait_for_selector("tr[data-snapshot] >> td[data-label=restores]:has-text('2')")
    assert row.locator("td[data-label=failed]").inner_text() == "1"
    assert row.locator("td[data-label=shared]").inner_text() == "100 B"
    assert not row.locator("text=avx2").is_visible()
    page.click("summary >> text=3 CPU flags")
    page.wait_for_selector("tr[data-snapshot] >> text=avx2 fma sse4_2")
    page.click("tr[data-snapshot] >> a >> text=smol")
    page.wait_for_selector("h1:has-text('smol')")
    page.wait_for_selector("tr[data-snapshot=fake-snapshot] >> text=good")


def test_checks_under_way_are_shown_with_their_machine(tmp_path: Path, open_page: OpenPage) -> None:
    with page_stand(tmp_path / "state", rented=1) as stand:
        stand.deploy(app_text("smol"))
        assert stand.call("smol") == 200  # a class without claims has no reserve

        def rented() -> str | None:
            names = [m["name"] for m in stand.client.pool()["machines"] if m["provider"] == "rack"
                     and m["state"] == "ready"]  # fmt: skip
            return names[0] if names else None

        until(lambda: rented() is not None)
        page = open_page(stand, "/#/pool")
        stand.client.order_machine(rented() or "", "diagnose?kind=heavy")
        page.wait_for_selector("tr:has-text('h100') >> text=diagnosing")
        shown = page.wait_for_selector("tr:has-text('h100') >> text=heavy checks are running, ")
        before = shown.inner_text()
        until(lambda: page.inner_text("[data-since]") != before)


def test_idle_time_is_shown_by_its_cause(stand: PageStand, open_page: OpenPage) -> None:
    stand.deploy(app_text("smol"))
    assert stand.call("smol") == 200
    page = open_page(stand, "/#/pool")
    page.wait_for_selector(".key.use-keep_alive:has-text('%')")
    page.wait_for_selector(".compare >> text=smol")
    causes = page.eval_on_selector_all(
        ".key[class*=use-]", "all => all.map((each) => each.textContent)"
    )
    assert [cause.partition(" ")[0] for cause in causes] == [
        "starting", "busy", "buffer", "keep-alive", "draining", "capture"
    ]  # fmt: skip


def test_requests_and_tokens_are_counted_as_they_pass(
    stand: PageStand, open_page: OpenPage
) -> None:
    stand.deploy(app_text("smol"))
    page = open_page(stand)
    body = json.dumps({"model": "smol", "prompt": "x", "max_tokens": 4, "stream": True})

    def has_counted() -> bool:
        assert stand.call("smol", "/v1/completions", body) == 200
        labels = page.eval_on_selector_all(".chart", "all => all.map((each) => each.ariaLabel)")
        said = " ".join(labels)
        return (
            bool(re.search(r"answered [\d.]+.*at most [1-9]", said))
            and "at most 0" not in (said.partition("Tokens")[2].partition("Requests in")[0])
        )

    until(has_counted)


def test_text_of_others_is_shown_as_text(stand: PageStand, open_page: OpenPage) -> None:
    """An app that fails with markup and escape codes, and its log."""
    stand.node.scripts["bad"].always_fails = HOSTILE
    stand.deploy(app_text("bad"))
    assert stand.call("bad") == 503
    page = open_page(stand)
    page.wait_for_selector("tr[data-app=bad] >> text=<img src=x")
    page.goto(f"{stand.url}/#/app/bad")
    page.wait_for_selector("pre >> text=<script>")
    assert "␛[31m" in page.inner_text("pre")
    assert "\\u202e" in page.inner_text("pre")
    assert page.locator("main img, main script").count() == 0
    assert page.evaluate("window.pwned") is None


@pytest.mark.parametrize("view", ["", "starts", "pool", "snapshots"])
def test_no_string_that_nagara_tells_becomes_markup(
    tmp_path: Path, open_page: OpenPage, view: str
) -> None:
    """Every string of every document is replaced by markup, names of apps among them."""
    seed(tmp_path / "state", 3, 30)

    def poison(value: Any) -> Any:
        if isinstance(value, str):
            return HOSTILE
        if isinstance(value, list):
            return [poison(each) for each in value]
        if isinstance(value, dict):
            return {key: poison(each) for key, each in value.items()}
        return value

    def answer(route: Any) -> None:
        body = f"event: hello\ndata: {json.dumps(poison(hello))}\n\n"
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    with page_stand(tmp_path / "state") as stand:
        starts = stand.client._call("GET", "/api/starts")["starts"]
        apps = [
            {**dict.fromkeys(("starting", "draining", "stopping", "min", "held", "running"), 0),
             "name": "x", "version": 1, "ready": 1, "max": 4, "requests_s": 0, "tokens_s": 0,
             "failures": 1, "last_failure": "x", "capture": "off", "capture_reason": "x",
             "starts": [{"replica": "x", "since_s": 1.0}]}
        ]  # fmt: skip
        pool = {**stand.client.pool(), "plan": stand.client.pool_plan(), "alerts": ["x"]}
        hello = {"apps": apps, "starts": starts, "pool": pool, "samples": []}
        page = open_page(stand, signed_in=False)
        page.route("**/api/events", answer)
        saved = [{**dict.fromkeys(_SAVED_NUMBERS, 1), **dict.fromkeys(_SAVED_TEXTS, "x"),
                  "cpu_flags": ["x"], "reasons": ["x"], "is_present": False}]  # fmt: skip
        document = json.dumps(poison({"snapshots": saved, "captures": saved}))
        for what in ("snapshots", "captures"):
            page.route(f"**/api/{what}*", lambda route: route.fulfill(body=document))
        page.fill("#token", stand.token)
        page.keyboard.press("Enter")
        page.wait_for_selector("text=onerror")
        page.goto(f"{stand.url}/#/{view}")
        page.wait_for_selector("main >> text=onerror")
        assert page.locator("main img, main script").count() == 0
        assert page.evaluate("window.pwned") is None


def test_markup_could_not_run_even_if_it_were_there(
    stand: PageStand, open_page: OpenPage, faults: list[str]
) -> None:
    page = open_page(stand)
    with pytest.raises(Exception, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<b>x</b>'")
    faults.clear()  # of this attempt
    policy = page.request.get(stand.url).headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_a_thousand_apps_and_ten_thousand_starts(tmp_path: Path, open_page: OpenPage) -> None:
    seed(tmp_path / "state", 1000, 10_000)
    with page_stand(tmp_path / "state") as stand:
        page = open_page(stand)
        page.wait_for_selector("text=1000 of 1000 apps")
        assert page.locator("tr[data-app]").count() == 200
        page.fill("input[type=search]", "app-0777")
        page.wait_for_selector("text=1 of 1000 apps")
        page.fill("input[type=search]", "")
        page.click("text=Show all 1000")
        assert page.locator("tr[data-app]").count() == 1000
        page.click("nav >> text=Starts")
        for count in (100, 300, 500):
            page.wait_for_selector(f"text={count} shown")
            assert page.locator(".start").count() == count
            page.click("text=Older starts")
        page.wait_for_selector("text=700 shown")


def test_it_goes_on_after_nagara_was_away(
    tmp_path: Path, open_page: OpenPage, faults: list[str]
) -> None:
    with page_stand(tmp_path / "state") as stand:
        stand.deploy(app_text("first"))
        port = int(stand.url.rpartition(":")[2])
        page = open_page(stand)
        page.wait_for_selector("tr[data-app=first]")
    page.wait_for_selector("#link:has-text('connecting')")
    with page_stand(tmp_path / "state", port=port) as stand:
        page.wait_for_selector("#link.live")
        stand.deploy(app_text("second"))
        page.wait_for_selector("tr[data-app=second]")
    faults.clear()  # of connections that were refused meanwhile


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", ["wide", "phone"])
def test_nothing_stands_in_the_way_of_assistive_tools(
    tmp_path: Path, open_page: OpenPage, theme: str, width: str
) -> None:
    seed(tmp_path / "state", 4, 30)
    options = {"viewport": PHONE} if width == "phone" else {}
    with page_stand(tmp_path / "state") as stand:
        stand.node.scripts["app-0001"].always_fails = "boom"
        stand.node.scripts["app-0002"].can_snapshot = True
        stand.call("app-0001")
        stand.call("app-0002")
        until(lambda: bool(stand.node.captured))
        page = open_page(stand, color_scheme=theme, bypass_csp=True, **options)
        for view in ("", "starts", "pool", "snapshots", "app/app-0002"):
            page.goto(f"{stand.url}/#/{view}")
            page.wait_for_selector("main h1")
            if view == "starts":
                page.click(".start > button >> nth=0")
            if view == "snapshots":
                page.click("summary >> text=CPU flags")
            page.evaluate(AXE.read_text())
            found = page.evaluate("axe.run()")
            assert len(found["passes"]) > 10
            serious = [
                (
                    each["id"],
                    each["impact"],
                    each["nodes"][0]["html"],
                    each["nodes"][0]["failureSummary"],
                )
                for each in found["violations"]
                if each["impact"] in ("serious", "critical")
            ]
            assert serious == [], view
        if width == "phone":
            wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert page.evaluate(wide) <= 0


def test_everything_can_be_done_with_the_keyboard(tmp_path: Path, open_page: OpenPage) -> None:
    seed(tmp_path / "state", 2, 10)
    with page_stand(tmp_path / "state") as stand:
        page = open_page(stand)
        page.wait_for_selector("tr[data-app]")
        page.keyboard.press("Tab")
        for _ in range(40):
            if page.evaluate("document.activeElement.textContent") == "app-0001":
                break
            page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_selector("h1:has-text('app-0001')")
        assert page.evaluate("document.activeElement.id") == "main"


def test_the_page_needs_no_key_and_tells_nothing_without(stand: PageStand) -> None:
    page = WebPage()
    assert page.serves("/")
    assert page.serves("/-/page.js")
    assert not page.serves("/smol/")
    assert not page.serves("/v1/models")
