"""Profiles: those that ship say what they say; broken files are refused by field."""

import dataclasses
import json

import pytest

from rhymeflow import profiles
from tests.refused import refusal

H20_FLOPS, H20_BYTES = 148e12, 96e9
BYTES_32B = 2 * 32.76e9

# parameters, active ones, layers, KV heads (all of 128), devices, training's utilisation
MODELS = {
    "qwen2.5-7b-h20": (7.62e9, 7.62e9, 28, 4, 1, 0.4),
    "qwen2.5-14b-h20": (14.77e9, 14.77e9, 48, 8, 1, 0.4),
    "qwen2.5-32b-h20": (32.76e9, 32.76e9, 64, 8, 2, 0.4),
    "qwen3-30b-a3b-h20": (30.53e9, 3.35e9, 48, 4, 1, 0.2),
}

# StaleFlow, arXiv 2601.12784: k2, k3, c, k1, k4
PUBLISHED = {
    "qwen2.5-7b-h20": (0.0064, 1.231e-4, 0.0027, 3.35e-8, 0.0028),
    "qwen2.5-14b-h20": (0.012303, 2.441e-4, 0.0049, 1.165e-7, 0.00197),
    "qwen2.5-32b-h20": (0.0250194, 2.446e-4, 0.01838, 6.3e-8, 2e-10),
    "qwen3-30b-a3b-h20": (0.0115108, 1.249e-4, 0.00979, 7.28e-8, 0.00087),
}

H800_FLOPS, H800_BYTES, H800_BANDWIDTH, H20_BANDWIDTH = 989e12, 80e9, 3.35e12, 4.0e12

# the H20 fit taken; parameters, layers, KV heads (of 128), devices
DERIVED = {
    "qwen3-1.7b-h800": ("qwen2.5-7b-h20", 1.72e9, 28, 8, 1),
    "qwen2.5-7b-h800": ("qwen2.5-7b-h20", 7.62e9, 28, 4, 1),
    "qwen3-8b-h800": ("qwen2.5-7b-h20", 8.19e9, 36, 8, 1),
    "qwen3-14b-h800": ("qwen2.5-14b-h20", 14.77e9, 40, 8, 1),
    "qwen2.5-32b-h800": ("qwen2.5-32b-h20", 32.76e9, 64, 8, 2),
}


def written(tmp_path, **changes):
    values = dataclasses.asdict(profiles.load("demo-cpu")) | changes
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))
    return path


@pytest.mark.parametrize("name", profiles.names())
def test_what_ships_loads_under_its_name_and_says_where_it_is_from(name):
    assert name in {*PUBLISHED, *DERIVED, "demo-cpu"}
    profile = profiles.load(name)
    assert profile.name == name
    assert profile.description
    assert len(profile.source) > 20
    assert profile.cost(1).iteration(1, 1000) > 0


@pytest.mark.parametrize("name", MODELS)
def test_decode_fits_are_the_published_ones_and_the_rest_follows_from_hardware_and_model(name):
    profile = profiles.load(name)
    parameters, active, layers, kv_heads, devices, utilisation = MODELS[name]
    assert (profile.k2, profile.k3, profile.c, profile.k1, profile.k4) == PUBLISHED[name]
    kv_bytes = 2 * 2 * layers * kv_heads * 128
    follows(profile, kv_bytes, parameters, devices, H20_BYTES)
    implied = 2 * active / (devices * H20_FLOPS * profile.k3)
    assert f"{implied:.2f}" in profile.source
    assert 0.3 < implied < 1
    assert profile.train_token == pytest.approx(6 * active / (H20_FLOPS * utilisation), rel=1e-3)
    # Reading cache and weights (of a mixture, the active part) is not faster than the memory.
    assert profile.k1 > kv_bytes / (devices * H20_BANDWIDTH)
    assert profile.k2 + profile.k4 > 2 * active / (devices * H20_BANDWIDTH)


