// Which metrics are charted, under which titles, if nobody chooses: those of a run that it has.

const SECTIONS = [
  ["Learning", [
    ["Reward", ["reward"]],
    ["Held-out reward", ["eval/reward"]],
    ["Divergence from the teacher", ["distillation/divergence"]],
    ["Groups without spread", ["frac_reward_zero_std"]],
    ["Responses cut", ["completions/clipped_ratio"]],
    ["Tokens of a response", ["completions/mean_length"]],
    ["Entropy", ["entropy"]],
    ["KL to the reference", ["kl"]],
    ["KL sampler to learner", ["off_policy/mismatch_kl"]],
    ["Clipped tokens", ["clip_ratio/region_mean"]],
    ["Gradient norm", ["grad_norm"]],
    ["Learning rate", ["learning_rate"]],
  ]],
  ["Turns and tools", [
    ["Turns", ["turns/mean", "turns/max"]],
    ["Tool calls", ["tools/call_frequency"]],
    ["Failed tool calls", ["tools/failure_frequency"]],
    ["Seconds of an answer", ["env/step_s"]],
  ]],
  ["Pace", [
    ["Tokens per second", ["rollout/tokens_per_s"]],
    ["Seconds of a step", ["step_time"]],
    ["Idle share", ["idle/rollout", "idle/learner"]],
    ["Staleness", ["staleness/mean", "staleness/max"]],
    ["Acceptance length", ["draft/mean_acceptance_length"]],
  ]],
];
const FUNCTION = /^rewards\/(.+)\/mean$/;
const SUITE = /^eval\/(?!logged\/)(.+)\/((?:avg|pass|maj)@\d+)$/;

// Names of metrics, each once; a row's number and time are none.
export function metricsOf(runs) {
  return [...new Set(runs.flatMap((run) => run.metrics))].filter((name) => name !== "step" && name !== "time").sort();
}

// [[section, [[title, [metric, ...]], ...]], ...] of what these runs have.
export function sectionsOf(runs) {
  const names = metricsOf(runs);
  const sections = SECTIONS.map(([section, charts]) => [section, charts
    .map(([title, wanted]) => [title, wanted.filter((name) => names.includes(name))])
    .filter(([, known]) => known.length)]);
  const functions = names.filter((name) => FUNCTION.test(name));
  const isSeveral = runs.some((run) => functions.filter((name) => run.metrics.includes(name)).length > 1);
  if (isSeveral) sections[0][1].splice(2, 0, ["Rewards by function", functions]);
  sections.splice(1, 0, ["Suites", suites(names)]);
  return sections.filter(([, charts]) => charts.length);
}

// Sections of all metrics that these do not chart, by the first part of their names.
export function rest(runs, sections) {
  const charted = new Set(sections.flatMap(([, charts]) => charts.flatMap(([, names]) => names)));
  const found = new Map();
  for (const name of metricsOf(runs).filter((each) => !charted.has(each))) {
    const part = name.includes("/") ? name.split("/")[0] : "others";
    found.set(part, [...found.get(part) ?? [], [name, [name]]]);
  }
  return [...found];
}

function suites(names) {
  const found = new Map();
  for (const name of names) {
    const match = SUITE.exec(name);
    if (!match || (match[1] === "held_out" && match[2].endsWith("@1"))) continue; // that is eval/reward
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push(name);
  }
  return [...found].map(([suite, known]) => [`Suite ${suite}`, known]);
}
