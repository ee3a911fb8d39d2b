"""An earlier run's directory: what is wrong with it is said in one line, with the field."""

from rhymeflow.config import Config
from rhymeflow.config.load import dump_config
from rhymeflow.store.previous_run import check, open_run
from rhymeflow.store.writer import SqliteTrajectoryStore
from tests.refused import refusal

FIELD = "drafting.history_run"


def test_a_run_is_opened_with_the_configuration_it_had_or_what_is_not_there_is_named(tmp_path):
    check(None, FIELD)
    assert refusal(check, str(tmp_path / "a"), FIELD) == f"{FIELD}: {tmp_path}/a: no such directory"
    config, where = tmp_path / "config.yaml", f"{FIELD}: {tmp_path}"
    config.write_text(dump_config(Config(run={"seed": 5})))
    assert refusal(check, str(tmp_path), FIELD).startswith(f"{where}: is not a run")
    SqliteTrajectoryStore(tmp_path / "events.db").close()
    check(str(tmp_path), FIELD)
    found, reader = open_run(str(tmp_path), FIELD)
    assert found.run.seed == 5
    assert reader.query("SELECT * FROM segments") == []
    reader.close()
    config.write_text("rollout: {num_birds: 3}")
    assert "num_birds" in refusal(check, str(tmp_path), FIELD)
    config.unlink()
    assert refusal(check, str(tmp_path), FIELD).startswith(f"{where}: is not a run")
