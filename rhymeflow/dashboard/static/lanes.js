// Draws lanes of the learner, the instances, the environments and the filling of batches over time.

import { colour } from "./colours.js";
import { duration, number } from "./words.js";

export const KINDS = { // colour, height within a lane, and label, in the order of drawing
  there: ["--raised", 1, "is there"],
  generating: ["--c3", 0.8, "generates"],
  prefill: ["--text", 0.25, "prefills, within a quarter second"],
  waiting: ["--sand", 0.25, "waits for environments"],
  answering: ["--sand", 0.8, "environments are asked"],
  training: ["--c1", 0.8, "trains"],
  evaluation: ["--c5", 0.3, "evaluates"],
  pull: ["--c6", 0.8, "pulls weights"],
};
const LANE = 24, AXIS = 22;
const POINTS = 100; // of a batch's filling, as the server sends them
export const NAMES = 110; // width of the lanes' names

export function draw(canvas, found) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.parentElement.clientWidth, height = AXIS + LANE * (found.lanes.length + found.batches.length);
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
    const begin = Math.min(...(lane.spans ?? []).map(([, start]) => start));
    if (found.start === 0 && x(begin) - NAMES > 60 && Number.isFinite(begin)) {
      context.fillStyle = colour("--dim");
      context.fillText("starting", NAMES + 4, y + LANE / 2);
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
  bars(batch.complete ?? [], "--c3");
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

export function at(found, event, share) {
  if (!found || share < 0) return null;
  const row = Math.floor((event.offsetY - AXIS) / LANE), lane = found.lanes[row];
  const time = found.start + share * (found.end - found.start);
  if (!lane) return entries(found.batches[row - found.lanes.length], time, Math.round(share * (POINTS - 1)));
  const words = (lane.spans ?? []).filter(([, start, end]) => start <= time && time <= end)
    .map(([kind, start, end, version]) => `${KINDS[kind]?.[2] ?? kind}${version === null ? "" : ` (version ${version})`}, ${number(end - start)} s`);
  const parts = Object.entries(lane.shares ?? {}).map(([kind, all]) => `${KINDS[kind]?.[2] ?? kind} ${Math.round(100 * all[Math.min(Math.floor(share * all.length), all.length - 1)])} %`);
  return `${lane.name} at ${number(time)} s: ${[...words, ...parts].join("; ") || "nothing"}`;
}
