// A run: what it is, how far it has come, its curves. A click on a curve opens the step's groups.

import { change, to } from "../address.js";
import { ask } from "../api.js";
import { chart } from "../charts.js";
import { duration, fill, h, number } from "../dom.js";

const CURVES = [
  ["Reward of training", ["reward"]],
  ["Held-out reward", ["eval/reward"]],
  ["Tokens of a response", ["completions/mean_length"]],
  ["Staleness, versions", ["staleness/mean", "staleness/max"]],
  ["Idle share of the time", ["idle/rollout", "idle/learner"]],
  ["Mean acceptance length", ["draft/mean_acceptance_length"]],
  ["Entropy", ["entropy"]],
  ["KL of sampler and learner", ["off_policy/mismatch_kl"]],
  ["Clipped share", ["clip_ratio"]],
  ["Gradient norm", ["grad_norm"]],
  ["Seconds of a step", ["step_time"]],
];

export async function show(main, now) {
  const axis = now.parameters.get("axis") === "time" ? "time" : "step";
  const smooth = Number(now.parameters.get("smooth") ?? 1);
  const facts = h("section", { class: "facts" });
  const curves = h("section", { class: "curves" });
  fill(main, facts, controls(axis, smooth), curves);
  let made = [];

  async function refresh() {
    const run = await ask(`runs/${now.run}`);
    fill(facts, ...described(run, now.run));
    const wanted = CURVES.filter(([, names]) => names.some((each) => run.metrics.includes(each)));
    const found = await ask(`runs/${now.run}/metrics`, { name: wanted.flatMap(([, names]) => names) });
    made.forEach((each) => each.destroy());
    made = wanted.map(([title, names]) => {
      const place = h("figure", {});
      curves.append(place);
      const series = names.map((name) => ({ label: name, points: found[name] }));
      const onstep = axis === "step" ? (step) => { location.hash = to(now.run, "groups", [], { step }); } : null;
      return chart(place, title, series, { axis, smooth, onstep });
    });
    fill(curves, ...made.map((each) => each.root.parentElement));
    return run.ended;
  }

  const ended = await refresh();
  return { refresh: ended ? null : refresh, close: () => made.forEach((each) => each.destroy()) };
}

function controls(axis, smooth) {
  return h("form", { class: "controls" },
    h("label", {}, "over ", h("select", { onchange: (event) => change({ axis: event.target.value }) },
      ["step", "time"].map((each) => h("option", { selected: each === axis }, each)))),
    h("label", {}, "smooth over ", h("input", {
      type: "number", min: 1, max: 1000, value: smooth,
      onchange: (event) => change({ smooth: event.target.value }),
    }), " points"));
}

function described(run, name) {
  const of = run.max_steps ? ` of ${number(run.max_steps)}` : "";
  const rate = run.steps / run.seconds;
  const left = run.max_steps && rate && !run.ended ? (run.max_steps - run.steps) / rate : null;
  const rows = [
    ["steps", `${number(run.steps)}${of}`],
    ["time", duration(run.seconds)],
    ["left, at this rate", left === null ? "–" : duration(left)],
    ["state", run.ended ? "ended" : "not ended"],
    ["schedule", `${run.config.schedule?.name}, bound ${run.config.schedule?.max_staleness}`],
    ["model", run.config.model?.path ?? run.config.model?.name ?? "–"],
    ["groups", Object.entries(run.endings).map(([ending, count]) => `${number(count)} ${ending}`).join(", ")],
    ["events", number(run.events)],
  ];
  if (run.share_indexed < 1) rows.push(["being indexed", `${Math.round(100 * run.share_indexed)} %`]);
  return [h("h1", {}, name), h("dl", {}, rows.map(([key, value]) => [h("dt", {}, key), h("dd", {}, value)]))];
}
