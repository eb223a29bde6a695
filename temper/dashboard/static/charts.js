// Draws with plotly. Owns: when it is loaded, a chart's card and what its buttons do. Refuses: waiting for plotly; a page
// stands before its charts do, and a chart is drawn when it comes into view.
import { el, fill, isNumber, prose } from "./dom.js";
import { csv, fileName, save } from "./exports.js";
import { COLORS } from "./traces.js";

// The hues of COLORS, light enough for a dark page.
const ON_DARK = ["#4aa3df", "#ff8a3d", "#2bbf95", "#e39cc4", "#9bd3f5", "#f2b632", "#a8a8a8", "#b79ad9"];
const PICTURE = { format: "png", width: 1000, height: 560, scale: 2 };
const charts = new Set();
let loading = null;
let view = null;

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

/** Charts keep what the reader chose for them (logarithmic, full size) with the choices of their page. */
export function useView(chosen) {
  view = chosen;
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

export class Chart {
  /** x and y: titles of the axes. */
  constructor(title, hint, { height = 210, x = "step", y = "", hasLog = true } = {}) {
    this.title = title;
    this.height = height;
    this.x = x;
    this.y = y;
    this.slug = fileName(title).toLowerCase();
    this.holder = el("div", { class: "chart", style: { height: `${height}px` } });
    this.holder.chart = this;
    this.latest = el("span", { class: "latest" });
    this.hint = el("p", { class: "hint" }, hint);
    this.left = el("p", { class: "hint left-out" });
    this.node = el(
      "section",
      { class: "card chart-card", data: { chart: this.slug } },
      el("div", { class: "card-head" }, el("h2", {}, title, this.latest), hint && this.hint, this.buttons(hasLog)),
      this.holder,
      this.left,
    );
    this.note = ""; // a sentence below the curves
    this.isVisible = this.isStale = false;
    charts.add(this);
    sight.observe(this.holder);
  }

  buttons(hasLog) {
    const button = (text, what, click) =>
      el("button", { type: "button", title: what, "aria-label": `${what}: ${this.title}`, on: { click } }, text);
    this.reset = button("Reset zoom", "Show everything again", () => this.resetZoom());
    this.reset.hidden = true;
    this.logButton = hasLog ? button("log", "Logarithmic axis", () => this.flipLog()) : null;
    this.fullButton = button("Full size", "Full size", () => (this.isFull ? this.leaveFull() : this.goFull()));
    const files = [
      button("CSV", "Download the numbers", () => this.saveNumbers()),
      button("PNG", "Download the picture", () => this.savePicture()),
    ];
    this.tools = el("div", { class: "chart-tools" }, this.reset, this.logButton, files, this.fullButton);
    return this.tools;
  }

  get isLog() {
    return (view?.get("scale") === "log") !== Boolean(view?.list("log").includes(this.slug)) && Boolean(this.logButton);
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
    this.tools.hidden = !traces.length;
    this.logButton?.setAttribute("aria-pressed", String(this.isLog));
    fill(this.left, [this.note, this.isLog ? belowZero(traces) : ""].filter(Boolean).join(" "));
    if (!traces.length) {
      this.clear();
      fill(this.holder, el("p", { class: "empty" }, prose(why)));
    } else if (this.isVisible) this.draw();
    if (traces.length && !this.isFull && view?.get("full") === this.slug) this.goFull();
    return this;
  }

  fullLayout() {
    return layoutOf(this.layout, { x: this.x, y: this.y, isLog: this.isLog });
  }

  /** The traces as they are drawn: in the colours of the theme, and without what a logarithm cannot show, or curves
   * would fall to the bottom of the chart there. */
  figure() {
    const above = (value) => (isNumber(value) && value <= 0 ? null : value);
    return themed(this.isLog ? this.traces.map((trace) => ({ ...trace, y: trace.y?.map(above) })) : this.traces);
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
    const isNew = !this.isDrawn;
    if (isNew) this.holder.replaceChildren();
    this.isDrawn = true;
    await Plotly.react(this.holder, this.figure(), this.fullLayout(), {
      displaylogo: false,
      responsive: true,
      displayModeBar: false,
    });
    if (isNew) this.holder.on?.("plotly_relayout", () => this.tellZoom());
    this.tellZoom();
  }

  tellZoom() {
    const { xaxis, yaxis } = this.holder._fullLayout || {};
    this.reset.hidden = !(xaxis?.autorange === false || yaxis?.autorange === false);
  }

  resetZoom() {
    window.Plotly.relayout(this.holder, { "xaxis.autorange": true, "yaxis.autorange": true });
  }

  flipLog() {
    view?.toggle("log", this.slug);
    this.set(this.traces, this.layout);
  }

  saveNumbers() {
    const y = this.layout.yaxis?.title || this.y;
    save(csv(this.traces, this.layout.xaxis?.title || this.x, y), `${fileName(this.title)}.csv`, "text/csv");
  }

  async savePicture() {
    const Plotly = await plotly();
    const style = getComputedStyle(document.documentElement);
    const layout = this.fullLayout();
    const figure = {
      data: this.figure(),
      layout: {
        ...layout,
        title: { text: this.title, font: { size: 16 } },
        margin: { l: 60, r: 20, t: 60, b: 50 },
        paper_bgcolor: style.getPropertyValue("--panel").trim(),
        legend: { ...layout.legend, y: -0.16, yanchor: "top" },
      },
    };
    save(await Plotly.toImage(figure, PICTURE), `${fileName(this.title)}.png`, "image/png");
  }

  /** In a dialog over the page: Escape closes it, and the focus stays inside. */
  goFull() {
    this.isFull = true;
    this.place = document.createComment("chart");
    const dialog = el("dialog", { class: "full", "aria-label": this.title });
    this.node.replaceWith(this.place);
    dialog.append(this.node);
    document.body.append(dialog);
    dialog.addEventListener("close", () => this.comeBack(dialog));
    dialog.showModal();
    this.fullButton.focus();
    this.fullButton.textContent = "Close";
    this.holder.style.height = "";
    view?.set({ full: this.slug });
    this.fit();
  }

  leaveFull() {
    this.node.closest("dialog")?.close();
  }

  comeBack(dialog) {
    this.isFull = false;
    this.fullButton.textContent = "Full size";
    this.holder.style.height = `${this.height}px`;
    this.place.replaceWith(this.node);
    dialog.remove();
    if (charts.has(this)) view?.set({ full: "" });
    this.fit();
  }

  fit() {
    if (this.isDrawn) window.Plotly.Plots.resize(this.holder);
  }

  clear() {
    if (this.isDrawn) window.Plotly.purge(this.holder);
    this.isDrawn = false;
  }

  close() {
    charts.delete(this);
    if (this.isFull) this.leaveFull();
    this.clear();
    sight.unobserve(this.holder);
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

/** A logarithm has no place for 0: what is not drawn is said. */
function belowZero(traces) {
  const values = traces.filter((trace) => trace.meta !== "edge").flatMap((trace) => [...(trace.y || [])]);
  const lost = values.filter((value) => isNumber(value) && value <= 0).length;
  const all = values.filter(isNumber).length;
  return lost ? `${lost} of ${all} points are 0 or less: a logarithmic axis cannot show them.` : "";
}

function themed(traces) {
  if (document.documentElement.dataset.theme !== "dark") return traces;
  const text = COLORS.reduce((sofar, color, index) => sofar.replaceAll(color, ON_DARK[index]), JSON.stringify(traces));
  return JSON.parse(text);
}

function layoutOf(own, { x, y, isLog }) {
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
  const titled = ({ title, ...other } = {}, usual = "") => ({
    ...axis,
    ...other,
    title: { text: title || usual, font: { size: 11 }, standoff: 6 },
  });
  const { xaxis, yaxis, ...rest } = own;
  const place = ["x", "kind", "scale"].map((name) => view?.get(name) ?? "").join("/");
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
    uirevision: `${place}/${isLog}`, // a zoom survives a live update, and not another axis
    ...rest,
    xaxis: titled(xaxis, x),
    yaxis: { ...titled(yaxis, y), ...(isLog ? { type: "log", rangemode: "normal" } : {}) },
  };
}
