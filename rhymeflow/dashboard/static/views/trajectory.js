// One response: the conversation, and its tokens with their details.

import { change, to } from "../address.js";
import { ask } from "../api.js";
import { fill, h, number, table } from "../dom.js";
import { columns, conversation } from "./group.js";

const CLIPPED = 1, CAPPED = 2, MASKED = 4;

// Name, function of a token that gives a value from 0 to 1, and labels of the legend's two ends.
const COLOURINGS = {
  "log-probability": [(t) => t.logprob === null ? null : Math.min(-t.logprob / 5, 1), "certain", "unlikely"],
  "learner − sampler": [(t) => t.learner === null || t.logprob === null ? null
    : Math.min(Math.abs(t.learner - t.logprob) / 0.5, 1), "the same", "0.5 nats or more apart"],
  version: [(t, all) => all.versions < 2 ? 0 : t.versionIndex / (all.versions - 1), "oldest", "newest"],
  drafts: [(t) => t.accepted === null ? null : t.accepted, "sampled alone", "drafted and accepted"],
  loss: [(t) => t.flags === null ? null : (t.flags & MASKED ? 1 : t.flags & (CLIPPED | CAPPED) ? 0.5 : 0),
    "in the loss", "masked"],
};

export async function show(main, now) {
  const [group, member] = now.parts.map(Number);
  const found = await ask(`runs/${now.run}/trajectories/${group}/${member}`);
  const other = now.parameters.get("beside");
  const beside = other ? await ask(`runs/${now.run}/trajectories/${other.replace(".", "/")}`) : null;
  const colouring = now.parameters.get("colour") in COLOURINGS ? now.parameters.get("colour") : "log-probability";
  const told = h("aside", { class: "token-facts", "aria-live": "polite" }, "Point at a token, or walk with the arrow keys.");
  fill(main,
    h("h1", {}, h("a", { href: to(now.run, "group", [group]) }, `Group ${group}`), `, response ${member}`),
    h("p", {}, facts(found).join(" · ")),
    rewards(found), conversation(found.prompt), columns(found.columns),
    controls(found, now, colouring, other),
    told,
    h("section", { class: "side" },
      panel(found, beside, colouring, told), beside ? panel(beside, found, colouring, told) : null),
    segments(found));
  const go = (by) => () => {
    const next = found.siblings[found.siblings.indexOf(member) + by];
    if (next !== undefined) location.hash = to(now.run, "trajectory", [group, next]);
  };
  return { keys: { "[": go(-1), "]": go(1) } };
}

function facts(found) {
  const versions = found.segments.map((each) => each.version);
  return [
    `prompt ${found.row}`, found.epoch === null ? "of a suite" : `epoch ${found.epoch}`,
    `${found.length ?? found.segments.reduce((sum, each) => sum + each.length, 0)} tokens`,
    found.reason ?? "not complete",
    versions.length ? `versions ${Math.min(...versions)} to ${Math.max(...versions)}` : "",
    found.step ? `trained on in step ${found.step}, staleness ${found.step - 1 - Math.min(...versions)}`
      : (found.ending_reason ?? found.ending ?? "open"),
  ].filter(Boolean);
}

function rewards(found) {
  if (found.reward === null) return h("p", {}, "no reward yet");
  const parts = Object.entries(found.components ?? {}).map(([name, value]) => [h("dt", {}, name), h("dd", {}, number(value))]);
  const advantage = found.advantage === null ? null
    : [h("dt", {}, "advantage of each token"), h("dd", {}, number(found.advantage))];
  return h("dl", { class: "rewards" }, h("dt", {}, "reward"), h("dd", {}, number(found.reward)), parts, advantage);
}

function controls(found, now, colouring, other) {
  const choices = [["", "nothing"],
    ...found.siblings.filter((each) => each !== found.member).map((each) => [`${found.group}.${each}`, `response ${each}`]),
    ...found.earlier.map((each) => [`${each.group}.${found.member}`, `epoch ${each.epoch}`])];
  const line = `rhymeflow inspect '${found.directory.replaceAll("'", "'\\''")}' --trajectory ${found.group}.${found.member}`;
  return h("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
    h("label", {}, "colour by ", h("select", { onchange: (event) => change({ colour: event.target.value }) },
      Object.keys(COLOURINGS).map((each) => h("option", { selected: each === colouring }, each)))),
    h("label", {}, "beside ", h("select", { onchange: (event) => change({ beside: event.target.value || null }) },
      choices.map(([value, text]) => h("option", { value, selected: value === (other ?? "") }, text)))),
    h("button", { type: "button", onclick: () => navigator.clipboard.writeText(JSON.stringify(found)) }, "copy as JSON"),
    h("button", { type: "button", onclick: () => navigator.clipboard.writeText(line) }, "copy as rhymeflow inspect"),
    found.generate ? h("button", { type: "button", onclick: () => navigator.clipboard.writeText(found.generate) }, "copy as rhymeflow generate") : null);
}

function tokensOf(found) {
  const versions = [...new Set(found.segments.map((each) => each.version))].sort((a, b) => a - b);
  const tokens = [];
  for (const segment of found.segments) {
    for (let i = 0; i < segment.length; i += 1) {
      const at = segment.start + i;
      tokens.push({
        at, segment, observed: segment.observed, begins: i === 0,
        id: found.tokens?.[at] ?? null,
        text: found.texts?.[at] ?? (found.tokens ? `⟨${found.tokens[at]}⟩` : "·"),
        logprob: segment.observed ? null : found.logprobs?.[at] ?? null,
        learner: segment.observed ? null : found.learner_logprobs?.[at] ?? null,
        accepted: segment.observed ? null : found.accepted?.[at] ?? null,
        flags: found.flags?.[at] ?? null,
        versionIndex: versions.indexOf(segment.version),
      });
    }
  }
  return { tokens, versions: versions.length };
}

