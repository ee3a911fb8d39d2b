"""Who is answered, and what: over HTTP, with hostile questions too."""

import json
import random
import shlex
import shutil
import socket
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.dashboard import kinds
from benchmarks.logs.made_up import Size, build_log
from rhymeflow.core.events import VersionPublished
from rhymeflow.core.types import TrajectoryId
from rhymeflow.dashboard import about, views
from rhymeflow.dashboard.run import Run
from rhymeflow.dashboard.serve import beside, listening, named, newest
from rhymeflow.dashboard.server import COOKIE, STATIC
from rhymeflow.errors import UserError
from rhymeflow.observe.query import TokenTexts
from tests.dashboard.conftest import TOKEN, Client, serving
from tests.export.made import MadeRun, model
from tests.observe.runs import begun, make_run, stored
from tests.refused import refusal
from tests.store.stores import answered, group, segment

# -- who may ask -----------------------------------------------------------------------------------


def test_nothing_without_the_token(client):
    for path in ("/", "/api/runs", "/static/app.js", "/api/runs/a-run/groups"):
        for cookie in ("", f"{COOKIE}=another", f"{COOKIE}={TOKEN[:-1]}", "other=1"):
            status, headers, body = client.raw(path, cookie=cookie)
            assert status == 403
            assert b"the address that" in body
            assert "default-src 'none'" in headers["content-security-policy"]
        assert client.raw(path)[0] == 200
    status, headers, _ = client.raw(f"/?token={TOKEN}", cookie="")
    assert (status, headers["location"]) == (303, "/")
    assert "HttpOnly" in headers["set-cookie"]
    assert "SameSite=strict" in headers["set-cookie"]
    assert client.raw("/?token=another", cookie="")[0] == 403


def test_pages_of_others_are_refused(client):
    for status, name, values in (
        (421, "host", ("evil.example", "evil.example:8750")),
        (200, "host", ("localhost:8750", "127.0.0.1", "[::1]:8750")),
        (403, "sec_fetch_site", ("cross-site", "same-site")),
        (200, "sec_fetch_site", ("same-origin", "none")),
    ):
        for value in values:
            assert client.raw("/api/runs", **{name: value})[0] == status, value


def test_nothing_can_be_changed_and_files_have_no_way_out(client):
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert client.raw("/api/runs", method)[0] == 405
    for path in (
        *("../server.py", "%2e%2e/server.py", "..%2fserver.py", "views/../../__init__.py", ""),
        *("/etc/passwd", "%2fetc%2fpasswd"),
    ):
        assert client.raw(f"/static/{path}")[0] == 404, path


def test_pages_load_nothing_from_elsewhere():
    for path in STATIC.rglob("*"):
        if path.is_file() and path.parent.name != "vendor":
            text = path.read_text()
            assert "http://" not in text, path
            assert "https://" not in text, path
            assert "innerHTML" not in text, path
    assert (STATIC / "vendor" / "uPlot-LICENSE").is_file()


# -- what is answered ------------------------------------------------------------------------------


def test_a_run(client, run_dir):
    assert client.ask("runs") == [{"name": "a-run", "directory": str(run_dir)}]
    found = client.ask("runs/a-run")
    assert (found["steps"], found["groups"]) == (4, 10)
    assert found["endings"] == {"consumed": 8, "aborted": 1, "open": 1}
    assert "reward" in found["metrics"]
    assert (found["state"], found["rows"]) == ("killed", 6)
    assert [row[1] for row in found["first"]] == [row[1] for row in found["last"]]
    assert [row[1] for row in found["last"]] == [0.1, 0.2, 0.3, 0.4]
    assert [each[:2] for each in found["held_out"]] == [[0, 0.25], [4, 0.75], [4, 0.75]]
    curves = client.ask("runs/a-run/metrics", name=["reward", "eval/reward", "nothing"])
    assert curves["reward"] == {
        "step": [1, 2, 3, 4], "time": [10, 20, 30, 40], "value": [0.1, 0.2, 0.3, 0.4],
    }  # fmt: skip
    assert curves["eval/reward"]["value"] == [0.25, 0.75]
    said, healthy = client.ask("meanings", name=["reward", "nothing"])["reward"]
    assert said.startswith("mean reward")
    assert healthy.startswith("rises")
    assert curves["nothing"] == {"step": [], "time": [], "value": []}


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"step": 2, "row": 3}, [3]),
        ({"component": "exact", "of": "wrong"}, []),
        ({"filter": ["consumed", "mixed"], "sort": "length", "descending": "true", "offset": 6},
         [1, 0]),
        ({"text": "IS 4"}, [4]),
    ],
)  # fmt: skip
def test_groups(client, asked, found):
    answer = client.ask("runs/a-run/groups", **asked)
    assert [each["group"] for each in answer["groups"]] == found
    assert answer["components"] == ["exact", "short"]


