"""Plans for clusters: what is planned fits and is what the simulator counts with; the rest is
refused in one line."""

from __future__ import annotations

import re
from functools import cache

import pytest

from rhymeflow import cli, memory, placement, profiles
from rhymeflow import cluster as plan
from rhymeflow.config import LoraConfig
from rhymeflow.config.load import dump_config, parse_config, read_config
from rhymeflow.models import load
from rhymeflow.sim import simulate
from rhymeflow.sim.workload import workload
from tests.refused import refusal

RECIPES = {
    "qwen3_1gpu": 1,
    "qwen3_8b_1gpu": 1,
    "code": 1,
    "qwen3_8gpus": 8,
    "qwen2.5_7b_2x8": 16,
    "qwen3_8b_2x8": 16,
    "qwen3_8b_16x8": 128,
    "qwen3_32b_16x8": 128,
    "qwen3_30b_a3b_16x8": 128,
}
"""And their GPUs."""


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan asks nobody for what recipes name."""

    def fail(*_: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(load, "load_config", fail)


@cache
def model_of(recipe: str) -> memory.ModelSize:
    return plan.model_of(read_config(recipe))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_says_what_runs_where(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", recipe, "--dry-run=plan"]) == 0
    out = capsys.readouterr().out
    config = parse_config(out)
    assert config == read_config(recipe)
    assert out.count("learner rank") == 1
    assert f" to {config.rollout.num_instances - 1}" in out or RECIPES[recipe] == 1
    for said in ("KV cache", "AdamW moments", "staged", "history index", "store, a day"):
        assert said in out
    nodes, each = placement.place(config), config.rollout.vllm_tensor_parallel_size
    assert len(nodes) * config.cluster.gpus_per_node == RECIPES[recipe]
    assert [r for node in nodes for r in node.ranks] == list(range(config.learner.num_ranks))
    instances = [i for node in nodes for i in node.instances]
    assert instances == list(range(config.rollout.num_instances))
    assert all(node.num_free == 0 for node in nodes)
    if not placement.shares_gpu(config, config.cluster.gpus_per_node):
        for node in nodes:
            assert len(node.ranks) + each * len(node.instances) == config.cluster.gpus_per_node


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_cache_is_that_of_the_cost_model(recipe: str) -> None:
    config = read_config(recipe)
    profile = profiles.load(config.schedule.cost_model)
    whole = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"vllm_gpu_memory_utilization": 0.9})}
    )
    found = memory.kv_tokens(whole, model_of(recipe), plan.max_prompt(whole))
    assert found == pytest.approx(profile.kv_capacity, rel=2e-3)  # an adapter takes some
    assert profile.devices_per_instance == config.rollout.vllm_tensor_parallel_size
    if config.rollout.max_kv_tokens is not None:  # what the simulator takes instead
        assert config.rollout.max_kv_tokens <= memory.kv_tokens(
            config, model_of(recipe), plan.max_prompt(config)
        )


def test_the_simulator_comes_near_what_the_plan_promises_and_not_beyond() -> None:
    """With fewer places than a batch has responses, so that instances are full."""
    small = {"rollout.max_num_seqs": "64", "rollout.num_generations": "8", "learner.max_steps": "5"}
    config = read_config("qwen3_8gpus", {**small, "drafting.window": "off"})
    found = simulate.run(config, workload(config, None))
    rates = re.findall(r"([\d,]+) tokens/s", plan.describe(config))
    rollout, learner, both = (int(each.replace(",", "")) for each in rates)
    assert both == rollout < learner
    assert 0.55 * both < found.response_throughput < both


def test_what_does_not_fit_together_fits_in_turns() -> None:
    small = {"cluster.gpu_memory_gb": "40", "rollout.vllm_gpu_memory_utilization": "0.5"}
    together = read_config("qwen3_8b_1gpu", small)
    assert "learner and engine take 44" in refusal(plan.describe, together)
    in_turns = together.changed(rollout={"vllm_sleeps": True})
    assert "learner and rollout on GPU 0 in turns" in plan.describe(in_turns)


def test_weights_of_engines_that_sleep_are_in_main_memory() -> None:
    sleeps = {"schedule.name": "synchronous", "rollout.vllm_sleeps": "true"}
    config, model = read_config("qwen3_1gpu", sleeps), model_of("qwen3_1gpu")
    (node,) = placement.place(config)
    (found,) = [p for p in plan.of_node(config, model, node) if "sleep" in p.what]
    assert found.num_bytes == model.weights
    awake = config.changed(rollout={"vllm_sleeps": False})
    assert [p for p in plan.of_node(config, model, node) if p != found] == (
        plan.of_node(awake, model, node)
    )


def test_an_adapter_has_costs_of_its_own() -> None:
    """Four operations a weight and token, six for the adapter's; what is under it is hashed."""
    config = read_config("qwen3_8b_1gpu")
    profile, model = profiles.load(config.schedule.cost_model), model_of("qwen3_8b_1gpu")
    whole, own = model.num_parameters, model.num_adapter
    found = plan.adapted(profile, config)
    train = profile.train_token * (4 * whole + 6 * own) / (6 * whole)
    assert found.train_token == pytest.approx(train)
    assert found.measure_token == profile.measure_token
    assert found.pull == pytest.approx(profile.pull * (own / whole + 1 / 16))
    assert found.push == pytest.approx(profile.push * (own / whole + 1 / 16))
    assert (found.k1, found.k2, found.prefill_token) == (
        profile.k1, profile.k2, profile.prefill_token
    )  # fmt: skip
    assert plan.adapted(found, config) == found
    without = config.changed(model={"lora": LoraConfig()})
    assert plan.adapted(profile, without) == profile
    rate = re.compile(r"learner +([\d,]+) tokens/s")
    by_adapter, by_all = (
        float(rate.search("\n".join(plan._rates(each, model)))[1].replace(",", ""))
        for each in (config, without)
    )
    assert by_adapter / by_all == pytest.approx(profile.train_token / train, rel=1e-3)


