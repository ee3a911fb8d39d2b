"""What history is worth, learned from groups one after another."""

from __future__ import annotations

import random

import pytest

from rhymeflow.core.lengths.evidence import Evidence, Example


def tell(evidence: Evidence, rng: random.Random, count: int, worth: float) -> list[float]:
    """Tell of groups of 8, in which history explains this much; return what it was said to be."""
    found = []
    for _ in range(count):
        deviation = rng.gauss(0, 0.6)
        level = worth * deviation + rng.gauss(0, 0.2 if worth else 0.6)
        logs = [7 + level + rng.gauss(0, 0.3) for _ in range(8)]
        mean = sum(logs) / 8
        scatter = sum((y - mean) ** 2 for y in logs)
        guess = evidence.base + evidence.worth * deviation
        evidence.learn([Example(mean, 8, scatter, deviation, evidence.base, guess)])
        found.append(evidence.worth)
    return found


def test_variances_and_worth_are_those_of_what_is_told():
    evidence = Evidence(7.0, 1.0)
    tell(evidence, random.Random(0), 600, worth=1.0)
    assert evidence.within == pytest.approx(0.09, rel=0.15)
    assert evidence.beyond == pytest.approx(0.04, rel=0.5)
    assert evidence.between == pytest.approx(0.4, rel=0.35)
    assert evidence.worth == pytest.approx(1, abs=0.1)
    assert evidence.base == pytest.approx(7, abs=0.15)
    assert evidence.skill == pytest.approx(0.36 / 0.49, abs=0.2), "of a few groups"


def test_chance_is_not_taken_for_worth():
    said = []
    for seed in range(8):
        evidence = Evidence(7.0, 1.0)
        said += tell(evidence, random.Random(seed), 400, worth=0.0)[100:]
        assert evidence.skill < 0.1
    assert sum(said) / len(said) < 0.03


def test_skill_is_not_spoken_of_before_there_are_examples():
    evidence, rng = Evidence(7.0, 1.0), random.Random(0)
    tell(evidence, rng, 4, worth=1.0)
    assert evidence.skill == 0
    tell(evidence, rng, 16, worth=1.0)
    assert evidence.skill > 0.4


def test_groups_handed_in_together_count_alike():
    found = []
    for turned in (False, True):
        evidence, rng = Evidence(7.0, 1.0), random.Random(0)
        batch = [Example(7 + rng.gauss(0, 1), 4, 0.5, rng.gauss(0, 1), 7.0, 7.0) for _ in range(40)]
        evidence.learn(batch[::-1] if turned else batch)
        found += [evidence.worth, evidence.drift, evidence.mean, evidence.beyond]
    assert found[:4] == pytest.approx(found[4:], rel=1e-9)
