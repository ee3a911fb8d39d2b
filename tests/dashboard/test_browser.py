"""The pages, in a real browser: every view of a finished run and of one that goes on."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page, sync_playwright

from rhymeflow.config.load import read_config
from rhymeflow.core.events import InstanceJoined, LearnerReady, RewardFailed
from rhymeflow.core.types import TrajectoryId
from rhymeflow.dashboard.run import Run
from rhymeflow.sim.simulate import simulate
from tests.dashboard.conftest import FIELDS, TOKEN, serving
from tests.export.made import MadeRun, model
from tests.processes import Command
from tests.runtime.tiny import file_of, tiny_config
from tests.runtime.tiny import until as wait_until
from tests.store.stores import finished, segment

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
VIEWS = ("run", "groups", "time", "drafts", "log", "setup")
NAMES = ("chromium", "chromium-browser", "google-chrome")
ALONE = [
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-quic", "--no-first-run"),
]
"""It asks for nothing but the pages."""
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 800}


@pytest.fixture(scope="module")
def chromium():
    """A real browser without a window. Where there is none, tests that need it are skipped; with
    `RHYMEFLOW_BROWSER=required`, as in CI, they fail instead."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        message = f"no browser is installed: none of {', '.join(NAMES)}"
        if os.environ.get("RHYMEFLOW_BROWSER") == "required":
            pytest.fail(message)
        pytest.skip(message)
    options = [*ALONE, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=options)
        yield found
        found.close()


def until(page: Page, function: str, argument: object = None, *, seconds: float = 30) -> None:
    """Wait until this is true in the page, whose policy forbids Playwright's own way to wait."""
    end = time.monotonic() + seconds
    while not page.evaluate(function, argument):
        assert time.monotonic() < end, f"{function} is not true of {page.url}"
        page.wait_for_timeout(50)


class Seen:
    """A page, and whatever went wrong in it: errors, refused requests, dialogs."""

    def __init__(self, page: Page) -> None:
        self.page, self.problems = page, list[str]()
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("requestfailed", self._failed)
        page.on("console", self._said)
        page.on("dialog", self._asked)

    def _failed(self, request) -> None:
        if request.failure != "net::ERR_ABORTED":  # a view that was left asks no more
            self.problems.append(f"{request.url}: {request.failure}")

    def _said(self, message) -> None:
        """Also of an answer with an error's status."""
        if message.type in ("error", "warning"):
            self.problems.append(f"console: {message.text}")

    def _asked(self, dialog) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def open(self, address: str) -> None:
        """Go there, and wait until the view is shown."""
        self.page.goto(address)
        self.shown()

    def shown(self) -> None:
        """Wait until the view is there. A view that was left stays until the page hears, a task
        later, that its address is another."""
        self.page.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
        until(
            self.page,
            "() => document.querySelector('main h1, main .problem') !== null"
            " && document.getElementById('state').textContent !== '…'",
        )

    def at(self, address: str | re.Pattern[str]) -> None:
        """Wait until the page is at this address, and until its view is there."""
        self.page.wait_for_url(address)
        self.shown()

    def heading(self, text: str) -> None:
        """Wait until the view has this heading."""
        until(self.page, "text => document.querySelector('main h1')?.textContent === text", text)
        self.shown()