def test_rates_are_of_the_model_or_not_known() -> None:
    default = {"schedule.cost_model": "demo-cpu", "simulation.profile": "null"}
    text = plan.describe(read_config("qwen3_8gpus", default))
    assert text == plan.describe(read_config("qwen3_8gpus"))
    assert "by the cost model qwen3-8b-h800" in text
    text = plan.describe(read_config("qwen3_8gpus", {**default, "cluster.gpu_memory_gb": "141"}))
    assert "no profile for Qwen/Qwen3-8B on GPUs of 141 GB, 1 to an instance: name one" in text
    assert "GPU memory of each rank" in text


PARTS = {"learner.num_ranks": "3", "cluster.nodes": "2"}
BOTH = {"learner.num_ranks": "2", "rollout.num_instances": "3"}
SIZES = [
    ("qwen3_8b_16x8", {}, (40, 88)),
    ("qwen3_8b_16x8", {"cluster.nodes": "8"}, (40, 24)),
    ("qwen3_32b_16x8", PARTS, (3, 6)),  # the GPUs of an instance are of one node
    ("qwen3_8gpus", {"learner.num_ranks": "7"}, (7, 1)),
    ("qwen3_8b_2x8", BOTH, (2, 3)),
    ("qwen3_1gpu", {}, (1, 1)),
]


@pytest.mark.parametrize(("recipe", "changes", "sizes"), SIZES)
def test_ranks_leave_the_other_gpus_to_instances(recipe, changes, sizes) -> None:
    config = read_config(recipe, changes)
    assert (config.learner.num_ranks, config.rollout.num_instances) == sizes
    assert sum(len(node.instances) for node in placement.place(config)) == sizes[1]
    assert parse_config(dump_config(config)) == config


def test_instances_leave_the_other_gpus_to_ranks() -> None:
    sections = "cluster: {nodes: 2}\nrollout: {num_instances: 3, engine: vllm"
    assert parse_config(f"{sections}}}").learner.num_ranks == 13
    assert parse_config(f"{sections}, vllm_tensor_parallel_size: 4}}").learner.num_ranks == 4
    assert parse_config(f"{sections}}}\nlearner: {{num_ranks: 1}}").learner.num_ranks == 1
    assert parse_config("cluster: {nodes: 2}").rollout.num_instances == 1, "neither says anything"


@pytest.mark.parametrize(
    ("field", "value"), [("num_instances", "70"), ("vllm_tensor_parallel_size", "4")]
)
def test_a_simulation_is_of_the_same_cluster(field, value, capsys) -> None:
    assert cli.main(["simulate", "qwen3_8b_2x8", f"--rollout.{field}", value]) == 2
    assert f"rollout.{field} = {value}" in capsys.readouterr().err


