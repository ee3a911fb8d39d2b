"""The pages, in a real browser: every view of a finished run and of one that goes on."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page

from rhymeflow.config.load import dump_config, read_config
from rhymeflow.dashboard.run import Run
from rhymeflow.sim.simulate import simulate
from tests.dashboard.browser import PHONE, WIDE, Seen, browser, until
from tests.dashboard.conftest import TOKEN, serving
from tests.dashboard.made import conversation, hostile
from tests.runtime.tiny import tiny_config

pytestmark = pytest.mark.slow

VIEWS = ("run", "time", "groups", "drafts", "log")
FIELDS = {
    "learner.max_steps": "8",
    "learner.groups_per_batch": "4",
    "rollout.num_instances": "2",
    "schedule.max_staleness": "2",
    "simulation.skip_steps": "1",
}


@pytest.fixture(scope="module")
def chromium():
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Over four runs: two simulated ones, a conversation with turns, and a hostile policy's."""
    folder = tmp_path_factory.mktemp("runs")
    simulate(read_config("demo", FIELDS), output=folder / "one")
    changed = {**FIELDS, "schedule.max_staleness": "1", "learner.max_steps": "6"}
    simulate(read_config("demo", changed), output=folder / "two")
    conversation(folder / "talk", folder / "model")
    hostile(folder / "hostile", folder / "model")
    runs = [Run(folder / name, name) for name in ("one", "two", "talk", "hostile")]
    with serving(runs) as client:
        yield f"http://127.0.0.1:{client.port}/"


@pytest.fixture
def seen(chromium, address: str, request) -> Iterator[Seen]:
    """A new visitor's page; nothing may go wrong in it."""
    size = getattr(request, "param", WIDE)
    context = chromium.new_context(viewport=size, permissions=["clipboard-read", "clipboard-write"])
    found = Seen(context.new_page())
    found.open(f"{address}?token={TOKEN}")
    yield found
    context.close()
    assert found.problems == []


def copied(seen: Seen) -> str:
    text: str = seen.page.evaluate("navigator.clipboard.readText()")
    return text


def rows(page: Page, count: int) -> None:
    """Wait until a table has so many."""
    until(page, "count => document.querySelectorAll('tbody tr').length === count", count)


# -- a finished run --------------------------------------------------------------------------------


def test_the_address_that_is_printed_leads_to_the_first_run(seen: Seen, address: str) -> None:
    assert seen.page.url == f"{address}#/one/run", "and has no token any more"
    assert seen.page.title() == "one · Run · Rhymeflow"


def test_from_a_curve_to_a_response(seen: Seen, address: str) -> None:
    page = seen.page
    seen.open(f"{address}#/one/run")
    facts = page.locator(".facts").inner_text()
    for text in ("8 of 8", "ended", "rhymeflow, bound 2", "32 consumed"):
        assert text in facts
    titles = page.locator(".u-title").all_inner_texts()
    assert "Tokens of a response" in titles
    assert "Entropy" not in titles, "a simulation has none"
    page.locator(".u-over").first.click(position={"x": 5, "y": 50})
    seen.heading("Groups of step 1")
    assert page.locator("tbody tr").count() == 4
    page.keyboard.press("]")
    seen.heading("Groups of step 2")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/#/one/group/*")
    page.wait_for_selector("article")
    assert page.locator("article").count() == 8
    page.locator("article a").first.click()
    page.wait_for_url("**/#/one/trajectory/**")
    page.wait_for_selector("text=Its tokens are not stored")


