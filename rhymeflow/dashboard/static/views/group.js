// One group: its prompt, its responses side by side, and the same prompt in other epochs.

import { to } from "../address.js";
import { ask } from "../api.js";
import { fill, h, number, table } from "../dom.js";

export async function show(main, now) {
  const group = await ask(`runs/${now.run}/groups/${now.parts[0]}`);
  const epochs = group.epochs.map((each) => h("tr", { "aria-current": each.group === group.group ? "true" : null },
    h("td", {}, h("a", { href: to(now.run, "group", [each.group]) }, each.group)),
    h("td", { class: "n" }, each.epoch ?? "–"), h("td", { class: "n" }, each.step ?? "–"),
    h("td", { class: "n" }, number(each.reward)), h("td", { class: "n" }, number(each.length, 0))));
  fill(main,
    h("h1", {}, `Group ${group.group}`),
    h("p", {}, [`prompt ${group.row}`, group.epoch === null ? "of a suite" : `epoch ${group.epoch}`,
      group.step ? `trained on in step ${group.step}` : (group.ending_reason ?? group.ending ?? "open")].join(" · ")),
    conversation(group.prompt),
    columns(group.columns),
    h("section", { class: "side" }, group.members.map((each) => response(each, group, now))),
    group.epochs.length > 1 ? h("details", { open: true }, h("summary", {}, "This prompt over epochs"),
      table(["group", "epoch", "step", "reward", "mean length"], epochs)) : null);
  const at = group.epochs.findIndex((each) => each.group === group.group);
  const go = (by) => () => {
    const other = group.epochs[at + by];
    if (other) location.hash = to(now.run, "group", [other.group]);
  };
  return { keys: { "[": go(-1), "]": go(1) } };
}

function response(each, group, now) {
  const parts = Object.entries(each.components ?? {}).map(([name, value]) => `${name} ${number(value)}`);
  return h("article", {},
    h("h2", {}, h("a", { href: to(now.run, "trajectory", [group.group, each.member]), "data-line": true },
      `response ${each.member}`)),
    h("p", {}, [`reward ${number(each.reward)}`, ...parts, `${each.length} tokens`, each.reason ?? "not complete",
      each.first_version === each.last_version ? `version ${each.first_version}`
        : `versions ${each.first_version} to ${each.last_version}`].join(" · ")),
    h("pre", {}, each.text ?? "(no text)"));
}

export function conversation(prompt) {
  if (typeof prompt === "string") return h("pre", { class: "prompt" }, prompt);
  return h("div", {}, prompt.map((each) => h("div", { class: "message" },
    h("b", {}, each.role), h("pre", {}, each.content || JSON.stringify(each.tool_calls, null, 1) || ""))));
}

export function columns(values) {
  const rows = Object.entries(values ?? {});
  if (!rows.length) return null;
  return h("details", {}, h("summary", {}, "Columns of the data"),
    h("dl", {}, rows.map(([key, value]) => [h("dt", {}, key),
      h("dd", {}, typeof value === "string" ? value : JSON.stringify(value))])));
}
