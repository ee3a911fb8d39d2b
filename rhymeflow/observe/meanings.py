"""What each metric of a run means, and what it looks like in a run that learns.

`docs/metrics.md` is written from this table (`python scripts/metrics_page.py`). `*` in a name
stands for a reward function, a suite, a tool or a number.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

from rhymeflow.observe import learning


class Meaning(NamedTuple):
    """What is known of the metrics of one name."""

    name: str
    said: str
    """What it measures, with its unit."""
    healthy: str = ""
    """The range of a run that learns; empty if it depends on the task or tells only about time."""


_REWARDS = (
    Meaning("reward", "mean reward of the batch's responses", "rises, or stays high"),
    Meaning("reward_std", "standard deviation of the rewards of the batch", "above 0"),
    Meaning(
        "frac_reward_zero_std",
        "share of groups in which all responses have the same reward, which teach nothing",
        f"below {learning.NO_SPREAD:.0%}; it rises as prompts are solved",
    ),
    Meaning("rewards/*/mean", "mean of one reward function, unweighted", "rises with `reward`"),
    Meaning("rewards/*/std", "standard deviation of one reward function"),
    Meaning(
        "rewards/failed",
        "responses without a reward since the last step, as a function or environment failed",
        "0, which is not written",
    ),
    Meaning(
        "eval/reward", "mean held-out reward", "rises; falls while `reward` rises: overfitting"
    ),
    Meaning("eval/*/stderr", "standard error of the suite's mean reward, over prompts"),
    Meaning("eval/*/avg@*", "mean reward of a suite, with so many answers to each prompt", "rises"),
    Meaning("eval/*/pass@*", "chance that one of so many answers passes", "rises"),
    Meaning("eval/*/maj@*", "share of prompts whose most frequent answer passes", "rises"),
    Meaning("eval/*/mean_length", "mean length of a suite's answers, tokens"),
    Meaning("eval/*/clipped_ratio", "share of a suite's answers that were cut at the limit", "low"),
    Meaning(
        "eval/*/failed", "answers of a suite that could not be judged", "0, which is not written"
    ),
)
_RESPONSES = (
    Meaning("completions/*_length", "mean, least and greatest length of a response, tokens"),
    Meaning(
        "completions/*_terminated_length",
        "the same of responses that ended by themselves; 0 if none did",
    ),
    Meaning(
        "completions/clipped_ratio",
        "share of responses cut at `rollout.max_completion_length`",
        f"below {learning.CUT:.0%}",
    ),
    Meaning("turns/mean", "mean number of turns of a response", "above 1 if turns are wanted"),
    Meaning("tools/call_frequency", "share of turns in which a tool was called", "above 0"),
    Meaning("tools/failure_frequency", "share of calls that failed", "falls"),
    Meaning("env/step_s", "mean time that an environment or a tool took for a turn, seconds"),
)
_LEARNING = (
    Meaning("loss", "mean loss of the batch's optimizer steps", "no goal: its sign says nothing"),
    Meaning(
        "entropy",
        "mean entropy of the policy at a token, nats",
        f"falls slowly; below {learning.ENTROPY_LEFT:.0%} of its start nothing new is tried",
    ),
    Meaning(
        "grad_norm", "norm of the gradient before it is clipped", "finite, above 0, no trend up"
    ),
    Meaning("skipped_steps", "optimizer steps left out, as the gradient was not finite", "0"),
    Meaning("learning_rate", "learning rate of the step"),
    Meaning(
        "kl",
        "KL from the reference to the policy, nats a token; with `learner.beta`",
        f"below {learning.RUNAWAY:g}",
    ),
    Meaning("clip_ratio/low_mean", "share of tokens clipped at the lower bound"),
    Meaning("clip_ratio/high_mean", "share of tokens clipped at the upper bound"),
    Meaning(
        "clip_ratio/region_mean",
        "share of tokens that were clipped, so carry no gradient",
        f"below {learning.CLIPPED:.0%}",
    ),
    Meaning("clip_ratio/low_min", "least share of a response clipped at the lower bound"),
    Meaning("clip_ratio/high_max", "greatest share of a response clipped at the upper bound"),
    Meaning(
        "off_policy/mismatch_kl",
        "KL from the probabilities sampled with to the learner's, nats a token",
        f"below {learning.MISMATCH:g}; at a staleness of 0 about 0",
    ),
    Meaning("off_policy/max_ratio", "greatest ratio of the two probabilities of a token", "near 1"),
    Meaning("staleness/mean", "mean age of the batch's responses, versions"),
    Meaning("staleness/max", "greatest age, versions", "at most the schedule's bound, always"),
)
_GROUPS = (
    Meaning("endings/consumed", "groups trained on so far"),
    Meaning(
        "endings/filtered",
        "groups left out so far, as their rewards were all equal",
        f"below {learning.FILTERED:.0%} of the two",
    ),
    Meaning(
        "endings/aborted",
        "groups that ended otherwise so far: surplus, too old, failed responses",
    ),
    Meaning("num_tokens", "tokens of prompts and responses trained on so far"),
)
_TIME = (
    Meaning("step", "versions published, from 1; 0 is the untrained policy"),
    Meaning("time", "since the run began, seconds"),
    Meaning("step_time", "between two publications, seconds"),
    Meaning("rollout/tokens_per_s", "tokens generated by all instances, a second"),
    Meaning("idle/rollout", "share of the step in which instances had nothing to do"),
    Meaning("idle/learner", "share of the step in which the learner had nothing to do"),
    Meaning(
        "packing/computed_share",
        "share of the batch's tokens that the learner computes: shared prompts and beginnings once",
    ),
    Meaning("params/push_s", "time to publish weights, seconds"),
    Meaning("params/pull_s", "mean time of an instance's pull, seconds"),
    Meaning("params/changed_share", "share of the weights that a step changed"),
    Meaning("params/whole_share", "share of the weights in tensors that are sent whole"),
    Meaning("params/delta_bytes", "bytes that a pull of the changes reads"),
    Meaning("coordination/coordinator_s", "time that the coordinator took, seconds"),
    Meaning("coordination/store_s", "time that the store took, seconds"),
    Meaning("coordination/share", "both as a share of the step", "a few percent"),
    Meaning("coordination/cpu_share", "processor time of the controller, as a share of the step"),
    Meaning("backup/behind_s", "age of the newest event that is not in the backup yet, seconds"),
)
_HISTORY = (
    Meaning(
        "draft/mean_acceptance_length",
        "tokens for each iteration that generated any",
        "above 1 from the second epoch on",
    ),
    Meaning("draft/acceptance_rate", "share of drafted tokens that were accepted"),
    Meaning(
        "draft/time_saved",
        "time that drafts saved in the step, by the engine's estimate, seconds of all instances",
        "not below 0",
    ),
    Meaning("draft/time_saved_share", "the same as a share of the time without drafts"),
    Meaning("draft/history_tokens", "tokens in the history that drafts come from"),
    Meaning(
        "lengths/explained_variance",
        "share of the variance of lengths that is predicted",
        "above 0 from the second epoch on",
    ),
    Meaning("lengths/rank_correlation", "rank correlation of predicted and true lengths"),
)
SECTIONS = {
    "Rewards": _REWARDS,
    "Responses": _RESPONSES,
    "Learning": _LEARNING,
    "Groups": _GROUPS,
    "Time": _TIME,
    "Drafts and lengths": _HISTORY,
}


def meaning_of(metric: str) -> Meaning | None:
    """Return what is known of a metric; None of one that a reward function logged."""
    every = (meaning for section in SECTIONS.values() for meaning in section)
    found = [meaning for meaning in every if fnmatchcase(metric, meaning.name)]
    return max(found, key=lambda meaning: len(meaning.name), default=None)


INTRODUCTION = """# Metrics

Each row of `metrics.jsonl` has some of these by name, and so have trackers; `rhymeflow inspect RUN
--step S` shows those of a step, and the dashboard charts any. Names are TRL's where TRL has one. A
run says by itself what keeps it from learning: [troubleshooting](troubleshooting.md).

A metric that a reward function logs with `log_metric` has the name given there, with `eval/` before
it for held-out responses. This page is written from `rhymeflow/observe/meanings.py`.
"""


def page() -> str:
    """Return the text of docs/metrics.md."""
    lines = [INTRODUCTION]
    for title, section in SECTIONS.items():
        lines += [f"## {title}", "", "| metric | meaning | in a run that learns |"]
        lines += ["| --- | --- | --- |"]
        lines += [f"| `{name}` | {said} | {healthy} |" for name, said, healthy in section]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
