"""Requests to servers with OpenAI's interface.

The API key comes from an environment variable and is in no configuration, log or error."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

WAIT_SECONDS = 0.5  # waiting time before the second try; doubled before each further one

RETRIED_CODES = (408, 409, 429, 500, 502, 503, 504)
"""HTTP status codes after which another try may succeed."""


def asking(
    url: str, timeout: float, retries: int, *, api_key_variable: str
) -> Callable[..., dict[str, Any]]:
    """Return a function that posts its arguments to `url` as JSON and returns the answer. It raises
    `ConnectionError` that names the URL after the last try; `timeout` is of one."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(api_key_variable, ""):
        headers["Authorization"] = f"Bearer {key}"

    def ask(**request: Any) -> dict[str, Any]:
        body = json.dumps(request).encode()
        for attempt in itertools.count():
            try:
                http_request = urllib.request.Request(url, body, headers)
                with urllib.request.urlopen(http_request, timeout=timeout) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                what = f"HTTP {error.code}: {error.read(200).decode(errors='replace')}"
                is_last = error.code not in RETRIED_CODES
            except (OSError, http.client.HTTPException) as error:
                what, is_last = str(error) or type(error).__name__, False
            if is_last or attempt == retries:
                break
            time.sleep(WAIT_SECONDS * 2**attempt)
        raise ConnectionError(f"{url}: {what}")

    return ask
