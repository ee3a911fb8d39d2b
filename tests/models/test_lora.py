"""What an adapter computes in model, learner and engine is what peft computes from its files."""

import json
from dataclasses import replace

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rhymeflow import check, memory
from rhymeflow.cli.dry_run import _check_room
from rhymeflow.config import Config, LoraConfig, ModelConfig
from rhymeflow.engine.native import body
from rhymeflow.engine.vllm.supported import check_adapted, check_supported
from rhymeflow.errors import UserError
from rhymeflow.models.adapter_files import CONFIG, WEIGHTS, adapter_for, adapter_of, lost_dropout
from rhymeflow.models.buffers import buffers_of
from rhymeflow.models.frozen_base import PARTS, FrozenBase
from rhymeflow.models.load import load_model
from rhymeflow.models.lora import (
    LoraLinear,
    adapter_in,
    at_start,
    attach,
    draw_adapter,
    load_policy,
    merge,
    save_adapter,
    unversioned,
    versioned,
)
from rhymeflow.models.source import other_base
from rhymeflow.models.tokenizer import load_tokenizer
from rhymeflow.runtime import disk_space
from rhymeflow.weights.proof import ChecksumMismatch
from tests.engine.models import make_engine, make_requests, run, tiny_model
from tests.families import cases
from tests.learner.builders import tiny_model as mixture
from tests.refused import refusal
from tests.runtime.tiny import tiny_config

CPU = torch.device("cpu")
IDS = torch.tensor([[3, 17, 5, 99, 140, 2, 8, 8, 61, 7]])


@pytest.fixture(params=["llama", "qwen2", "olmo2"])
def base(request, tmp_path):
    """The first two run in the engine's own layers, the last in its modules."""
    tiny_model(request.param, "eager").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def configured(base, **fields):
    return ModelConfig(name=str(base), dtype="float32", lora=LoraConfig(**fields))


def adapted(base, **fields):
    config = configured(base, **fields)
    model = load_policy(config, dtype=torch.float32, device=CPU, seed=3)
    draw_adapter(model)
    return model


def saved(model, directory):
    directory.mkdir()
    save_adapter(directory, adapter_in(model), str(model.name_or_path), versioned(model))
    return directory


def in_peft(base, directory, dtype=torch.float32):
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(plain, directory).eval()


@torch.no_grad()
def logits(model, ids=IDS):
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")
    return model(input_ids=ids, use_cache=False).logits[0]


@pytest.fixture
def unread(monkeypatch):
    """Whatever is refused is refused before a model is read."""
    monkeypatch.setattr("rhymeflow.models.lora.load_model", None)


SHAPES = [
    {"rank": 4},
    {"rank": 4, "alpha": 3.0, "use_rslora": True},
    {"rank": 2, "target_modules": ("q_proj", "up_proj", "mlp.down_proj")},
    {  # a layer's alone; of what is trained whole, nothing is adapted
        "rank": 3, "target_modules": ("layers.1.self_attn.q_proj", "down_proj"),
        "modules_to_save": ("lm_head", "layers.0.mlp"),
    },
]  # fmt: skip


@pytest.mark.parametrize("fields", SHAPES)
def test_peft_computes_the_same_from_the_files(base, tmp_path, fields):
    model = adapted(base, **fields)
    directory = saved(model, tmp_path / "adapter")
    found, expected = logits(model), logits(in_peft(base, directory))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    layers = {name.rpartition(".")[0] for name in versioned(model) if "lora_" in name}
    assert all(name.endswith(fields.get("target_modules", "proj")) for name in layers)
    own = load_policy(ModelConfig(name=str(directory)), dtype=torch.float32, device=CPU)
    assert versioned(own).keys() == versioned(model).keys()
    assert torch.equal(logits(own), found)
    with at_start(model):
        without = logits(model)
    torch.testing.assert_close(
        without, logits(load_model(configured(base), dtype=torch.float32, device=CPU))
    )
    assert (found - without).abs().max() > 0.1
    torch.testing.assert_close(logits(model), found)  # it is on again


