// The curves of a view for the metrics that a run has.

import { chart } from "./charts.js";
import { h } from "./dom.js";

// `known`: [[title, [metric, ...]], ...]. `show` takes points by run and metric, and draws or updates
// a curve for each title with points.
export function curves(known, options = {}) {
  const root = h("section", { class: "curves" });
  const made = new Map();
  return {
    root,
    show(pointsByRun) {
      const runs = Object.entries(pointsByRun);
      for (const [title, names] of known) {
        const series = runs.flatMap(([run, points]) => names
          .filter((name) => points[name]?.step.length)
          .map((name) => ({ label: runs.length === 1 ? name : names.length === 1 ? run : `${run}, ${name}`, points: points[name] })));
        if (!series.length) continue;
        if (made.has(title)) made.get(title).update(series);
        else {
          const place = h("figure", {});
          root.append(place);
          made.set(title, chart(place, title, series, options));
        }
      }
    },
    close() {
      made.forEach((each) => each.destroy());
    },
  };
}

// The metrics of these curves that a run has.
export function metricsOf(known, run) {
  return known.flatMap(([, names]) => names).filter((name) => run.metrics.includes(name));
}