function panel(found, beside, colouring, told) {
  const all = tokensOf(found);
  const [shade, least, most] = COLOURINGS[colouring];
  const differs = beside ? different(found.tokens ?? [], beside.tokens ?? []) : new Set();
  let last = null;
  const elements = all.tokens.map((token) => {
    const marks = [];
    if (last && token.begins && last.segment.version !== token.segment.version) marks.push(mark(`version ${token.segment.version}`));
    if (last && token.begins && last.segment.instance !== token.segment.instance) marks.push(mark(token.segment.instance));
    last = token;
    const value = shade(token, all);
    const span = h("span", {
      class: ["token", token.observed ? "observed" : "", value === null ? "unknown" : "", differs.has(token.at) ? "differs" : ""].join(" "),
      tabindex: token.at === 0 ? "0" : "-1",
      onmouseenter: () => fill(told, ...tell(token, found.advantage)),
      onfocus: () => fill(told, ...tell(token, found.advantage)),
      onkeydown: walk,
    }, visible(token.text));
    if (value !== null) span.style.setProperty("--share", value);
    return [marks, span];
  });
  const note = found.tokens ? null : h("p", { class: "note" }, "Its tokens are not stored: they were deleted (run.keep_tokens), or the run was simulated.");
  const numbers = found.tokens && !found.texts ? h("p", { class: "note" }, "The run's tokenizer is not on this machine: numbers of tokens.") : null;
  return h("article", {},
    h("h2", {}, `response ${found.group}.${found.member}`), note, numbers,
    h("p", { class: "legend" }, h("span", { class: "token low" }, least), " ", h("span", { class: "token high" }, most),
      " ", h("span", { class: "token observed" }, "what an environment answered")),
    h("div", { class: "tokens" }, elements));
}

function mark(text) {
  return h("span", { class: "mark" }, text);
}

function visible(text) {
  return text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥");
}

function walk(event) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by) return;
  const all = [...event.target.parentElement.querySelectorAll(".token")];
  all[all.indexOf(event.target) + by]?.focus();
  event.preventDefault();
}

function tell(token, advantage) {
  const what = [
    ["token", `${token.at}: ${JSON.stringify(token.text)}${token.id === null ? "" : `, number ${token.id}`}`],
    ["generated by", token.observed ? "the environment" : `${token.segment.instance}, version ${token.segment.version}`],
    ["log-probability, sampler", number(token.logprob, 4)],
    ["log-probability, learner", number(token.learner, 4)],
    ["draft", token.accepted === null ? "–" : token.accepted ? "drafted and accepted" : "sampled"],
    ["rejected in its segment", rejected(token.segment)],
    ["advantage", token.observed || token.flags & MASKED ? "–" : number(advantage)],
    ["loss", token.flags === null ? "–" : loss(token.flags)],
  ];
  return [h("dl", {}, what.map(([key, value]) => [h("dt", {}, key), h("dd", {}, value)]))];
}

function rejected({ length, steps, drafted, observed }) {
  return observed || !drafted ? "–" : `${drafted - Math.max(length - steps, 0)} of ${drafted} drafted`;
}

function loss(flags) {
  const found = [[MASKED, "masked"], [CLIPPED, "clipped"], [CAPPED, "capped"]].filter(([bit]) => flags & bit);
  return found.length ? found.map(([, name]) => name).join(", ") : "in it";
}

// Positions of `tokens` that are not in the longest common subsequence with `others`. Equal beginnings
// and ends are removed before; if more than two thousand are left, all from the first difference on.
function different(tokens, others) {
  let begin = 0;
  while (begin < tokens.length && begin < others.length && tokens[begin] === others[begin]) begin += 1;
  let end = 0;
  while (end < tokens.length - begin && end < others.length - begin
    && tokens[tokens.length - 1 - end] === others[others.length - 1 - end]) end += 1;
  const a = tokens.slice(begin, tokens.length - end), b = others.slice(begin, others.length - end);
  const found = new Set();
  if (a.length > 2000 || b.length > 2000) {
    a.forEach((_, i) => found.add(begin + i));
    return found;
  }
  const width = b.length + 1;
  const lengths = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      lengths[i * width + j] = a[i] === b[j] ? lengths[(i + 1) * width + j + 1] + 1
        : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
    }
  }
  for (let i = 0, j = 0; i < a.length;) {
    if (j < b.length && a[i] === b[j]) { i += 1; j += 1; }
    else if (j < b.length && lengths[i * width + j + 1] >= lengths[(i + 1) * width + j]) j += 1;
    else { found.add(begin + i); i += 1; }
  }
  return found;
}

function segments(found) {
  const rows = found.segments.map((each) => h("tr", {},
    [each.start, each.length, each.version, each.instance, each.steps, each.drafted,
      each.steps ? number(each.length / each.steps, 2) : "–"].map((value) => h("td", { class: "n" }, value))));
  return h("details", {}, h("summary", {}, "Segments"),
    table(["from", "tokens", "version", "instance", "iterations", "drafted", "acceptance length"], rows));
}
