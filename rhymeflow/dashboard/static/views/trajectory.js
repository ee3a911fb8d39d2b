// One response: the conversation, turn by turn, and its tokens with their details.

import { change, to } from "../address.js";
import { ask } from "../api.js";
import { fill, h, styled } from "../dom.js";
import { badge, card, copier, facts, form, labelled, select, table } from "../parts.js";
import { conversation, isBrief, placed, promptOf, rendered, speaker, turn, turnsOf } from "../speakers.js";
import { quoted } from "../state.js";
import { different, tokensOf } from "../tokens.js";
import { number, plural } from "../words.js";
import { columns, ended } from "./group.js";

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
  const told = h("aside", { class: "card token-facts", "aria-live": "polite" }, h("p", { class: "note" }, "Point at a token, or walk with the arrow keys."));
  fill(main,
    h("div", { class: "head" },
      h("h1", {}, h("a", { href: to(now.run, "group", [group]) }, `Group ${group}`), `, response ${member}`),
      ended(found.reason)),
    h("div", { class: "response" },
      h("div", { class: "first" },
        card("Prompt", conversation(found.prompt), columns(found.columns),
          found.calls.length ? null : rendered(() => promptOf(found))), // of an agent, calls are what the policy read
        controls(found, now, colouring, other),
        h("section", { class: beside ? "side" : "first" },
          panel(found, beside, colouring, told), beside ? panel(beside, found, colouring, told) : null),
        segments(found)),
      h("div", { class: "aside" }, rewards(found), card("Response", facts(described(found))), told)));
  const go = (by) => () => {
    const next = found.siblings[found.siblings.indexOf(member) + by];
    if (next !== undefined) location.hash = to(now.run, "trajectory", [group, next]);
  };
  return { keys: { "[": go(-1), "]": go(1) } };
}

function described(found) {
  const versions = found.segments.map((each) => each.version);
  const from = Math.min(...versions), upto = Math.max(...versions);
  return [
    ["prompt", `row ${found.row}, ${found.epoch === null ? "of a suite" : `epoch ${found.epoch}`}`],
    ["length", plural(found.length ?? found.segments.reduce((sum, each) => sum + each.length, 0), "token")],
    ["calls", found.calls.length ? `${found.calls.length}, in ${plural(Math.max(...found.calls.map((each) => each.sequence)), "sequence")}` : null],
    ["versions", versions.length ? (from === upto ? String(from) : `${from} to ${upto}`) : null],
    ["trained on", found.step ? `in step ${found.step}, staleness ${found.step - 1 - from}` : null],
    ["group", found.ending_reason ?? found.ending ?? "open"],
  ];
}

function rewards(found) {
  if (found.reward === null) return card("Reward", h("p", { class: "note" }, found.components ? "None: nothing judges responses." : "None yet."));
  const all = Object.entries(found.components ?? {}), parts = all.length > 1 ? all.map(([name, value]) => [name, number(value)]) : [];
  const advantage = found.advantage === null ? null : number(found.advantage);
  return h("section", { class: "card stat" }, h("span", { class: "name" }, "Reward"), h("span", { class: "value" }, number(found.reward)),
    facts([...parts, ["advantage of each token", advantage]]));
}

function controls(found, now, colouring, other) {
  const choices = [["", "nothing"],
    ...found.siblings.filter((each) => each !== found.member).map((each) => [`${found.group}.${each}`, `response ${each}`]),
    ...found.earlier.map((each) => [`${each.group}.${found.member}`, `epoch ${each.epoch}`])];
  const line = `rhymeflow inspect ${quoted(found.directory)} --trajectory ${found.group}.${found.member}`;
  return form(
    labelled("colour by", select(Object.keys(COLOURINGS), colouring, (each) => change({ colour: each }))),
    labelled("beside", select(choices, other ?? "", (each) => change({ beside: each || null }))),
    h("span", { class: "chips" },
      copier(() => JSON.stringify(found), "copy as JSON"),
      copier(line, "copy as rhymeflow inspect"),
      found.generate ? copier(found.generate, "copy as rhymeflow generate") : null));
}

