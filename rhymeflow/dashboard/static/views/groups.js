// Groups of a step, a prompt or the whole run, filtered and sorted, with members side by side.

import { change, to } from "../address.js";
import { ask } from "../api.js";
import { fill, h, number, table } from "../dom.js";

const FILTERS = ["right", "wrong", "mixed", "cut", "errors", "open", "consumed", "filtered", "aborted"];
const SORTS = ["order", "spread", "reward", "length", "staleness"];
const PAGE = 50;

export async function show(main, now) {
  const given = Object.fromEntries(now.parameters);
  const filters = now.parameters.getAll("filter");
  const form = h("form", { class: "controls", onsubmit: (event) => event.preventDefault() });
  const list = h("section", {});
  fill(main, h("h1", {}, given.step ? `Groups of step ${given.step}` : "Groups"), form, list);
  const set = (name) => (event) => change({ [name]: event.target.value, offset: null });
  form.append(
    h("label", {}, "step ", h("input", { type: "number", min: 1, value: given.step ?? "", onchange: set("step") })),
    h("label", {}, "prompt ", h("input", { type: "number", min: 0, value: given.row ?? "", onchange: set("row") })),
    h("label", {}, "text ", h("input", { type: "search", value: given.text ?? "", onchange: set("text") })),
    h("label", {}, "by ", h("select", { onchange: set("sort") },
      SORTS.map((each) => h("option", { selected: each === given.sort }, each)))),
    h("label", {}, h("input", {
      type: "checkbox", checked: given.descending === "true",
      onchange: (event) => change({ descending: event.target.checked ? "true" : null }),
    }), " largest first"),
    h("span", { class: "chips" }, FILTERS.map((each) => h("button", {
      type: "button", "aria-pressed": String(filters.includes(each)),
      onclick: () => change({
        filter: filters.includes(each) ? filters.filter((one) => one !== each) : [...filters, each],
        offset: null,
      }),
    }, each))));

  async function refresh() {
    const found = await ask(`runs/${now.run}/groups`, { ...given, filter: filters });
    fill(list, ...listed(found, now, Number(given.offset ?? 0)));
    return found;
  }

  const found = await refresh();
  if (found.components.length) form.append(component(found.components, given));
  const step = Number(given.step);
  const go = (by) => () => {
    if (given.step && step + by >= 1 && step + by <= found.steps) change({ step: step + by, offset: null });
  };
  return { refresh, keys: { "[": go(-1), "]": go(1) } };
}

// Groups by the values of one reward function, in runs that have several.
function component(names, given) {
  const choice = (name, values, chosen) => h("select", {
    "aria-label": name,
    onchange: (event) => change({ [name]: event.target.value || null, offset: null }),
  }, values.map((each) => h("option", { value: each, selected: each === chosen }, each || "any")));
  return h("span", {}, "reward function ", choice("component", ["", ...names], given.component ?? ""),
    given.component ? [" ", choice("of", ["mixed", "right", "wrong"], given.of ?? "mixed")] : null);
}

function listed(found, now, offset) {
  const rows = found.groups.map((each) => h("tr", {},
    h("td", {}, h("a", { href: to(now.run, "group", [each.group]), "data-line": true }, each.group)),
    h("td", { class: "prompt" }, each.prompt),
    h("td", { class: "n" }, each.epoch),
    h("td", { class: "n" }, each.step ?? "–"),
    h("td", {}, each.ending_reason ?? each.ending ?? "open"),
    h("td", { class: "n" }, number(each.reward)),
    h("td", { class: "members" }, each.members.map((one) => member(one, each, now))),
    h("td", { class: "n" }, number(each.length, 0)),
    h("td", { class: "n" }, each.staleness_max ?? "–")));
  const pages = h("p", {},
    `${number(found.count)} groups`,
    offset > 0 ? h("button", { onclick: () => change({ offset: Math.max(offset - PAGE, 0) }) }, "before") : null,
    offset + PAGE < found.count ? h("button", { onclick: () => change({ offset: offset + PAGE }) }, "after") : null);
  return [pages, table(
    ["group", "prompt", "epoch", "step", "ending", "reward", "responses", "mean length", "staleness"], rows)];
}

function member(one, group, now) {
  const link = h("a", {
    href: to(now.run, "trajectory", [group.group, one.member]),
    title: `response ${one.member}: reward ${number(one.reward)}, ${one.length} tokens, ${one.reason ?? "not complete"}`,
  }, one.reward === null ? "·" : number(one.reward, 2));
  link.style.setProperty("--share", share(one.reward, group));
  link.className = one.reward === null ? "reward none" : "reward";
  return link;
}

function share(reward, group) {
  const least = Math.min(0, group.reward_min ?? 0);
  const most = Math.max(1, group.reward_max ?? 1);
  return reward === null ? 0 : (reward - least) / (most - least);
}
