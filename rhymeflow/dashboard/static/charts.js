// Curves over steps or time, with a band where a point stands for many rows.

import uPlot from "./vendor/uPlot.js";
import { duration, number } from "./dom.js";

const COLOURS = ["#2a78d6", "#eb6834", "#1baf7a", "#b8860b", "#8050c8", "#d03b6b"];

const sync = uPlot.sync("curves");

// A canvas takes no variables: what a colour of the style sheet is here and now.
export function colour(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

function smoothed(values, width) {
  if (width < 2) return values;
  const weight = 2 / (width + 1);
  let mean = null;
  return values.map((each) => {
    if (each === null) return mean;
    mean = mean === null ? each : mean + weight * (each - mean);
    return mean;
  });
}

// `series`: [{ label, points }], points as the server gives them. Returns the chart.
export function chart(element, title, series, { axis = "step", smooth = 1, onstep = null } = {}) {
  const xs = [...new Set(series.flatMap((each) => each.points[axis]))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, i) => [x, i]));
  const spread = (points, values) => {
    const found = new Array(xs.length).fill(null);
    points[axis].forEach((x, i) => { found[place.get(x)] = values[i]; });
    return found;
  };
  const data = [xs];
  const lines = [{ label: axis, value: (_, x) => (x === null ? "" : axis === "time" ? duration(x) : String(x)) }];
  const bands = [];
  series.forEach(({ label, points }, i) => {
    const stroke = COLOURS[i % COLOURS.length];
    data.push(spread(points, smoothed(points.value, smooth)));
    lines.push({ label, stroke, width: 1.5, spanGaps: true, points: { show: xs.length < 40 },
      value: (_, y) => number(y) });
    if (points.low) {
      data.push(spread(points, points.high), spread(points, points.low));
      bands.push({ series: [data.length - 2, data.length - 1], fill: `${stroke}22` });
      for (const name of ["most", "least"]) {
        lines.push({ label: `${label}, ${name}`, stroke: "transparent", spanGaps: true,
          points: { show: false }, value: (_, y) => number(y) });
      }
    }
  });
  const line = { stroke: colour("--line"), width: 1 };
  const axes = { stroke: colour("--dim"), grid: line, ticks: line };
  const width = element.clientWidth;
  const made = new uPlot({
    title, width, height: 200, series: lines, bands,
    scales: { x: { time: false } },
    axes: [
      { ...axes, values: axis === "time" ? (_, ticks) => ticks.map(duration) : undefined },
      { ...axes, size: 56 },
    ],
    legend: { live: true },
    cursor: { sync: { key: sync.key } },
  }, data, element);
  if (onstep) {
    made.over.addEventListener("click", () => {
      const at = made.cursor.idx;
      if (at !== null && at !== undefined) onstep(xs[at]);
    });
  }
  return made;
}