@pytest.mark.parametrize("fields", SHAPES)
def test_the_engine_samples_from_it(base, tmp_path, fields):
    """Gate and up are one product, and query, key and value are: each has its own adapter."""
    model = adapted(base, **fields)
    engine = make_engine(model)
    engine.prove()
    with torch.no_grad():  # in place, as a pull does
        for each in versioned(model).values():
            each.mul_(0.7)
    engine.set_version(1, keep_cache=False)
    reference = in_peft(base, saved(model, tmp_path / "adapter"))
    requests = make_requests([5, 9, 9])
    run(engine, requests)
    for request in requests:
        ids = torch.tensor([request.prompt_ids + request.tokens])
        predicted = logits(reference, ids).log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
        expected = predicted.gather(1, torch.tensor(request.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(request.logprobs), expected, atol=1e-4, rtol=0)


def test_a_router_may_have_another_precision(tmp_path):
    cases.save("hunyuan_v1_moe", tmp_path)
    config = configured(tmp_path, rank=2)
    model = load_policy(config, dtype=torch.bfloat16, device=CPU)
    draw_adapter(model)
    make_engine(model).prove()


def test_an_adapter_of_peft_is_read(base, tmp_path):
    plain = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    shape = peft.LoraConfig(
        r=3, lora_alpha=5, use_rslora=True, modules_to_save=["lm_head"],
        target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False,
    )  # fmt: skip
    theirs = peft.get_peft_model(plain, shape).eval()
    with torch.no_grad():
        theirs.get_output_embeddings().weight.mul_(1.1)
    theirs.save_pretrained(tmp_path / "adapter")
    expected = logits(theirs)
    for config in (
        configured(base, adapter=str(tmp_path / "adapter")),
        ModelConfig(name=str(tmp_path / "adapter")),  # it names its base
    ):
        model = load_policy(config, dtype=torch.float32, device=CPU)
        torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)
    assert "lm_head.weight" in versioned(model)
    merged = merge(model)
    assert not [each for each in merged.modules() if isinstance(each, LoraLinear)]
    torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    torch.testing.assert_close(logits(again), expected, atol=1e-4, rtol=1e-4)


def test_new_values_change_nothing_and_follow_from_the_seed(base):
    config = configured(base, rank=4)
    one, same, other = (
        load_policy(config, dtype=torch.bfloat16, device=CPU, seed=seed) for seed in (1, 1, 2)
    )
    own = versioned(one)
    assert {each.dtype for each in own.values()} == {torch.float32}
    assert {each.dtype for each in unversioned(one).values()} == {torch.bfloat16}
    assert all(torch.equal(each, versioned(same)[name]) for name, each in own.items())
    assert not all(torch.equal(each, versioned(other)[name]) for name, each in own.items())
    assert not any(name.endswith("lora_B") and each.any() for name, each in own.items())
    assert {n for n, p in one.named_parameters() if p.requires_grad} == own.keys()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_modules": ("q_prjo",)}, "target_modules: 'q_prjo' is the end of no linear layer"),
        ({"target_modules": ("proj",)}, "'proj' is the end of no linear layer"),
        ({"target_modules": ("lm_head",)}, "the output head is not adapted"),
        ({"modules_to_save": ("nrom",)}, "modules_to_save: 'nrom' is the end of no module's name"),
        (
            {"rank": 1000},
            "rank = 1,000: no layer that is adapted has a rank above 48; give at most",
        ),
    ],
)
def test_names_that_fit_nothing_are_refused(tmp_path, unread, fields, message):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=message):
        adapted(tmp_path, **{"rank": 2} | fields)


def test_a_model_without_linear_layers_is_refused(tmp_path, unread):
    cases.save("gpt2", tmp_path)
    with pytest.raises(UserError, match="a model of type 'gpt2' has no linear layers to adapt"):
        adapted(tmp_path, rank=2)


def test_tied_modules_are_not_trained_whole(tmp_path):
    model = tiny_model()
    model.lm_head.weight = model.model.embed_tokens.weight
    shape = adapter_for(ModelConfig(lora=LoraConfig(rank=2, modules_to_save=("lm_head",))))
    with pytest.raises(UserError, match=r"'lm_head' is tied to 'model\.embed_tokens\.weight'"):
        attach(model, shape)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora = True in adapter_config.json is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern = "),
        ({"bias": "all"}, "bias = 'all'"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
        ({"target_modules": ".*proj"}, "target_modules = "),
        ({"r": 5}, r"is \[4, 48\], in this model \[5, 48\]"),
        ({"r": 0}, "has r = 0 and lora_alpha = 8; both are above 0"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = 'pissa_niter_4' in"),
        ({"modules_to_save": "lm_head"}, "modules_to_save = 'lm_head' in"),
        ({"target_modules": ["q_proj"]}, r"has base_model.model.model.layers.0.mlp.down_proj"),
    ],
)
def test_other_adapters_are_refused(tmp_path, request, changes, message):
    tiny_model().save_pretrained(tmp_path / "base")
    directory = saved(adapted(tmp_path / "base", rank=4), tmp_path / "adapter")
    request.getfixturevalue("unread")
    fields = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps(fields | changes))
    with pytest.raises(UserError, match=message):
        load_policy(ModelConfig(name=str(directory)), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 2, "modules_to_save": ("lm_head",)}, "has no place for 'lm_head'"),
        ({"rank": 600}, "the adapter has rank 600; at most 512 is possible"),
    ],
)
def test_vllm_has_no_place_for_some(tmp_path, fields, message):
    config = tiny_config(tmp_path, model={"lora": fields}, rollout={"engine": "vllm"})
    assert message in refusal(check.check_adapter, config)


