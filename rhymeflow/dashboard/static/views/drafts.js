// Drafts by epoch, position and prompt; predicted lengths against true ones.

import { to } from "../address.js";
import { ask } from "../api.js";
import { curves, metricsOf } from "../curves.js";
import { fill, h, number, table } from "../dom.js";

const CURVES = [
  ["Mean acceptance length", ["draft/mean_acceptance_length"]],
  ["Accepted share of drafted tokens", ["draft/acceptance_rate"]],
  ["Seconds saved in a step", ["draft/time_saved"]],
  ["Predicted and true lengths, rank correlation", ["lengths/rank_correlation"]],
  ["Variance of lengths explained", ["lengths/explained_variance"]],
];

export async function show(main, now) {
  const tables = h("section", {}), prompted = h("section", {});
  const drawn = curves(CURVES);
  fill(main, h("h1", {}, "Drafts and lengths"), tables, drawn.root, prompted);

  async function refresh() {
    const found = await ask(`runs/${now.run}/drafts`);
    const run = await ask(`runs/${now.run}`);
    fill(tables,
      h("h2", {}, "By epoch"), figures("epoch", found.epochs, (each) => each.epoch),
      h("h2", {}, "By position in the response"),
      figures("from token", found.positions, (each) => `${number(each.from)} on`));
    const metrics = metricsOf(CURVES, run);
    if (metrics.length) drawn.show({ [now.run]: await ask(`runs/${now.run}/metrics`, { name: metrics }) });
    const open = [...prompted.querySelectorAll("details")].map((each) => each.open);
    fill(prompted,
      prompts("Prompts whose drafts do best", found.best, now),
      prompts("Prompts whose drafts do worst", found.worst, now));
    prompted.querySelectorAll("details").forEach((each, i) => { each.open = open[i] ?? false; });
    return run.ended;
  }

  const ended = await refresh();
  return { refresh: ended ? null : refresh, close: () => drawn.close() };
}

function cells(each) {
  const bar = h("td", { class: "bar" }, number(each.acceptance_length, 2));
  bar.style.setProperty("--share", Math.min(((each.acceptance_length ?? 1) - 1) / 7, 1));
  return [bar, h("td", { class: "n" }, each.acceptance_rate === null ? "–" : `${number(100 * each.acceptance_rate, 1)} %`),
    h("td", { class: "n" }, number(each.tokens)), h("td", { class: "n" }, number(each.drafted))];
}

const HEADINGS = ["acceptance length", "accepted", "tokens", "drafted"];

function figures(heading, rows, name) {
  if (!rows.length) return h("p", { class: "note" }, "Nothing was generated yet.");
  return table([heading, ...HEADINGS], rows.map((each) => h("tr", {}, h("td", { class: "n" }, name(each)), cells(each))));
}

function prompts(title, rows, now) {
  if (!rows.length) return null;
  return h("details", {}, h("summary", {}, title), table(["prompt", "", ...HEADINGS],
    rows.map((each) => h("tr", {},
      h("td", { class: "n" }, h("a", { href: to(now.run, "group", [each.group]), "data-line": true }, each.row)),
      h("td", { class: "prompt" }, each.prompt), cells(each)))));
}
