// The log: what went wrong first, then events, and under each the commands that it caused, or what a
// worker printed.

import { change, read, to } from "../address.js";
import { ask } from "../api.js";
import { fill, h } from "../dom.js";
import { card, chip, copier, form, labelled, notice, notices, select, table } from "../parts.js";
import { since } from "../verdicts.js";
import { bytes, capital, duration, number, plural } from "../words.js";

const WRONG = ["InstanceLeft", "EnvironmentFailed", "ProgramLost", "RewardFailed"];
const MILESTONES = ["VersionPublished", "Evaluated", "InstanceJoined", ...WRONG];
const STEPS = 80; // fewer than a page has rows
const HEADINGS = ["time", "event", "", "what", "fields"];

export async function show(main, now) {
  const { worker, all, ...given } = Object.fromEntries(now.parameters);
  const isMilestones = !all && !Object.keys(given).length;
  const [found, outputs, run] = await Promise.all(["/log", "/outputs", ""].map((each) => ask(`runs/${now.run}${each}`, each === "/log" ? given : {})));
  const parts = worker ? await printed(now.run, worker)
    : isMilestones ? milestones(await newest(found, run), found, now) : events(found, given, now);
  const what = worker ? null : isMilestones ? "milestones" : "all events";
  fill(main, h("h1", {}, "Log"), problems(found.problems, outputs, run, now), places(outputs, worker, what), parts);
  return {};
}

// -- what went wrong ---------------------------------------------------------------------------------

function problems(found, outputs, run, now) {
  const { verdicts } = run;
  const alike = new Map(); // by kind and words, the newest last
  for (const each of found) {
    const key = `${each.kind} ${each.said}`;
    alike.set(key, { ...each, count: (alike.get(key)?.count ?? 0) + 1 });
  }
  const broken = outputs.filter((each) => each.problem);
  if (!alike.size && !broken.length && !verdicts.length) return notices(notice("good", "No errors and no warnings."));
  return card("Errors and warnings", notices(
    broken.map((each) => notice("bad", h("div", {}, h("a", { href: to(now.run, "log", [], { worker: each.name }) }, each.name), " printed"), h("code", {}, each.problem.trim().slice(0, 500)))),
    [...alike.values()].reverse().map((each) => notice(WRONG.includes(each.kind) ? "bad" : "warn",
      h("div", {}, h("b", {}, each.kind), each.count > 1 ? ` ${number(each.count)} times, last` : "", ` at ${duration(each.time)}`,
        each.instance ? ` on ${each.instance}` : "",
        each.group === null ? "" : [", ", h("a", { href: to(now.run, "group", [each.group]) }, `group ${each.group}`)]),
      h("code", {}, each.said ?? ""))),
    verdicts.map((each) => notice("warn", h("b", {}, capital(each.said)), since(each), `: ${each.remedy}`))));
}

// -- events, or an output ----------------------------------------------------------------------------

function places(outputs, worker, what) {
  const { run } = read();
  const go = (parameters) => () => { location.hash = to(run, "log", [], parameters); };
  const output = (each) => chip(`${each.name}${each.problem ? " !" : ""}`, each.name === worker, go({ worker: each.name }));
  const silent = outputs.filter((each) => !each.bytes);
  return [h("div", { class: "chips", role: "group", "aria-label": "What is shown" },
    chip("milestones", what === "milestones", go({})), chip("all events", what === "all events", go({ all: "true" })),
    outputs.filter((each) => each.bytes).map(output)),
  silent.length ? h("details", {}, h("summary", {}, `${plural(silent.length, "worker")} printed nothing`), h("div", { class: "chips" }, silent.map(output))) : null];
}

// Milestones of about the last `STEPS` steps, newest first, and since when they are.
async function newest({ kinds }, { name, steps, seconds }) {
  const time = steps > STEPS ? seconds * (1 - STEPS / steps) : 0;
  const pages = await Promise.all(MILESTONES.filter((kind) => kinds.includes(kind)).map((kind) => ask(`runs/${name}/log`, { kind, time })));
  return { time, rows: pages.flatMap((page) => page.rows).sort(order) };
}

