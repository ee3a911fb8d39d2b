// Lanes of the learner, the instances and the batches over time, and what limits the run.

import { change } from "../address.js";
import { ask } from "../api.js";
import { colour } from "../charts.js";
import { duration, fill, h, number, table } from "../dom.js";

const KINDS = { // colour, height within a lane, and label, in the order of drawing
  there: ["--raised", 1, "is there"],
  generating: ["--good", 0.8, "generates"],
  prefill: ["--text", 0.25, "prefills, within a quarter second"],
  waiting: ["--sand", 0.25, "waits for environments"],
  answering: ["--sand", 0.8, "environments are asked"],
  training: ["--accent", 0.8, "trains"],
  evaluation: ["--violet", 0.8, "evaluates"],
  pull: ["--hot", 0.8, "pulls weights"],
};
const LANE = 24, NAMES = 110, AXIS = 22;
const POINTS = 100; // of a batch's filling, as the server sends them

export async function show(main, now) {
  const from = now.parameters.get("from"), to = now.parameters.get("to");
  const query = { from, to };
  const canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": "Lanes of learner and instances" });
  const told = h("p", { class: "token-facts", "aria-live": "polite" }, "Point at a span. The wheel or + and − zoom, dragging or the arrow keys move, 0 shows all.");
  const limits = h("section", {});
  fill(main, h("h1", {}, "Time"), limits, advice(now.run), legend(), told, h("div", { class: "scroll" }, canvas));
  let found = null;

  async function refresh() {
    found = await ask(`runs/${now.run}/time`, query);
    const read = found.read < 1 ? h("p", { class: "note" }, `${Math.floor(100 * found.read)} % of the log is read`) : null;
    fill(limits, sentence(found.limits), read);
    draw(canvas, found);
  }
  // The server reads a long log in parts, one for each request.
  async function readOn() {
    while (found.read < 1) await refresh();
  }

  function zoom(by, at = 0.5) {
    const middle = found.start + at * (found.end - found.start);
    const start = Math.max(middle - (middle - found.start) * by, 0);
    const end = Math.min(middle + (found.end - middle) * by, found.last);
    if (end - start > 0.002) change({ from: start.toFixed(3), to: end.toFixed(3) });
  }
  function shift(by) {
    const width = found.end - found.start;
    const start = Math.min(Math.max(found.start + by * width, 0), found.last - width);
    change({ from: start.toFixed(3), to: (start + width).toFixed(3) });
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
  const resized = () => draw(canvas, found);
  window.addEventListener("resize", resized);
  await refresh();
  readOn().catch(() => {}); // fails if the view was left
  return {
    refresh: from || to ? null : refresh,
    close: () => window.removeEventListener("resize", resized),
    keys: {
      "+": () => zoom(1 / 1.5), "-": () => zoom(1.5), 0: () => change({ from: null, to: null }),
      ArrowLeft: () => shift(-0.25), ArrowRight: () => shift(0.25),
    },
  };
}

function sentence(limits) {
  if (!limits) return h("p", {}, "No step is done yet.");
  const share = (name) => `${Math.round(100 * limits[name])} %`;
  const parts = [["both", "both work"], ["learner", "only the learner"], ["instances", "only instances"], ["environments", "waiting for environments"], ["neither", "neither"]];
  const bar = h("div", { class: "shares" }, parts.map(([name, text]) => {
    const part = h("span", { class: `share ${name}`, title: `${text}: ${share(name)}` }, `${text} ${share(name)}`);
    part.style.flexGrow = String(Math.max(limits[name], 0.001));
    return part;
  }));
  return [h("p", {}, h("b", {}, `Pace: ${limits.line}`), ` (last ${limits.steps} steps)`), bar];
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
  return h("section", {}, button, told);
}

function advised(found) {
  const fields = (change) => Object.entries(change.fields).map(([name, value]) => `--${name} ${value}`).join(" ");
  const percent = (share) => `${share >= 0 ? "+" : "−"}${number(100 * Math.abs(share), 1)} %`;
  const best = found.recommended;
  return [
    h("p", {}, best ? [h("b", {}, `It recommends ${fields(best)}: ${percent(best.gain)} steps per second.`),
      " What more staleness costs in reward it cannot say."]
      : h("b", {}, "It knows nothing that is worth a change.")),
    h("p", { class: "note" }, `This run, simulated with the lengths of its newest ${found.steps} steps: ${number(found.simulated)} steps per second, where it had ${number(found.steps_per_second)} (${percent(found.simulated / found.steps_per_second - 1)}). A gain within that distance is not recommended.`),
    found.changes.length ? table(["change", "steps per second"], found.changes.map((each) => h("tr", {},
      h("td", {}, h("code", {}, fields(each))), h("td", { class: "n" }, percent(each.gain))))) : null,
  ].filter(Boolean);
}

function legend() {
  return h("p", { class: "legend" }, Object.values(KINDS).map(([name, , text]) => {
    const box = h("span", { class: "swatch" });
    box.style.background = `var(${name})`;
    return [box, ` ${text}  `];
  }));
}

function draw(canvas, found) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.parentElement.clientWidth, height = AXIS + LANE * (found.lanes.length + found.batches.length);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  const x = (time) => NAMES + (width - NAMES) * (time - found.start) / (found.end - found.start || 1);
  axis(context, found, x, width, height);
  found.lanes.forEach((lane, i) => {
    const y = AXIS + i * LANE;
    context.fillStyle = colour("--text");
    context.fillText(lane.name, 0, y + LANE / 2);
    context.save();
    context.beginPath();
    context.rect(NAMES, y, width - NAMES, LANE);
    context.clip();
    for (const [kind, [name, share]] of Object.entries(KINDS)) {
      context.fillStyle = colour(name);
      const top = y + LANE * (1 - share) / 2, tall = LANE * share - 1;
      for (const [, start, end] of (lane.spans ?? []).filter((each) => each[0] === kind)) {
        context.fillRect(x(start), top, Math.max(x(end) - x(start), 1), tall);
      }
      (lane.shares?.[kind] ?? []).forEach((each, j, all) => {
        context.globalAlpha = each;
        const left = NAMES + (width - NAMES) * j / all.length;
        context.fillRect(left, top, (width - NAMES) / all.length + 0.5, tall);
        context.globalAlpha = 1;
      });
    }
    context.restore();
  });
  found.batches.forEach((batch, i) => fillings(context, batch, AXIS + (found.lanes.length + i) * LANE, width));
}