def conversation(run_dir: Path, model_dir: Path) -> None:
    """Three groups; response 0.0 has two turns, versions and instances, and all that is known of
    tokens."""
    made = MadeRun(run_dir, model(model_dir))
    made.store.record(0.5, [LearnerReady(0), InstanceJoined("rollout-0", 0, 8, 100)])
    first = TrajectoryId(0, 0)
    made.group(0, "first?", row=4)
    for start, text, version, instance, drafted, accepted in (
        (0, "ab", 1, "rollout-0", 3, b"\0\1"),
        (4, "c", 2, "rollout-1", 0, b"\0"),
    ):
        by = {"version": version, "instance": instance, "drafted": drafted, "accepted": accepted}
        logprobs = [-0.5, -1.0][: len(text)]
        segment(made.store, first, made.ids(text), start=start, logprobs=logprobs, **by)
    made.store.put_observed(first, start=2, version=1, tokens=made.ids("=3"))
    finished(made.store, first, 5, 1.0, text="ab=3c", right=1.0)
    made.response(0, 1, "abd", 0.0)
    made.store.put_consumed(0, version=3, members=(0, 1))
    learner = np.array([-0.5, -1.5, 0, 0, -0.25], "<f4")
    made.store.put_token_details(first, logprobs=learner.tobytes(), flags=bytes([0, 1, 4, 4, 0]))
    made.store.record(0.6, [RewardFailed(TrajectoryId(1, 0), "ValueError: bang")] * 2)
    _files(run_dir)
    for group, prompt in ((1, "second?"), (2, "third?")):
        made.group(group, prompt)
        made.response(group, 0, "x")
        made.response(group, 1, "y")
        made.store.put_consumed(group, version=3, members=(0, 1))
    made.calls(2, 2, [("[user]ab", 0, "c"), ("[tool]d", 9, "e"), ("[user]f", 0, "h")])
    made.close()


def _files(run_dir: Path) -> None:
    """Metrics of six steps without a reward, a checkpoint, and what a worker printed."""
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1, 7):
            row = {"step": step, "time": 2.0 * step, "step_time": 2.0, "reward": 0.0}
            row |= {"reward_std": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0}
            row |= {"learning_rate": 2e-4, "rewards/right/mean": 0.0, "rewards/right/std": 0.0}
            file.write(json.dumps(row) + "\n")
        for step, reward in ((0, 0.5), (4, 0.75)):
            file.write(json.dumps({"step": step, "time": 2.0, "eval/reward": reward}) + "\n")
    (run_dir / "verdicts.jsonl").write_text('{"step": 5, "name": "rewards all 0"}\n')
    (run_dir / "checkpoints/step-4").mkdir(parents=True)
    (run_dir / "logs/attempt-1").mkdir(parents=True)
    (run_dir / "logs/attempt-1/rollout-0.log").write_text("a line\nValueError: boom\n")
    (run_dir / "summary.json").write_text(json.dumps({"seconds": 1.0}))


def taught(run_dir: Path, model_dir: Path) -> None:
    """Metrics of twelve steps under a teacher alone: no rewards, and a divergence that falls."""
    made = MadeRun(run_dir, model_dir)
    made.store.record(0.5, [InstanceJoined("rollout-0", 0, 8, 100)])
    made.close()
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1, 13):
            row = {"step": step, "time": 2.0 * step, "step_time": 2.0}
            file.write(json.dumps(row | {"distillation/divergence": 3 / step}) + "\n")


