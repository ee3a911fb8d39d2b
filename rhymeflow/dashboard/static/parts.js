// Parts that several views are made of.

import { fill, h, styled } from "./dom.js";
import { number } from "./words.js";

export function card(title, ...children) {
  return h("section", { class: "card" }, title ? h("h2", {}, title) : null, children);
}

// `tone`: accent, good, warn or bad.
export function badge(text, tone = "", isLive = false) {
  return h("span", { class: `badge ${tone} ${isLive ? "live" : ""}` }, text);
}

export function notices(...each) {
  return h("ul", { class: "notices" }, each);
}

export function notice(tone, ...children) {
  const marks = { good: "✓", warn: "!", bad: "✕" };
  return h("li", { class: `notice ${tone}` }, h("span", { class: "mark", "aria-hidden": "true" }, marks[tone] ?? "·"),
    h("div", {}, children));
}

export function stat(name, value, more, attributes = {}) {
  return h("section", { class: "card stat", ...attributes }, h("span", { class: "name" }, name), value,
    h("span", { class: "more" }, more));
}

export function value(text, unit = null) {
  return h("span", { class: "value" }, text, unit ? h("small", {}, ` ${unit}`) : null);
}

// A reward in the colour of its place among those of its group; a link if it has a place to go to.
export function rewarded(reward, least, most, attributes = {}) {
  const low = Math.min(0, least ?? 0), high = Math.max(1, most ?? 1);
  const chip = h(attributes.href ? "a" : "span", { ...attributes, class: "reward" }, reward === null ? "·" : number(reward, 2));
  return styled(chip, "--share", reward === null ? 0 : (reward - low) / (high - low));
}

export function table(headings, rows, kind = "") {
  return h("div", { class: "scroll" },
    h("table", { class: kind },
      h("thead", {}, h("tr", {}, headings.map((each) => h("th", { scope: "col" }, each)))),
      h("tbody", {}, rows)));
}

export function facts(pairs) {
  return h("dl", {}, pairs.filter(([, text]) => text !== null).map(([key, text]) => [h("dt", {}, key), h("dd", {}, text)]));
}

// A button that copies, and says that it did.
export function copier(text, label = "copy") {
  const button = h("button", { type: "button", onclick: async () => {
    await navigator.clipboard.writeText(typeof text === "function" ? text() : text);
    fill(button, "copied");
    setTimeout(() => fill(button, label), 1200);
  } }, label);
  return button;
}

export function copied(text) {
  return h("div", { class: "copy" }, h("code", {}, text), copier(text));
}

// One of several, as buttons beside each other.
export function choice(name, values, chosen, onchoose) {
  return h("span", { class: "choice", role: "group", "aria-label": name }, values.map((each) => h("button", {
    type: "button", "aria-pressed": String(each === chosen), onclick: () => onchoose(each),
  }, each)));
}

export function chip(text, isPressed, onclick) {
  return h("button", { type: "button", "aria-pressed": String(isPressed), onclick }, text);
}

export function form(...children) {
  return h("form", { class: "controls", onsubmit: (event) => event.preventDefault() }, children);
}

export function labelled(text, element) {
  return h("label", {}, text, element);
}

export function select(values, chosen, onchoose, attributes = {}) {
  return h("select", { ...attributes, onchange: (event) => onchoose(event.target.value) },
    values.map((each) => {
      const [one, text] = Array.isArray(each) ? each : [each, each];
      return h("option", { value: one, selected: one === chosen }, text);
    }));
}
