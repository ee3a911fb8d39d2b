// The first screen of a run: its state, verdicts on it and large figures, then curves, with those of other
// runs on request. A click on a curve opens the step's groups.

import { change, to } from "../address.js";
import { ask } from "../api.js";
import { metricsOf, rest, sectionsOf } from "../catalogue.js";
import { curves } from "../curves.js";
import { fill, h } from "../dom.js";
import { chip, choice, form, labelled, stat, table, value } from "../parts.js";
import { isOver, sentence, stateBadge, tone, wayOn } from "../state.js";
import { changed, learningBadge, verdicts } from "../verdicts.js";
import { capital, duration, figure, number, percent, plural, short, signed } from "../words.js";

const CHOSEN = "Chosen";
const [SECONDS, REWARD, FLAT, CUT, RATE, APART] = [0, 1, 2, 3, 4, 5]; // places in a row of `first` and `last`

export async function show(main, now) {
  const axis = now.parameters.get("axis") === "time" ? "time" : "step";
  const smooth = now.parameters.has("smooth") ? Number(now.parameters.get("smooth")) : null;
  const isLog = now.parameters.get("scale") === "log", isAll = now.parameters.has("all");
  const chosen = now.parameters.getAll("metric");
  const all = (await ask("runs")).map((each) => each.name);
  const others = now.parameters.getAll("with").filter((name) => all.includes(name) && name !== now.run);
  const head = h("div", { class: "first" }), tools = h("div", { class: "head" });
  const onstep = axis === "step" ? (step) => { location.hash = to(now.run, "groups", [], { step }); } : null;
  const drop = (name) => change({ metric: chosen.filter((each) => each !== name) });
  const drawn = curves((section, title, names) => ({
    axis, smooth, isLog, onstep, onremove: section === CHOSEN ? () => drop(title) : null,
    meaning: names.map((name) => explained(name, meanings[name])).join("\n"),
  }));
  let meanings = {};
  fill(main, head, tools, others.length ? await differences([now.run, ...others]) : null, drawn.root);
  const isNew = changes(), hasRows = changes(), hasMetrics = changes();

  async function refresh() {
    const runs = await Promise.all([now.run, ...others].map((name) => ask(`runs/${name}`)));
    if (isNew(JSON.stringify(runs[0]))) fill(head, ...described(runs[0]));
    if (hasRows(runs.map((each) => each.rows).join())) await draw(runs);
    return isOver(runs[0]);
  }

  async function draw(runs) {
    const sections = sectionsOf(runs);
    if (isAll) sections.push(...rest(runs, sections));
    if (chosen.length) sections.unshift([CHOSEN, chosen.map((name) => [name, [name]])]);
    const wanted = new Set(sections.flatMap(([, charts]) => charts.flatMap(([, names]) => names)));
    const points = {};
    for (const run of runs) {
      const name = metricsOf([run]).filter((each) => wanted.has(each));
      points[run.name] = name.length ? await ask(`runs/${run.name}/metrics`, { name }) : {};
    }
    if (hasMetrics(metricsOf(runs).join())) {
      meanings = await ask("meanings", { name: metricsOf(runs) });
      fill(tools, controls({ axis, smooth, isLog, isAll, chosen, others }, metricsOf(runs), all.filter((name) => name !== now.run)));
    }
    drawn.show(sections, points);
  }

  await refresh();
  return { refresh, close: () => drawn.close() };
}

// Whether a value is another than at the call before.
function changes() {
  let before = null;
  return (found) => {
    const isOther = found !== before;
    before = found;
    return isOther;
  };
}

// -- what a run says of itself -----------------------------------------------------------------------

function described(run) {
  return [
    h("div", { class: "head" }, h("h1", {}, run.name), stateBadge(run), learningBadge(run), h("span", { class: "note state-words" }, sentence(run))),
    made(run),
    run.emulated ? h("p", { class: "note" }, `${capital(run.emulated)}.`) : null,
    wayOn(run),
    verdicts(run),
    h("div", { class: "stats" }, heldOut(run), reward(run), steps(run), time(run), pace(run)),
  ];
}

function heldOut(run) {
  const [first, best, last] = run.held_out;
  if (!last) return stat("Held-out reward", value("–"), isOver(run) ? "not evaluated" : "not evaluated yet", { "data-fact": "held_out" });
  const [step, mean, error] = last;
  const by = mean - first[1];
  const change = step === first[0] ? `at step ${step}` : by === 0 ? `unchanged since step ${first[0]}` : [
    h("b", { class: changed(run) > 0 ? "up" : changed(run) < 0 ? "down" : "" }, signed(by)),
    ` since step ${first[0]}`, best[1] > mean ? `, best ${number(best[1])} at step ${best[0]}` : `, best so far`];
  return stat("Held-out reward", value(figure(mean), error ? `± ${number(1.96 * error, 2)}` : null), change,
    { "data-fact": "held_out" });
}

function reward(run) {
  const many = run.last.length, few = Math.min(many, run.steps - many); // steps before those of the mean
  const isTaught = mean(run.last, REWARD) === null && mean(run.last, APART) !== null, what = isTaught ? APART : REWARD;
  const now = mean(run.last, what), before = mean(run.first.slice(0, few), what), flat = mean(run.last, FLAT), cut = mean(run.last, CUT);
  const parts = [];
  if (now !== null) parts.push(before === null ? `mean of ${plural(many, "step")}` : `mean of the last ${many} steps, ${signed(now - before)} since the first ${few === 1 ? "one" : few}`);
  if (flat > 0) parts.push(`${percent(flat)} of groups all equal in reward: no gradient from them`);
  if (cut > 0) parts.push(`${percent(cut)} of responses cut`);
  return stat(isTaught ? "Divergence from the teacher" : "Reward of training", value(figure(now)), parts.map((each) => h("div", {}, each)), { "data-fact": "reward" });
}