def hostile(run_dir: Path, model_dir: Path) -> None:
    """One group, all of whose texts are HTML."""
    made = MadeRun(run_dir, model_dir)
    made.store.record(0.5, [InstanceJoined(HOSTILE, 0, 8, 100)])
    made.group(0, HOSTILE)
    made.response(0, 0, "abc")
    made.store.put_text(TrajectoryId(0, 0), HOSTILE)
    made.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Over five runs: two simulated ones, a conversation with turns, a hostile policy's, and one
    under a teacher."""
    folder = tmp_path_factory.mktemp("runs")
    fields = {**FIELDS, "learner.max_steps": "8"}
    simulate(read_config("demo", fields), output=folder / "one")
    changed = {**FIELDS, "schedule.max_staleness": "1", "learner.max_steps": "6"}
    simulate(read_config("demo", changed), output=folder / "two")
    conversation(folder / "talk", folder / "model")
    hostile(folder / "hostile", folder / "model")
    taught(folder / "taught", folder / "model")
    runs = [Run(folder / name, name) for name in ("one", "two", "talk", "hostile", "taught")]
    with serving(runs) as client:
        yield f"http://127.0.0.1:{client.port}/"


@pytest.fixture
def seen(chromium, address, request):
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


def test_from_a_curve_to_a_response(seen, address):
    page = seen.page
    assert page.url == f"{address}#/one/run", "the printed address, without its token"
    assert page.title() == "one · Run · Rhymeflow"
    said = page.locator(".first").inner_text()
    for text in (
        "8 of 8",
        "Ended",
        "All 8 steps are done",
        "at most 2 versions old",
        "4 × 8 responses a step",
        "32 consumed",
    ):
        assert text in said
    titles = page.locator(".chart h3").all_inner_texts()
    assert "Tokens of a response" in titles
    assert "Entropy" not in titles, "a simulation has none"
    assert "no evaluation says that it learns" in page.locator(".notices").inner_text()
    height = "document.documentElement.scrollHeight"
    before = page.evaluate(height)
    page.locator(".u-over").first.hover(position={"x": 40, "y": 50})
    page.wait_for_selector(".chart .head >> text=/^step \\d$/")
    assert page.evaluate(height) == before, "the page does not jump"
    page.locator(".u-over").first.click(position={"x": 5, "y": 50})
    seen.heading("Groups of step 1")
    assert page.locator("tbody tr").count() == 4
    page.keyboard.press("]")
    seen.heading("Groups of step 2")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    seen.at("**/#/one/group/*")
    page.wait_for_selector("article")
    assert page.locator("article").count() == 8
    assert re.match(r"advantage [+-]?\d", page.locator("article .note").first.inner_text())
    page.locator("article a").first.click()
    seen.at("**/#/one/trajectory/**")
    page.wait_for_selector("text=Its tokens are not stored")


def test_time(seen, address):
    page = seen.page
    seen.open(f"{address}#/one/time")
    text = page.locator("main").inner_text()
    assert re.search(r"Pace: limited by .* \(last \d steps\)", text)
    said = page.locator(".legend").first.inner_text()
    shares = [int(each) for each in re.findall(r"(\d+) %", said)]
    assert abs(sum(shares) - 100) <= 2, "each is rounded"
    kinds = page.locator(".legend").nth(1).inner_text()
    assert "trains" in kinds
    assert "environments" not in kinds, "only what is there"
    page.get_by_role("button", name="whole run").click()
    seen.at("**whole=true")
    canvas = page.locator("canvas.lanes")
    box = canvas.bounding_box()
    assert box["height"] == 22 + 24 * (3 + 8), "a learner, two instances, eight batches"
    page.mouse.move(box["x"] + 500, box["y"] + 22 + 12)
    page.wait_for_selector(".told >> text=learner at")
    page.mouse.move(box["x"] + 0.85 * box["width"], box["y"] + 22 + 24 * 10.5)
    page.wait_for_selector(".told >> text=/batch 8 at .* of 4 groups begun, . complete/")
    page.keyboard.type("+")
    seen.at(re.compile(r"/time\?from="))
    page.keyboard.press("0")
    seen.at(re.compile(r"/time$"))
    page.get_by_role("button", name="What would the simulator change?").click()
    page.wait_for_selector("text=/It (recommends|knows nothing)/", timeout=60_000)
    assert page.locator("code", has_text="--schedule.max_staleness 3").count() >= 1


def test_groups_are_chosen_and_sorted(seen, address):
    page = seen.page
    seen.open(f"{address}#/talk/groups")
    assert page.locator("main h1").inner_text() == "Groups of step 4", "the newest"
    assert page.locator("tbody tr").count() == 3
    page.get_by_role("button", name="mixed").click()
    seen.at("**filter=mixed**")
    rows(page, 1)
    page.get_by_role("button", name="mixed").click()
    rows(page, 3)
    page.get_by_label("text").fill("second")
    page.keyboard.press("Enter")
    rows(page, 1)


def test_a_response_with_turns_token_by_token(seen, address):
    page = seen.page
    seen.open(f"{address}#/talk/trajectory/0/0")
    tokens = page.locator(".tokens .token")
    assert tokens.all_inner_texts() == list("ab=3c")
    assert page.locator(".tokens .observed").all_inner_texts() == ["=", "3"]
    assert page.locator(".tokens .mark").all_inner_texts() == ["version 2", "rollout-1"]
    who = page.locator(".turn .who").all_inner_texts()
    assert [re.split(r"\W", each)[0] for each in who] == [
        "user", "assistant", "environment", "assistant",
    ]  # fmt: skip
    page.get_by_text("The prompt as the policy read it").click()
    page.wait_for_selector("details pre >> text=<eos>ab")
    tokens.nth(1).hover()
    facts = page.locator(".token-facts").inner_text()
    for text in ("sampler\n-1\n", "-1.5000", "drafted and accepted", "clipped", "2 of 3 drafted"):
        assert text in facts, text
    page.get_by_label("colour by").select_option("drafts")
    seen.at("**colour=drafts**")
    share = (
        page.locator(".tokens .token").nth(1).evaluate("e => e.style.getPropertyValue('--share')")
    )
    assert share == "1"
    page.get_by_label("beside").select_option(label="response 1")
    seen.at("**beside=0.1**")
    assert page.locator("article").count() == 2
    assert page.locator("article").first.locator(".tokens .differs").all_inner_texts() == [
        "=",
        "3",
        "c",
    ]
    page.get_by_role("button", name="copy as JSON").click()
    assert json.loads(copied(seen))["text"] == "ab=3c"
    page.get_by_role("button", name="copy as rhymeflow generate").click()
    assert copied(seen).startswith("rhymeflow generate ")
    page.keyboard.press("]")
    seen.at("**/trajectory/0/1**")


def test_the_calls_of_an_agents_program(seen, address):
    page = seen.page
    seen.open(f"{address}#/talk/trajectory/2/2")
    notes = page.locator(".tokens .turn .note").all_inner_texts()
    assert [each.split(", ")[1:] for each in notes] == [
        ["call 1", "begins a conversation"], ["trained on in sequence 1"],
        ["call 2", "continues call 1"], ["trained on in sequence 1"],
        ["call 3", "begins a conversation"], ["trained on in sequence 2"],
    ]  # fmt: skip
    assert "3, in 2 sequences" in page.locator(".aside").inner_text()
    assert page.get_by_text("The prompt as the policy read it").count() == 0


def test_the_log(seen, address):
    page = seen.page
    seen.open(f"{address}#/one/log")
    kinds = page.locator("tbody td:nth-child(4)").all_inner_texts()
    assert kinds.count("VersionPublished") == 8
    assert kinds[0] == "VersionPublished"
    assert kinds[-1] == "InstanceJoined", "the newest comes first"
    page.get_by_role("button", name="all events").click()
    seen.at("**all=true**")
    rows(page, 100)
    for count in (200, 300, 400):
        page.get_by_role("button", name="more").click()
        rows(page, count)
    numbers = page.locator("tbody tr:not(.command) td:nth-child(2)").all_inner_texts()
    found = [int(each.replace(",", "")) for each in numbers]
    assert found == sorted(set(found), reverse=True), "each line once, the newest first"
    whats = page.locator("tbody td:nth-child(4)").all_inner_texts()
    assert "Finish" in whats[1], "a command is below the event that it came from"
    page.get_by_label("kind").select_option("Train")
    rows(page, 8)
    page.get_by_role("button", name="copy as SQL").click()
    assert "kind = 'Train'" in copied(seen)


def test_runs_side_by_side(seen, address):
    page = seen.page
    seen.open(f"{address}#/one/run")
    page.get_by_role("button", name="two").click()
    seen.at("**with=two**")
    page.wait_for_selector("text=What differs between their configurations")
    table = page.locator("details table").inner_text()
    fields = "learner.max_steps", "schedule.max_staleness", "schedule.max_inflight_batches"
    for field in fields:
        assert field in table, "the bound says how much may be in flight"
    assert page.locator("details tbody tr").count() == len(fields)
    page.wait_for_selector(".legend >> text=two")
    page.get_by_label("smooth over").fill("3")
    page.keyboard.press("Enter")
    seen.at("**smooth=3**")
    assert "with=two" in page.url


def test_keys_and_help(seen, address):
    page = seen.page
    for view in ("time", "groups", "log", "run", "setup", "drafts"):
        page.keyboard.press("g")
        page.keyboard.press(view[0])
        seen.at(f"**/#/one/{view}")
        seen.shown()
    assert "By epoch" in page.locator("main").inner_text()
    assert page.locator("td.bar").count() >= 2
    page.keyboard.press("?")
    assert page.locator("dialog").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("dialog").is_visible()


def test_what_a_policy_writes_is_only_text(seen, address):
    """Any script that ran would open a dialog."""
    for view in (*VIEWS, "group/0", "trajectory/0/0"):
        seen.open(f"{address}#/hostile/{view}")
    seen.open(f"{address}#/hostile/group/0")
    text = seen.page.locator("main").inner_text()
    assert "<script>alert(2)</script>" in text
    assert seen.page.locator("main img, main script").count() == 0


def test_what_is_wrong_is_said(seen, address):
    seen.open(f"{address}#/one/group/999")
    assert "has no group 999" in seen.page.locator(".problem").inner_text()
    seen.problems.clear()  # the browser tells of the answer with status 400, as it should
    seen.open(f"{address}#/one/nothing")
    assert "There is no view nothing" in seen.page.locator(".problem").inner_text()


@pytest.mark.parametrize("seen", [PHONE], indirect=True)
def test_nothing_is_wider_than_a_phone(seen, address):
    views = *VIEWS, "group/0", "trajectory/0/0", "log?worker=attempt-1%2Frollout-0"
    for run, view in [("one", each) for each in VIEWS] + [("talk", each) for each in views]:
        seen.open(f"{address}#/{run}/{view}")
        width = seen.page.evaluate("document.documentElement.scrollWidth")
        assert width <= PHONE["width"], (run, view)


def test_the_first_screen_says_how_it_is(seen, address):
    """A run whose rewards are all 0, that something ended."""
    seen.open(f"{address}#/talk/run")
    page = seen.page
    assert page.locator(".head .badge").all_inner_texts() == ["Stopped", "not learning"]
    assert page.locator(".badge.good, .badge.bad, progress.good, progress.bad").count() == 0
    assert "rhymeflow resume" in page.locator(".copy code").inner_text()
    figures = " ".join(page.locator(".stats").inner_text().split())
    for text in (
        "0.750",
        "+0.250 since step 0",
        "100 % of groups all equal",
        "6 of ",
        " 2 s a step",
    ):
        assert text in figures
    said = page.locator(".verdicts").inner_text()
    assert "All rewards of the last 4 steps are 0, since step 5" in said
    links = page.locator(".verdicts a").evaluate_all("all => all.map(each => each.hash)")
    assert links == ["#/talk/groups?step=6", "#/talk/setup"] * 2
    assert page.evaluate(ABOVE), "verdicts come before figures"
    assert "Groups without spread" in page.locator(".chart h3").all_inner_texts()
    flat = page.locator(".chart", has_text="Learning rate").locator("canvas")
    top, bottom, height = flat.evaluate(ROWS)
    assert 0.2 * height < top <= bottom < 0.8 * height, "a flat curve is not at the frame"


def test_a_run_without_rewards_says_how_far_from_its_teacher_it_is(seen, address):
    seen.open(f"{address}#/taught/run")
    figures = " ".join(seen.page.locator(".stats").inner_text().split())
    assert "Divergence from the teacher" in figures
    assert "0.382 mean of the last 8 steps, -1.180 since the first 4" in figures
    assert "Reward of training" not in figures
    titles = seen.page.locator(".chart h3").all_inner_texts()
    assert "Divergence from the teacher" in titles
    assert "Reward" not in titles


ABOVE = """document.querySelector(".verdicts").compareDocumentPosition(
    document.querySelector(".stats")) === Node.DOCUMENT_POSITION_FOLLOWING"""

ROWS = """canvas => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const rows = [];
    for (let i = 0; i < data.length; i += 4) {
        if (data[i + 2] - data[i] > 120) rows.push(Math.floor(i / 4 / canvas.width));
    }
    return [Math.min(...rows), Math.max(...rows), canvas.height];
}"""
"""The first and the last row of a chart's pixels that have the blue of its curve; all rows."""


