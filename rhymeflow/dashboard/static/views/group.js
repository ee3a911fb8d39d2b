// One group: its prompt, its responses side by side, and the same prompt in other epochs.

import { to } from "../address.js";
import { ask } from "../api.js";
import { fill, h } from "../dom.js";
import { badge, card, table } from "../parts.js";
import { conversation, promptOf, rendered, speaker, turn, turnsOf } from "../speakers.js";
import { tokensOf } from "../tokens.js";
import { number, plural } from "../words.js";

export async function show(main, now) {
  const group = await ask(`runs/${now.run}/groups/${now.parts[0]}`);
  const first = group.members[0]?.member;
  const whole = (member) => ask(`runs/${now.run}/trajectories/${group.group}/${member}`);
  fill(main,
    h("div", { class: "head" }, h("h1", {}, `Group ${group.group}`), badge(group.ending ?? "open", { consumed: "good", aborted: "bad" }[group.ending] ?? "")),
    h("p", { class: "note" }, [`prompt ${group.row}`, group.epoch === null ? "of a suite" : `epoch ${group.epoch}`,
      group.step ? `trained on in step ${group.step}` : group.ending_reason].filter(Boolean).join(" · ")),
    card("Prompt", conversation(group.prompt),
      first === undefined ? null : rendered(async () => promptOf(await whole(first))), columns(group.columns)),
    h("section", { class: "side" }, group.members.map((each) => response(each, group, now, whole))),
    group.epochs.length > 1 ? card("This prompt over epochs", epochs(group, now)) : null);
  const at = group.epochs.findIndex((each) => each.group === group.group);
  const go = (by) => () => {
    const other = group.epochs[at + by];
    if (other) location.hash = to(now.run, "group", [other.group]);
  };
  return { keys: { "[": go(-1), "]": go(1) } };
}

function epochs(group, now) {
  return table(["group", "epoch", "step", "reward", "mean length"],
    group.epochs.map((each) => h("tr", { "aria-current": each.group === group.group ? "true" : null },
      h("td", {}, h("a", { href: to(now.run, "group", [each.group]) }, each.group)),
      h("td", { class: "n" }, each.epoch ?? "–"), h("td", { class: "n" }, each.step ?? "–"),
      h("td", { class: "n" }, number(each.reward)), h("td", { class: "n" }, number(each.length, 0)))));
}

function response(each, group, now, whole) {
  const parts = Object.entries(each.components ?? {}).map(([name, value]) => `${name} ${number(value)}`);
  const text = h("div", { class: "talk" }, h("pre", { class: "long" }, each.text ?? "(no text)"));
  if (each.observed) inTurns(text, () => whole(each.member)).catch(() => {}); // the text stays
  return h("article", { class: "card" },
    h("div", { class: "head" },
      h("h2", {}, h("a", { href: to(now.run, "trajectory", [group.group, each.member]), "data-line": true }, `response ${each.member}`)),
      ended(each.reason), h("b", { class: "end n" }, each.reward === null ? "no reward" : `reward ${number(each.reward)}`)),
    h("p", { class: "note" }, [...parts, plural(each.length, "token"),
      each.first_version === each.last_version ? `version ${each.first_version}`
        : `versions ${each.first_version} to ${each.last_version}`].join(" · ")),
    text);
}

// Shows a response of several turns as these.
async function inTurns(place, load) {
  const found = await load();
  if (!found.texts) return;
  const turns = turnsOf(tokensOf(found).tokens);
  fill(place, turns.map((each, i) => turn(speaker(turns, i), null, h("pre", {}, each.tokens.map((token) => token.text).join("")))));
}

// How a response ended.
export function ended(reason) {
  if (reason === null || reason === undefined) return badge("not complete");
  const isCut = reason === "length" || reason === "finished_early";
  return badge(isCut ? `cut: ${reason}` : reason, isCut ? "warn" : "");
}

export function columns(values) {
  const rows = Object.entries(values ?? {});
  if (!rows.length) return null;
  return h("details", {}, h("summary", {}, "Columns of the data"),
    h("dl", {}, rows.map(([key, value]) => [h("dt", {}, key),
      h("dd", {}, typeof value === "string" ? value : JSON.stringify(value))])));
}
