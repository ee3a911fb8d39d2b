"""What a user is told of a mistake."""

from collections.abc import Callable
from typing import Any

import pytest

from rhymeflow.errors import UserError


def refusal(call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """The one line that a call is refused with."""
    with pytest.raises(UserError) as error:
        call(*arguments, **named)
    assert "\n" not in str(error.value)
    return str(error.value)
