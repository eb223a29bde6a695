// Draws with plotly. Owns: when it is loaded, colours, smoothing, the steps axis. Refuses: waiting for it; a page stands
// before its charts do, and a chart is drawn when it comes into view.
import { el, fill, isNumber, prose } from "./dom.js";

// Okabe and Ito's palette, told apart by colour-blind readers too; yellow is left out: it vanishes on white.
export const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f", "#8c6bb1"];
// The same hues, light enough for a dark page.
const ON_DARK = ["#4aa3df", "#ff8a3d", "#2bbf95", "#e39cc4", "#9bd3f5", "#f2b632", "#a8a8a8", "#b79ad9"];
const MOST_POINTS = 1000;
const charts = new Set();
let loading = null;

function plotly() {
  loading ??= new Promise((done, failed) => {
    const script = el("script", { src: "/static/plotly.min.js" });
    script.addEventListener("load", () => done(window.Plotly));
    script.addEventListener("error", () =>
      failed(new Error("plotly.min.js did not load; install it with: pip install plotly")),
    );
    document.head.append(script);
  });
  return loading;
}

const sight = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      entry.target.chart.isVisible = entry.isIntersecting;
      if (entry.isIntersecting) entry.target.chart.draw();
    }
  },
  { rootMargin: "150px" },
);

/** Plotly reads a little HTML in names; what comes from a run is shown as it is written. */
export function label(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

export class Chart {
  constructor(title, hint, { height = 210 } = {}) {
    this.holder = el("div", { class: "chart", style: { height: `${height}px` } });
    this.holder.chart = this;
    this.latest = el("span", { class: "latest" });
    this.node = el(
      "section",
      { class: "card" },
      el("div", { class: "card-head" }, el("h2", {}, title, this.latest), hint && el("p", { class: "hint" }, hint)),
      this.holder,
    );
    this.title = title;
    this.isVisible = this.isStale = false;
    charts.add(this);
    sight.observe(this.holder);
  }

  /** What to show from now on; drawn at once when in view. No traces: `why` stands in their place. */
  set(traces, layout = {}, why = "") {
    this.traces = traces;
    this.layout = layout;
    this.isStale = true;
    this.holder.setAttribute("role", "img");
    this.holder.setAttribute(
      "aria-label",
      `${this.title}: ${traces.length ? `chart with ${traces.length} series` : why}`,
    );
    if (!traces.length) {
      this.clear();
      fill(this.holder, el("p", { class: "empty" }, prose(why)));
    } else if (this.isVisible) this.draw();
    return this;
  }

  async draw() {
    if (!this.isStale || !this.traces?.length) return;
    let Plotly;
    try {
      Plotly = await plotly();
    } catch (error) {
      fill(this.holder, el("p", { class: "empty failure" }, error.message));
      return;
    }
    if (!this.isStale || !this.traces.length || !this.holder.isConnected) return;
    this.isStale = false;
    if (!this.isDrawn) this.holder.replaceChildren();
    this.isDrawn = true;
    Plotly.react(this.holder, themed(this.traces), layoutOf(this.layout), {
      displaylogo: false,
      responsive: true,
      displayModeBar: false,
    });
  }

  clear() {
    if (this.isDrawn) window.Plotly.purge(this.holder);
    this.isDrawn = false;
  }

  close() {
    this.clear();
    sight.unobserve(this.holder);
    charts.delete(this);
  }
}

export function closeCharts() {
  for (const chart of [...charts]) chart.close();
}

export function repaint() {
  for (const chart of charts) {
    chart.isStale = true;
    if (chart.isVisible) chart.draw();
  }
}

function themed(traces) {
  if (document.documentElement.dataset.theme !== "dark") return traces;
  const text = COLORS.reduce((sofar, color, index) => sofar.replaceAll(color, ON_DARK[index]), JSON.stringify(traces));
  return JSON.parse(text);
}

function layoutOf(own) {
  const style = getComputedStyle(document.documentElement);
  const tone = (name) => style.getPropertyValue(name).trim();
  const axis = {
    gridcolor: tone("--line"),
    zerolinecolor: tone("--line"),
    linecolor: tone("--line"),
    automargin: true,
    nticks: 6,
    tickfont: { size: 11 },
  };
  const titled = ({ title, ...other } = {}) => ({
    ...axis,
    ...other,
    title: { text: title, font: { size: 11 }, standoff: 6 },
  });
  const { xaxis, yaxis, ...rest } = own;
  return {
    margin: { l: 44, r: 10, t: 6, b: 30 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    autosize: true,
    font: { family: style.getPropertyValue("--font"), size: 12, color: tone("--muted") },
    colorway: COLORS,
    hovermode: "x unified",
    hoverlabel: { bgcolor: tone("--panel"), bordercolor: tone("--line"), font: { color: tone("--text"), size: 12 } },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 }, traceorder: "normal" },
    bargap: 0.15,
    dragmode: "zoom",
    uirevision: "keep", // a zoom survives a live update
    ...rest,
    xaxis: titled(xaxis),
    yaxis: titled(yaxis),
  };
}

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

