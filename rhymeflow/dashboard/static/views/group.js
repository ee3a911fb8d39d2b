// One group: its prompt, its responses side by side, and the same prompt in other epochs.

import { to } from "../address.js";
import { ask } from "../api.js";
import { fill, h } from "../dom.js";
import { badge, card, facts, rewarded, table } from "../parts.js";
import { conversation, isBrief, placed, promptOf, rendered, speaker, turn, turnsOf } from "../speakers.js";
import { tokensOf } from "../tokens.js";
import { number, plural, signed } from "../words.js";

const SHORT = 60; // characters of a column beside others

export async function show(main, now) {
  const group = await ask(`runs/${now.run}/groups/${now.parts[0]}`);
  const first = group.members[0]?.member;
  const whole = (member) => ask(`runs/${now.run}/trajectories/${group.group}/${member}`);
  fill(main,
    h("div", { class: "head" }, h("h1", {}, `Group ${group.group}`), badge(group.ending ?? "open", { consumed: "good", aborted: "bad" }[group.ending] ?? "")),
    h("p", { class: "note" }, [`prompt ${group.row}`, group.epoch === null ? "of a suite" : `epoch ${group.epoch}`,
      group.step ? `trained on in step ${group.step}` : group.ending_reason, spread(group.members)].filter(Boolean).join(" · ")),
    card("Prompt", conversation(group.prompt),
      columns(group.columns), first === undefined ? null : rendered(async () => promptOf(await whole(first)))),
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
  const all = Object.entries(each.components ?? {});
  const parts = all.length > 1 ? all.map(([name, value]) => `${name} ${number(value)}`) : [];
  const rewards = group.members.map((one) => one.reward).filter((one) => one !== null);
  const text = h("div", { class: "talk" }, h("pre", { class: "long" }, each.text ?? "(no text)"));
  if (each.observed) inTurns(text, () => whole(each.member)).catch(() => {}); // the text stays
  return h("article", { class: "card" },
    h("div", { class: "head" },
      h("h2", {}, h("a", { href: to(now.run, "trajectory", [group.group, each.member]), "data-line": true }, `response ${each.member}`)),
      ended(each.reason), h("span", { class: "end n" }, each.reward === null ? "no reward" : ["reward ", rewarded(each.reward, Math.min(...rewards), Math.max(...rewards))])),
    h("p", { class: "note" }, [each.advantage === null ? null : `advantage ${signed(each.advantage)}`, ...parts, plural(each.length, "token"),
      each.first_version === each.last_version ? `version ${each.first_version}`
        : `versions ${each.first_version} to ${each.last_version}`].filter(Boolean).join(" · ")),
    text);
}

// Shows a response of several turns as these.
async function inTurns(place, load) {
  const found = await load();
  if (!found.texts) return;
  const turns = turnsOf(tokensOf(found).tokens);
  fill(place, turns.map((each, i) => turn(`${speaker(turns, i)}${isBrief(each) ? " brief" : ""}`, placed(found.calls, each), h("pre", {}, each.tokens.map((token) => token.text).join("")))));
}

function spread(members) {
  const rewards = members.map((each) => each.reward).filter((each) => each !== null);
  if (!rewards.length) return plural(members.length, "response");
  const mean = rewards.reduce((sum, each) => sum + each, 0) / rewards.length;
  const std = Math.sqrt(rewards.reduce((sum, each) => sum + (each - mean) ** 2, 0) / rewards.length);
  return `mean reward ${number(mean)}, standard deviation ${number(std)}, of ${plural(rewards.length, "response")}`;
}

// How a response ended.
export function ended(reason) {
  if (reason === null || reason === undefined) return badge("not complete");
  const isCut = reason === "length" || reason === "finished_early";
  return badge(isCut ? `cut: ${reason}` : reason, isCut ? "warn" : "");
}

export function columns(values) {
  const rows = Object.entries(values ?? {}).map(([key, value]) => [key, typeof value === "string" ? value : JSON.stringify(value)]);
  const isShort = ([, text]) => text.length <= SHORT && !text.includes("\n");
  const few = rows.filter(isShort), long = rows.filter((each) => !isShort(each));
  return [few.length ? h("p", { class: "facts" }, few.map(([key, text]) => h("code", {}, `${key} = ${text}`))) : null,
    long.length ? h("details", {}, h("summary", {}, "Columns of the data"), facts(long)) : null];
}