REFUSED = {
    "more instances than GPUs": (
        "qwen3_8b_16x8",
        {"rollout.num_instances": "100"},
        "rollout.num_instances = 100 x rollout.vllm_tensor_parallel_size = 1 and "
        "learner.num_ranks = 40 take 140 GPUs, and cluster.nodes = 16 x cluster.gpus_per_node = 8 "
        "are 128",
    ),
    "pairs that find no two GPUs in a node": (
        "qwen3_32b_16x8",
        {"learner.num_ranks": "3", "rollout.num_instances": "50", "cluster.gpus_per_node": "7"},
        "rollout.num_instances = 50: only 47 of them find rollout.vllm_tensor_parallel_size = 2",
    ),
    "a model that is too large for its ranks": (
        "qwen3_8gpus",
        {"learner.num_ranks": "1", "rollout.num_instances": "7"},
        "learner.num_ranks = 1: a rank takes 1[56][0-9]\\.[0-9]+ GB, 65.53 GB of it AdamW moments",
    ),
    "a sequence that one rank cannot train on": (
        "qwen3_8b_2x8",
        {"learner.gradient_checkpointing": "false"},
        "rollout.max_completion_length = 16384: to train on one sequence of 17,408 tokens takes "
        "1[0-9][0-9].* GB of a rank's GPU, .*context parallelism. is not there: gradient_check",
    ),
    "weights too large for an instance": (
        "qwen3_32b_16x8",
        {"cluster.gpu_memory_gb": "32", "learner.num_ranks": "48"},
        "beside weights of 65.52 GB the KV cache would hold 0 tokens, and one prompt and response "
        "may have 17,408",
    ),
    "main memory": (
        "qwen3_32b_16x8",
        {"cluster.memory_gb": "128"},
        "cluster.memory_gb = 128: node 0 takes 2[0-9][0-9].* GB, 131.05 GB of it weights staged",
    ),
    "several machines without Ray": (
        "qwen3_8gpus",
        {"runtime": "local", "cluster.nodes": "2"},
        "runtime = 'local' is one machine, and cluster.nodes = 2",
    ),
    "both on one GPU that is too small": (
        "qwen3_1gpu",
        {"cluster.gpu_memory_gb": "40"},
        "learner and engine take 52.[0-9]+ GB",
    ),
    "both in turn": (
        "qwen3_8b_1gpu",
        {"cluster.gpu_memory_gb": "48"},
        "learner and engine take [0-9.]+ GB, .*; rollout.vllm_sleeps = true, under schedule.name",
    ),
    "in turn, but too small": (
        "qwen3_8b_1gpu",
        {"cluster.gpu_memory_gb": "36", "rollout.vllm_sleeps": "true"},
        "learner and engine take [0-9.]+ GB, .*: more than cluster.gpu_memory_gb = 36$",
    ),
    "in turn, before the batch is there": (
        "qwen3_8b_1gpu",
        {"schedule.accumulate_early": "true", "rollout.vllm_sleeps": "true"},
        "rollout.vllm_sleeps: needs schedule.name = 'synchronous', without accumulate_early",
    ),
    "in turn, on GPUs of their own": (
        "qwen3_8b_1gpu",
        {"cluster.gpus_per_node": "2", "rollout.vllm_sleeps": "true"},
        "rollout.vllm_sleeps: learner and engines share no GPU",
    ),
    "in turn, while both compute": (
        "qwen3_8b_1gpu",
        {"schedule.name": "rhymeflow", "rollout.vllm_sleeps": "true"},
        "rollout.vllm_sleeps: needs schedule.name = 'synchronous'",
    ),
    "a mixture's adapter in vLLM": (
        "qwen3_30b_a3b_16x8",
        {"model.lora.rank": "16"},
        "model.lora: vLLM 0.32 is not used for an adapter of a mixture of experts, as model.name",
    ),
    "heads that cannot be divided": (
        "qwen3_8gpus",
        {"rollout.vllm_tensor_parallel_size": "3", "rollout.num_instances": "1"},
        "rollout.vllm_tensor_parallel_size = 3 does not divide the 32 attention heads and 8 KV",
    ),
    "a cost model of other instances": (
        "qwen3_8gpus",
        {"rollout.vllm_tensor_parallel_size": "2", "rollout.num_instances": "2"},
        "schedule.cost_model = 'qwen3-8b-h800' is of instances of 1 GPUs",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_refused_in_one_line(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, changes, said = REFUSED[case]
    options = [word for name, value in changes.items() for word in (f"--{name}", value)]
    assert cli.main(["train", recipe, "--dry-run=plan", *options]) == 2
    out, err = capsys.readouterr()
    assert re.search(said.replace("(", "\\("), err), err
    assert (err.count("\n"), out) == (1, "")


@pytest.mark.parametrize(
    ("size", "published"), [("30B-A3B", 30.53e9), ("32B", 32.76e9), ("8B", 8.19e9)]
)
def test_shipped_architectures_have_the_published_sizes(size: str, published: float) -> None:
    hf_config = load.architecture(parse_config("", {"model.name": f"Qwen/Qwen3-{size}"}).model)
    assert load.count_parameters(hf_config) == pytest.approx(published, rel=1e-3)
