"""One real run under faults: starts it, hurts it, resumes it, and has it audited at its end.

The injector knows the run as a user does, by its files and its processes; whatever it stopped goes
on in the end. A controller that ends otherwise than by a fault or by success, or that a full disk
does not end with one line, is a violation.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil  # type: ignore[import-untyped]

from benchmarks.faults import processes, wal
from benchmarks.faults.messages import counted
from benchmarks.faults.plan import DISK, Account, Fault, Injected
from benchmarks.training.train import ROOT
from rhymeflow.config import Config
from rhymeflow.config.load import dump_config
from rhymeflow.observe import metrics

POLL_SECONDS = 0.05
"""How exactly faults and recoveries are timed."""
END_SECONDS = 30.0
"""What the processes of a killed controller are given to end."""
STALL_SECONDS = 240.0
"""A run without a step for so long has hung, which is a violation."""
LAST_LINES = 30
FULL = "the disk is full"
"""What a run says that a full disk has ended."""


class Finished(msgspec.Struct):
    faults: list[Injected]
    violations: list[str]
    """What the audit found wrong, and ends that no fault explains."""
    steps: int
    speed: float
    """Steps per second of wall time, from the end of the first step to the end of the last."""
    resumed: int
    """How often it was resumed."""
    messages: dict[str, int] = {}
    """How many came `twice`, and how many `late`."""


def run_with_faults(
    config: Config,
    plan: Sequence[Fault],
    disk: SmallDisk | None = None,
    message_seed: int | None = None,
) -> Finished:
    """Carry a run to its end through the faults of the plan; `disk` is the one that it is on.

    With `message_seed` messages between its processes come twice and late.
    """
    run_dir = Path(str(config.run.output_dir))
    # What the run prints must not be on a disk that gets full: it says so there.
    folder = disk.folder.parent if disk else run_dir.parent
    recipe = folder / f"{run_dir.name}.yaml"
    recipe.write_text(dump_config(config), encoding="utf-8")
    attack = Attack(run_dir, recipe, Account(plan), disk, message_seed)
    try:
        violations = attack.carry_through()
    finally:
        attack.close()
    account = attack.account
    if not violations:
        violations = audited(run_dir)
        if account.newest != config.learner.max_steps:
            violations.append(f"ended after {account.newest} steps")
    return Finished(
        account.injected, violations, account.newest, account.speed(), attack.num_resumed,
        dict(counted(attack.messages)),
    )  # fmt: skip


def audited(run_dir: Path) -> list[str]:
    command = [sys.executable, str(ROOT / "examples" / "audit_run.py"), str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = (done.stdout + done.stderr).splitlines()
    if done.returncode == 0 and lines[-1:] == ["all hold"]:
        return []
    return [line for line in lines if not line.startswith("law") or "groups: " not in line]


class Attack:
    """The run's present controller, and the processes that are stopped."""

    def __init__(
        self,
        run_dir: Path,
        recipe: Path,
        account: Account,
        disk: SmallDisk | None,
        message_seed: int | None,
    ) -> None:
        self.run_dir, self.account, self.disk = run_dir, account, disk
        self.messages = recipe.with_suffix(".messages")
        self._message_seed = message_seed
        self.num_resumed = 0
        self._killed = self._filled = False  # whether a fault ends the present controller
        self._holds = processes.Holds()
        self._metrics: object = None  # what the file was like when it was read
        self._began = time.monotonic()
        self._stepped = self._now()
        self._output = recipe.with_suffix(".out").open("wb")
        self._controller = self._start("train", str(recipe))

    def close(self) -> None:
        self._holds.release()
        self._controller.kill()
        self._controller.wait()
        self._output.close()

    def carry_through(self) -> list[str]:
        """Until the run has ended; return what is wrong with its end."""
        while True:
            time.sleep(POLL_SECONDS)
            now = self._now()
            self._watch(now)
            self._holds.turn(now)
            code = self._controller.poll()
            if code is not None and (self._killed or (self._filled and self._said_full())):
                self._resume()
            elif code is not None:
                self._watch(now)
                return [] if code == 0 else [f"it ended with exit code {code}: {self._said()}"]
            elif now - self._stepped > STALL_SECONDS:
                return [f"no step for {STALL_SECONDS:g} seconds: {self._said()}"]
            elif fault := self.account.due(now):
                self._inject(fault)

    def _inject(self, fault: Fault) -> None:
        """Inject it, if there is such a process now; else it stays due."""
        if fault.kind == DISK:
            done = self._fill()
        elif found := processes.of_kind(processes.family(self._controller.pid), fault.kind):
            done = self._hurt(found[int(fault.draw * len(found))], fault)
        else:
            done = False
        if not done:
            return
        one = self.account.inject(self._now())
        what = f"step {one.after_step}: {one.fault.label}"
        print(f"  {one.at:6.1f} s, {what}", file=sys.stderr, flush=True)
        if self._killed:
            one.cut = self._end_controller(fault.wal_bytes)

    def _fill(self) -> bool:
        if self.disk is None or self._filled or not self.run_dir.is_dir():
            return False
        self._filled = True
        self.disk.fill()
        return True

    def _hurt(self, process: psutil.Process, fault: Fault) -> bool:
        if fault.action in ("stopped", "slowed"):
            until, stops = self._now() + fault.seconds, fault.action == "stopped"
            return self._holds.hold(process, until, stops=stops)
        if fault.kind == "controller":
            self._killed = True
            return True
        return processes.done(process.kill)

    def _end_controller(self, wal_bytes: int) -> int:
        """Kill it, or with `wal_bytes` the whole run, and cut the log; return the bytes cut."""
        run = processes.family(self._controller.pid)[1:]
        self._controller.kill()
        self._controller.wait()
        self._holds.release()  # what is stopped can neither hear of it nor end
        if not wal_bytes:
            return 0
        for process in run:
            processes.done(process.kill)
        _, alive = psutil.wait_procs(run, END_SECONDS)
        if alive:
            raise TimeoutError("processes that were killed have not ended")
        return wal.cut(self.run_dir / "events.db", wal_bytes)

    def _resume(self) -> None:
        if self._filled and self.disk is not None:
            self.disk.free()
        self._killed = self._filled = False
        self.num_resumed += 1
        self._controller = self._start("resume", str(self.run_dir))

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        self._output_began = self._output.tell()
        command = ["rhymeflow"]
        if self._message_seed is not None:
            seed = f"{self._message_seed}{self.num_resumed:03}"  # another one for each attempt
            command = ["benchmarks.faults.messages", seed, str(self.messages)]
        return subprocess.Popen(
            [sys.executable, "-m", *command, *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def _watch(self, now: float) -> None:
        """Read which steps the run has trained, if its metrics have changed."""
        path = self.run_dir / metrics.FILE
        if not path.is_file():
            return
        stat = path.stat()
        state = stat.st_ino, stat.st_size
        if state == self._metrics:
            return
        self._metrics = state
        newest, rows = self.account.newest, metrics.read(self.run_dir)
        steps = [step for step, row in rows.items() if "completions/mean_length" in row]
        self.account.trained(steps, now)
        if self.account.newest > newest:
            self._stepped = now

    def _said_full(self) -> bool:
        """Whether this attempt was ended by the full disk, and said so without a traceback."""
        said = self._said()
        return FULL in said and "Traceback" not in said

    def _said(self) -> str:
        text = Path(self._output.name).read_bytes()[self._output_began :].decode(errors="replace")
        return "\n".join(text.splitlines()[-LAST_LINES:])

    def _now(self) -> float:
        """Seconds since the run's start."""
        return time.monotonic() - self._began


NUM_BYTES = 2 * 2**30
"""Far more than a run of the demo writes."""
_CHUNK = bytes(2**20)


def can_mount() -> bool:
    return sys.platform == "linux" and os.geteuid() == 0


class SmallDisk:
    """A disk at `folder`, which is made."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        options = f"size={NUM_BYTES}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
        self.folder, self._ballast = folder, folder / "ballast"

    def fill(self) -> None:
        size = len(_CHUNK)
        with self._ballast.open("ab", buffering=0) as ballast:
            while size:
                try:
                    ballast.write(_CHUNK[:size])
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 2

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def __enter__(self) -> SmallDisk:
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)
        self.folder.rmdir()