NEVER_EMPTY = {
    "groups: of a step, by spread", "groups: of a row", "groups: text, a word",
    "groups: text of all", "groups: text, two words", "log: whole", "log: any page",
    "log: of a group",
}  # fmt: skip


def test_every_kind_of_question_that_is_timed_is_answered(tmp_path):
    size = Size(num_responses=1_600, tokens=20, rows=100, instances=3)
    build_log(tmp_path, size, {"rollout.num_generations": "4", "learner.groups_per_batch": "8"})
    with serving([Run(tmp_path, "large")]) as client:

        def ask(path: str = "", **query: Any) -> Any:
            return client.ask(f"runs/large{path}", **query)

        board: Any = SimpleNamespace(ask=ask)
        for kind, question in kinds(board, random.Random(0)).items():
            for _ in range(4):
                path, query = question()
                answer = ask(path, **query)
                if kind in NEVER_EMPTY:
                    assert answer["groups" if kind.startswith("groups") else "rows"], kind


def test_what_is_left_is_at_the_pace_of_steps(client, run_dir):
    """Loading is no step, and a batch that is being trained on has not been done."""
    with stored(begun(run_dir, learner={"max_steps": 7})) as store:
        store.record(100.0, [VersionPublished(4)])
        store.put_consumed(9, version=4, members=(0, 1))
    found = client.ask("runs/a-run")
    assert (found["steps"], found["max_steps"], found["left"]) == (4, 7, 30.0)


def test_figures_are_of_the_first_and_the_last_eight_steps(client, run_dir):
    with (run_dir / "metrics.jsonl").open("a") as file:
        for step in range(5, 13):
            file.write(json.dumps({"step": step, "time": step, "step_time": float(step)}) + "\n")
    found = client.ask("runs/a-run")
    assert [row[0] for row in found["last"]] == [*range(5, 13)]
    assert [row[0] for row in found["first"]][4:] == [5, 6, 7, 8]


def test_drafts_by_the_position_of_tokens(tmp_path):
    """20 tokens in one stretch; of those with details the drafted ones are known."""
    with stored(tmp_path) as store:
        for number, accepted in ((1, None), (2, bytes([0] * 15 + [1] * 4 + [0]))):
            group(store, number)
            segment(store, (number, 0), 20, steps=16, drafted=8, accepted=accepted)
        group(store, -1, suite="held_out", version=0)
        segment(store, (-1, 0), 20)  # an answer to a suite's prompt does not count
    with serving([Run(tmp_path, "one")]) as client:
        first, second = client.ask("runs/one/drafts")["positions"]
    # Evenly 12.8 and 3.2 iterations; by the details 15, the last token's among the others.
    assert (first["from"], first["tokens"], second["from"], second["tokens"]) == (0, 32, 16, 8)
    assert first["acceptance_length"] == pytest.approx(32 / (12.8 + 15))
    assert second["acceptance_length"] == pytest.approx(8 / (3.2 + 1))
    assert first["acceptance_rate"] == pytest.approx((32 - 27.8) / (27.8 * 8 / 16))


def test_a_prompt_that_drafted_is_that_of_training(tmp_path):
    """Rows count from 0 in each source, so a suite may have the same."""
    begun(tmp_path)
    with stored(tmp_path) as store:
        for number in (1, 2):
            group(store, number, row=0, epoch=number - 1, prompt="trained")
            segment(store, (number, 0), 20, steps=16, drafted=8)
        answered(store, -1, [0.5], row=0)
    with serving([Run(tmp_path, "one")]) as client:
        [best] = client.ask("runs/one/drafts")["best"]
        assert client.ask("runs/one/groups/-1")["group"] == -1
        assert client.ask("runs/one/trajectories/-1/0")["group"] == -1
    assert best["prompt"] == "trained"


