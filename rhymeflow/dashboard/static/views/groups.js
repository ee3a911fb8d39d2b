// Groups of a step, a prompt or the whole run, filtered and sorted, with members side by side.

import { change, to } from "../address.js";
import { ask } from "../api.js";
import { fill, h } from "../dom.js";
import { chip, form, labelled, rewarded, select, table } from "../parts.js";
import { number, plural } from "../words.js";

const FILTERS = {
  outcome: { right: "all right", wrong: "all wrong", mixed: "mixed" },
  ending: { consumed: "consumed", filtered: "filtered", aborted: "aborted", open: "open", cut: "cut", errors: "errors" },
};
const SORTS = ["order", "spread", "reward", "length", "staleness"];
const PAGE = 50;
const ALL = "all"; // steps

export async function show(main, now) {
  const given = Object.fromEntries(now.parameters);
  if (!Object.keys(given).length) given.step = (await ask(`runs/${now.run}/groups`, { offset: 1e9 })).steps || "";
  if (given.step === ALL) delete given.step;
  const filters = now.parameters.getAll("filter");
  const list = h("section", { class: "card" }), choices = controls(given, filters);
  fill(main, h("div", { class: "head" }, h("h1", {}, given.step ? `Groups of step ${given.step}` : "Groups of the whole run"),
    given.step ? h("a", { href: to(now.run, "groups", [], { step: ALL }) }, "whole run") : h("a", { href: to(now.run, "groups") }, "newest step")), choices, list);

  async function refresh() {
    const found = await ask(`runs/${now.run}/groups`, { ...given, filter: filters });
    fill(list, ...listed(found, now, Number(given.offset ?? 0)));
    return found;
  }

  const found = await refresh();
  if (found.components.length) choices.append(component(found.components, given));
  const step = Number(given.step);
  const go = (by) => () => {
    if (given.step && step + by >= 1 && step + by <= found.steps) change({ step: step + by, offset: null });
  };
  return { refresh, keys: { "[": go(-1), "]": go(1) } };
}

function controls(given, filters) {
  const kept = { step: given.step || ALL, offset: null };
  const set = (name) => (value) => change({ ...kept, [name]: name === "step" ? value || ALL : value });
  const input = (name, attributes) => h("input", { value: given[name] ?? "", onchange: (event) => set(name)(event.target.value), ...attributes });
  return form(
    labelled("step", input("step", { type: "number", min: 1 })),
    labelled("prompt", input("row", { type: "number", min: 0 })),
    labelled("text", input("text", { type: "search" })),
    labelled("by", select(SORTS, given.sort, set("sort"))),
    labelled("largest first", h("input", {
      type: "checkbox", checked: given.descending === "true",
      onchange: (event) => change({ ...kept, descending: event.target.checked ? "true" : null }),
    })),
    Object.entries(FILTERS).map(([kind, all]) => h("span", { class: "chips", role: "group", "aria-label": kind }, h("span", { class: "note" }, kind),
      Object.entries(all).map(([each, text]) => chip(text, filters.includes(each), () => change({
        ...kept, filter: filters.includes(each) ? filters.filter((one) => one !== each) : [...filters, each],
      }))))));
}

// Groups by the values of one reward function, in runs that have several.
function component(names, given) {
  const set = (name) => (value) => change({ step: given.step || ALL, [name]: value || null, offset: null });
  return h("label", {}, "reward function",
    select([["", "any"], ...names], given.component ?? "", set("component"), { "aria-label": "component" }),
    given.component ? select(["mixed", "right", "wrong"], given.of ?? "mixed", set("of"), { "aria-label": "of" }) : null);
}

function listed(found, now, offset) {
  const rows = found.groups.map((each) => h("tr", {},
    h("td", {}, h("a", { href: to(now.run, "group", [each.group]), "data-line": true }, each.group)),
    h("td", { class: "prompt" }, each.prompt),
    h("td", { class: "n" }, number(each.reward)),
    h("td", { class: "members" }, each.members.map((one) => member(one, each, now))),
    h("td", { class: "n" }, each.step ?? "–"),
    h("td", { class: "n" }, each.epoch),
    h("td", {}, each.ending_reason ?? each.ending ?? "open"),
    h("td", { class: "n" }, number(each.length, 0)),
    h("td", { class: "n" }, each.staleness_max ?? "–")));
  const last = Math.min(offset + PAGE, found.count);
  const pages = h("div", { class: "head" },
    h("b", {}, plural(found.count, "group")),
    found.count > PAGE ? h("span", { class: "note n" }, `${number(offset + 1)} to ${number(last)}`) : null,
    h("span", { class: "end choice" },
      offset > 0 ? h("button", { onclick: () => change({ offset: Math.max(offset - PAGE, 0) }) }, `previous ${PAGE}`) : null,
      last < found.count ? h("button", { onclick: () => change({ offset: offset + PAGE }) }, `next ${PAGE}`) : null));
  return [pages, found.count ? table(
    ["group", "prompt", "reward", "responses", "step", "epoch", "ending", "mean length", "staleness"], rows, "groups")
    : h("p", { class: "note" }, "No group is like that.")];
}

function member(one, group, now) {
  return rewarded(one.reward, group.reward_min, group.reward_max, {
    href: to(now.run, "trajectory", [group.group, one.member]),
    title: `response ${one.member}: reward ${number(one.reward)}, ${one.length} tokens, ${one.reason ?? "not complete"}`,
  });
}