// The filling of a batch: groups that began, behind complete ones, until it was trained on.
function fillings(context, batch, y, width) {
  context.fillStyle = colour("--text");
  context.fillText(named(batch), 0, y + LANE / 2);
  const most = batch.size ?? Math.max(...batch.begun, 1), step = (width - NAMES) / (POINTS - 1);
  const bars = (counts, name) => {
    context.fillStyle = colour(name);
    counts.forEach((count, i) => {
      const tall = (LANE - 4) * count / most;
      if (count) context.fillRect(NAMES + (i - 0.5) * step, y + LANE - 2 - tall, step + 0.5, tall);
    });
  };
  context.save();
  context.beginPath();
  context.rect(NAMES, y, width - NAMES, LANE);
  context.clip();
  bars(batch.begun, "--line");
  bars(batch.complete ?? [], "--good");
  context.restore();
}

function named(batch) {
  return batch.version === null ? "in no batch yet" : `batch ${batch.version + 1}`;
}

function entries(batch, time, i) {
  if (!batch || batch.begun[i] === undefined) return null;
  const of = batch.size === undefined ? "" : ` of ${batch.size}`;
  const complete = batch.complete ? `, ${batch.complete[i]} complete` : "";
  return `${named(batch)} at ${number(time)} s: ${batch.begun[i]}${of} groups begun${complete}`;
}

function axis(context, found, x, width, height) {
  const span = found.end - found.start;
  const steps = [0.001, 0.01, 0.1, 1, 5, 10, 30, 60, 300, 600, 1800, 3600, 10800, 36000, 86400];
  const step = steps.find((each) => span / each <= 8) ?? span / 8;
  context.fillStyle = colour("--dim");
  context.strokeStyle = colour("--line");
  for (let time = Math.ceil(found.start / step) * step; time <= found.end; time += step) {
    context.fillText(step < 1 ? `${time.toFixed(3)} s` : duration(time), x(time) + 3, AXIS / 2);
    context.beginPath();
    context.moveTo(x(time), 0);
    context.lineTo(x(time), height);
    context.stroke();
  }
}

function at(found, event, share) {
  if (!found || share < 0) return null;
  const row = Math.floor((event.offsetY - AXIS) / LANE), lane = found.lanes[row];
  const time = found.start + share * (found.end - found.start);
  if (!lane) return entries(found.batches[row - found.lanes.length], time, Math.round(share * (POINTS - 1)));
  const words = (lane.spans ?? []).filter(([, start, end]) => start <= time && time <= end)
    .map(([kind, start, end, version]) => `${KINDS[kind]?.[2] ?? kind}${version === null ? "" : ` (version ${version})`}, ${number(end - start)} s`);
  const parts = Object.entries(lane.shares ?? {}).map(([kind, all]) => `${KINDS[kind]?.[2] ?? kind} ${Math.round(100 * all[Math.min(Math.floor(share * all.length), all.length - 1)])} %`);
  return `${lane.name} at ${number(time)} s: ${[...words, ...parts].join("; ") || "nothing"}`;
}
