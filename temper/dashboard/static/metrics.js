// Every number that was recorded. Owns: the list of all metrics by prefix, their search, and one chart for each.
import { remembered } from "./api.js";
import { Chart } from "./charts.js";
import { curves, groupsOf, isCompared, layOf, loadEntries, readSeries, spreadNote } from "./curves.js";
import { el, empty, fill, isNumber, number } from "./dom.js";
import { axisTitle, boundaries, mergedKinds } from "./stages.js";
import { tools } from "./tools.js";

const SHARES = /\/\d\d$/; // data/p_hist/00 … 09: ten shares of one whole
const FEW = 12;

export async function mount(root, { run, runs, view, isCurrent }) {
  const state = { run, runs, view, entries: [], metrics: [], shown: [] };
  const count = el("span", { class: "hint", role: "status" });
  const list = el("div", { class: "stack" });
  const search = el("input", {
    type: "search",
    id: "metric-search",
    value: view.get("q"),
    name: "q",
    placeholder: "a name, a unit, a word of what it means  ( / )",
    on: {
      input: (event) => {
        view.set({ q: event.target.value });
        build();
      },
    },
  });
  const every = (open) => () => {
    view.set({ open: open ? [...new Set(state.metrics.map(prefix))] : "-" });
    build();
  };
  fill(
    root,
    tools({ view, run, runs, redraw: () => draw(state), reload: load }),
    el(
      "div",
      { class: "tools" },
      el("label", { class: "field row-field wide-search", for: "metric-search" }, "Search", search),
      el("button", { type: "button", on: { click: every(true) } }, "Open all"),
      el("button", { type: "button", on: { click: every(false) } }, "Close all"),
      count,
    ),
    list,
  );

  async function load() {
    const entries = await loadEntries(view, state.run, state.runs, async (id) => ({
      metrics: await remembered(id, "metrics"),
      series: {},
    }));
    if (!isCurrent()) return;
    state.entries = entries;
    state.metrics = [...new Map(entries.flatMap((one) => one.metrics).map((one) => [one.name, one])).values()];
    build();
  }

  /** The groups, and the charts of those that are open. */
  function build() {
    for (const { chart } of state.shown) chart.close();
    state.shown = [];
    const found = state.metrics.filter((metric) => fits(metric, view.get("q")));
    const groups = Map.groupBy ? Map.groupBy(found, prefix) : grouped(found);
    const isSmall = view.get("q") && found.length <= FEW;
    const word = groups.size === 1 ? "group" : "groups";
    count.textContent = `${found.length} of ${state.metrics.length} metrics in ${groups.size} ${word}`;
    fill(
      list,
      groups.size
        ? [...groups].map(([name, metrics], index) => section(name, metrics, isSmall || isOpen(name, index)))
        : state.metrics.length
          ? empty("No metric fits", "Search for a part of a name (`kl`), a unit (`nats`) or a word of its meaning.")
          : empty("Nothing was recorded yet", "Metrics appear with the first step."),
    );
    return fetchShown();
  }

  /** As the reader left it; at first the first group, and all that a search finds. */
  function isOpen(name, index) {
    if (view.get("q")) return !view.list("closed").includes(name);
    return view.get("open") ? view.list("open").includes(name) : index === 0;
  }

  function section(name, metrics, open) {
    const grid = el("div", { class: "grid" });
    const node = el(
      "details",
      { class: "metric-group", open, data: { group: name } },
      el("summary", {}, el("b", {}, name), ` ${metrics.length}`),
      grid,
    );
    const put = () => {
      const charts = specs(metrics, state).map((spec) => ({
        spec,
        chart: new Chart(spec.title, spec.hint, { y: spec.unit }),
      }));
      state.shown.push(...charts);
      fill(
        grid,
        charts.map(({ chart }) => chart.node),
      );
    };
    if (open) put();
    node.addEventListener("toggle", () => {
      if (node.open === grid.childElementCount > 0) return;
      if (node.open) put();
      else {
        for (const one of state.shown.filter(({ chart }) => grid.contains(chart.node))) one.chart.close();
        state.shown = state.shown.filter(({ chart }) => !grid.contains(chart.node));
        fill(grid);
      }
      remember();
      fetchShown();
    });
    return node;
  }

  function remember() {
    const all = [...list.querySelectorAll("details")];
    const names = (some) => some.map((one) => one.dataset.group);
    if (view.get("q")) view.set({ closed: names(all.filter((one) => !one.open)) });
    else view.set({ open: names(all.filter((one) => one.open)).join(",") || "-" });
  }

  async function fetchShown() {
    const names = [...new Set(state.shown.flatMap(({ spec }) => spec.names))];
    const entries = state.entries;
    await Promise.all(
      entries.map(async (entry) => {
        const missing = names.filter((name) => !(name in entry.series));
        if (missing.length) Object.assign(entry.series, await readSeries(entry.run.id, missing));
      }),
    );
    if (isCurrent() && entries === state.entries) draw(state);
  }
  await load();
  return {
    update: async (kinds, current, all) => {
      state.run = current;
      state.runs = all;
      const known = state.metrics.length;
      const entries = await loadEntries(view, state.run, state.runs, async (id) => ({
        metrics: await remembered(id, "metrics"),
        series: {},
      }));
      state.entries = entries;
      state.metrics = [...new Map(entries.flatMap((one) => one.metrics).map((one) => [one.name, one])).values()];
      return state.metrics.length === known ? fetchShown() : build();
    },
  };
}