@pytest.mark.parametrize(
    ("path", "query", "said"),
    [
        ("runs/other", {}, "no run 'other' here; there are a-run"),
        ("runs/a-run/groups", {"filter": "rihgt"}, "no filter 'rihgt'; did you mean right?"),
        ("runs/a-run/groups", {"sort": "rewrad"}, "no order 'rewrad'"),
        ("runs/a-run/groups", {"step": "x"}, "step = 'x': is no number"),
        ("runs/a-run/groups", {"component": "exat"},
         "there is no reward function 'exat'; did you mean exact?"),
        ("runs/a-run/groups", {"component": "exact", "of": "nothing"}, "'nothing'"),
        ("runs/a-run/groups/99", {}, "has no group 99"),
        ("runs/a-run/groups/99999999999999999999", {}, "is no number"),
        ("runs/a-run/time", {"from": 30, "to": 20}, "nothing lies between 30 and 20 seconds"),
        ("runs/a-run/time", {"from": "nan"}, "is no number of seconds"),
        ("runs/a-run/log", {"after": "1"}, "is no place in the log"),
        ("runs/a-run/log", {"kind": "Evaluted"}, "has no kind 'Evaluted'; did you mean Evaluated"),
        ("runs/a-run/outputs/attempt-1/learner", {}, "there is no output 'attempt-1/learner'"),
        ("runs/a-run/log", {"instance": "rollout-9"}, "the log has no instance 'rollout-9'"),
        ("differences", {"run": ["a-run", "three"]}, "no run 'three'"),
    ],
)  # fmt: skip
def test_what_is_not_asked_well(client, path, query, said):
    assert said in client.problem(path, **query)


def test_a_store_that_cannot_be_read_is_one_line(client, run_dir):
    store = run_dir / "events.db"
    content, half = store.read_bytes(), store.stat().st_size // 2
    store.write_bytes(content[:4096] + b"\x55" * (half - 4096) + content[half:])
    for said in ("events.db", "events.db: no such file"):
        for path in ("", "/time", "/groups", "/log", "/drafts", "/groups/1", "/trajectories/1/0"):
            assert said in client.problem(f"runs/a-run{path}"), path
        store.unlink(missing_ok=True)


# -- what a run is made of -------------------------------------------------------------------------


def test_files_are_those_that_the_configuration_names(tmp_path):
    (tmp_path / "mine.py").write_text("import os\n\ndef good(completions):\n    return 1\n")
    (tmp_path / "rows.csv").write_text("prompt\n" + "a\n" * about.MOST)
    fields = {"data.source": "rows.csv", "reward.functions": ["mine.py:good", "no.such.one"]}
    run_dir = MadeRun(tmp_path / "run", model(tmp_path / "model"), **fields).close()
    (run_dir / "logs/attempt-10").mkdir(parents=True)
    log = run_dir / "logs/attempt-10/learner.log"
    log.write_text("first\n" + "x" * about.MOST + "\nlast\nOSError: full\n")
    (run_dir / "secret.log").write_text("secret")
    with serving([Run(run_dir, "one")]) as client:
        about_run = client.ask("runs/one/about")
        (data, function, module), changed = about_run["sources"], about_run["changed"]
        [output] = client.ask("runs/one/outputs")
        text = client.ask(f"runs/one/outputs/{output['name']}")["text"]
        for path in ("..%2F..%2Fsecret", "attempt-10/..%2F..%2Fsecret"):
            assert client.raw(f"/api/runs/one/outputs/{path}")[0] in (400, 404), path
    assert changed["recipe"] is None
    assert changed["fields"]["reward.functions"][0]["function"] == "exact_match"
    assert {"model.name", *fields} <= set(changed["fields"])
    assert (data["path"], len(data["text"])) == (str(tmp_path / "rows.csv"), about.MOST)
    assert (function["path"], function["line"]) == (str(tmp_path / "mine.py"), 3)
    assert (module["path"], module["text"]) == (None, None)
    assert (output["name"], output["problem"]) == ("attempt-10/learner", "OSError: full")
    assert text == "last\nOSError: full\n"


