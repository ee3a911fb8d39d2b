"""What is said where Ray is missing, of another version, or not there. Needs no Ray."""

from __future__ import annotations

from importlib import metadata

import pytest

from rhymeflow import check
from rhymeflow.config.load import read_config
from rhymeflow.errors import UserError
from rhymeflow.runtime.ray import library
from rhymeflow.runtime.start import runtime_of

RAY = {"runtime": "ray"}


def test_one_line_says_how_to_install_it(monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(library.metadata, "version", version)
    with pytest.raises(UserError, match=r"pip install 'rhymeflow\[ray\]'"):
        runtime_of(read_config("demo", RAY))


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(library.metadata, "version", lambda name: "2.99.0")
    with pytest.raises(UserError, match=r"needs ray 2\.60, and 2\.99\.0 is installed"):
        library.load(None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rollout.cpus": "[[0]]"}, "is not pinned to cores"),
        ({"rollout.num_instances": "3", "rollout.max_instances": "2"}, "at least"),
        ({"runtime": "local", "rollout.max_instances": "2"}, "needs runtime = 'ray'"),
    ],
)
def test_what_ray_cannot_do_is_refused(given, message):
    with pytest.raises(UserError, match=message):
        read_config("demo", {**RAY, **given})


def test_what_it_cannot_do_yet_is_refused_before_a_run():
    config = read_config("demo", {**RAY, "rollout.python": "python3"})
    with pytest.raises(UserError, match="under the Python of its node"):
        check.before_start(config)