def test_any_metric_is_charted_by_choice(seen, address):
    page = seen.page
    seen.open(f"{address}#/talk/run")
    assert "rewards/right/std" not in page.locator(".chart h3").all_inner_texts()
    page.get_by_label("Chart a metric").fill("rewards/right/std")
    page.keyboard.press("Enter")
    seen.at("**metric=rewards%2Fright%2Fstd**")
    page.reload()
    seen.shown()
    assert page.locator(".chart h3").first.inner_text() == "rewards/right/std"
    page.get_by_label("Remove rewards/right/std").click()
    seen.at("**/#/talk/run")
    page.get_by_label("Chart a metric").fill("rewards/right")
    page.keyboard.press("Enter")
    seen.at(re.compile("metric=rewards%2Fright%2Fmean&metric=rewards%2Fright%2Fstd$"))
    page.get_by_role("button", name="remove 2 chosen").click()
    seen.at("**/#/talk/run")
    page.get_by_role("button", name="all metrics").click()
    page.wait_for_selector(".section:last-child .chart h3 >> text=rewards/right/std")
    assert "others" in page.locator(".section h2").all_inner_texts()


def test_an_axis_of_values_may_be_logarithmic(seen, address):
    """Also of a curve that is 0 throughout, as the rewards are."""
    page = seen.page
    seen.open(f"{address}#/one/run")
    chart = page.locator(".chart", has_text="Tokens of a response").locator("canvas")
    before = chart.evaluate("canvas => canvas.toDataURL()")
    page.get_by_role("button", name="log", exact=True).click()
    seen.at("**scale=log**")
    page.wait_for_timeout(50)  # charts are drawn with the next frame
    assert chart.evaluate("canvas => canvas.toDataURL()") != before
    seen.open(f"{address}#/talk/run?scale=log")
    assert page.locator(".chart canvas").count() > 3


