"""An earlier run's directory: what is wrong with it is said in one line, with the field."""

from __future__ import annotations

import pytest

from rhymeflow.config import Config
from rhymeflow.config.load import dump_config
from rhymeflow.errors import UserError
from rhymeflow.store.previous_run import check, open_run
from rhymeflow.store.writer import SqliteTrajectoryStore


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.yaml").write_text(dump_config(Config(run={"seed": 5})))
    SqliteTrajectoryStore(path / "events.db").close()
    return path


def test_a_run_is_opened_with_the_configuration_it_had(run_dir):
    config, reader = open_run(str(run_dir), "drafting.history_run")
    assert config.run.seed == 5
    assert reader.query("SELECT * FROM segments") == []
    reader.close()
    check(str(run_dir), "drafting.history_run")
    check(None, "drafting.history_run")


def test_what_is_not_there_is_named(run_dir, tmp_path):
    with pytest.raises(UserError, match=r"^drafting.history_run: .*nowhere: no such directory$"):
        check(str(tmp_path / "nowhere"), "drafting.history_run")
    for name in ("events.db", "config.yaml"):
        (run_dir / name).unlink()
        with pytest.raises(UserError, match=r"^drafting.history_run: .*run: is not a run"):
            check(str(run_dir), "drafting.history_run")


def test_a_configuration_that_says_nothing_we_know_is_refused(run_dir):
    (run_dir / "config.yaml").write_text("rollout: {num_birds: 3}")
    with pytest.raises(UserError, match=r"^drafting.history_run: .*num_birds"):
        check(str(run_dir), "drafting.history_run")