# -- names, addresses ------------------------------------------------------------------------------


def test_runs_have_names_that_tell_them_apart(tmp_path):
    for place in ("x/run", "y/run", "y/other"):
        (tmp_path / place).mkdir(parents=True)
        make_run(tmp_path / place, num_steps=1)
    paths = [tmp_path / place for place in ("x/run", "y/run", "y/run/../run", "y/other")]
    assert [run.name for run in named(paths)] == ["x-run", "y-run", "y-other"]
    assert [run.name for run in named(paths[1:])] == ["run", "other"]
    assert "is not a run directory" in refusal(named, [tmp_path])
    (tmp_path / "y/run/events.db").touch()
    assert newest(tmp_path / "y") == tmp_path / "y/run"
    shutil.rmtree(tmp_path / "x/run")
    assert "has no run; name a run directory" in refusal(newest, tmp_path / "x")


def test_the_next_port_is_taken_if_none_was_asked_for():
    with listening("127.0.0.1", None) as first, listening("127.0.0.1", None) as second:
        taken = first.getsockname()[1]
        assert second.getsockname()[1] > taken
        assert f"--port {taken}: Address already in use" in refusal(listening, "127.0.0.1", taken)
        # asyncio asks for TCP_NODELAY where a socket says that it is TCP; else a short answer on a
        # connection that is kept takes 40 ms.
        assert first.proto == socket.IPPROTO_TCP


@pytest.mark.parametrize("error", [None, UserError("no such column")])
def test_beside_a_run_in_a_terminal_it_stays(run_dir, monkeypatch, capsys, error):
    """Until Ctrl-C, and says how the run ended; without a terminal it ends with the run."""
    asked = []

    def ask_and_leave() -> None:
        said = capsys.readouterr().out
        assert ("the run has stopped: no such column" if error else "the run has ended") in said
        asked.append(Client(int(said.split(":")[-1].split("/")[0])).raw("/api/runs")[0])
        raise KeyboardInterrupt

    monkeypatch.setattr("signal.pause", ask_and_leave)
    for isatty in (True, False):
        monkeypatch.setattr("sys.stdout.isatty", lambda isatty=isatty: isatty)
        with pytest.raises(UserError) if error else nullcontext(), beside(run_dir):
            if error:
                raise error
    assert asked == [403], "its token is another"


def test_points_are_means_where_there_are_many(tmp_path):
    run = Run(make_run(tmp_path), "a")
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(2 * views.POINTS):
            row = {"step": step, "time": step, "a": step % 2, "idle/learner": step % 2}
            file.write(json.dumps({**row, "step_time": [9.0, 1.0][step % 2]}) + "\n")
    found = views.metrics(run, ["a", "idle/learner"])
    assert found["a"]["value"] == [0.5] * views.POINTS
    assert (set(found["a"]["low"]), set(found["a"]["high"])) == ({0}, {1})
    assert "weight" not in found["a"]
    assert set(found["idle/learner"]["value"]) == {0.1}, "idle for 1 of 10 seconds"
    assert set(found["idle/learner"]["weight"]) == {10.0}, "for means of these"


