// Lanes of the learner, the instances and the batches over time, and what limits the run.

import { change } from "../address.js";
import { ask } from "../api.js";
import { fill, h, styled } from "../dom.js";
import { KINDS, NAMES, at, draw } from "../lanes.js";
import { card, choice, table } from "../parts.js";
import { number, percent } from "../words.js";

const STEPS = 10;

export async function show(main, now) {
  const from = now.parameters.get("from"), to = now.parameters.get("to"), isWhole = now.parameters.has("whole");
  const isNewest = !from && !to && !isWhole;
  const kinds = h("p", { class: "legend" });
  const canvas = h("canvas", { class: "lanes", tabindex: "0", role: "img", "aria-label": "Lanes of learner and instances" });
  const told = h("p", { class: "note told", "aria-live": "polite" }, "Point at a span. The wheel or + and − zoom, dragging or the arrow keys move, 0 shows the newest steps.");
  const limits = h("section", { class: "card" });
  fill(main, h("h1", {}, "Time"), limits, card(null, stretch(), kinds, told, h("div", { class: "scroll" }, canvas)), advice(now.run));
  let found = null;

  async function refresh() {
    found = await ask(`runs/${now.run}/time`, { from: isNewest ? await newest(now.run) : from, to });
    const read = found.read < 1 ? h("p", { class: "note" }, `${Math.floor(100 * found.read)} % of the log is read`) : null;
    fill(limits, sentence(found.limits), read);
    fill(kinds, legend(found));
    draw(canvas, found);
  }
  function stretch() {
    const names = [`newest ${STEPS} steps`, "whole run"], chosen = isNewest ? names[0] : isWhole ? names[1] : null;
    return choice("Time shown", names, chosen, (each) => change({ from: null, to: null, whole: each === names[1] ? "true" : null }));
  }
  // The server reads a long log in parts, one for each request.
  async function readOn() {
    while (found.read < 1) await refresh();
  }

  function zoom(by, at = 0.5) {
    const middle = found.start + at * (found.end - found.start);
    const start = Math.max(middle - (middle - found.start) * by, 0);
    const end = Math.min(middle + (found.end - middle) * by, found.last);
    if (end - start > 0.002) change({ from: start.toFixed(3), to: end.toFixed(3), whole: null });
  }
  function shift(by) {
    const width = found.end - found.start;
    const start = Math.min(Math.max(found.start + by * width, 0), found.last - width);
    change({ from: start.toFixed(3), to: (start + width).toFixed(3), whole: null });
  }
  const place = (event) => (event.offsetX - NAMES) / (canvas.clientWidth - NAMES);
  canvas.addEventListener("wheel", (event) => { event.preventDefault(); zoom(event.deltaY > 0 ? 1.5 : 1 / 1.5, place(event)); }, { passive: false });
  let grabbed = null;
  canvas.addEventListener("pointerdown", (event) => { grabbed = place(event); canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", (event) => {
    if (grabbed !== null && Math.abs(place(event) - grabbed) > 0.01) shift(grabbed - place(event));
    grabbed = null;
  });
  canvas.addEventListener("pointermove", (event) => { const text = at(found, event, place(event)); if (text) fill(told, text); });
  const resized = () => { if (found) draw(canvas, found); };
  window.addEventListener("resize", resized);
  window.addEventListener("theme", resized);
  await refresh();
  readOn().catch(() => {}); // fails if the view was left
  return {
    refresh: from || to ? null : refresh,
    close: () => {
      window.removeEventListener("resize", resized);
      window.removeEventListener("theme", resized);
    },
    keys: {
      "+": () => zoom(1 / 1.5), "-": () => zoom(1.5), 0: () => change({ from: null, to: null, whole: null }),
      ArrowLeft: () => shift(-0.25), ArrowRight: () => shift(0.25),
    },
  };
}

const PARTS = { both: "both work", learner: "only the learner", instances: "only instances", environments: "waiting for environments", neither: "neither" };

function sentence(limits) {
  if (!limits) return h("p", { class: "note" }, "No step is done yet.");
  const parts = Object.entries(PARTS).filter(([name]) => limits[name] >= 0.005);
  const bar = h("div", { class: "shares", "aria-hidden": "true" }, parts.map(([name]) => {
    const part = h("span", { class: `share ${name}` });
    part.style.flexGrow = String(limits[name]);
    return part;
  }));
  return [h("h2", {}, `Pace: ${limits.line}`, h("span", { class: "note" }, ` (last ${limits.steps} steps)`)), bar,
    h("p", { class: "legend" }, parts.map(([name, text]) => h("span", { class: "entry" },
      h("i", { class: `swatch share ${name}` }), text, h("b", {}, percent(limits[name])))))];
}

// Advice of the simulator, on a click only, because it takes seconds of a core.
function advice(run) {
  const told = h("div", { "aria-live": "polite" });
  const button = h("button", { type: "button", onclick: () => work() }, "What would the simulator change?");
  async function work() {
    button.disabled = true;
    fill(told, h("p", { class: "note" }, "It is simulating this run and its neighbours…"));
    try {
      let found = await ask(`runs/${run}/advice`, { anew: "true" });
      while (found.working) {
        await new Promise((resolve) => { setTimeout(resolve, 500); });
        found = await ask(`runs/${run}/advice`);
      }
      fill(told, ...advised(found));
    } catch (error) {
      if (error.name !== "AbortError") fill(told, h("p", { class: "problem" }, error.message));
    }
    button.disabled = false;
  }
  return h("section", { class: "card" }, button, told);
}

function advised(found) {
  const fields = (change) => Object.entries(change.fields).map(([name, value]) => `--${name} ${value}`).join(" ");
  const gain = (share) => `${share >= 0 ? "+" : "−"}${number(100 * Math.abs(share), 1)} %`;
  const best = found.recommended;
  return [
    h("p", {}, best ? [h("b", {}, `It recommends ${fields(best)}: ${gain(best.gain)} steps per second.`),
      " What more staleness costs in reward it cannot say."]
      : h("b", {}, "It knows nothing that is worth a change.")),
    h("p", { class: "note" }, `This run, simulated with the lengths of its newest ${found.steps} steps: ${number(found.simulated)} steps per second, where it had ${number(found.steps_per_second)} (${gain(found.simulated / found.steps_per_second - 1)}). A gain within that distance is not recommended.`),
    found.changes.length ? table(["change", "steps per second"], found.changes.map((each) => h("tr", {},
      h("td", {}, h("code", {}, fields(each))), h("td", { class: "n" }, gain(each.gain))))) : null,
  ].filter(Boolean);
}

// When the newest steps begin, in seconds of the run; null if there are no others.
async function newest(run) {
  const { step_time: { time } } = await ask(`runs/${run}/metrics`, { name: "step_time" });
  return time.length > STEPS ? time.at(-STEPS - 1) : null;
}

// Of the kinds that are there.
function legend({ lanes }) {
  const there = new Set(lanes.flatMap((lane) => [...(lane.spans ?? []).map(([kind]) => kind),
    ...Object.entries(lane.shares ?? {}).filter(([, all]) => all.some((each) => each > 0)).map(([kind]) => kind)]));
  return Object.entries(KINDS).filter(([kind]) => there.has(kind)).map(([, [name, , text]]) => h("span", { class: "entry" },
    styled(h("i", { class: "swatch" }), "--fill", `var(${name})`), text));
}
