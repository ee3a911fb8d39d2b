"""What each metric of a run means, and what it looks like in a run that learns.

`docs/metrics.md` is written from this table (`python scripts/metrics_page.py`). `*` in a name
stands for a reward function, a suite, a tool or a number."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

from rhymeflow.observe import learning


class Meaning(NamedTuple):
    """What is known of the metrics of one name."""

    name: str
    said: str  # what it measures, with its unit
    healthy: str = ""
    """The range of a run that learns; empty if it depends on the task or tells only about time."""


# A line each: name | meaning | in a run that learns.
_TABLE = f"""
## Rewards
reward | mean reward of the batch's responses | rises, or stays high
reward_std | standard deviation of the rewards of the batch | above 0
frac_reward_zero_std | share of groups in which all responses have the same reward, which teach \
nothing | below {learning.NO_SPREAD:.0%}; it rises as prompts are solved
rewards/*/mean | mean of one reward function, unweighted | rises with `reward`
rewards/*/std | standard deviation of one reward function
rewards/failed | responses without a reward since the last step, as a function or environment \
failed | 0, which is not written
eval/reward | mean held-out reward | rises; falls while `reward` rises: overfitting
eval/*/stderr | standard error of the suite's mean reward, over prompts
eval/*/avg@* | mean reward of a suite, with so many answers to each prompt | rises
eval/*/pass@* | chance that one of so many answers passes | rises
eval/*/maj@* | share of prompts whose most frequent answer passes | rises
eval/*/mean_length | mean length of a suite's answers, tokens
eval/*/reward_* | mean of one of several reward functions over a suite's answers, \
unweighted
eval/*/clipped_ratio | share of a suite's answers that were cut at the limit | low
eval/*/failed | answers of a suite that could not be judged | 0, which is not written
## Responses
completions/*_length | mean, least and greatest length of a response, tokens
completions/*_terminated_length | the same of responses that ended by themselves; 0 if none did
completions/clipped_ratio | share of responses cut at `rollout.max_completion_length` | below \
{learning.CUT:.0%}
turns/mean | mean number of turns of a response | above 1 if turns are wanted
tools/call_frequency | share of turns in which a tool was called | above 0
tools/failure_frequency | share of calls that failed | falls
env/step_s | mean time that an environment or a tool took for a turn, seconds
## Learning
loss | mean loss of the batch's optimizer steps | no goal: its sign says nothing
entropy | mean entropy of the policy at a token, nats | falls slowly; below \
{learning.ENTROPY_LEFT:.0%} of its start nothing new is tried
grad_norm | norm of the gradient before it is clipped | finite, above 0, no trend up
skipped_steps | optimizer steps left out, as the gradient was not finite | 0
learning_rate | learning rate of the step
kl | KL from the reference to the policy, nats a token; with `learner.beta` | \
below {learning.RUNAWAY:g}
distillation/divergence | divergence of the policy from the teacher, nats a token; with \
`sampled_token` estimated by log(pi / pi_teacher) | falls
clip_ratio/low_mean | share of tokens clipped at the lower bound
clip_ratio/high_mean | share of tokens clipped at the upper bound
clip_ratio/region_mean | share of tokens that were clipped, so carry no gradient (but of \
`weighted_log`, whose weight is) | below \
{learning.CLIPPED:.0%}
clip_ratio/low_min | least share of a response clipped at the lower bound
clip_ratio/high_max | greatest share of a response clipped at the upper bound
off_policy/mismatch_kl | KL from the probabilities sampled with to the learner's, nats a token | \
below {learning.MISMATCH:g}; at a staleness of 0 about 0
off_policy/max_ratio | greatest ratio of the two probabilities of a token | near 1
off_policy/mean_weight | mean weight of a token by `learner.off_policy_correction` | near 1
off_policy/masked_share | share of tokens with weight 0: masked, or past a bound | below 10%
value/explained_variance | share of the variance of returns that the critic's values explain; with \
a critic | rises towards 1; below 0 a critic is worse than none
value/mean | mean value of a token before the step, in units of the reward | near `reward`
value/loss | mean loss of the critic at a token | falls
value/clip_ratio | share of tokens whose value moved past `learner.cliprange_value` | low
value/grad_norm | norm of the critic's gradient before it is clipped | finite, above 0
staleness/mean | mean age of the batch's responses, versions
staleness/max | greatest age, versions | at most the schedule's bound, always
## Groups
endings/consumed | groups trained on so far
endings/filtered | groups left out so far, as their rewards were all equal | \
below {learning.FILTERED:.0%} of the two
endings/aborted | groups that ended otherwise so far: surplus, too old, failed responses
num_tokens | tokens of prompts and responses trained on so far
## Time
step | versions published, from 1; 0 is the untrained policy
time | since the run began, seconds; like all times that of the emulated cluster, if there is one
step_time | between two publications, seconds
rollout/tokens_per_s | tokens generated by all instances, a second
idle/rollout | share of the step in which instances had nothing to do
idle/learner | share of the step in which the learner had nothing to do
packing/computed_share | share of the batch's tokens that the learner computes: shared prompts \
and beginnings once
params/push_s | time to publish weights, seconds
params/pull_s | mean time of an instance's pull, seconds
params/changed_share | share of the weights that a step changed
params/whole_share | share of the weights in tensors that are sent whole
params/delta_bytes | bytes that a pull of the changes reads
coordination/coordinator_s | time that the coordinator took, seconds
coordination/store_s | time that the store took, seconds
coordination/share | both as a share of the step | a few percent
coordination/cpu_share | processor time of the controller, as a share of the step
emulation/learner_behind | by what share the learner's work took longer than an emulated cluster's \
would have | below {learning.BEHIND:.0%}
emulation/rollout_behind | the same of instances, as a share of their busy time | below \
{learning.BEHIND:.0%}
backup/behind_s | age of the newest event that is not in the backup yet, seconds
## Drafts and lengths
draft/mean_acceptance_length | tokens for each iteration that generated any | above 1 from the \
second epoch on
draft/acceptance_rate | share of drafted tokens that were accepted
draft/time_saved | time that drafts saved in the step, by the engine's estimate, seconds of all \
instances | not below 0
draft/time_saved_share | the same as a share of the time without drafts
draft/history_tokens | tokens in the history that drafts come from
lengths/explained_variance | share of the variance of lengths that is predicted | above 0 from \
the second epoch on
lengths/rank_correlation | rank correlation of predicted and true lengths
"""


def _sections() -> dict[str, list[Meaning]]:
    sections: dict[str, list[Meaning]] = {}
    for line in _TABLE.strip().splitlines():
        if line.startswith("## "):
            meanings = sections.setdefault(line.removeprefix("## "), [])
        else:
            meanings.append(Meaning(*line.split(" | ")))
    return sections


SECTIONS = _sections()  # meanings by the heading that they stand under


def meaning_of(metric: str) -> Meaning | None:
    """Return what is known of a metric; None of one that a reward function logged."""
    every = (meaning for section in SECTIONS.values() for meaning in section)
    found = [meaning for meaning in every if fnmatchcase(metric, meaning.name)]
    return max(found, key=lambda meaning: len(meaning.name), default=None)