def test_time(seen: Seen, address: str) -> None:
    page = seen.page
    seen.open(f"{address}#/one/time")
    text = page.locator("main").inner_text()
    assert re.search(r"Pace: limited by .* \(last \d steps\)", text)
    shares = [int(each) for each in re.findall(r"(\d+) %", page.locator(".shares").inner_text())]
    assert abs(sum(shares) - 100) <= 2, "each is rounded"
    canvas = page.locator("canvas")
    box = canvas.bounding_box()
    assert box is not None
    assert box["height"] == 22 + 24 * (3 + 8), "a learner, two instances, eight batches"
    page.mouse.move(box["x"] + 500, box["y"] + 22 + 12)
    page.wait_for_selector(".token-facts >> text=learner at")
    page.mouse.move(box["x"] + 0.85 * box["width"], box["y"] + 22 + 24 * 10.5)
    page.wait_for_selector(".token-facts >> text=/batch 8 at .* of 4 groups begun, . complete/")
    page.keyboard.type("+")
    page.wait_for_url(re.compile(r"/time\?from="))
    seen.shown()
    page.keyboard.press("0")
    page.wait_for_url(re.compile(r"/time$"))
    page.get_by_role("button", name="What would the simulator change?").click()
    page.wait_for_selector("text=/It (recommends|knows nothing)/", timeout=60_000)
    assert page.locator("code", has_text="--schedule.max_staleness 3").count() >= 1


def test_groups_are_chosen_and_sorted(seen: Seen, address: str) -> None:
    page = seen.page
    seen.open(f"{address}#/talk/groups")
    assert page.locator("tbody tr").count() == 3
    page.get_by_role("button", name="mixed").click()
    page.wait_for_url("**filter=mixed**")
    rows(page, 1)
    page.get_by_role("button", name="mixed").click()
    rows(page, 3)
    page.get_by_label("text").fill("second")
    page.keyboard.press("Enter")
    rows(page, 1)


def test_a_response_with_turns_token_by_token(seen: Seen, address: str) -> None:
    page = seen.page
    seen.open(f"{address}#/talk/trajectory/0/0")
    tokens = page.locator(".tokens .token")
    assert tokens.all_inner_texts() == list("ab=3c")
    assert page.locator(".tokens .observed").all_inner_texts() == ["=", "3"]
    assert page.locator(".tokens .mark").all_inner_texts() == [
        "environment", "version 2", "rollout-1",
    ]  # fmt: skip
    tokens.nth(1).hover()
    facts = page.locator(".token-facts").inner_text()
    for text in ("sampler\n-1\n", "-1.5000", "drafted and accepted", "clipped", "2 of 3 drafted"):
        assert text in facts, text
    page.get_by_label("colour by").select_option("drafts")
    page.wait_for_url("**colour=drafts**")
    seen.shown()
    share = (
        page.locator(".tokens .token").nth(1).evaluate("e => e.style.getPropertyValue('--share')")
    )
    assert share == "1"
    page.get_by_label("beside").select_option(label="response 1")
    page.wait_for_url("**beside=0.1**")
    seen.shown()
    assert page.locator("article").count() == 2
    assert page.locator("article").first.locator(".differs").all_inner_texts() == ["=", "3", "c"]
    page.get_by_role("button", name="copy as JSON").click()
    assert json.loads(copied(seen))["text"] == "ab=3c"
    page.get_by_role("button", name="copy as rhymeflow generate").click()
    assert copied(seen).startswith("rhymeflow generate ")
    page.keyboard.press("]")
    page.wait_for_url("**/trajectory/0/1**")


def test_drafts_and_lengths(seen: Seen, address: str) -> None:
    seen.open(f"{address}#/one/drafts")
    text = seen.page.locator("main").inner_text()
    assert "By epoch" in text
    assert seen.page.locator("td.bar").count() >= 2


def test_the_log(seen: Seen, address: str) -> None:
    page = seen.page
    seen.open(f"{address}#/one/log")
    assert page.locator("tbody tr").count() == 100
    for count in (200, 300, 400):
        page.get_by_role("button", name="more").click()
        rows(page, count)
    numbers = page.locator("tbody tr:not(.command) td:nth-child(2)").all_inner_texts()
    found = [int(each.replace(",", "")) for each in numbers]
    assert found == sorted(set(found)), "each line once"
    page.get_by_label("kind").select_option("Train")
    rows(page, 8)
    page.get_by_role("button", name="copy as SQL").click()
    assert "kind = 'Train'" in copied(seen)


