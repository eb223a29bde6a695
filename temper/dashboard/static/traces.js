// Curves for plotly. Owns: colours, smoothing, bands, the mean of seeds. Refuses: axes (stages.js) and drawing (charts.js).
import { isNumber, label } from "./dom.js";
import { joinSegments } from "./stages.js";

// Okabe and Ito's palette, told apart by colour-blind readers too; yellow is left out: it vanishes on white.
export const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f", "#8c6bb1"];
const FEW_POINTS = 3;

/** Exponential mean over the steps, corrected for its start, so that it begins at the first value and not at 0. */
export function smooth(values, weight) {
  let sum = 0;
  let mass = 0;
  return values.map((value) => {
    if (!isNumber(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

/** A line, and under it its unsmoothed self. */
export function line({ x, y, names }, name, color, weight = 0) {
  const shown = weight ? smooth(y, weight) : y;
  const few = y.length < FEW_POINTS ? "lines+markers" : "lines";
  const main = {
    x,
    y: shown,
    text: names,
    name: label(name),
    mode: few,
    type: "scatter",
    line: { color, width: 2 },
    marker: { color, size: 6 },
    hovertemplate: "%{y:.4~g}  <i>%{text}</i>",
  };
  if (!weight) return [main];
  const raw = { ...main, y, opacity: 0.22, line: { color, width: 1 }, hoverinfo: "skip", hovertemplate: null };
  return [{ ...raw, name: `${main.name} (as measured)`, showlegend: false }, main];
}

/** A line with a band around it; points: {x, y, names, low, high}. A band ends where a value has no interval: plotly
 * would fill across the gap, so each stretch has edges of its own. */
export function banded({ x, y, names, low, high }, name, color, mode = "lines+markers") {
  const quiet = { hoverinfo: "skip", showlegend: false, meta: "edge" };
  const edge = { type: "scatter", mode: "lines", line: { width: 0 }, ...quiet };
  const edges = stretches(low, high).flatMap(([from, to]) => [
    { ...edge, x: x.slice(from, to), y: low.slice(from, to) },
    { ...edge, x: x.slice(from, to), y: high.slice(from, to), fill: "tonexty", fillcolor: `${color}2e` },
  ]);
  return [
    ...edges,
    {
      type: "scatter",
      mode,
      name: label(name),
      x,
      y,
      line: { color, width: 2 },
      marker: { size: 6, color },
      meta: { low, high },
      text: names.map((text, at) =>
        isNumber(low[at]) ? `[${low[at].toPrecision(3)}, ${high[at].toPrecision(3)}] ${text}` : text,
      ),
      hovertemplate: "%{y:.4~g} <i>%{text}</i>",
    },
  ];
}

/** [from, to) of every stretch in which both sides are known. */
function stretches(low, high) {
  const found = [];
  let from = -1;
  for (let at = 0; at <= low.length; at += 1) {
    const isKnown = at < low.length && isNumber(low[at]) && isNumber(high[at]);
    if (isKnown && from < 0) from = at;
    if (!isKnown && from >= 0) {
      found.push([from, at]);
      from = -1;
    }
  }
  return found;
}

/** A line with its interval as a band; rows: {x, score, low, high, name}. */
export function band(rows, name, color) {
  const pick = (key) => rows.map((row) => (isNumber(row[key]) ? row[key] : null));
  const points = { x: rows.map((row) => row.x), y: pick("score"), low: pick("low"), high: pick("high") };
  return banded({ ...points, names: rows.map((row) => row.name || "") }, name, color);
}

/** The score of always giving the commonest answer, dotted. */
export function constant(rows, color) {
  const flat = rows.filter((row) => isNumber(row.constant_score));
  if (!flat.length) return [];
  return [
    {
      type: "scatter",
      mode: "lines",
      name: "constant answer",
      showlegend: false,
      x: flat.map((row) => row.x),
      y: flat.map((row) => row.constant_score),
      line: { color, width: 1, dash: "dot" },
      hovertemplate: "%{y:.4~g}",
    },
  ];
}

/** Mean of several curves, and the lowest and highest of them. members: segments of each, by kind. At each x those count
 * that have got there; between two of its points a curve is straight. */
export function spread(members) {
  const order = [...new Set(members.flat().map((part) => part.kind))];
  const parts = order.map((kind) => {
    const own = members.map((parts) => parts.find((part) => part.kind === kind)).filter(Boolean);
    const x = [...new Set(own.flatMap((part) => part.x))].sort((a, b) => a - b);
    const columns = x.map((place) => own.map((part) => valueAt(part, place)).filter(isNumber));
    const over = (work) => columns.map((values) => (values.length ? work(values) : null));
    return {
      kind,
      x,
      y: over((values) => values.reduce((sum, value) => sum + value, 0) / values.length),
      low: over((values) => Math.min(...values)),
      high: over((values) => Math.max(...values)),
      names: columns.map((values) => `${label(kind)}, ${values.length} of ${members.length} runs`),
    };
  });
  return joinSegments(parts, ["x", "y", "low", "high", "names"]);
}

function valueAt({ x, y }, place) {
  const at = x.findIndex((one) => one >= place);
  if (at < 0) return null;
  if (x[at] === place) return y[at];
  if (at === 0 || !isNumber(y[at - 1]) || !isNumber(y[at])) return null;
  return y[at - 1] + ((place - x[at - 1]) / (x[at] - x[at - 1])) * (y[at] - y[at - 1]);
}

/** The mean of seeds with its band. */
export function meanLine(members, name, color, weight = 0) {
  const whole = spread(members);
  const even = (values) => (weight ? smooth(values, weight) : values);
  const points = { ...whole, y: even(whole.y), low: even(whole.low), high: even(whole.high) };
  return banded(points, name, color, whole.y.length < FEW_POINTS ? "lines+markers" : "lines");
}