// The mean of a metric over steps, as the server sends them; null if none has it.
function mean(rows, i) {
  const known = rows.map((row) => row[i]).filter((each) => each !== null);
  return known.length ? known.reduce((sum, each) => sum + each, 0) / known.length : null;
}

function steps(run) {
  const bar = run.max_steps ? h("progress", { class: tone(run), max: run.max_steps, value: run.steps, "aria-label": "Steps done" }) : null;
  const endings = Object.entries(run.endings).map(([ending, count]) => `${number(count)} ${ending}`).join(", ");
  return stat("Steps", value(number(run.steps), run.max_steps ? `of ${number(run.max_steps)}` : null),
    [bar ?? (run.attempts.length ? "without an end" : ""), endings ? h("div", {}, `groups: ${endings}`) : null], { "data-fact": "steps" });
}

function time(run) {
  const all = run.last.map((row) => row[SECONDS]).sort((a, b) => a - b);
  const each = all.length ? `${number(all[Math.floor(all.length / 2)], 1)} s a step (median of the last ${all.length})` : "";
  if (isOver(run)) return stat("Took", value(duration(run.seconds)), each, { "data-fact": "time" });
  return stat("Time left", value(run.left === null ? "–" : duration(run.left)), [`${duration(run.seconds)} so far`, each ? h("div", {}, each) : null], { "data-fact": "time" });
}

function pace(run) {
  const known = run.last.filter((row) => row[RATE] !== null), sum = (of) => known.reduce((all, row) => all + of(row), 0);
  const rate = known.length ? sum((row) => row[RATE] * row[SECONDS]) / sum((row) => row[SECONDS]) : null;
  return stat("Pace", h("span", { class: "value words" }, run.limit ? capital(run.limit.line) : "–"),
    rate === null ? "" : `${number(Math.round(rate))} tokens/s generated (last ${plural(run.last.length, "step")})`, { "data-fact": "pace" });
}

// What it is, by its configuration.
function made({ name, config, bound }) {
  const { model, reward, learner, rollout, schedule } = config;
  if (!learner) return null;
  const rewards = reward.functions.map((each) => `${each.function}${each.weight === 1 ? "" : ` × ${each.weight}`}`);
  const worlds = (config.environment?.classes ?? []).map((each) => each.environment);
  const parts = [
    `model ${model.path ?? model.name}`, `reward ${[...rewards, ...worlds].join(" + ") || "none"}`,
    `${learner.groups_per_batch} × ${rollout.num_generations} responses a step`,
    `learning rate ${short(learner.learning_rate)}`,
    `schedule ${schedule.name}: ${bound ? `tokens at most ${plural(bound, "version")} old` : "no stale tokens"}`,
  ];
  return h("p", { class: "facts" }, parts.map((text) => h("span", {}, text)), h("a", { href: to(name, "setup") }, "setup"));
}

// -- what is charted ---------------------------------------------------------------------------------

function controls({ axis, smooth, isLog, isAll, chosen, others }, metrics, names) {
  const add = ({ target: { value: part } }) => {
    const found = metrics.includes(part) ? [part] : metrics.filter((name) => part && name.includes(part));
    if (found.length) change({ metric: [...new Set([...chosen, ...found])] });
  };
  return form(
    h("label", { class: "pick" }, h("input", { type: "search", list: "metrics", placeholder: "Chart any metric…", "aria-label": "Chart a metric", title: "A part of names charts all that have it", onchange: add }),
      h("datalist", { id: "metrics" }, metrics.filter((name) => !chosen.includes(name)).map((name) => h("option", { value: name })))),
    h("span", { class: "chips" }, chip("all metrics", isAll, () => change({ all: isAll ? null : "true" })),
      chosen.length > 1 ? chip(`remove ${chosen.length} chosen`, false, () => change({ metric: null })) : null),
    choice("Axis", ["step", "time"], axis, (each) => change({ axis: each })),
    choice("Scale of values", ["linear", "log"], isLog ? "log" : "linear", (each) => change({ scale: each === "log" ? each : null })),
    labelled("smooth over", h("input", {
      type: "number", min: 1, max: 1000, value: smooth ?? "", placeholder: "auto",
      onchange: (event) => change({ smooth: event.target.value || null }),
    })),
    names.length ? h("span", { class: "chips" }, h("span", { class: "note" }, "beside"), names.map((name) => chip(name, others.includes(name),
      () => change({ with: others.includes(name) ? others.filter((one) => one !== name) : [...others, name] })))) : null);
}

function explained(name, meaning) {
  if (!meaning) return name;
  const [said, healthy] = meaning;
  return `${name}: ${said}${healthy ? `. In a run that learns: ${healthy}` : ""}`;
}

async function differences(names) {
  const found = Object.entries(await ask("differences", { run: names }));
  if (!found.length) return h("p", { class: "note" }, "Their configurations are the same.");
  return h("details", { class: "card", open: found.length <= 12 }, h("summary", {}, `What differs between their configurations: ${plural(found.length, "field")}`),
    table(["field", ...names], found.map(([field, values]) => h("tr", {},
      h("td", {}, h("code", {}, field)),
      values.map((each) => h("td", {}, h("code", {}, typeof each === "string" ? each : JSON.stringify(each))))))));
}
