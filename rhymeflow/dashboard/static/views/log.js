// The log: events, and under each the commands that it caused.

import { change, to } from "../address.js";
import { ask } from "../api.js";
import { duration, fill, h, number, table } from "../dom.js";

export async function show(main, now) {
  const given = Object.fromEntries(now.parameters);
  const found = await ask(`runs/${now.run}/log`, given);
  const set = (name) => (event) => change({ [name]: event.target.value || null, after: null });
  const choice = (name, values) => h("label", {}, `${name} `, h("select", { onchange: set(name) },
    ["", ...values].map((each) => h("option", { value: each, selected: each === (given[name] ?? "") }, each || "any"))));
  const lines = h("tbody", {}, found.rows.map((each) => line(each, now)));
  const more = h("button", { hidden: !found.after, onclick: go }, "more");
  let after = found.after;

  async function go() {
    more.disabled = true;
    const next = await ask(`runs/${now.run}/log`, { ...given, after: after.join(",") });
    after = next.after;
    lines.append(...next.rows.map((each) => line(each, now)));
    more.hidden = !after;
    more.disabled = false;
  }

  const shown = table(["time", "event", "", "what", "fields"], []);
  shown.querySelector("tbody").replaceWith(lines);
  fill(main,
    h("h1", {}, "Log"),
    h("p", {}, `${number(found.events)} events, ${number(found.commands)} commands`),
    h("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
      choice("kind", found.kinds), choice("instance", found.instances),
      h("label", {}, "group ", h("input", { type: "number", value: given.group ?? "", onchange: set("group") })),
      h("label", {}, "text ", h("input", { type: "search", value: given.text ?? "", onchange: set("text") })),
      h("label", {}, "from second ", h("input", { type: "number", min: 0, value: given.time ?? "", onchange: set("time") })),
      h("button", { type: "button", onclick: () => navigator.clipboard.writeText(found.sql) }, "copy as SQL")),
    shown,
    more);
  return {};
}

function line(each, now) {
  const { trajectory, group, ...rest } = each.body;
  const of = trajectory ? h("a", { href: to(now.run, "trajectory", trajectory) }, trajectory.join("."))
    : group === undefined ? null : h("a", { href: to(now.run, "group", [group]) }, `group ${group}`);
  return h("tr", { class: each.command ? "command" : null },
    h("td", { class: "n", title: `${each.time} s` }, each.command ? "" : duration(each.time)),
    h("td", { class: "n" }, each.command ? "" : number(each.number)),
    h("td", { class: "n" }, of),
    h("td", {}, each.command ? `→ ${each.kind}` : each.kind),
    h("td", {}, h("code", {}, Object.entries(rest).map(([key, value]) => `${key} ${short(value)}`).join(", "))));
}

function short(value) {
  const text = typeof value === "string" ? value : JSON.stringify(value);
  return text.length > 160 ? `${text.slice(0, 160)}…` : text;
}
