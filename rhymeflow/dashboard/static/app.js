// The frame of all views: navigation, keys, and one view at a time.

import { read, to } from "./address.js";
import { ask, leave } from "./api.js";
import { fill, h } from "./dom.js";
import { select } from "./parts.js";
import * as theme from "./theme.js";
import * as drafts from "./views/drafts.js";
import * as group from "./views/group.js";
import * as groups from "./views/groups.js";
import * as log from "./views/log.js";
import * as run from "./views/run.js";
import * as setup from "./views/setup.js";
import * as time from "./views/time.js";
import * as trajectory from "./views/trajectory.js";

const VIEWS = { run, time, groups, group, trajectory, drafts, log, setup };
const SHOWN = { run: "Run", groups: "Groups", time: "Time", drafts: "Drafts", log: "Log", setup: "Setup" };
const WITHIN = { group: "groups", trajectory: "groups" };
const GO = { r: "run", g: "groups", t: "time", d: "drafts", l: "log", s: "setup" };
const KEYS = [
  [Object.keys(GO).map((key) => `g ${key}`).join(", "), `the views ${Object.values(SHOWN).join(", ")}`],
  ["[ and ]", "the step, epoch or sibling before and after"],
  ["j and k", "the next and the previous line of a list; Enter opens it"],
  ["?", "this help"],
];

const place = (id) => document.getElementById(id);

let runs = [];
let shown = null; // returned by the shown view: { keys, refresh, close }
let prefix = "";
let timer = 0;

function navigation(now) {
  const names = runs.map((each) => each.name);
  fill(place("runs"), names.length < 2 ? null
    : select(names, now.run, (name) => { location.hash = to(name, "run"); }, { "aria-label": "Run" }));
  const current = WITHIN[now.view] ?? now.view;
  fill(place("nav"), Object.entries(SHOWN).map(([view, name]) => h("a", {
    href: to(now.run, view), "aria-current": view === current ? "page" : null,
  }, name)));
  place("nav").querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
}

export function say(text, isProblem = false) {
  place("state").textContent = text;
  place("state").className = isProblem ? "problem" : "";
}

async function show() {
  if (!runs.length) return; // they have been requested
  leave();
  clearTimeout(timer);
  shown?.close?.();
  shown = null;
  const now = read();
  if (!runs.some((each) => each.name === now.run)) {
    location.replace(to(runs[0].name, "run"));
    return;
  }
  const main = place("main");
  navigation(now);
  document.title = `${now.run} · ${SHOWN[now.view] ?? now.view} · Rhymeflow`;
  const view = VIEWS[now.view];
  if (!view) {
    fill(main, h("p", { class: "problem" }, `There is no view ${now.view}.`));
    return;
  }
  try {
    say("…");
    shown = await view.show(main, now);
    say("");
    follow();
  } catch (error) {
    if (error.name === "AbortError") return;
    say("");
    fill(main, h("p", { class: "problem" }, error.message));
    timer = setTimeout(show, 5000); // a run that begins does not have all files yet
  }
}

// The shown view is refreshed every second, and more seldom while it says that the run is over, which
// may be resumed.
function follow(seconds = 1) {
  if (!shown?.refresh) return;
  timer = setTimeout(async () => {
    const view = shown;
    let isOver = false, problem = "";
    try {
      if (!document.hidden) isOver = await view.refresh() === true;
    } catch (error) {
      problem = error.message;
    }
    if (view !== shown) return; // it was left meanwhile
    say(problem, problem !== "");
    follow(isOver ? 5 : 1);
  }, 1000 * seconds);
}

function move(by) {
  const lines = [...document.querySelectorAll("[data-line]")];
  if (!lines.length) return;
  const at = lines.indexOf(document.activeElement);
  lines[Math.min(Math.max(at + by, 0), lines.length - 1)].focus();
}

function pressed(event) {
  if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  const now = read();
  if (prefix === "g" && event.key in GO) {
    location.hash = to(now.run, GO[event.key]);
    prefix = "";
    return;
  }
  prefix = event.key === "g" ? "g" : "";
  if (event.key === "j") move(1);
  else if (event.key === "k") move(-1);
  else if (event.key === "?") help();
  else shown?.keys?.[event.key]?.();
}

function help() {
  fill(place("help"),
    h("h2", {}, "Keys"),
    h("dl", {}, KEYS.map(([key, what]) => [h("dt", {}, key), h("dd", {}, what)])),
    h("form", { method: "dialog" }, h("button", {}, "Close")));
  place("help").showModal();
}

window.addEventListener("hashchange", show);
window.addEventListener("keydown", pressed);
place("keys").addEventListener("click", help);
theme.begin(place("theme"));
try {
  runs = await ask("runs");
  await show();
} catch (error) {
  fill(place("main"), h("p", { class: "problem" }, error.message));
}
