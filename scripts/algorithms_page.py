"""Writes docs/algorithms.md from the tables of algorithms and their parts in the package.

python scripts/algorithms_page.py
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rhymeflow.config.algorithms import ALGORITHMS, PARTS
from rhymeflow.learner.algorithms.advantages import ESTIMATORS
from rhymeflow.learner.algorithms.surrogates import RATIOS, SURROGATES


class Described(NamedTuple):
    """What an algorithm is: sg(x) is a constant, r the ratio, A the advantage, R the reward."""

    formula: str
    paper: str
    in_trl: str
    in_verl: str


DESCRIBED = {
    "grpo": Described(
        "-min(rA, clip(r)A), A = (R - mean) / std of the group; mean over tokens, then responses",
        "2402.03300",
        "`loss_type: grpo`",
        "`adv_estimator: grpo`, `seq-mean-token-mean`: its dual clip at 3 is on by "
        "default (`learner.dual_clip`), a response without a token in the loss is no "
        "sample, and 1e-6 is added to the deviation, not 1e-4",
    ),
    "dr_grpo": Described(
        "as `grpo`, A = R - mean; sum / (responses x `max_completion_length`)",
        "2503.20783",
        "`loss_type: dr_grpo`, `scale_rewards: none`",
        "`norm_adv_by_std_in_grpo: false`, `seq-mean-token-sum-norm`: the divisor is the "
        "batch's longest response",
    ),
    "dapo": Described(
        "as `grpo`, clipped further above than below; mean over the batch's tokens",
        "2503.14476",
        "`loss_type: dapo` (its default, with `epsilon_high` 0.2)",
        "`token-mean`, `clip_ratio_high: 0.28`: its dual clip at 3 is on by default "
        "(`learner.dual_clip`)",
    ),
    "bnpo": Described(
        "as `grpo`; mean over the optimizer step's tokens",
        "2506.02864",
        "`loss_type: bnpo`; the normalisation only, without the paper's Beta distribution",
        "`token-mean`: its dual clip at 3 is on by default (`learner.dual_clip`)",
    ),
    "gdpo": Described(
        "as `grpo`, A = sum of each reward's own A, over the batch's std",
        "2601.05242",
        "`multi_objective_aggregation: normalize_then_sum`",
        "`adv_estimator: gdpo`: the sums are whitened over the batch's tokens",
    ),
    "rloo": Described(
        "-min(rA, clip(r)A), r the product, A = R - mean of the others; mean over responses",
        "2402.14740",
        "`RLOOTrainer`: with KL in the reward (`learner.kl_in`)",
        "`adv_estimator: rloo`: with `ratio: token`",
    ),
    "reinforce_plus_plus": Described(
        "-min(rA, clip(r)A), A = the rewards that follow a token, whitened over tokens; mean over "
        "tokens",
        "2501.03262",
        "",
        "`adv_estimator: reinforce_plus_plus`",
    ),
    "reinforce_plus_plus_baseline": Described(
        "the same, A = R - mean of the group, whitened over tokens",
        "2501.03262",
        "",
        "`adv_estimator: reinforce_plus_plus_baseline`",
    ),
    "gspo": Described(
        "-min(sA, clip(s)A), s = exp(mean of log r over the response); mean over responses",
        "2507.18071",
        "`importance_sampling_level: sequence`, `loss_type: grpo`",
        "",
    ),
    "gspo_token": Described(
        "as `gspo`, s = sg(s) pi / sg(pi), so that each token has its own A and weight",
        "2507.18071",
        "",
        "`loss_mode: gspo`: a response without a token in the loss is no sample",
    ),
    "cispo": Described(
        "-sg(clip(r)) A log pi; mean over tokens",
        "2506.13585",
        "`loss_type: cispo`: its `epsilon_high` is the bound itself, ours plus 1",
        "`loss_mode: cispo`: clips between 1 - `clip_ratio_low` and 1 + `clip_ratio_high`, as here",
    ),
    "sapo": Described(
        "-4/t sigmoid(t(r - 1)) A, t = 1 if A > 0, else 1.05; mean over tokens, then responses",
        "2511.20347",
        "`loss_type: sapo`",
        "`loss_mode: sapo`: a response without a token in the loss is no sample",
    ),
    "gmpo": Described(
        "-exp(mean of log r over the response, each clipped where A says) A; mean over responses",
        "2507.20673",
        "`GMPOTrainer`",
        "`loss_mode: geo_mean`",
    ),
    "ppo": Described(
        "-min(rA, clip(r)A), each token's A by a critic (GAE), whitened over tokens; mean over "
        "tokens",
        "1707.06347",
        "",
        "`adv_estimator: gae`, whose `lam` is 1 and `cliprange_value` 0.5 by default; its dual "
        "clip at 3 is on (`learner.dual_clip`)",
    ),
}

HEAD = """\
# Algorithms

    rhymeflow train demo --learner.algorithm gspo --dry-run