function prefix(metric) {
  return metric.name.split("/")[0];
}

function grouped(metrics) {
  const groups = new Map();
  for (const one of metrics) groups.set(prefix(one), [...(groups.get(prefix(one)) || []), one]);
  return groups;
}

/** Every word is somewhere in the name, the unit or the meaning. */
function fits(metric, query) {
  const text = `${metric.name} ${metric.unit} ${metric.meaning}`.toLowerCase();
  return query
    .toLowerCase()
    .split(/\s+/)
    .every((word) => text.includes(word));
}

/** A chart per metric. The loss has one per kind of stage; ten shares of one whole are one chart, unless runs are
 * compared. */
function specs(metrics, state) {
  const found = [];
  const kinds = mergedKinds(state.entries.map((entry) => entry.run));
  const isSingle = !isCompared(groupsOf(state.entries, state.view, state.runs));
  for (const metric of metrics) {
    const base = metric.name.replace(SHARES, "");
    const { unit, meaning: hint } = metric;
    if (isSingle && base !== metric.name) {
      const whole = found.find((one) => one.title === `${base}/*`);
      if (whole) whole.names.push(metric.name);
      else found.push({ title: `${base}/*`, names: [metric.name], unit, hint });
    } else if (metric.name === "loss" && kinds.length > 1)
      found.push(...kinds.map((kind) => ({ title: `loss, ${kind}`, names: ["loss"], unit, hint, kind })));
    else found.push({ title: metric.name, names: [metric.name], unit, hint });
  }
  return found;
}

function draw(state) {
  const groups = groupsOf(state.entries, state.view, state.runs);
  const weight = Number(state.view.get("smooth", "0"));
  for (const { spec, chart } of state.shown) {
    const chosen = state.view.get("kind");
    const lay = layOf(state.entries, state.view, spec.kind && chosen && chosen !== spec.kind ? "(none)" : spec.kind);
    const rename = (name) => name.split("/").at(-1);
    const { traces, latest } = curves(spec.names, groups, lay, { weight, rename });
    chart.note = spreadNote(groups);
    chart.latest.textContent = spec.names.length === 1 && isNumber(latest) ? number(latest) : "";
    chart.set(
      traces,
      {
        ...boundaries(lay),
        xaxis: { title: axisTitle(lay) },
        showlegend: traces.filter((trace) => trace.showlegend !== false && trace.meta !== "edge").length > 1,
      },
      "Not recorded in the stage that is shown.",
    );
  }
}
