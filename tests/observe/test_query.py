"""What is answered about a run: groups, steps and responses, for the terminal and the pages."""

import numpy as np
import pytest

from rhymeflow.config import ModelConfig
from rhymeflow.core.types import TrajectoryId
from rhymeflow.errors import UserError
from rhymeflow.observe import query
from rhymeflow.observe.query import Texts, TokenTexts
from rhymeflow.store.previous_run import section_in_force
from rhymeflow.store.reader import TrajectoryReader
from tests.observe.runs import begun, make_run, stored
from tests.refused import refusal
from tests.store.stores import finished, group, segment


@pytest.fixture
def reader(tmp_path):
    """See `make_run`; then group 10, the prompt of group 4 again, with all that can be known of a
    response, one that is going on, and one that has no token yet."""
    make_run(tmp_path)
    begun(tmp_path, model={"name": "recipe:demo"})
    which = TrajectoryId(10, 0)
    with stored(tmp_path) as store:
        group(store, 10, row=4, epoch=1, prompt=[{"role": "user", "content": "again"}])
        logged = {"logprobs": [-0.5, -1.0], "accepted": b"\0\1"}
        segment(store, which, [5, 6], version=1, drafted=3, **logged)
        store.put_observed(which, start=2, version=1, tokens=[7, 8])
        segment(store, which, [9], start=4, version=2, logprobs=[-0.25], accepted=b"\0")
        finished(store, which, 5, 0.5, "finished_early", "said", exact=0.5)
        segment(store, (10, 1), 1, version=3)
        store.put_consumed(10, version=3, members=(0,))
        learner = np.array([-0.5, -1.5, 0, 0, -0.25], "<f4").tobytes()
        store.put_token_details(which, logprobs=learner, flags=bytes([0, 1, 4, 4, 0]))
        group(store, 11, row=4, epoch=2, prompt="none")
    return TrajectoryReader(tmp_path / "events.db")


def test_a_group(reader):
    found = query.group(reader, 10)
    first, second = found.pop("members")
    epochs = [
        {"group": 4, "epoch": 0, "step": 3, "reward": 0.5, "length": 59.0},
        {"group": 10, "epoch": 1, "step": 4, "reward": 0.5, "length": 3.0},
        {"group": 11, "epoch": 2, "step": None, "reward": None, "length": None},
    ]
    assert found == {
        "group": 10, "row": 4, "epoch": 1, "prompt": [{"role": "user", "content": "again"}],
        "columns": {}, "ending": "consumed", "ending_version": 3, "ending_reason": None, "step": 4,
        "responses": 2, "rewarded": 1, "cut": 1, "reward": 0.5, "reward_min": 0.5,
        "reward_max": 0.5, "length": 3.0, "length_max": 5, "staleness_max": 2, "epochs": epochs,
    }  # fmt: skip
    assert first == {
        "member": 0, "length": 5, "observed": 2, "first_version": 1, "last_version": 2, "steps": 2,
        "drafted": 3, "reason": "finished_early", "reward": 0.5, "step": 4, "text": "said",
        "components": {"exact": 0.5},
    }  # fmt: skip
    assert (second["length"], second["reason"], second["text"], second["components"]) == (
        1, None, None, None,
    )  # fmt: skip
    assert query.group(reader, 11)["members"] == []
    assert "has no group 99; they go to 11" in refusal(query.group, reader, 99)


def test_a_response_token_by_token(reader):
    found = query.response(reader.path.parent, reader, TrajectoryId(10, 0))
    segments = found.pop("segments")
    assert [(each["start"], each["version"], each["observed"]) for each in segments] == [
        (0, 1, False), (2, 1, True), (4, 2, False),
    ]  # fmt: skip
    assert found == {
        "directory": str(reader.path.parent), "group": 10, "member": 0, "row": 4, "epoch": 1,
        "prompt": [{"role": "user", "content": "again"}], "columns": {}, "text": "said",
        "length": 5, "reason": "finished_early", "reward": 0.5, "components": {"exact": 0.5},
        "step": 4, "ending": "consumed", "ending_reason": None, "tokens": [5, 6, 7, 8, 9],
        "logprobs": [-0.5, -1.0, 0, 0, -0.25], "learner_logprobs": [-0.5, -1.5, 0, 0, -0.25],
        "flags": [0, 1, 4, 4, 0], "accepted": [0, 1, 0, 0, 0], "siblings": [0, 1],
        "earlier": [{"group": 4, "epoch": 0}], "calls": [],
    }  # fmt: skip
    other = query.response(reader.path.parent, reader, TrajectoryId(10, 1))
    for name in ("flags", "learner_logprobs", "accepted", "step", "reward", "text"):
        assert other[name] is None, name
    with pytest.raises(UserError, match=r"has no trajectory 77\.0"):
        query.response(reader.path.parent, reader, TrajectoryId(77, 0))


def test_of_deleted_tokens_there_are_none(reader):
    with stored(reader.path.parent) as store:
        for _ in range(3):
            store.prune(before=99, history_tokens=0)
            store.commit()
    found = query.response(reader.path.parent, reader, TrajectoryId(0, 0))
    assert found["tokens"] is found["logprobs"] is None
    assert [member["length"] for member in query.group(reader, 0)["members"]] == [10, 100]


def test_texts_of_tokens_are_the_tokenizers_or_none(reader):
    def load(model: ModelConfig) -> Texts:
        assert model.name == "recipe:demo"
        return lambda tokens: [f"t{token}" for token in tokens]

    def unloadable(model: ModelConfig) -> Texts:
        raise UserError("no such model")

    assert TokenTexts(load).of(reader, [1, 5]) == ["t1", "t5"]
    assert TokenTexts(unloadable).of(reader, [1, 5]) is None


def test_sections_of_a_configuration_of_before(tmp_path):
    """Fields that are gone say nothing to who looks at the run; a value must be one, still."""
    make_run(tmp_path)
    reader = TrajectoryReader(tmp_path / "events.db")
    assert "the run has not begun" in refusal(section_in_force, reader, "model")
    begun(tmp_path, model={"name": "a", "gone": 1}, rollout={"temperature": "hot"}, gone={"b": 2})
    assert section_in_force(reader, "model").name == "a"
    assert section_in_force(reader, "data").system_prompt is None
    with pytest.raises(UserError, match=r"attempt 1, rollout\.temperature: .*valid number"):
        section_in_force(reader, "rollout")
