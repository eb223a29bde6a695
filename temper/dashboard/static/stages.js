// Where a step lies on the axis. Owns: stages by kind, so that runs meet where they do the same; steps, tokens or time.
import { label } from "./dom.js";

export const AXES = {
  steps: { title: "step" },
  trained: { title: "tokens trained" },
  drawn: { title: "tokens drawn" },
  seconds: { title: "time in steps" },
};
const UNITS = [
  [7200, 3600, "h"],
  [180, 60, "min"],
  [0, 1, "s"],
];

/** The stages of a run with their kinds: its name, and a number from the second of that name on. */
export function kinds(run) {
  const seen = {};
  return (run?.stages || []).map((stage) => {
    seen[stage.name] = (seen[stage.name] || 0) + 1;
    return { ...stage, kind: seen[stage.name] === 1 ? stage.name : `${stage.name} ${seen[stage.name]}` };
  });
}

/** Kinds of all runs in one order: that of the first run, others behind what precedes them in their own run. */
export function mergedKinds(runs) {
  const order = [];
  for (const run of runs) {
    let before = -1;
    for (const { kind } of kinds(run)) {
      const at = order.indexOf(kind);
      if (at < 0) order.splice(before + 1, 0, kind);
      before = at < 0 ? before + 1 : at;
    }
  }
  return order;
}

/** Where each kind of stage begins for all of the entries, {run, axes}. chosen: only that kind, from its own step 1. */
export function layOut(entries, { x = "steps", chosen = "" } = {}) {
  const lay = { x: AXES[x] ? x : "steps", chosen, starts: new Map(), divisor: 1, unit: "" };
  let before = 0;
  for (const kind of mergedKinds(entries.map((entry) => entry.run))) {
    if (chosen && kind !== chosen) continue;
    lay.starts.set(kind, before);
    const sizes = entries.flatMap((entry) =>
      kinds(entry.run)
        .filter((stage) => stage.kind === kind)
        .map((stage) => extent(entry, stage, lay.x)),
    );
    before += Math.max(0, ...sizes);
  }
  if (lay.x === "seconds") [, lay.divisor, lay.unit] = UNITS.find(([least]) => before >= least);
  return lay;
}

function extent({ axes }, stage, x) {
  return x === "steps" ? Number(stage.steps) || 0 : axes?.[stage.stage]?.[x]?.at(-1) || 0;
}

export function axisTitle(lay) {
  const { title } = AXES[lay.x];
  return lay.unit ? `${title} (${lay.unit})` : title;
}

/** The place of a step on the axis; null: its stage is not shown. */
export function position(lay, entry, stage, step) {
  const kind = kinds(entry.run).find((one) => one.stage === stage)?.kind;
  const start = lay.starts.get(kind);
  if (start === undefined) return null;
  return (start + passed(lay, entry.axes?.[stage], step)) / lay.divisor;
}

/** Steps, tokens or seconds from the beginning of the stage to the end of a step; straight lines between known ones. */
function passed(lay, axis, step) {
  if (lay.x === "steps") return step;
  const steps = axis?.steps || [];
  const at = steps.findIndex((one) => one >= step);
  if (at < 0) return axis?.[lay.x]?.at(-1) || 0;
  const [left, low] = at ? [steps[at - 1], axis[lay.x][at - 1]] : [0, 0];
  const share = (step - left) / (steps[at] - left || 1);
  return low + share * (axis[lay.x][at] - low);
}

/** Points of one metric, {stage, steps, values} by stage, on the axis: [{kind, x, y, names}]. */
export function segments(pieces, entry, lay) {
  const found = [];
  for (const piece of pieces || []) {
    const stage = kinds(entry.run).find((one) => one.stage === piece.stage);
    if (!stage || !lay.starts.has(stage.kind) || !piece.steps.length) continue;
    found.push({
      kind: stage.kind,
      x: piece.steps.map((step) => position(lay, entry, piece.stage, step)),
      y: piece.values,
      names: piece.steps.map((step) => `${label(stage.kind)} step ${step}`),
    });
  }
  return found;
}

/** One curve with a gap between its segments. */
export function joinSegments(parts, keys = ["x", "y", "names"]) {
  const whole = Object.fromEntries(keys.map((key) => [key, []]));
  for (const part of parts) {
    if (whole.x.length)
      for (const key of keys) whole[key].push(key === "x" ? whole.x.at(-1) : key === "names" ? "" : null);
    for (const key of keys) whole[key].push(...part[key]);
  }
  return whole;
}

/** Dotted lines where stages begin, and their names. */
export function boundaries(lay) {
  const places = [...lay.starts].map(([kind, start]) => [kind, start / lay.divisor]);
  if (places.length < 2) return { shapes: [], annotations: [] };
  const line = { color: "#8888", width: 1, dash: "dot" };
  return {
    shapes: places
      .filter(([, start]) => start > 0)
      .map(([, start]) => ({ type: "line", x0: start, x1: start, y0: 0, y1: 1, yref: "paper", line })),
    annotations: places.map(([kind, start]) => ({
      x: start,
      y: 1,
      yref: "paper",
      text: label(kind),
      showarrow: false,
      xanchor: "left",
      yanchor: "top",
      font: { size: 10 },
      opacity: 0.75,
    })),
  };
}