function panel(found, beside, colouring, told) {
  const all = tokensOf(found), turns = turnsOf(all.tokens);
  const [shade, least, most] = COLOURINGS[colouring];
  const differs = beside ? different(found.tokens ?? [], beside.tokens ?? []) : new Set();
  let last = null;

  function element(token) {
    const marks = [];
    if (last && token.begins && !token.observed) {
      if (last.version !== token.segment.version) marks.push(mark(`version ${token.segment.version}`));
      if (last.instance !== token.segment.instance) marks.push(mark(token.segment.instance));
    }
    if (!token.observed) last = token.segment;
    const value = shade(token, all);
    const tell = () => fill(told, facts(about(token, found.advantage)));
    const span = h("span", {
      class: ["token", token.observed ? "observed" : "", value === null ? "unknown" : "", differs.has(token.at) ? "differs" : ""].join(" "),
      tabindex: token.at === 0 ? "0" : "-1", onmouseenter: tell, onfocus: tell, onclick: tell, onkeydown: walk,
    }, visible(token.text));
    return [marks, value === null ? span : styled(span, "--share", value)];
  }

  return h("article", { class: "card" },
    h("div", { class: "head" }, h("h2", {}, `Response ${found.group}.${found.member}`), beside ? badge(`reward ${number(found.reward)}`) : null),
    found.tokens ? null : h("p", { class: "note" }, "Its tokens are not stored: they were deleted (run.keep_tokens), or the run was simulated."),
    found.tokens && !found.texts ? h("p", { class: "note" }, "The run's tokenizer is not on this machine: numbers of tokens.") : null,
    h("p", { class: "legend" }, h("span", { class: "token low" }, least), h("span", { class: "token high" }, most),
      differs.size ? h("span", { class: "token differs" }, "differs") : null),
    h("div", { class: "talk tokens" }, turns.map((each, i) => turn(`${speaker(turns, i)}${turns.length > 1 && isBrief(each) ? " brief" : ""}`,
      [plural(each.tokens.length, "token"), placed(found.calls, each)].filter(Boolean).join(", "), h("div", {}, each.tokens.map(element))))));
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
  const all = [...event.target.closest(".tokens").querySelectorAll(".token")];
  all[all.indexOf(event.target) + by]?.focus();
  event.preventDefault();
}

function about(token, advantage) {
  return [
    ["token", `${token.at}: ${JSON.stringify(token.text)}${token.id === null ? "" : `, number ${token.id}`}`],
    ["generated by", token.observed ? "the environment" : `${token.segment.instance}, version ${token.segment.version}`],
    ["log-probability, sampler", number(token.logprob, 4)],
    ["log-probability, learner", number(token.learner, 4)],
    ["draft", token.accepted === null ? "–" : token.accepted ? "drafted and accepted" : "sampled"],
    ["rejected in its segment", rejected(token.segment)],
    ["advantage", token.observed || token.flags & MASKED ? "–" : number(advantage)],
    ["loss", token.flags === null ? "–" : loss(token.flags)],
  ];
}

function rejected({ length, steps, drafted, observed }) {
  return observed || !drafted ? "–" : `${drafted - Math.max(length - steps, 0)} of ${drafted} drafted`;
}

function loss(flags) {
  const found = [[MASKED, "masked"], [CLIPPED, "clipped"], [CAPPED, "capped"]].filter(([bit]) => flags & bit);
  return found.length ? found.map(([, name]) => name).join(", ") : "in it";
}

function segments(found) {
  const rows = found.segments.map((each) => h("tr", {},
    [each.start, each.length, each.version, each.instance, each.steps, each.drafted,
      each.steps ? number(each.length / each.steps, 2) : "–"].map((value) => h("td", { class: "n" }, value))));
  return h("details", { class: "card" }, h("summary", {}, "Segments"),
    table(["from", "tokens", "version", "instance", "iterations", "drafted", "acceptance length"], rows));
}