`learner.algorithm` chooses a combination of an advantage, a probability ratio, a surrogate and a
normalisation of the loss, with the values that were published with it; the dry run prints them.
Each part can be set alone, in the file or on the command line, and wins. The default is `dapo`.
Resuming a run with another algorithm takes that one's values. `rhymeflow train --help=learner`
describes every field; this page is written from the tables in the code
(`python scripts/algorithms_page.py`).

`beta`, the weight of the KL term, is 0 with each of them: it needs a reference model. What is
done about responses that another policy sampled is `off_policy_correction`, whatever the algorithm
is: by default ratios are to the policy that sampled.

Losses, gradients, masks and advantages are those of TRL 1.16, verl and AReaL, as
`tests/learner/test_oracle.py` shows.
"""

TAIL = """
## On the demo

    rhymeflow bench algorithms

runs recipe `demo` for ten steps with each algorithm, one seed, with its published values and the
recipe's learning rate. The held-out reward, greedy, is 0.383 at the start; its standard error is
0.04, so this says that each learns, not which is best
([record](../benchmarks/results/algorithms.md), made beside other programs).

| algorithm | after 5 steps | 10 |
| --- | --- | --- |
| `grpo`, `gdpo`, `gmpo` | 0.703 | 0.805 |
| `dr_grpo` | 0.703 | 0.820 |
| `dapo`, `bnpo`, `cispo` | 0.703 | 0.828 |
| `gspo` | 0.695 | 0.812 |
| `gspo_token` | 0.695 | 0.789 |
| `sapo` | 0.703 | 0.797 |
| `rloo` | 0.703 | 0.844 |
| `reinforce_plus_plus` | 0.695 | 0.742 |
| `reinforce_plus_plus_baseline` | 0.703 | 0.789 |
| `ppo` with `critic_learning_rate: 1e-4` | 0.688 | 0.719 |

A batch makes one optimizer step here, and its responses are at most one version old, so ratios are
near 1: algorithms that differ in the ratio alone learn nearly the same.

## A function of yours

`advantage`, `ratio`, `surrogate` and `loss_type` also take `path/to/file.py:function`:

```python
def advantage(rewards, lengths):  # of a group, arrays
    return rewards - rewards.max()


def ratio(log_ratios, advantages, responses, config):  # of tokens; .mean(x), .sum(x)
    return responses.mean(log_ratios).exp()


def surrogate(ratios, advantages, logprobs, config):  # returns losses
    return -ratios * advantages


def loss_type(length, max_completion_length):  # of a response's tokens in the loss, perhaps 0
    return 1 / max(length, 1), 1.0  # factor of each of them; what it adds to the divisor
```

Each is tried before the run, and one that raises, or gives another number of values, or NaN, is
refused by name. The normalisation above is GRPO's: the divisor of an optimizer step is
the sum over its responses.

## PPO's critic

    rhymeflow train demo --learner.algorithm ppo --learner.critic_learning_rate 1e-4

The critic is a second model with weights of its own: at first the policy's, with one output in
place of the head, which begins at 0. At the beginning of a step it estimates the value of each
token, which is that of the tokens before it. From these and the reward, at the last token,
follow advantages and returns by GAE (`gamma`, `lam`), over sampled tokens only: advantages pass
over what an environment answered. With `kl_in: reward` each token's KL is taken from its own
reward. The critic learns the returns beside the policy, by the same optimizer steps and
normalisation, with `critic_learning_rate` and a norm of its own that is clipped; its loss is 0.5
max((v - R)^2, (clip(v) - R)^2), v clipped to `cliprange_value` around the value before the step.
An optimizer step in which either has a gradient that is not finite is taken by neither.

`reinforce_plus_plus` has the same advantages with values of 0 and `lam` 1, and no critic.

`critic_warmup_steps` steps train the critic alone. The metrics `value/*` say how good it is.
Checkpoints have it, and a resumed run goes on with it; the model in a checkpoint is the policy.
A single response to each prompt is enough (`rollout.num_generations: 1`). It works on one and
many ranks, and not with `model.lora` or `schedule.accumulate_early`, which are refused.

| verl | here |
| --- | --- |
| `algorithm.gamma`, `algorithm.lam` | `learner.gamma`, `learner.lam` |
| `critic.cliprange_value` | `learner.cliprange_value` |
| `critic.optim.lr` | `learner.critic_learning_rate` |
| `trainer.critic_warmup` | `learner.critic_warmup_steps` |
| `critic.ppo_epochs`, `critic.ppo_mini_batch_size` | the policy's |
| `critic.model.path` | the policy's |

## Corrections for another policy's tokens

u is the ratio of the learner's policy before the step to the one that sampled, and c is
`importance_sampling_cap`; `importance_sampling_floor` is a second bound, below.