def test_what_is_trained_whole_has_no_reference(tmp_path):
    """Whether the configuration says so or the adapter's files."""
    tiny_model().save_pretrained(tmp_path / "base")
    fields = {"rank": 2, "modules_to_save": ("lm_head",)}
    directory = saved(adapted(tmp_path / "base", **fields), tmp_path / "adapter")
    for lora in (fields, {"adapter": str(directory)}):
        config = tiny_config(tmp_path, model={"lora": lora}, learner={"beta": 0.1})
        assert "not with 'lm_head', which model.lora" in refusal(check.check_adapter, config)
        check.check_adapter(config.changed(learner={"beta": 0.0}))


@pytest.mark.parametrize("name", [*cases.EXPERTS, "mixtral", "qwen2_moe", "gpt_oss"])
def test_vllm_is_asked_for_no_mixture_with_an_adapter(name):
    found = refusal(check_adapted, Config(), cases.config_of(name))
    assert "an adapter of a mixture of experts" in found


def test_vllm_does_not_compute_experts_beside_an_adapter(tmp_path):
    mixture("qwen3_moe").save_pretrained(tmp_path / "mixture")
    model = {"name": str(tmp_path / "mixture"), "lora": {"rank": 2}}
    config = tiny_config(tmp_path, model=model, rollout={"engine": "vllm"})
    assert "an adapter of a mixture of experts" in refusal(check_supported, config, {})
    check_supported(config.changed(model={"lora": LoraConfig()}), {})


def test_a_dry_run_compares_the_adapter_too(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, model={"lora": {"rank": 4, "target_modules": ("q_proj",)}})
    check.prove(config, has_engine=True)
    without = lambda product, x_TI: product.base(x_TI)  # noqa: E731
    monkeypatch.setattr(body._AdaptedProduct, "__call__", without)
    assert "the native engine's log-probabilities are" in refusal(
        check.prove, config, has_engine=True
    )


def test_the_plan_counts_what_an_adapter_trains(tmp_path):
    """By hand: matrices of rank 4 for each of the seven layers of a small model's layers."""
    plain = tiny_config(tmp_path, model={"dtype": "bfloat16"})
    adapted = tiny_config(tmp_path, model={"dtype": "bfloat16", "lora": {"rank": 4}})
    without, model = memory.model_here(plain), memory.model_here(adapted)
    sizes = load_model(adapted.model, dtype=torch.float32, device=CPU).config
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    kv = sizes.num_key_value_heads * hidden // sizes.num_attention_heads
    wide = [(hidden, hidden)] * 2 + [(hidden, kv)] * 2 + [(hidden, inner)] * 2 + [(inner, hidden)]
    own = sizes.num_hidden_layers * 4 * sum(i + o for i, o in wide)
    assert (model.num_adapter, model.narrow) == (own, sizes.num_hidden_layers * 7 * 4)
    found = {what: size for _, (what, size) in memory.here(adapted, model, 10)}
    assert found["master weights (float32)"] == found["gradients (float32)"] == 4 * own
    assert found["AdamW moments (2 x float32)"] == 8 * own
    assert found["weights, two slots in shared memory"] == 2 * 2 * own
    assert found["weights (bfloat16)"] == 2 * (own + without.num_parameters)
    exact = memory.model_here(tiny_config(tmp_path, model={"dtype": "float32"}))
    more = memory.head_bytes(adapted, model) - memory.head_bytes(adapted, exact)
    assert more == 4 * sizes.vocab_size * hidden, "the head's weight in float32"
    beta = adapted.changed(learner={"beta": 0.1})
    assert memory.here(beta, model, 10) == memory.here(adapted, model, 10)  # no reference
    two = adapted.changed(learner={"num_ranks": 2})
    ranks = {what: size for _, (what, size) in memory.here(two, model, 10)}
    assert ranks["weights under the adapter (bfloat16), 1/2"] == 2 * without.num_parameters
    of_layers = 2 * (without.num_parameters - without.num_outside) / without.num_layers
    gathered = ranks["gathered: embeddings, head and two layers"]
    assert gathered == 2 * 2 * (without.num_outside + of_layers)  # each rank, without a gradient


