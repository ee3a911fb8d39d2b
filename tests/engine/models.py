"""Tiny random models, requests, and the slow way to do what the engine does."""

import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rhymeflow.engine.base import NoiseKey, Request, Sampling
from rhymeflow.engine.native import noise
from rhymeflow.engine.native.engine import Engine
from rhymeflow.models import attention

VOCABULARY = 150
SEED = 7


def tiny_config(kind):
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 320,
        "initializer_range": 0.15,  # far from uniform, so that masks and temperature bite
    }
    return LlamaConfig(**sizes) if kind == "llama" else Qwen2Config(**sizes)


def tiny_model(kind="llama", implementation=attention.NAME, seed=0):
    """The same weights for the same seed, whatever the attention implementation."""
    torch.manual_seed(seed)
    cls = LlamaForCausalLM if kind == "llama" else Qwen2ForCausalLM
    return cls._from_config(tiny_config(kind), attn_implementation=implementation).eval()


def sampling(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=24, stop=()):
    return Sampling(temperature, top_p, top_k, max_new_tokens, frozenset(stop))


def make_requests(lengths, how=None):
    """One request per prompt length; the first two share a prompt where their lengths agree."""
    requests = []
    for i, length in enumerate(lengths):
        prompt = [(3 * length + j * j) % VOCABULARY for j in range(length)]
        requests.append(Request(i, prompt, NoiseKey(10 + i, 2, i % 3), how or sampling()))
    return requests


def make_engine(model, max_num_seqs=8, max_prefill_tokens=64, **more):
    sizes = {"max_num_seqs": max_num_seqs, "max_prefill_tokens": max_prefill_tokens}
    return Engine(model, seed=SEED, **{"instance": "a", "version": 0} | sizes | more)


def run(engine, requests):
    """Submit all, run to the end; return the reasons by id."""
    for request in requests:
        engine.submit(request)
    reasons = {}
    while engine.has_work:
        reasons.update({request.id: reason for request, reason in engine.step()})
    return reasons


def oracle(model, request, seed=SEED):
    """Tokens, log-probabilities and reason by full recomputation, one token at a time.

    `model` is the plain Hugging Face model (eager or SDPA attention). Shaping is written out here.
    """
    how, tokens, logprobs = request.sampling, [], []
    word = noise.stream(seed, request.noise_key)
    while True:
        ids = torch.tensor([request.prompt_ids + tokens], device=model.device)
        with torch.no_grad():
            logits = model(ids).logits[0, -1].float().cpu()
        x = slow_shaped(logits, how)
        if how.temperature == 0:
            token = int(x.argmax())
        else:
            keys = noise.row_keys([word], [len(tokens)], torch.device("cpu"))
            token = int((x.double() - noise.exponentials(keys, len(x))[0].log()).argmax())
        tokens.append(token)
        logprobs.append(float(x.log_softmax(0)[token]))
        if token in how.stop_token_ids:
            return tokens, logprobs, "stop"
        if len(tokens) == how.max_new_tokens:
            return tokens, logprobs, "length"


def slow_shaped(logits, how):
    """Temperature, top-k, top-p in plain Python."""
    x = logits.tolist()
    if how.temperature > 0:
        x = [value / how.temperature for value in x]
    order = sorted(range(len(x)), key=lambda i: -x[i])
    keep = order[: how.top_k] if how.top_k else order
    total = sum(math.exp(x[i]) for i in keep)
    reached, nucleus = 0.0, []
    for i in keep:
        if reached >= how.top_p:
            break
        nucleus.append(i)
        reached += math.exp(x[i]) / total
    shaped = torch.full_like(logits, -torch.inf)
    shaped[nucleus] = torch.tensor([x[i] for i in nucleus])
    return shaped