/** The steps of all stages behind each other: where each stage begins. */
export function offsets(run) {
  const starts = {};
  let before = 0;
  for (const stage of run?.stages || []) {
    starts[stage.stage] = before;
    before += Number(stage.steps) || 0;
  }
  return starts;
}

/** Points of one metric on the axis of all stages, with a gap between stages. stage: only that one, from its own step 1. */
export function joined(pieces, run, stage = "") {
  const starts = offsets(run);
  const x = [];
  const y = [];
  const names = [];
  for (const piece of pieces || []) {
    if (stage !== "" && String(piece.stage) !== String(stage)) continue;
    if (x.length) {
      x.push(x.at(-1));
      y.push(null);
      names.push("");
    }
    const shift = stage === "" ? starts[piece.stage] || 0 : 0;
    const every = Math.ceil(piece.steps.length / MOST_POINTS);
    piece.steps.forEach((step, index) => {
      if (index % every && index !== piece.steps.length - 1) return;
      x.push(step + shift);
      y.push(piece.values[index]);
      names.push(`${stageName(run, piece.stage)} step ${step}`);
    });
  }
  return { x, y, names };
}

export function stageName(run, stage) {
  const found = (run?.stages || []).find((one) => one.stage === stage);
  return label(found ? found.name : `stage ${stage}`);
}

/** A line, and under it its unsmoothed self. */
export function line({ x, y, names }, name, color, weight = 0) {
  const shown = weight ? smooth(y, weight) : y;
  const few = y.length < 3 ? "lines+markers" : "lines";
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
  return [
    { ...main, y, opacity: 0.22, line: { color, width: 1 }, hoverinfo: "skip", hovertemplate: null, showlegend: false },
    main,
  ];
}

/** A line with its interval as a band; rows: {x, score, low, high, name}. */
export function band(rows, name, color) {
  const sides = rows.filter((row) => isNumber(row.low) && isNumber(row.high));
  const shape = { type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
  const x = sides.map((row) => row.x);
  return [
    { ...shape, x, y: sides.map((row) => row.low) },
    { ...shape, x, y: sides.map((row) => row.high), fill: "tonexty", fillcolor: `${color}2e` },
    {
      type: "scatter",
      mode: "lines+markers",
      name: label(name),
      x: rows.map((row) => row.x),
      y: rows.map((row) => row.score),
      line: { color, width: 2 },
      marker: { size: 6, color },
      text: rows.map(
        (row) => `${isNumber(row.low) ? `[${row.low.toFixed(3)}, ${row.high.toFixed(3)}] ` : ""}${row.name || ""}`,
      ),
      hovertemplate: "%{y:.4~g} <i>%{text}</i>",
    },
  ];
}

/** Dotted lines where stages begin. */
export function boundaries(run, stage = "") {
  if (stage !== "") return [];
  return Object.values(offsets(run))
    .filter((start) => start > 0)
    .map((start) => ({
      type: "line",
      x0: start,
      x1: start,
      y0: 0,
      y1: 1,
      yref: "paper",
      line: { color: "#8888", width: 1, dash: "dot" },
    }));
}

/** The score of always giving the commonest answer, dotted. */
export function constant(rows, color) {
  const flat = rows.filter((row) => isNumber(row.constant_score));
  return flat.length
    ? [
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
      ]
    : [];
}

/** Many short numbers over the steps, one colour per name. */
export function lines(series, run, { stage = "", weight = 0, rename = (name) => name } = {}) {
  const names = Object.keys(series || {}).filter((name) => (series[name] || []).some((piece) => piece.steps?.length));
  return names.flatMap((name, index) =>
    line(joined(series[name], run, stage), rename(name), COLORS[index % COLORS.length], weight),
  );
}
