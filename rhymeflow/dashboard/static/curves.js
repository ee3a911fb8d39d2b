// The charts of a view for the metrics that runs have, in sections.

import { chart } from "./charts.js";
import { h } from "./dom.js";

const COLOURS = { "idle/rollout": 2, "idle/learner": 0 }; // as in the lanes of time

// `show` takes sections as of the catalogue and points by run and metric, and draws or updates a
// chart for each title with points. `options`: as of `chart`, or a function of section, title and metrics.
export function curves(options = {}) {
  const root = h("div", { class: "charts" });
  const made = new Map(), places = new Map();

  // Metrics come one after the other in a run that begins, and charts stay in the catalogue's order.
  function section(name, nth) {
    if (!places.has(name)) {
      const place = h("div", { class: "curves" });
      const around = h("section", { class: "section" }, name ? h("h2", {}, name) : null, place);
      around.style.order = nth;
      root.append(around);
      places.set(name, place);
    }
    return places.get(name);
  }

  function draw([name, i], [title, j], names, runs, ends) {
    // One run has a colour for each metric, of several each has its own, and dashes tell metrics apart.
    const isOne = runs.length === 1;
    const series = runs.flatMap(([run, points], i) => names
      .map((each, j) => ({
        label: isOne ? each : names.length === 1 ? run : `${run}, ${each}`,
        points: points[each], colour: isOne ? COLOURS[each] ?? j : i, dash: isOne ? 0 : j,
      }))
      .filter((each) => each.points?.step.length));
    if (!series.length) return;
    const key = JSON.stringify([name, title]);
    if (made.has(key)) made.get(key).update(series, ends);
    else {
      const place = h("figure", { class: "card chart" });
      place.style.order = j;
      section(name, i).append(place);
      const given = typeof options === "function" ? options(name, title, names) : options;
      made.set(key, chart(place, title, series, { ...given, ends }));
    }
  }

  return {
    root,
    show(sections, pointsByRun) {
      const runs = Object.entries(pointsByRun);
      const all = runs.flatMap(([, points]) => Object.values(points));
      const end = (axis) => Math.max(1, ...all.map((each) => each[axis].at(-1) ?? 0));
      const ends = { step: end("step"), time: end("time") }; // all charts have one axis
      sections.forEach(([name, charts], i) => {
        charts.forEach(([title, names], j) => draw([name, i], [title, j], names, runs, ends));
      });
    },
    close() {
      made.forEach((each) => each.destroy());
    },
  };
}