// The newest event first, and its commands below it.
function order(a, b) {
  return b.event - a.event || a.command - b.command || a.number - b.number;
}

function milestones({ time, rows }, found, now) {
  const shown = table(HEADINGS, rows.map((each) => line(each, now)), "events");
  return h("section", { class: "card" },
    h("p", { class: "note" }, `Newest first${time ? `, since ${duration(time)}` : ""}; all are ${plural(found.events, "event")}, ${plural(found.commands, "command")}`), shown);
}

async function printed(run, worker) {
  const found = await ask(`runs/${run}/outputs/${worker.split("/").map(encodeURIComponent).join("/")}`);
  const lines = found.text.split("\n").map((each) => [
    /error|warning|traceback|exception|critical/i.test(each) ? h("span", { class: "wrong" }, each) : each, "\n"]);
  const place = h("pre", { class: "output", tabindex: "0" }, found.text ? lines : "(nothing)");
  requestAnimationFrame(() => { place.scrollTop = place.scrollHeight; });
  const isCut = found.text.length < found.bytes && found.bytes > 65_536;
  return card(`What ${worker} printed`, h("p", { class: "note" }, isCut ? `the end of ${bytes(found.bytes)}` : bytes(found.bytes)), place);
}

function events(found, given, now) {
  const lines = h("tbody", {}), rows = [];
  const more = h("button", { hidden: !found.after, onclick: go }, "more");
  let after = found.after;

  async function go() {
    more.disabled = true;
    const next = await ask(`runs/${now.run}/log`, { ...given, after: after.join(",") });
    after = next.after;
    add(next.rows);
    more.hidden = !after;
    more.disabled = false;
  }

  // A page may end among the commands of an event.
  function add(older) {
    rows.push(...older);
    fill(lines, rows.sort(order).map((each) => line(each, now)));
  }

  add(found.rows);
  const shown = table(HEADINGS, [], "events");
  shown.querySelector("tbody").replaceWith(lines);
  return [controls(found, given), h("section", { class: "card" },
    h("p", { class: "note" }, `Newest first; ${plural(found.events, "event")}, ${plural(found.commands, "command")}`), shown, more)];
}

function controls(found, given) {
  const set = (name) => (value) => change({ [name]: value || null, all: "true", after: null });
  const choice = (name, values) => labelled(name, select([["", "any"], ...values], given[name] ?? "", set(name)));
  const input = (name, attributes) => h("input", { value: given[name] ?? "", onchange: (event) => set(name)(event.target.value), ...attributes });
  return form(
    choice("kind", found.kinds), choice("instance", found.instances),
    labelled("group", input("group", { type: "number" })),
    labelled("text", input("text", { type: "search" })),
    labelled("from second", input("time", { type: "number", min: 0 })),
    copier(found.sql, "copy as SQL"));
}

function line(each, now) {
  const { trajectory, group, ...rest } = each.body;
  const of = trajectory ? h("a", { href: to(now.run, "trajectory", trajectory) }, trajectory.join("."))
    : group === undefined ? null : h("a", { href: to(now.run, "group", [group]) }, `group ${group}`);
  return h("tr", { class: each.command ? "command" : WRONG.includes(each.kind) ? "wrong" : null },
    h("td", { class: "n", title: `${each.time} s` }, each.command ? "" : duration(each.time)),
    h("td", { class: "n" }, each.command ? "" : number(each.number)),
    h("td", { class: "n" }, of),
    h("td", {}, each.command ? `→ ${each.kind}` : each.kind),
    h("td", { class: "fields" }, h("code", {}, Object.entries(rest).filter(([, value]) => value !== null && value !== "" && value.length !== 0).map(([key, value]) => `${key} ${short(value)}`).join(", "))));
}

function short(value) {
  const text = typeof value === "string" ? value : JSON.stringify(value);
  return text.length > 160 ? `${text.slice(0, 160)}…` : text;
}