| here | a token's loss is | in TRL | in verl |
| --- | --- | --- | --- |
| `tis` | times min(u, c) | `token_truncate` | `rollout_is: token` |
| `tis`, level `sequence` | times min(product, c) | `sequence_truncate` | `rollout_is: sequence` |
| `decoupled` | times u, or 0 past c | `token_mask` | threshold `"lo_hi"`: IcePop |
| `decoupled`, level `sequence` | times the product, or 0 past c | `sequence_mask` | the same |
| level `geometric_mean` | the same with the product's root | - | - (AReaL's `level: sequence`) |
| `proximal` | as it is | without a correction | without a correction |
| `off_policy_masks` | 0 where the KL is above its bound | - | `rollout_rs` |
| `off_policy_mask_threshold` | 0 in bad responses far from the policy | the same | - |
| `normalize_importance_weights` | over the mean weight | - | `rollout_is_batch_normalize` |

The metrics `off_policy/mean_weight` and `off_policy/masked_share` say what they do to a batch;
[training on stale responses](off-policy.md) says which to choose.

A field that the chosen parts do not use, such as `epsilon` with `surrogate: sigmoid`, a cap without
`tis` or `decoupled`, or `reward_clip` with `normalize_then_sum`, is refused by its name. With one
optimizer step for a batch all ratios are 1, unless they are of the policy that sampled
(`off_policy_correction: none`): a bound of ratios that was set then is reported.

## Terms and bounds beside

- KL: `beta`, `kl_in` the loss or the reward, `kl_estimator`, `use_bias_correction_kl`.
- Entropy: `entropy_coef`, a bonus; `top_entropy_quantile`, only the most uncertain tokens.
- A teacher: `distillation`, in the advantages or as a divergence in the loss
  ([distillation](distillation.md)).
- Bounds: `dual_clip`, `delta`, `reward_clip`, `advantage_clip`; `overlong_buffer`, for rewards.

## What it costs

With `ratio: token` and corrections of single tokens a step is computed in one pass, chunk by
chunk. What a response's tokens have in common (every other ratio, `off_policy_level`, masks of
responses) is known after a forward pass without gradient, so a step computes one more: about a
third more of the learner's time. A critic computes what the policy does and one forward pass
more, and has masters, gradients and moments of its own. A batch's loss does not depend on
micro-batches, chunks or ranks.

## Where others differ

- verl's dual clip (`clip_ratio_c` = 3) is on by default: give `learner.dual_clip: 3`.
- A response without a token in the loss counts as one in `grpo` and `dr_grpo`, as in TRL; not in
  verl's `seq-mean` modes.
- CISPO's bound is 1 + `epsilon_high` here and in verl, `epsilon_high` itself in TRL.
- The geometric mean over a response is AReaL's `level: sequence` (`off_policy_level:
  geometric_mean`); TRL's and verl's `sequence` is the product.
- Without a correction, verl and TRL clip around the policy before the step:
  `off_policy_correction: proximal`. `none` clips around the one that sampled.
"""


def table(head: list[str], rows: list[list[str]]) -> str:
    """Format a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines) + "\n"


def linked(paper: str) -> str:
    """Return an arXiv number as a link."""
    return f"[{paper}](https://arxiv.org/abs/{paper})"


def parts(name: str, functions: Mapping[str, Any]) -> str:
    """Return a part's heading and the table of its functions."""
    texts = {key: " ".join(str(inspect.getdoc(each)).split()) for key, each in functions.items()}
    rows = [[f"`{key}`", text] for key, text in texts.items()]
    return f"\n## `learner.{name}`\n\n{table([name, 'what it is'], rows)}"


def page() -> str:
    """Return docs/algorithms.md."""
    names = [
        [f"`{name}`", each.formula, linked(each.paper), each.in_trl or "-", each.in_verl or "-"]
        for name, each in DESCRIBED.items()
    ]
    assert DESCRIBED.keys() == ALGORITHMS.keys()
    values = [
        [f"`{name}`", *(str(each[part]) for part in PARTS if part != PARTS[2])]
        for name, each in ALGORITHMS.items()
    ]
    heads = [f"`{part}`" for part in PARTS if part != PARTS[2]]
    return "".join(
        (
            HEAD,
            "\n" + table(["algorithm", "loss", "arXiv", "in TRL", "in verl"], names),
            "\n## What each sets\n\n" + table(["algorithm", *heads], values),
            f"\n`gdpo` sets `{PARTS[2]}: normalize_then_sum`, the others `sum_then_normalize`.\n",
            parts("advantage", ESTIMATORS),
            parts("ratio", RATIOS),
            parts("surrogate", SURROGATES),
            TAIL,
        )
    )


if __name__ == "__main__":
    Path("docs/algorithms.md").write_text(page(), encoding="utf-8")
