// Curves over steps or time, with a band where a point stands for many rows.

import uPlot from "./vendor/uPlot.js";
import { duration, number } from "./dom.js";

const COLOURS = ["#2a78d6", "#eb6834", "#1baf7a", "#b8860b", "#8050c8", "#d03b6b"];

const sync = uPlot.sync("curves");

// The present value of a colour in the style sheet, as a canvas takes no variables.
export function colour(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

// Formats a number for an axis, with few characters.
function short(value) {
  const size = Math.abs(value);
  if (value === 0 || (size >= 0.001 && size < 1e5)) return String(Number(value.toPrecision(4)));
  return value.toExponential(1).replace("e+", "e").replace(".0e", "e");
}

function smoothed({ value, weight }, width) {
  if (width < 2) return value;
  const share = 2 / (width + 1);
  let sum = null, all = null;
  return value.map((each, i) => {
    const w = weight ? weight[i] : 1;
    sum = sum === null ? w * each : sum + share * (w * each - sum);
    all = all === null ? w : all + share * (w - all);
    return sum / all;
  });
}

// `series`: [{ label, points }], with points as the server sends them. `update(series)` of the result
// shows newer points and keeps the zoom.
export function chart(element, title, series, { axis = "step", smooth = 1, onstep = null } = {}) {
  let shown = arranged(series, axis, smooth);
  const xs = () => shown.data[0];
  const line = { stroke: colour("--line"), width: 1 };
  const axes = { stroke: colour("--dim"), grid: line, ticks: line };
  const plot = (width) => new uPlot({
    title, width, height: 200, series: shown.lines, bands: shown.bands,
    scales: { x: { time: false } },
    axes: [
      { ...axes, values: axis === "time" ? (_, ticks) => ticks.map(duration) : undefined },
      { ...axes, size: 60, values: (_, ticks) => ticks.map(short) },
    ],
    legend: { live: true },
    cursor: { sync: { key: sync.key } },
  }, shown.data, element);
  let made = plot(element.clientWidth);
  const clicked = () => {
    const at = made.cursor.idx;
    if (at !== null && at !== undefined) onstep(xs()[at]);
  };
  const listen = () => { if (onstep) made.over.addEventListener("click", clicked); };
  listen();
  const follow = new ResizeObserver(() => {
    const width = element.clientWidth;
    if (width && width !== made.width) made.setSize({ width, height: 200 });
  });
  follow.observe(element);
  return {
    update(newer) {
      const before = shown;
      shown = arranged(newer, axis, smooth);
      if (shown.lines.map((each) => each.label).join() !== before.lines.map((each) => each.label).join()) {
        const width = made.width;
        made.destroy();
        made = plot(width);
        listen();
        return;
      }
      const { min, max } = made.scales.x;
      const isWhole = !before.data[0].length || (min <= before.data[0][0] && max >= before.data[0].at(-1));
      made.setData(shown.data, isWhole);
      if (!isWhole) made.redraw();
    },
    destroy() {
      follow.disconnect();
      made.destroy();
    },
  };
}

// Data for uPlot: columns of one length, lines that show them, and bands between lines.
function arranged(series, axis, smooth) {
  const xs = [...new Set(series.flatMap((each) => each.points[axis]))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, i) => [x, i]));
  const spread = (points, values) => {
    const found = new Array(xs.length).fill(null);
    points[axis].forEach((x, i) => { found[place.get(x)] = values[i]; });
    return found;
  };
  const data = [xs], bands = [];
  const lines = [{ label: axis, value: (_, x) => (x === null ? "" : axis === "time" ? duration(x) : String(x)) }];
  const hidden = { stroke: "transparent", spanGaps: true, points: { show: false }, value: (_, y) => number(y) };
  series.forEach(({ label, points }, i) => {
    const stroke = COLOURS[i % COLOURS.length];
    data.push(spread(points, smoothed(points, smooth)));
    lines.push({ label, stroke, width: 1.5, spanGaps: true, points: { show: (plot) => plot.data[0].length < 40 },
      value: (_, y) => number(y) });
    if (!points.low) return;
    data.push(spread(points, points.high), spread(points, points.low));
    bands.push({ series: [data.length - 2, data.length - 1], fill: `${stroke}22` });
    const names = points.is_interval ? ["95 % up to", "95 % from"] : ["most", "least"];
    lines.push(...names.map((name) => ({ ...hidden, label: `${label}, ${name}` })));
  });
  return { data, lines, bands };
}
