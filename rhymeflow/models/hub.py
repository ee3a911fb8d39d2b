"""Whether the Hugging Face hub can be reached, found out once and within seconds.

Without this, each file of a model is asked for five times, with growing pauses, before anything is
said, also where the model is in the cache.
"""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from functools import cache

from huggingface_hub import constants

PATIENCE = 5.0
"""Seconds that the hub has to answer."""

WAYS_OUT = (
    "give a local directory that holds the model; or fill the cache where there is a network and "
    "set HF_HOME to it here (HF_HUB_OFFLINE=1 then asks nobody); or set HF_ENDPOINT to a mirror"
)


@cache
def unreachable() -> str | None:
    """Return why nothing can be fetched from the hub, or None if it answers."""
    endpoint = constants.ENDPOINT
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        asked = urllib.request.Request(endpoint, method="HEAD")
        urllib.request.urlopen(asked, timeout=PATIENCE).close()
    except urllib.error.HTTPError:
        return None  # it answers
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):
            return None  # it answers; the hub's own client has certificates of its own
        what = getattr(reason, "strerror", None) or reason
        return f"{endpoint} cannot be reached: {what}"
    return None
