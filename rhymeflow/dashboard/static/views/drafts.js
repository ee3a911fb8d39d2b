// Drafts by epoch, position and prompt; predicted lengths against true ones.

import { to } from "../address.js";
import { ask } from "../api.js";
import { metricsOf } from "../catalogue.js";
import { curves } from "../curves.js";
import { fill, h, styled } from "../dom.js";
import { card, table } from "../parts.js";
import { isOver } from "../state.js";
import { number } from "../words.js";

const CURVES = [["", [
  ["Acceptance length", ["draft/mean_acceptance_length"]],
  ["Accepted share", ["draft/acceptance_rate"]],
  ["Seconds saved in a step", ["draft/time_saved"]],
  ["Lengths: rank correlation", ["lengths/rank_correlation"]],
  ["Lengths: variance explained", ["lengths/explained_variance"]],
]]];

export async function show(main, now) {
  const tables = h("section", { class: "side wide" }), prompted = h("section", { class: "first" });
  const drawn = curves();
  fill(main, h("h1", {}, "Drafts and lengths"), drawn.root, tables, prompted);

  async function refresh() {
    const found = await ask(`runs/${now.run}/drafts`);
    const run = await ask(`runs/${now.run}`);
    fill(tables,
      card("By epoch", figures("epoch", found.epochs, (each) => each.epoch)),
      card("By position in the response", figures("from token", found.positions, (each) => `${number(each.from)} on`)));
    const known = metricsOf([run]);
    const name = CURVES[0][1].flatMap(([, names]) => names).filter((each) => known.includes(each));
    if (name.length) drawn.show(CURVES, { [now.run]: await ask(`runs/${now.run}/metrics`, { name }) });
    const open = [...prompted.querySelectorAll("details")].map((each) => each.open);
    fill(prompted,
      prompts("Prompts whose drafts do best", found.best, now),
      prompts("Prompts whose drafts do worst", found.worst, now));
    prompted.querySelectorAll("details").forEach((each, i) => { each.open = open[i] ?? false; });
    return isOver(run);
  }

  await refresh();
  return { refresh, close: () => drawn.close() };
}

function cells(each) {
  const share = Math.min(((each.acceptance_length ?? 1) - 1) / 7, 1);
  return [styled(h("td", { class: "bar n" }, number(each.acceptance_length, 2)), "--share", share),
    h("td", { class: "n" }, each.acceptance_rate === null ? "–" : `${number(100 * each.acceptance_rate, 1)} %`),
    h("td", { class: "n" }, number(each.tokens)), h("td", { class: "n" }, number(each.drafted))];
}

const HEADINGS = ["acceptance length", "accepted", "tokens", "drafted"];

function figures(heading, rows, name) {
  if (!rows.length) return h("p", { class: "note" }, "Nothing was generated yet.");
  return table([heading, ...HEADINGS], rows.map((each) => h("tr", {}, h("td", { class: "n" }, name(each)), cells(each))));
}

function prompts(title, rows, now) {
  if (!rows.length) return null;
  return h("details", { class: "card" }, h("summary", {}, title), table(["prompt", "", ...HEADINGS],
    rows.map((each) => h("tr", {},
      h("td", { class: "n" }, h("a", { href: to(now.run, "group", [each.group]), "data-line": true }, each.row)),
      h("td", { class: "prompt" }, each.prompt), cells(each)))));
}
