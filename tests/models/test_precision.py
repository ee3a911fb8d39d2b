"""What `auto` resolves to."""

import pytest
import torch

from rhymeflow.models import precision
from rhymeflow.models.precision import SMALL, auto_dtype, cpu_has_bfloat16


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 sse", True),
        ("flags\t\t: fpu amx_bf16", True),
        ("Features\t: fp asimd bf16", True),
        ("flags\t\t: fpu avx2 avx512f", False),
        ("model name\t: avx512_bf16", False),
    ],
)
def test_bfloat16_is_read_from_the_flags(tmp_path, line, expected):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{line}\n")
    assert cpu_has_bfloat16(cpuinfo) is expected
    assert cpu_has_bfloat16(tmp_path / "absent") is False


def test_only_large_models_on_able_cpus_take_bfloat16(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: True)
    assert auto_dtype(SMALL, cpu) == torch.bfloat16
    assert auto_dtype(SMALL - 1, cpu) == torch.float32
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: False)
    assert auto_dtype(SMALL, cpu) == torch.float32
