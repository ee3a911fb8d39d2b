// What a run is made of: checkpoints, the prompt as the policy reads it, data and code, configuration.

import { to } from "../address.js";
import { ask } from "../api.js";
import { fill, h } from "../dom.js";
import { card, copied, facts, table } from "../parts.js";
import { promptOf } from "../speakers.js";
import { bytes, duration, plural } from "../words.js";

export async function show(main, now) {
  const [run, about] = await Promise.all([ask(`runs/${now.run}`), ask(`runs/${now.run}/about`)]);
  fill(main, h("h1", {}, "Setup"), changed(about.changed, run.config),
    h("section", { class: "side" }, card("Run", facts(described(run))), checkpoints(run, about.checkpoints), await prompt(now, about.first)),
    h("section", { class: "first" }, about.sources.map(source)),
    configuration(run.config));
  return {};
}

// All other fields are as in the recipe, or as by default. Those come last that it leaves to the machine
// or the data, unless somebody chose them.
function changed({ recipe, fields }, config) {
  const from = recipe ? `recipe ${recipe}` : "default", here = Object.fromEntries(flat(config));
  const isOpen = ([, usual]) => usual === null || usual === "auto";
  const rows = Object.entries(fields).sort((a, b) => isOpen(a) - isOpen(b)).map(([name, usual]) => h("tr", { class: isOpen([name, usual]) ? "open" : null },
    h("td", {}, h("code", { class: "n" }, name)), [here[name], usual].map((each) => h("td", {}, h("code", {}, text(each))))));
  return card(`Changed from the ${recipe ? from : "defaults"}`,
    rows.length ? table(["field", "this run", from], rows) : h("p", { class: "note" }, "Nothing."));
}

function text(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

function described(run) {
  const attempts = run.attempts.map((each, i) => `${each.started}${i ? `, resumed at ${duration(each.time)}` : ""}`);
  return [
    ["directory", copied(run.directory)],
    ["began", attempts.map((each) => h("div", {}, each))],
    ["model", run.config.model?.path ?? run.config.model?.name ?? "–"],
    ["schedule", `${run.config.schedule?.name}, bound ${run.bound}`],
    ["seed", String(run.config.run?.seed ?? "–")],
  ];
}

function checkpoints(run, found) {
  const best = run.held_out[1]?.[0], steps = Object.keys(found).map(Number).sort((a, b) => b - a);
  if (!steps.length) return card("Checkpoints", h("p", { class: "note" }, "None is saved yet."));
  const says = (step, i) => [i === 0 ? "newest" : null, step === best ? "best held-out reward" : null].filter(Boolean).join(", ");
  return card("Checkpoints", steps.map((step, i) => h("div", {},
    h("div", { class: "note small" }, `step ${step}${says(step, i) ? `: ${says(step, i)}` : ""}`), copied(found[step]))));
}

async function prompt(now, first) {
  if (!first) return null;
  const found = await ask(`runs/${now.run}/trajectories/${first.join("/")}`);
  return card("A prompt as the policy reads it", h("pre", { class: "output long" }, promptOf(found)),
    h("p", { class: "note small" }, "of ", h("a", { href: to(now.run, "group", [first[0]]) }, `group ${first[0]}`), ", with the template and special tokens"));
}

function source(each) {
  const where = each.path ? `${each.path}${each.bytes === null ? "" : `, ${bytes(each.bytes)}`}` : "not a file on this machine, or a module";
  const lines = each.text?.replace(/\n$/, "").split("\n").map((line, i) => h("span", { "aria-current": i + 1 === each.line ? "true" : null }, line || " "));
  const details = h("details", { class: "card" },
    h("summary", {}, h("b", {}, each.field), " ", h("code", {}, each.spec), h("div", { class: "note small" }, where)),
    lines ? h("div", { class: "source", tabindex: "0" }, lines) : h("p", { class: "note" }, "There is no text of it to show."));
  details.addEventListener("toggle", () => {
    const defined = details.querySelector(".source [aria-current]");
    if (defined) defined.parentElement.scrollTop = defined.offsetTop - defined.parentElement.offsetTop - 40;
  });
  return details;
}

function configuration(config) {
  const list = h("div", { class: "sections" });
  const sections = Object.entries(config).filter(([, value]) => isSection(value)).map(([name, value]) => [name, flat(value)]);
  const rows = [["general", Object.entries(config).filter(([, value]) => !isSection(value))], ...sections];
  const pick = (part) => {
    const shown = rows.map(([name, fields]) => [name, fields.filter(([field]) => `${name}.${field}`.includes(part))]).filter(([, fields]) => fields.length);
    fill(list, shown.length ? shown.map(([name, fields]) => h("section", {}, h("h3", {}, name),
      facts(fields.map(([field, value]) => [field, text(value)]))))
      : h("p", { class: "note" }, "No field has this in its name."));
  };
  pick("");
  return card(null, h("div", { class: "head" }, h("h2", {}, "Configuration"), h("span", { class: "note" }, plural(rows.reduce((sum, [, each]) => sum + each.length, 0), "field")),
    h("input", { class: "end", type: "search", placeholder: "Find a field…", "aria-label": "Find a field", oninput: (event) => pick(event.target.value.trim()) })), list);
}

function isSection(value) {
  return value !== null && typeof value === "object" && !Array.isArray(value);
}

function flat(value, path = "") {
  return Object.entries(value).flatMap(([name, each]) => (isSection(each) && Object.keys(each).length
    ? flat(each, `${path}${name}.`) : [[path + name, each]]));
}
