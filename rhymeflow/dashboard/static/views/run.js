// A run: its configuration, progress and curves, with those of other runs on request. A click on a
// curve opens the step's groups.

import { change, to } from "../address.js";
import { ask } from "../api.js";
import { curves, metricsOf } from "../curves.js";
import { duration, fill, h, number, table } from "../dom.js";

const CURVES = [
  ["Reward of training", ["reward"]],
  ["Held-out reward", ["eval/reward"]],
  ["Tokens of a response", ["completions/mean_length"]],
  ["Staleness, versions", ["staleness/mean", "staleness/max"]],
  ["Idle share of the time", ["idle/rollout", "idle/learner"]],
  ["Generated tokens per second", ["rollout/tokens_per_s"]],
  ["Mean acceptance length", ["draft/mean_acceptance_length"]],
  ["Entropy", ["entropy"]],
  ["KL of sampler and learner", ["off_policy/mismatch_kl"]],
  ["Clipped share", ["clip_ratio/region_mean"]],
  ["Gradient norm", ["grad_norm"]],
  ["Seconds of a step", ["step_time"]],
];

export async function show(main, now) {
  const axis = now.parameters.get("axis") === "time" ? "time" : "step";
  const smooth = Number(now.parameters.get("smooth") ?? 1);
  const all = (await ask("runs")).map((each) => each.name);
  const others = now.parameters.getAll("with").filter((name) => all.includes(name) && name !== now.run);
  const facts = h("section", { class: "facts" });
  const onstep = axis === "step" ? (step) => { location.hash = to(now.run, "groups", [], { step }); } : null;
  const drawn = curves(CURVES, { axis, smooth, onstep });
  fill(main, facts, controls(axis, smooth, all.filter((name) => name !== now.run), others),
    others.length ? await differences([now.run, ...others]) : null, drawn.root);

  async function refresh() {
    const run = await ask(`runs/${now.run}`);
    fill(facts, ...described(run, now.run));
    const points = {};
    for (const name of [now.run, ...others]) {
      const metrics = metricsOf(CURVES, name === now.run ? run : await ask(`runs/${name}`));
      points[name] = metrics.length ? await ask(`runs/${name}/metrics`, { name: metrics }) : {};
    }
    drawn.show(points);
    return run.ended;
  }

  const ended = await refresh();
  return { refresh: ended ? null : refresh, close: () => drawn.close() };
}

function controls(axis, smooth, names, others) {
  return h("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
    h("label", {}, "over ", h("select", { onchange: (event) => change({ axis: event.target.value }) },
      ["step", "time"].map((each) => h("option", { selected: each === axis }, each)))),
    h("label", {}, "smooth over ", h("input", {
      type: "number", min: 1, max: 1000, value: smooth,
      onchange: (event) => change({ smooth: event.target.value }),
    }), " points"),
    names.length ? h("span", { class: "chips" }, "beside ", names.map((name) => h("button", {
      type: "button", "aria-pressed": String(others.includes(name)),
      onclick: () => change({ with: others.includes(name) ? others.filter((one) => one !== name) : [...others, name] }),
    }, name))) : null);
}

async function differences(names) {
  const found = Object.entries(await ask("differences", { run: names }));
  if (!found.length) return h("p", { class: "note" }, "Their configurations are the same.");
  return h("details", { open: found.length <= 12 }, h("summary", {}, `What differs between their configurations: ${found.length} fields`),
    table(["field", ...names], found.map(([field, values]) => h("tr", {},
      h("td", {}, h("code", {}, field)),
      values.map((value) => h("td", {}, h("code", {}, typeof value === "string" ? value : JSON.stringify(value))))))));
}

function described(run, name) {
  const of = run.max_steps ? ` of ${number(run.max_steps)}` : "";
  const left = run.ended ? null : run.left;
  const rows = [
    ["steps", `${number(run.steps)}${of}`],
    ["time", duration(run.seconds)],
    ["left, at this rate", left === null ? "–" : duration(left)],
    ["state", run.ended ? "ended" : "not ended"],
    ["schedule", `${run.config.schedule?.name}, bound ${run.bound}`],
    ["model", run.config.model?.path ?? run.config.model?.name ?? "–"],
    ["groups", Object.entries(run.endings).map(([ending, count]) => `${number(count)} ${ending}`).join(", ")],
    ["events", number(run.events)],
  ];
  const verdicts = run.verdicts.map((each) => h("li", {}, h("strong", {}, each.said), `: ${each.remedy}`));
  return [h("h1", {}, name), verdicts.length ? h("ul", { class: "verdicts" }, verdicts) : null, h("dl", {}, rows.map(([key, value]) => [h("dt", {}, key), h("dd", {}, value)]))];
}
