// A conversation: messages of the prompt, and turns of a response, each with who speaks.

import { h } from "./dom.js";

const ROLE = /[<|[>\n](tool|user)(?:_re\w*|[\]>|\n<])/gi;

// Who answers the policy, by the chat template's marks at the beginning; else it is the environment.
export function answerer(text) {
  const roles = [...`\n${text.slice(0, 120)}`.matchAll(ROLE)].map(([, role]) => role.toLowerCase());
  return roles.includes("tool") ? "tool" : roles[0] ?? "environment";
}

export function turn(who, note, ...children) {
  return h("section", { class: `turn ${who}` },
    h("div", { class: "who" }, who.split(" ")[0], note ? h("span", { class: "note" }, note) : null), children);
}

export function conversation(prompt) {
  const messages = typeof prompt === "string" ? [{ role: "user", content: prompt }] : prompt;
  return h("div", { class: "talk" }, messages.map((each) => turn(each.role, null,
    h("pre", { class: "long" }, each.content || JSON.stringify(each.tool_calls, null, 1) || ""))));
}

// What the policy read, special tokens and template included; only asked for when it is opened.
export function rendered(load) {
  const place = h("pre", { class: "long" }, "…");
  const details = h("details", {}, h("summary", {}, "The prompt as the policy read it, with the template"), place);
  details.addEventListener("toggle", async () => {
    if (details.open) place.textContent = await load();
  }, { once: true });
  return details;
}

export function promptOf(found) {
  return found.prompt_texts?.join("") ?? "The run's tokenizer is not on this machine.";
}

// Consecutive tokens of one speaker: [{ observed, tokens }]; `tokens` have the field `observed`.
export function turnsOf(tokens) {
  const turns = [];
  for (const token of tokens) {
    if (turns.at(-1)?.observed !== token.observed) turns.push({ observed: token.observed, tokens: [] });
    turns.at(-1).tokens.push(token);
  }
  return turns;
}

// Whether a turn fits on a line with who speaks.
export function isBrief({ tokens }) {
  return tokens.length <= 12 && !tokens.some((token) => token.text.trimEnd().includes("\n"));
}

export function speaker(turns, i) {
  const { observed, tokens } = turns[i];
  return observed ? answerer(tokens.slice(0, 60).map((token) => token.text).join("")) : "assistant";
}

// Which call of an agent's program a turn is, or answers.
export function placed(calls, { observed, tokens }) {
  const made = calls.findLast((each) => each.start <= tokens[0].at);
  if (!made) return null;
  if (!observed) return made.sequence === null ? null : `trained on in sequence ${made.sequence}`;
  return `call ${made.call}, ${made.continues === null ? "begins a conversation" : `continues call ${made.continues}`}`;
}