def test_a_router_whose_bias_changes_is_found():
    """It is a buffer, which an engine reads from the model's files as what is under an adapter."""
    model = attach(cases.model_of("glm4_moe"), adapter_of(LoraConfig(rank=2)))
    base, (name, bias) = FrozenBase(model), next(iter(buffers_of(model).items()))
    bias += 1e-3
    assert not torch.equal(FrozenBase(model).checksum, base.checksum)

    def all_parts():
        for _ in range(PARTS):
            base.check_part()

    with pytest.raises(ChecksumMismatch, match=f"changed in place .*{name}"):
        all_parts()


def test_the_engine_never_takes_pefts_layers_for_plain_ones():
    """They have the weight under the adapter, with which alone it would sample."""
    model = tiny_model("llama")
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["v_proj"]))
    with pytest.raises(AssertionError):
        make_engine(model)


def test_an_adapter_knows_its_model(tmp_path, monkeypatch):
    """Also from elsewhere; on another model it is said."""
    monkeypatch.chdir(tmp_path)
    for name in ("base", "other"):
        tiny_model().save_pretrained(name)
    directory = str(saved(adapted("base", rank=4), tmp_path / "adapter"))
    monkeypatch.chdir("/")
    load_policy(ModelConfig(name=directory), dtype=torch.float32, device=CPU)
    assert other_base(configured(tmp_path / "base", adapter=directory)) is None
    assert other_base(configured(tmp_path / "base", rank=4)) is None
    assert lost_dropout(configured(tmp_path / "base", adapter=directory)) is None
    file = tmp_path / "adapter" / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_dropout": 0.05}))
    said = lost_dropout(configured(tmp_path / "base", adapter=directory))
    assert said.endswith(
        "its lora_dropout = 0.05 is not continued: there is no dropout in training"
    )
    said = other_base(configured(tmp_path / "other", adapter=directory))
    assert said.endswith(
        f"was trained on '{tmp_path}/base', and is put on model.name = '{tmp_path}/other'"
    )


def test_an_adapters_own_tokenizer_is_read(tmp_path):
    """What it was trained with may be another one than the model's."""
    base = tiny_config(tmp_path).model
    directory = saved(adapted(base.name, rank=4), tmp_path / "adapter")
    named = ModelConfig(name=str(directory))
    tokenizer = load_tokenizer(named)
    assert tokenizer.get_vocab() == load_tokenizer(base).get_vocab()
    tokenizer.chat_template = "{{ messages[0].content }}="
    tokenizer.save_pretrained(directory)
    assert load_tokenizer(named).chat_template == tokenizer.chat_template


def test_an_adapter_is_given_once(tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    directory = saved(adapted(tmp_path / "base", rank=4), tmp_path / "adapter")
    twice = ModelConfig(name=str(directory), lora=LoraConfig(rank=4))
    assert "is an adapter already" in refusal(adapter_for, twice)


def test_its_checkpoints_need_little_room(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, model={"lora": {"rank": 2}})
    model = memory.model_here(config)
    count = config.run.save_total_limit + 1
    free = disk_space.LOG_BYTES + count * 16 * model.num_adapter  # float32, and masters and moments
    monkeypatch.setattr(disk_space, "free_bytes", lambda path: free)
    _check_room(config, model, tmp_path)
    assert "checkpoints of" in refusal(_check_room, config, replace(model, num_adapter=0), tmp_path)


def test_damaged_values_are_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    directory = saved(adapted(tmp_path / "base", rank=4), tmp_path / "adapter")
    values = load_file(directory / WEIGHTS)
    name = min(values)
    values[name][0, 0] = torch.nan
    save_file(values, directory / WEIGHTS)
    config = ModelConfig(name=str(directory))
    with pytest.raises(UserError, match=f"{name} has numbers that are NaN"):
        load_policy(config, dtype=torch.float32, device=CPU)
    del values[name]
    save_file(values, directory / WEIGHTS)
    with pytest.raises(UserError, match=f"has no {name}"):
        load_policy(config, dtype=torch.float32, device=CPU)
    (directory / WEIGHTS).unlink()
    with pytest.raises(UserError, match=f"holds no adapter: {WEIGHTS} is missing"):
        load_policy(config, dtype=torch.float32, device=CPU)