def test_held_out_rewards_have_the_interval_of_their_mean(client, run_dir):
    """By the standard error over prompts that was recorded with them."""
    rows = [
        {"step": 0, "time": 0, "eval/reward": 0.25},
        {"step": 4, "time": 9, "eval/reward": 0.75},
    ]
    asked = "runs/a-run/metrics"
    for errors in ((0.125, 0.25), (0.125, None)):
        lines = [row | {"eval/held_out/stderr": e} for row, e in zip(rows, errors, strict=True)]
        (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        found = client.ask(asked, name=["eval/reward"])["eval/reward"]
        assert ("is_interval" in found) == (None not in errors)
        if None not in errors:
            assert found["low"] == pytest.approx([0.25 - 1.96 * 0.125, 0.75 - 1.96 * 0.25])
            assert found["high"] == pytest.approx([0.25 + 1.96 * 0.125, 0.75 + 1.96 * 0.25])


# -- a response ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("group", [0.7070, -0.7070, 0.0]),
        ("none", [0.5, -0.5, 0.0]),
        ("batch", [0.3333, -0.3333, 0.0]),  # the deviation of 1, 0, 3, 3 is 1.5
    ],
)
def test_the_advantage_is_that_of_its_batch(tmp_path, scale, expected):
    """Two groups of a batch: rewards 1 and 0, and 3 and 3; the third response is of the second."""
    fields = {"learner.scale_rewards": scale}
    made = MadeRun(tmp_path / "run", model(tmp_path / "model"), **fields)
    for number, rewards in enumerate([(1.0, 0.0), (3.0, 3.0)]):
        made.group(number)
        for member, reward in enumerate(rewards):
            made.response(number, member, "ab", reward)
        made.store.put_consumed(number, version=0, members=(0, 1))
    made.group(2)
    made.response(2, 0, "ab", 1.0)
    made.store.commit()
    run = Run(made.run_dir, "a")
    which = ((0, 0), (0, 1), (1, 0), (2, 0))
    found = [views.response(run, TrajectoryId(*each), TokenTexts()) for each in which]
    assert [each["advantage"] for each in found[:3]] == pytest.approx(expected, abs=1e-3)
    assert (found[0]["texts"], found[3]["advantage"]) == (["a", "b"], None)
    members = [views.group(run, number)["members"] for number in (0, 1, 2)]
    shown = [each["advantage"] for group in members for each in group]
    assert shown[:3] == [each["advantage"] for each in found[:3]]
    assert shown[4] is None


@pytest.mark.parametrize(
    "fields",
    [{"learner.algorithm": "ppo"}, {"learner.algorithm": "reinforce_plus_plus"},
     {"learner.distillation.teacher": "start"}],
)  # fmt: skip
def test_where_each_token_has_its_own_advantage_none_is_shown_for_all(tmp_path, fields):
    made = MadeRun(tmp_path / "run", model(tmp_path / "model"), **fields)
    made.group(0)
    for member, reward in enumerate((1.0, 0.0)):
        made.response(0, member, "ab", reward)
    made.store.put_consumed(0, version=0, members=(0, 1))
    made.store.commit()
    found = views.group(Run(made.run_dir, "a"), 0)
    assert [each["advantage"] for each in found["members"]] == [None, None]


def test_the_calls_of_an_agents_program_say_what_they_continue_and_where_they_are_trained_on(
    tmp_path,
):
    """Two conversations, the first of which was continued in two ways."""
    made = MadeRun(tmp_path / "run", model(tmp_path / "model"))
    made.group(0)
    made.calls(0, 0, [("ab", 0, "c"), ("d", 3, "e"), ("fg", 0, "h"), ("i", 3, "j")])
    made.group(1)
    made.response(1, 0, "ab")
    made.store.commit()
    run = Run(made.run_dir, "a")
    found = views.response(run, TrajectoryId(0, 0), TokenTexts())
    assert [tuple(each.values()) for each in found["calls"]] == [
        (1, 0, None, 1), (2, 3, 1, 1), (3, 5, None, 2), (4, 8, 1, 3),
    ]  # fmt: skip
    assert views.response(run, TrajectoryId(1, 0), TokenTexts())["calls"] == []


def test_the_line_that_asks_the_same_again(tmp_path):
    fields = {"data.system_prompt": "be brief", "data.chat_template": True}
    made = MadeRun(tmp_path / "a run", model(tmp_path / "model"), **fields)

    made.store.commit()

    def line(prompt: Any) -> str | None:
        with Run(made.run_dir, "a").reader() as reader:
            return views.command(made.run_dir, reader, prompt)

    options = ["--temperature", "1", "--max-tokens", str(made.config.rollout.max_completion_length)]
    options += ["--system", "be brief"]
    asked = ["rhymeflow", "generate", str(tmp_path / "model"), "it's 1?", *options]
    assert shlex.split(line("it's 1?") or "") == asked
    for step in (5, 40, 9):
        (made.run_dir / f"checkpoints/step-{step}").mkdir(parents=True)
    asked[2] = str(made.run_dir / "checkpoints/step-40")
    assert shlex.split(line([{"role": "user", "content": "it's 1?"}]) or "") == asked
    assert line([{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]) is None