def test_dark_and_light_follow_the_system_or_the_button(seen, address):
    page = seen.page
    seen.open(f"{address}#/one/run")

    def looks() -> tuple[str, str]:
        """The page's background, and a picture of a chart."""
        page.wait_for_timeout(50)  # charts are drawn with the next frame
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return back, page.locator(".chart canvas").first.evaluate("canvas => canvas.toDataURL()")

    page.emulate_media(color_scheme="dark")
    dark = looks()
    page.emulate_media(color_scheme="light")
    light = looks()
    assert dark[0] != light[0]
    assert dark[1] != light[1]
    page.locator("#theme").click()
    assert looks() == light
    page.locator("#theme").click()
    assert looks() == dark
    page.reload()
    seen.shown()
    assert looks()[0] == dark[0], "it is remembered"


def test_what_went_wrong_comes_first_in_the_log(seen, address):
    page = seen.page
    seen.open(f"{address}#/talk/log")
    wrong = page.locator(".card").first.inner_text()
    for text in ("Errors and warnings", "RewardFailed 2 times", "ValueError: boom"):
        assert text in wrong
    page.get_by_role("link", name="attempt-1/rollout-0").click()
    page.wait_for_selector(".output >> text=a line")
    seen.open(f"{address}#/talk/setup")
    text = page.locator("main").inner_text()
    assert page.locator("h2").first.inner_text() == "Changed from the defaults"
    for each in ("exact_match", "builtin.py", "checkpoints/step-4", "best held-out reward"):
        assert each in text


# -- a run that goes on ----------------------------------------------------------------------------


def test_a_live_run_is_followed_in_every_view(chromium, tmp_path):
    """`train --dashboard`: the pages are there while it trains, follow it, and end with it."""
    config = tiny_config(
        tmp_path, learner={"max_steps": 10_000}, run={"report_to": [], "eval_steps": 0}
    )
    run = Command("train", file_of(config, tmp_path), "--dashboard", cwd=tmp_path)
    try:
        wait_until(lambda: run.output.count("\n"))
        match = re.match(r"dashboard: (http://127\.0\.0\.1:\d+/)\?token=\S+\n", run.output)
        assert match, run.output
        page = chromium.new_page()
        page.goto(match[0].split()[1], timeout=60_000)
        page.wait_for_selector("main h1", timeout=60_000)
        figure = "document.querySelector('[data-fact=steps] .value')"
        steps = f"Number({figure}?.textContent.split(' ')[0].replace(',', '') ?? 0)"
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
