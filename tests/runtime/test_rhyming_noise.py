"""`rollout.rhyming_noise` in real runs: weights that hardly move answer a second time as before."""

from __future__ import annotations

from collections import defaultdict

from tests.runtime.logs import reader, train
from tests.runtime.tiny import tiny_config

NUM_ROWS = 10
"""Of 12 prompts two are held out."""


def two_epochs(directory) -> dict[tuple[int, int], list[bytes]]:
    """By row and member: the tokens of the responses that were finished, an epoch each.

    Of 4 members that are needed, and 2 more, half rhyme. The bound is 0 and the learning rate next
    to nothing.
    """
    config = tiny_config(
        directory,
        rollout={"num_generations": 4, "rhyming_noise": 0.5, "max_num_seqs": 12},
        learner={"max_steps": 2 * NUM_ROWS // 2, "learning_rate": 1e-12},
        schedule={"name": "synchronous", "max_staleness": None, "extra_generations": 2},
        run={"eval_steps": 0},
    )
    train(config)
    log = reader(config)
    segments = log.query(
        "SELECT s.group_id, g.row, s.member, s.tokens FROM segments s JOIN groups g"
        " USING (group_id) JOIN trajectories t USING (group_id, member)"
        " ORDER BY g.epoch, s.group_id, s.member, s.start"
    )
    log.close()
    responses: dict = defaultdict(bytes)
    for group, row, member, tokens in segments:
        responses[group, row, member] += tokens
    found: dict = defaultdict(list)
    for (_, row, member), tokens in responses.items():
        found[row, member].append(tokens)
    return found


def repeated(found: dict[tuple[int, int], list[bytes]], members: range) -> list[bool]:
    """Of what these members finished in both epochs: was it the same?"""
    pairs = [made for (_, member), made in found.items() if member in members and len(made) == 2]
    return [first == second for first, second in pairs]


def test_the_share_is_of_all_members_the_surplus_included(tmp_path):
    """Of 4 + 2 members three rhyme, whichever four are in time."""
    found = two_epochs(tmp_path)
    for member in range(3):
        rhyming = repeated(found, range(member, member + 1))
        assert rhyming
        assert all(rhyming)
    fresh = repeated(found, range(3, 6))
    assert len(fresh) >= 4
    assert sum(fresh) <= len(fresh) // 2, "a random model seldom says the same twice"
    texts = [(row, made[1]) for (row, _), made in found.items() if len(made) == 2]
    assert len(set(texts)) > 0.75 * len(texts), "members rhyme with themselves, not one another"