def test_runs_side_by_side(seen: Seen, address: str) -> None:
    page = seen.page
    seen.open(f"{address}#/one/run")
    page.get_by_role("button", name="two").click()
    page.wait_for_url("**with=two**")
    page.wait_for_selector("text=What differs between their configurations")
    table = page.locator("details table").inner_text()
    fields = "learner.max_steps", "schedule.max_staleness"
    for field in fields:
        assert field in table
    assert page.locator("details tbody tr").count() == len(fields)
    page.wait_for_selector(".u-legend >> text=two")
    page.get_by_label("smooth over").fill("3")
    page.keyboard.press("Enter")
    page.wait_for_url("**smooth=3**")
    assert "with=two" in page.url


def test_keys_and_help(seen: Seen, address: str) -> None:
    page = seen.page
    seen.open(f"{address}#/one/run")
    for key, view in (("t", "time"), ("g", "groups"), ("d", "drafts"), ("l", "log"), ("r", "run")):
        page.keyboard.press("g")
        page.keyboard.press(key)
        page.wait_for_url(f"**/#/one/{view}")
        seen.shown()
    page.keyboard.press("?")
    assert page.locator("dialog").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("dialog").is_visible()


def test_what_a_policy_writes_is_only_text(seen: Seen, address: str) -> None:
    """Any script that ran would open a dialog."""
    for view in ("groups", "group/0", "trajectory/0/0", "log", "time", "drafts"):
        seen.open(f"{address}#/hostile/{view}")
    seen.open(f"{address}#/hostile/group/0")
    text = seen.page.locator("main").inner_text()
    assert "<script>alert(2)</script>" in text
    assert seen.page.locator("main img, main script").count() == 0


def test_what_is_wrong_is_said(seen: Seen, address: str) -> None:
    seen.open(f"{address}#/one/group/999")
    assert "has no group 999" in seen.page.locator(".problem").inner_text()
    seen.problems.clear()  # the browser tells of the answer with status 400, as it should
    seen.open(f"{address}#/one/nothing")
    assert "There is no view nothing" in seen.page.locator(".problem").inner_text()


@pytest.mark.parametrize("seen", [PHONE], indirect=True)
def test_nothing_is_wider_than_a_phone(seen: Seen, address: str) -> None:
    for view in (*VIEWS, "group/0", "trajectory/0/0"):
        seen.open(f"{address}#/talk/{view}")
        width = seen.page.evaluate("document.documentElement.scrollWidth")
        assert width <= PHONE["width"], view


def test_without_the_token_there_is_nothing(chromium, address: str) -> None:
    page = chromium.new_context().new_page()
    page.goto(address)
    assert "open the address that" in page.content()
    page.context.close()


# -- a run that goes on ----------------------------------------------------------------------------


def test_a_live_run_is_followed_in_every_view(chromium, tmp_path: Path) -> None:
    """`train --dashboard`: the pages are there while it trains, follow it, and end with it."""
    config = tiny_config(
        tmp_path, learner={"max_steps": 10_000}, run={"report_to": [], "eval_steps": 0}
    )
    path = tmp_path / "live.yaml"
    path.write_text(dump_config(config))
    command = [sys.executable, "-m", "rhymeflow", "train", str(path), "--dashboard"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert run.stdout is not None
        said = run.stdout.readline()
        match = re.match(r"dashboard: (http://127\.0\.0\.1:\d+/)\?token=\S+\n", said)
        assert match, said
        page = chromium.new_page()
        page.goto(said.split()[1], timeout=60_000)
        page.wait_for_selector("main h1", timeout=60_000)
        steps = "Number(document.querySelector('.facts dd')?.textContent.split(' ')[0] ?? 0)"
        until(page, f"() => {steps} > 2", seconds=60)
        before = page.evaluate(steps)
        started = time.monotonic()
        until(page, f"() => {steps} > {before}")
        assert time.monotonic() - started < 6, "two seconds, and what a loaded machine adds"
        for view in ("time", "groups", "drafts", "log", "group/0", "trajectory/0/0"):
            page.goto(f"{match[1]}#/run/{view}")
            page.wait_for_selector("main h1")
            assert page.locator(".problem").count() == 0, view
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130
        with pytest.raises(Exception, match="ERR_CONNECTION_REFUSED"):
            page.goto(match[1])
    finally:
        run.kill()
        run.wait()
