// The frame of all views: navigation, keys, and one view at a time.

import { read, to } from "./address.js";
import { ask, leave } from "./api.js";
import { fill, h } from "./dom.js";
import * as drafts from "./views/drafts.js";
import * as group from "./views/group.js";
import * as groups from "./views/groups.js";
import * as log from "./views/log.js";
import * as run from "./views/run.js";
import * as time from "./views/time.js";
import * as trajectory from "./views/trajectory.js";

const VIEWS = { run, time, groups, group, trajectory, drafts, log };
const SHOWN = { run: "Run", time: "Time", groups: "Groups", drafts: "Drafts and lengths", log: "Log" };
const KEYS = [
  ["g r, g t, g g, g d, g l", "the views Run, Time, Groups, Drafts, Log"],
  ["[ and ]", "the step, epoch or sibling before and after"],
  ["j and k", "the next and the previous line of a list; Enter opens it"],
  ["?", "this help"],
];

let runs = [];
let shown = null; // returned by the shown view: { keys, refresh, close }
let prefix = "";
let timer = 0;

function navigation(now) {
  const names = h("select", {
    "aria-label": "Run",
    onchange: (event) => { location.hash = to(event.target.value, "run"); },
  }, runs.map((each) => h("option", { value: each.name, selected: each.name === now.run }, each.name)));
  const links = Object.entries(SHOWN).map(([view, name]) => h("a", {
    href: to(now.run, view), "aria-current": view === now.view ? "page" : null,
  }, name));
  document.getElementById("nav").replaceChildren(names, ...links);
}

export function say(text, isProblem = false) {
  const state = document.getElementById("state");
  state.textContent = text;
  state.className = isProblem ? "problem" : "";
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
  const main = document.getElementById("main");
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

// The shown view of a live run is refreshed every second.
function follow() {
  if (!shown?.refresh) return;
  timer = setTimeout(async () => {
    try {
      if (!document.hidden) await shown.refresh();
      say("");
    } catch (error) {
      if (error.name === "AbortError") return;
      say(error.message, true);
    }
    follow();
  }, 1000);
}

function move(by) {
  const lines = [...document.querySelectorAll("[data-line]")];
  if (!lines.length) return;
  const place = lines.indexOf(document.activeElement);
  lines[Math.min(Math.max(place + by, 0), lines.length - 1)].focus();
}

function pressed(event) {
  if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  const now = read();
  if (prefix === "g" && "rtgdl".includes(event.key)) {
    location.hash = to(now.run, { r: "run", t: "time", g: "groups", d: "drafts", l: "log" }[event.key]);
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
  const dialog = document.getElementById("help");
  fill(dialog,
    h("h2", {}, "Keys"),
    h("dl", {}, KEYS.map(([key, what]) => [h("dt", {}, key), h("dd", {}, what)])),
    h("form", { method: "dialog" }, h("button", {}, "Close")));
  dialog.showModal();
}

window.addEventListener("hashchange", show);
window.addEventListener("keydown", pressed);
try {
  runs = await ask("runs");
  await show();
} catch (error) {
  document.getElementById("main").replaceChildren(h("p", { class: "problem" }, error.message));
}
