"""A real browser for tests: Chromium without a window, driven by Playwright.

Where there is none, tests that need one are skipped; with `RHYMEFLOW_BROWSER=required`, as in CI,
they fail instead.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
ALONE = [
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-quic", "--no-first-run"),
]
"""It asks for nothing but the pages."""
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 800}


def executable() -> str:
    """Where the browser is."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        message = f"no browser is installed: none of {', '.join(NAMES)}"
        if os.environ.get("RHYMEFLOW_BROWSER") == "required":
            pytest.fail(message)
        pytest.skip(message)
    return found


@contextmanager
def browser() -> Iterator[Browser]:
    """One that is open until the end."""
    options = [*ALONE, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    path = executable()
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
        page.on("response", self._answered)

    def _failed(self, request) -> None:
        if request.failure != "net::ERR_ABORTED":  # a view that was left asks no more
            self.problems.append(f"{request.url}: {request.failure}")

    def _said(self, message) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"console: {message.text}")

    def _asked(self, dialog) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _answered(self, response) -> None:
        if response.status >= 400:
            self.problems.append(f"{response.url}: {response.status}")

    def open(self, address: str) -> None:
        """Go there, and wait until the view is shown."""
        self.page.goto(address)
        self.shown()

    def shown(self) -> None:
        """Wait until the view is there."""
        until(
            self.page,
            "() => document.querySelector('main h1, main .problem') !== null"
            " && document.getElementById('state').textContent !== '…'",
        )

    def heading(self, text: str) -> None:
        """Wait until the view has this heading."""
        until(self.page, "text => document.querySelector('main h1')?.textContent === text", text)
        self.shown()