def follows(profile, kv_bytes, parameters, devices, memory):
    """What follows in the same way on all hardware. Weights are pushed and pulled as those of 32B
    were."""
    room = devices * 0.9 * memory - 2 * parameters
    assert profile.devices_per_instance == devices
    assert profile.kv_capacity == pytest.approx(room / kv_bytes, rel=1e-3)
    assert profile.prefill_token == profile.k3  # the utilisation that k3 implies
    assert profile.measure_token == pytest.approx(profile.train_token / 3, rel=1e-3)  # 2 of 6 FLOPs
    assert profile.push == pytest.approx(4 * 2 * parameters / BYTES_32B, rel=1e-3)
    assert profile.pull == pytest.approx(2 * 2 * parameters / BYTES_32B, rel=1e-3)


@pytest.mark.parametrize("name", DERIVED)
def test_the_h800_follows_from_the_h20_and_the_data_sheets(name):
    profile = profiles.load(name)
    base, parameters, layers, heads, devices = DERIVED[name]
    base_parameters, _, base_layers, base_heads, base_devices, _ = MODELS[base]
    k2, _, _, k1, k4 = PUBLISHED[base]
    kv_bytes = 2 * 2 * layers * heads * 128
    slower = H20_BANDWIDTH / H800_BANDWIDTH
    follows(profile, kv_bytes, parameters, devices, H800_BYTES)
    assert devices == base_devices
    base_bytes = 2 * 2 * base_layers * base_heads * 128
    assert profile.k1 == pytest.approx(k1 * kv_bytes / base_bytes * slower, rel=1e-3)
    assert profile.k2 == pytest.approx(k2 * parameters / base_parameters * slower, rel=1e-3)
    assert profile.k3 == pytest.approx(2 * parameters / (devices * H800_FLOPS * 0.5), rel=1e-3)
    assert profile.k4 == k4
    # The kink is where arithmetic takes as long as reading the weights at full bandwidth.
    reading = 2 * parameters / (devices * H800_BANDWIDTH)
    assert (profile.k2 - profile.c) / profile.k3 == pytest.approx(reading / profile.k3, rel=1e-3)
    assert profile.train_token == pytest.approx(6 * parameters / (H800_FLOPS * 0.4), rel=1e-3)
    assert profile.train_step == 0
    for said in (f"{kv_bytes}", f"{k1:g}", f"{k2:g}", f"{parameters / 1e9:.2f}e9", "Nothing here"):
        assert said in profile.source


def test_training_is_shared_by_the_devices():
    profile = profiles.load("qwen2.5-14b-h20")
    one, many = profile.cost(1), profile.cost(32)
    shared = {"train_token": many.train_token * 32, "measure_token": many.measure_token * 32}
    assert dataclasses.asdict(one) == pytest.approx(dataclasses.asdict(many) | shared)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"k1": ...}, "k1: is missing"),
        ({"prefil_token": 1}, "prefil_token: there is no such field; did you mean prefill_token?"),
        ({"k1": "fast"}, 'k1: given "fast", should be a number'),
        ({"k3": -1e-9}, "k3: given -1e-09, should be greater than or equal to 0"),
        ({"push": True}, "push: given true, should be a number"),
        ({"pull": float("nan")}, "pull: given NaN, should be a finite number"),
        ({"pull": float("inf")}, "pull: given Infinity, should be a finite number"),
        ({"kv_capacity": 0}, "kv_capacity: given 0, should be greater than 0"),
        ({"kv_capacity": 8.5}, "kv_capacity: given 8.5, should be an integer"),
        ({"description": ""}, 'description: given "", should have at least 1 character'),
    ],
)
def test_a_wrong_field_is_named(tmp_path, changes, said):
    path = written(tmp_path, **changes)
    assert f"{path}: {said}" in refusal(profiles.load, str(path))


def test_what_is_no_profile(tmp_path):
    path = tmp_path / "mine.json"
    table = [
        # text of the file, name, what is said
        ("{", path, "is not JSON"),
        ("[1]", path, "given [1], should be a mapping"),
        ("", tmp_path / "none.json", "none.json: the profile cannot be read: No such file"),
        ("", "qwen2.5-14b", "no such profile"),
        ("", "qwen2.5-14b", "did you mean qwen2.5-14b-h20?"),
    ]
    for text, name, said in table:
        path.write_text(text)
        assert said in refusal(profiles.load, str(name))
    demo = profiles.load("demo-cpu")
    assert "cannot be written" in refusal(profiles.save, demo, path / "mine.json")
