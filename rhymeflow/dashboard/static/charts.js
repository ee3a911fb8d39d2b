// A card with curves over steps or time, and a band where a point stands for many rows. Its legend
// has the last values, and those below the pointer while there is one.

import uPlot from "./vendor/uPlot.js";
import { colour, faded, line } from "./colours.js";
import { fill, h, styled } from "./dom.js";
import { logRange, range } from "./range.js";
import { smoothed } from "./smooth.js";
import { duration, figure, number, short } from "./words.js";

const HEIGHT = 188;
const FONT = "12px system-ui, sans-serif";
const STEPS = [1, 2, 5].flatMap((each, _, all) => [1, 10, 100, 1e3, 1e4, 1e5, 1e6].map((by) => each * by)).sort((a, b) => a - b);
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800];

const DASHES = [undefined, [6, 4], [2, 3]];

const sync = uPlot.sync("curves");

// `series`: [{ label, points, colour, dash }], with points as the server sends them, and numbers of a
// colour and of a kind of dashes; `ends`: of the x axis, by its name. `update(series, ends)` of the
// result shows newer points and keeps the zoom.
export function chart(element, title, series, { axis = "step", smooth = null, isLog = false, ends = {}, onstep = null, onremove = null, meaning = "" } = {}) {
  let shown = arranged(series, axis, smooth), last = ends[axis];
  const place = h("div", { class: "plot" }), legend = h("div", { class: "legend" });
  const latest = h("b", { class: "n" }), where = h("span", { class: "note small n" });
  const remove = onremove && h("button", { type: "button", class: "quiet", "aria-label": `Remove ${title}`, onclick: onremove }, "×");
  fill(element,
    h("figcaption", { class: "head" }, h("h3", { title: meaning }, title), h("span", { class: "end head" }, where, latest, remove)), legend, place);

  function tell(plot) {
    const at = plot?.cursor.idx ?? null;
    const x = at === null ? null : shown.data[0][at];
    const entries = shown.entries.map((each) => ({ ...each, ...each.tell(at) }));
    const isOne = entries.length === 1;
    latest.textContent = isOne ? entries[0].text : "";
    where.textContent = x === null ? "" : axis === "time" ? duration(x) : `step ${number(x)}`;
    fill(legend,
      entries.map((each) => h("span", { class: "entry" }, styled(h("i", { class: `swatch ${each.isDashed ? "dashed" : ""}` }), "--fill", `var(${each.colour})`),
        h("span", { class: "label" }, each.label), isOne ? null : h("b", {}, each.text), each.more)),
      shown.notes.map((each) => h("span", {}, each)));
  }

  const plot = () => new uPlot({
    width: place.clientWidth || 300, height: HEIGHT, series: shown.lines, bands: shown.bands,
    scales: {
      x: { time: false, range: ({ data: [xs] }, min, max) => (min === xs[0] && max === xs.at(-1) ? [0, last] : [min, max]) },
      y: { distr: isLog ? 3 : 1, range: (_, min, max) => (isLog ? logRange : range)(min, max) },
    },
    axes: [
      { ...axes(), incrs: axis === "time" ? SECONDS : STEPS, size: 28, values: (_, ticks) => ticks.map(axis === "time" ? duration : short) },
      { ...axes(), size: width, values: (_, ticks) => ticks.map((each) => (each === null ? "" : short(each))) },
    ],
    padding: [8, 12, 0, 0],
    legend: { show: false },
    cursor: { sync: { key: sync.key }, y: false, points: { size: 7 } },
    hooks: { setCursor: [tell] },
  }, shown.data, place);

  let made = plot();
  const clicked = () => {
    const at = made.cursor.idx;
    if (at !== null && at !== undefined) onstep(shown.data[0][at]);
  };
  const listen = () => { if (onstep) made.over.addEventListener("click", clicked); };
  const redraw = () => made.redraw();
  listen();
  tell(made);
  const follow = new ResizeObserver(() => {
    if (place.clientWidth && place.clientWidth !== made.width) made.setSize({ width: place.clientWidth, height: HEIGHT });
  });
  follow.observe(place);
  window.addEventListener("theme", redraw);
  return {
    update(newer, { [axis]: end }) {
      const before = shown;
      last = end;
      shown = arranged(newer, axis, smooth);
      if (shown.key !== before.key) {
        made.destroy();
        made = plot();
        listen();
      } else {
        const { min, max } = made.scales.x, xs = before.data[0];
        const isWhole = !xs.length || (min <= xs[0] && max >= xs.at(-1));
        made.setData(shown.data, isWhole);
        if (!isWhole) made.redraw();
      }
      tell(made);
    },
    destroy() {
      window.removeEventListener("theme", redraw);
      follow.disconnect();
      made.destroy();
    },
  };
}

// Of an axis, by its longest number.
function width(_, texts) {
  return Math.max(40, 16 + 7 * Math.max(0, ...(texts ?? []).map((each) => each.length)));
}

function axes() {
  const lines = { stroke: () => colour("--line"), width: 1 };
  return { stroke: () => colour("--dim"), grid: lines, ticks: { ...lines, size: 4 }, font: FONT };
}

// Data for uPlot: columns of one length, lines that show them, and bands between lines; and what the
// legend says of each series at a place, or at its end.
function arranged(series, axis, smooth) {
  const xs = [...new Set(series.flatMap((each) => each.points[axis]))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, i) => [x, i]));
  const found = { data: [xs], lines: [{}], bands: [], entries: [], notes: new Set() };
  const add = (points, values, line) => {
    const column = new Array(xs.length).fill(null);
    points[axis].forEach((x, i) => { column[place.get(x)] = values[i]; });
    found.data.push(column);
    found.lines.push({ spanGaps: true, ...line });
    return column;
  };
  const hidden = { stroke: "transparent", points: { show: false } };
  series.forEach(({ label, points, colour: nth, dash }) => {
    const name = line(nth), mean = smoothed(points, smooth);
    if (mean.width > 1) {
      found.notes.add(`mean of about ${mean.width}`);
      add(points, points.value, { stroke: () => faded(name, 0.3), width: 1, points: { show: false } });
    }
    const values = add(points, mean.values, { stroke: () => colour(name), width: 1.75, dash: DASHES[dash % DASHES.length],
      points: { show: (plot) => plot.data[0].length < 40, size: 5, stroke: () => colour(name), fill: () => colour(name) } });
    let between = () => "";
    if (points.low) {
      const high = add(points, points.high, hidden), low = add(points, points.low, hidden);
      found.bands.push({ series: [found.data.length - 2, found.data.length - 1], fill: () => faded(name, 0.15) });
      between = (at) => h("span", { class: "n", title: points.is_interval ? "95 % interval" : "least and greatest" },
        `${figure(low[at])}–${figure(high[at])}`);
    }
    const tell = (at) => {
      let last = at ?? values.length - 1;
      while (last > 0 && values[last] === null) last -= 1;
      const isKnown = values[last] !== null && values[last] !== undefined;
      return isKnown ? { text: figure(values[last]), more: between(last) } : { text: "–", more: "" };
    };
    found.entries.push({ label, colour: name, isDashed: dash > 0, tell });
  });
  found.notes = [...found.notes];
  found.key = JSON.stringify([found.entries.map((each) => each.label), found.lines.length, found.bands.length]);
  return found;
}
