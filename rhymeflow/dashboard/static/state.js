// How a run is, in words: going on, or how it ended and what can be done.

import { h } from "./dom.js";
import { badge, copied } from "./parts.js";
import { plural } from "./words.js";

const TONES = { running: "accent", ended: "good", stopped: "warn", killed: "bad" };
const WORDS = { running: "Running", ended: "Ended", stopped: "Stopped", killed: "Killed" };

export function isOver(run) {
  return run.state !== "running";
}

// Neutral if there is a verdict: that a run ended says nothing of whether it learned.
export function tone(run) {
  return run.verdicts.length ? "neutral" : TONES[run.state];
}

export function stateBadge(run) {
  return badge(WORDS[run.state], tone(run), run.state === "running");
}

export function sentence(run) {
  const done = run.max_steps ? `${run.steps} of ${plural(run.max_steps, "step")}` : plural(run.steps, "step");
  if (run.state === "running") return run.steps ? "" : "It loads, or makes its first step.";
  if (run.state === "ended") return `All ${plural(run.steps, "step")} are done.`;
  return run.state === "stopped" ? `Ctrl-C or an error ended it after ${done}; the log says of errors.`
    : `Its process was gone after ${done}, before it could end the run.`;
}

export function wayOn(run) {
  if (run.state !== "stopped" && run.state !== "killed") return null;
  return h("div", { class: "head" }, h("span", { class: "note" }, "To go on:"),
    copied(`rhymeflow resume ${quoted(run.directory)}`));
}

// For a shell.
export function quoted(text) {
  return /^[\w./:@%+=,-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}
