// What says that a run learns, or that it does not, and where to look.

import { to } from "./address.js";
import { h } from "./dom.js";
import { badge, notice, notices } from "./parts.js";
import { capital, number } from "./words.js";

const UNSURE = "held-out change within noise";
const BESIDE = ["responses cut", "rewards fail", "tools unused", "turns unused", "tokens clipped", "mismatch"]; // a run may learn with these
const OF_REWARD = /^(rewards?|no spread)\b/;

// The change of the held-out reward since the first evaluation, 0 within two standard errors of both.
export function changed(run) {
  const [first, , last] = run.held_out;
  if (!last || first[0] === last[0]) return 0;
  const by = last[1] - first[1];
  return Math.abs(by) > noise(run) ? by : 0;
}

function noise({ held_out: [first, , last] }) {
  return 2 * Math.hypot(first[2] ?? Infinity, last[2] ?? Infinity);
}

export function learningBadge(run) {
  const names = run.verdicts.map((each) => each.name);
  if (!names.length) return null;
  if (names.every((name) => name === UNSURE)) return badge("unsure", "warn");
  return badge(names.every((name) => name === UNSURE || BESIDE.includes(name)) ? "see below" : "not learning", "warn");
}

// From which step a verdict holds; not known of one on a run that is over.
export function since(verdict) {
  return verdict.since === null ? "" : `, since step ${verdict.since}`;
}

export function verdicts(run) {
  if (!run.verdicts.length) return run.steps < 4 ? null : notices(evidence(run));
  return h("div", { class: "verdicts" }, notices(run.verdicts.map((each) => notice("warn",
    h("b", {}, capital(each.said)), since(each), h("div", {}, `What to try: ${each.remedy}.`),
    h("div", { class: "small head" },
      h("a", { href: to(run.name, "groups", [], { step: run.steps }) }, `responses of step ${run.steps}`),
      OF_REWARD.test(each.name) ? h("a", { href: to(run.name, "setup") }, "reward function") : null,
      h("span", { class: "note" }, `docs/troubleshooting.md, “${each.name}”`))))));
}

function evidence(run) {
  const [first, , last] = run.held_out;
  if (!last || first[0] === last[0]) return notice("", "No sign of trouble in its metrics; no evaluation says that it learns.");
  const words = `Held-out ${number(first[1])} → ${number(last[1])}`;
  if (!Number.isFinite(noise(run))) return notice("", `No sign of trouble in its metrics. ${words}, of unknown noise.`);
  if (changed(run) > 0) return notice("good", h("b", {}, words), ` (± ${number(1.96 * last[2], 2)})`);
  return notice("", `No sign of trouble in its metrics. ${words}, within its noise of ± ${number(noise(run), 2)}.`);
}
