"""A suite's prompts answered and judged: the loop around the engine, in this process.

Holds true: each prompt gets `n` answers and each answer one reward, or there is a `UserError`; an
answer depends on nothing but weights, prompt, `run.seed` and its number, so not on what else runs
or on drafts (law 3); the first greedy answer is the one that a run under these weights evaluates
by. While environments and reward functions work, the engine goes on.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial

from rhymeflow.data.encode import PromptEncoder
from rhymeflow.data.prompts import PromptSource, opened
from rhymeflow.engine.base import NoiseKey, Request, Sampling
from rhymeflow.environments import check_calls, tool_schemas
from rhymeflow.errors import UserError
from rhymeflow.evaluation.answer import Answer
from rhymeflow.evaluation.policy import Policy
from rhymeflow.evaluation.rewards import Rewards
from rhymeflow.evaluation.turns import Turns
from rhymeflow.evaluation.waiting import Asked, wait_for
from rhymeflow.histospec.noise_sharing import EVALUATION_EPOCH
from rhymeflow.suites.suite import Suite

UNDER_WAY = 2
"""Answers that are begun and not complete, at most, for each that is decoded at a time: enough that
none idles while environments answer, and few enough that environments do not pile up."""

Progress = Callable[[int, int], None]
"""Called now and then with how many answers have their reward, and of how many."""


def answer_suite(policy: Policy, suite: Suite, progress: Progress) -> list[list[Answer]]:
    """Return the judged answers to each prompt of a suite, in the order of their numbers.

    Raises:
        UserError: prompts, environments or reward functions cannot be had or used, or one fails.
    """
    with closing(Answering(policy, suite, suite.prompts())) as answering:
        answering.start()
        return answering.run(progress)


class Answering:
    """Answers `prompts` as a suite says."""

    def __init__(self, policy: Policy, suite: Suite, prompts: PromptSource) -> None:
        config = suite.config
        self._policy, self._suite, self._prompts = policy, suite, prompts
        rollout = config.rollout
        room = policy.max_length - rollout.max_completion_length
        if room <= 0:
            raise UserError(
                f"suite {suite.name}: max_completion_length = {rollout.max_completion_length} "
                f"leaves no room for a prompt in the model's context of {policy.max_length} tokens"
            )
        tokenizer = policy.tokenizer
        tools = tool_schemas(config)
        self._encoder = PromptEncoder(tokenizer, config.data, room, tools)
        check_calls(config, tokenizer, prompts, tools)
        self._decode = partial(tokenizer.decode, skip_special_tokens=True)
        self._rewards = Rewards(config, suite.name, suite.n, self._decode, self._encoder.seen)
        self._turns: Turns | None = None
        if config.environment.is_used:
            self._turns = Turns(
                config,
                tokenizer,
                prompts,
                goes_on=self._generate,
                is_over=self._complete,
                is_judged=self._judge,
            )
        self._asked: list[Asked] = [self._rewards]
        if self._turns is not None:
            self._asked.append(self._turns)
        self._openings: dict[int, str] = {}
        self._prompt_ids: list[list[int]] = []
        self._num_complete = 0

    def start(self) -> None:
        """Start the processes, have prompts opened and encode them.

        Raises:
            UserError: something cannot be had, or a prompt is too long.
        """
        self._rewards.start()
        if self._turns is not None:
            self._turns.start()
            self._openings = dict(self._turns.open(range(len(self._prompts))))
        for row in range(len(self._prompts)):
            prompt = self._prompts[row]
            whole = opened(prompt.prompt, self._openings.get(row, ""))
            self._prompt_ids.append(self._encoder.encode(replace(prompt, prompt=whole)))

    def close(self) -> None:
        """End the processes."""
        self._rewards.close()
        if self._turns is not None:
            self._turns.close()

    def run(self, progress: Progress) -> list[list[Answer]]:
        """Answer all prompts, see `answer_suite`."""
        config, n = self._suite.config, self._suite.n
        rollout = config.rollout
        self._sampling = Sampling(
            rollout.temperature,
            rollout.top_p,
            rollout.top_k,
            rollout.max_completion_length,
            self._policy.stop_token_ids,
        )
        drafts = n > 1 and config.drafting.window != "off"
        self._engine = self._policy.engine(config, drafts=drafts)
        answers = [[self._answer(row, sample) for sample in range(n)] for row in range(len(self))]
        waiting = itertools.chain.from_iterable(answers)
        num_begun, total = 0, n * len(self)
        while self._rewards.num_rewarded < total:
            most = self._num_complete + UNDER_WAY * rollout.max_num_seqs
            for answer in itertools.islice(waiting, max(0, most - num_begun)):
                self._generate(answer)
                num_begun += 1
            self._turn()
            progress(self._rewards.num_rewarded, total)
        return answers

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self._prompts)

    def _turn(self) -> None:
        """Run an iteration of the engine, if there is anything to run, and take what came."""
        is_working = self._engine.has_work
        for request, reason in self._engine.step() if is_working else ():
            self._generated(request, reason)
        now = time.monotonic()
        if self._turns is not None:  # first, since what it takes may go on to the functions
            is_working |= self._turns.poll(now) > 0
        is_working |= self._rewards.poll(now) > 0
        if not is_working:
            wait_for(self._asked)

    def _answer(self, row: int, sample: int) -> Answer:
        return Answer(f"answer {sample} to row {row} of suite {self._suite.name}", row, sample)

    def _generate(self, answer: Answer) -> None:
        """Have the policy begin, or go on after what was answered to it."""
        tokens = answer.tokens
        noise = NoiseKey(answer.row, EVALUATION_EPOCH, answer.sample)
        request = Request(answer, self._prompt_ids[answer.row], noise, self._sampling, tokens)
        request.turn_start, request.keeps_cache = len(tokens), self._turns is not None
        self._engine.submit(request)

    def _generated(self, request: Request, reason: str) -> None:
        answer = request.id
        assert isinstance(answer, Answer)
        answer.sampled.append(request.tokens[request.turn_start :])
        if self._turns is not None and reason == "stop":
            # At least one token of a next turn has to fit too.
            room = self._sampling.max_new_tokens - len(request.tokens) - 1
            self._turns.ask(answer, room)
            return
        answer.reason = "stop" if reason == "stop" else "length"
        self._complete(answer)

    def _complete(self, answer: Answer) -> None:
        self._num_complete += 1
        if self._turns is not None and self._turns.judges:
            self._turns.judge(answer)
        else:
            self._judge(answer)

    def _judge(self, answer: Answer) -> None:
        """Have the reward functions called; its environment has judged it, if it does."""
        opening = self._openings.get(answer.row, "")
        self._rewards.judge(answer, self._prompts[answer.row], opening)
