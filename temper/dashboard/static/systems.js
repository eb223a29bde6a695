// Where the time and the memory go. Owns: seconds per step by phase, idle time, cache, staleness, what controls did.
import { remembered } from "./api.js";
import { Chart } from "./charts.js";
import { curves } from "./curves.js";
import { ExpertLoads } from "./experts.js";
import { bytes, duration, el, fill, isNumber, label, number, percent, tile } from "./dom.js";
import { boundaries, joinSegments, layOut, segments } from "./stages.js";
import { COLORS } from "./traces.js";

const FEW_STEPS = 120;
const SAMPLING = "Appears when a stage samples from the policy.";
const NAMES = {
  "stale/mean": "mean age",
  "stale/p95": "95 of 100 are not older",
  "stale/max": "oldest",
  "stale/in_flight": "while it was drawn",
  "stale/in_queue": "while it waited",
  "flow/overtaken": "a later one is trained",
  "flow/cut": "cut since the step before",
  "flow/put_off": "wait for a late step",
  "flow/running_limit": "may run",
  "flow/lead_limit": "may be under way",
  "flow/running_limit_change": "change of those that may run",
};
const STEPPING = "Appears with the first step.";
const CHARTS = [
  {
    title: "Throughput",
    hint: "Tokens per second, by what they are counted over.",
    y: "tokens/s",
    names: /tok_s$/,
    why: STEPPING,
  },
  {
    title: "Key-value cache",
    hint: "Share of its blocks in use.",
    y: "share",
    names: /kv_use$/,
    why: SAMPLING,
    format: ".0%",
  },
  {
    title: "Preemptions",
    hint: "Sequences that lost their cache and were computed again. Above 0: too many at once.",
    y: "sequences",
    names: /preempt/,
    why: SAMPLING,
  },
  {
    title: "Peak memory",
    hint: "Of the device, or resident on a CPU.",
    y: "GiB",
    names: /memory_bytes/,
    why: STEPPING,
  },
  {
    title: "Staleness over the steps",
    hint: "Age of the weights that drew a trained response, in versions.",
    y: "versions",
    names: /^stale\/(mean|p95|max)$/,
    why: SAMPLING,
  },
  {
    title: "Where staleness comes from",
    hint: "Versions published while a response was drawn, and while it waited to be trained.",
    y: "versions",
    names: /^stale\/in_/,
    why: SAMPLING,
  },
  {
    title: "Drawn by several versions",
    hint: "Share of responses whose tokens come from more than one version.",
    y: "share of responses",
    names: /mixed_version/,
    why: SAMPLING,
  },
  {
    title: "Groups that are late",
    hint: "Drawn before one that is trained already, cut in favour of quicker ones, or put off to a late step.",
    y: "groups",
    names: /^flow\/(overtaken|cut|put_off)$/,
    isOptional: true,
  },
  {
    title: "Length of a step's answers",
    hint: "Mean over that of the last 32 steps. Under 1: quick groups were trained; over 1: late ones came.",
    y: "ratio",
    names: /^flow\/length_ratio$/,
    isOptional: true,
  },
  {
    title: "Late steps",
    hint: "1: the step caught up on groups that were put off.",
    y: "0 or 1",
    names: /^flow\/late_step$/,
    isOptional: true,
  },
  {
    title: "Limit of short steps",
    hint: "By tail: an answer that is longer puts its group off.",
    y: "tokens",
    names: /^flow\/tail_limit$/,
    isOptional: true,
  },
  {
    title: "Interrupted answers",
    hint: "By partial: paused when the step was full, and resumed with the next weights.",
    y: "requests",
    names: /^flow\/interrupted$/,
    isOptional: true,
  },
  {
    title: "Computed a second time",
    hint: "By partial: tokens of resumed answers that new weights computed again, over those trained.",
    y: "ratio",
    names: /^flow\/prefilled_again$/,
    isOptional: true,
  },
  {
    title: "Limits of running groups",
    hint: "By concurrency: lower when the cache is full or finished groups queue.",
    y: "groups",
    names: /^flow\/(running_limit|lead_limit)/,
    isOptional: true,
  },
];
const TOKEN_AGES = /^stale\/token_hist\//;
const DONE = /tokens$|memory_since_start/; // counts that Throughput shows, and a flag
const REST = { s: "Seconds", share: "Shares", groups: "Groups that wait", requests: "Requests in flight" };

export async function mount(root, { run, isCurrent }) {
  const state = { run, rest: new Map() };
  const tiles = el("div", { class: "tiles" });
  const seconds = new Chart("Seconds per step", "Wall time of each step by phase.", {
    height: 320,
    y: "seconds",
    hasLog: false,
  });
  const charts = CHARTS.map((spec) => ({ spec, chart: new Chart(spec.title, spec.hint, { y: spec.y }) }));
  const stale = new Chart(
    "Staleness",
    "Trained responses of the last steps by the age of the weights that drew their oldest token.",
    { x: "versions", y: "responses" },
  );
  const ages = new Chart(
    "Ages of trained tokens",
    "Share of tokens by the age, in versions, of the weights that drew them.",
    { y: "share of tokens", hasLog: false },
  );
  const loads = new ExpertLoads();
  const grid = el("div", { class: "grid" }, charts.map(({ chart }) => chart.node), stale.node, ages.node, loads.node);
  fill(root, tiles, el("div", { class: "stack", style: { "margin-bottom": "16px" } }, seconds.node), grid);

  async function load() {
    const found = await remembered(state.run.id, "systems");
    if (!isCurrent()) return;
    const lay = layOut([state]);
    const series = gibibytes(found.series || {});
    const drawn = (names, rename = words) =>
      curves(names, [{ entries: [{ run: state.run, series }], name: "", color: COLORS[0] }], lay, { rename }).traces;
    const names = Object.keys(series);
    fill(tiles, summary(found));
    seconds.set(
      phases(found.seconds, state.run, lay),
      { barmode: "stack", bargap: 0, ...boundaries(lay), margin: { l: 44, r: 10, t: 6, b: 30 } },
      "Appears with the first step.",
    );
    for (const { spec, chart } of charts) {
      const own = names.filter((name) => spec.names.test(name)).sort(inOrder);
      chart.node.hidden = Boolean(spec.isOptional) && !own.length; // most recipes have no controls
      chart.set(
        drawn(own),
        { ...boundaries(lay), showlegend: true, yaxis: { rangemode: "tozero", tickformat: spec.format } },
        spec.why,
      );
    }
    stale.set(bars(found.staleness), { hovermode: "closest", xaxis: { dtick: 1 } }, SAMPLING);
    const stacked = { ...boundaries(lay), showlegend: true, yaxis: { rangemode: "tozero" } };
    ages.set(shares(series, state.run, lay), stacked, SAMPLING);
    drawRest(state, grid, found, names, drawn, lay);
    await loads.load(state.run, isCurrent);
  }
  await load();
  return {
    update: (kinds, current) => {
      state.run = current;
      return load();
    },
  };
}

/** What no chart above has, one chart for each unit: seconds and requests do not share an axis. */
function drawRest(state, grid, found, names, drawn, lay) {
  const isShown = (name) => CHARTS.some((spec) => spec.names.test(name)) || TOKEN_AGES.test(name) || DONE.test(name);
  const units = new Map();
  for (const name of names.filter((name) => !isShown(name))) {
    const unit = found.units?.[name] || "";
    units.set(unit, [...(units.get(unit) || []), name]);
  }
  for (const [unit, own] of units) {
    if (!state.rest.has(unit)) {
      const chart = new Chart(REST[unit] || `Other numbers${unit ? `, ${unit}` : ""}`, "", { y: unit });
      state.rest.set(unit, chart);
      grid.append(chart.node);
    }
    const layout = { ...boundaries(lay), showlegend: true, yaxis: { rangemode: "tozero" } };
    state.rest.get(unit).set(drawn(own), layout, "Nothing was recorded.");
  }
}

function inOrder(one, other) {
  const order = Object.keys(NAMES);
  return order.indexOf(one) - order.indexOf(other);
}

function words(name) {
  return NAMES[name] || name.replace(/^(sys|stale|flow)\//, "").replace("tok_s", "tokens/s").replaceAll("_", " ");
}

function summary({ series = {}, idle, seconds }) {
  const last = (pattern) => {
    const name = Object.keys(series).find((one) => pattern.test(one));
    return name ? series[name].flatMap((piece) => piece.values).findLast(isNumber) : null;
  };
  const total = Object.values(seconds || {})
    .flat()
    .flatMap((piece) => piece.values)
    .filter(isNumber)
    .reduce((sum, value) => sum + value, 0);
  const share = (value) => (isNumber(value) ? percent(value) : "–");
  return [
    tile("Trainer idle", share(idle?.trainer), "share of wall time without training"),
    tile("Sampler idle", share(idle?.sampler), "share of wall time without drawing"),
    tile("Drawing", number(last(/rollout_tok_s/)), "tokens per second"),
    tile("Training", number(last(/train_tok_s/)), "tokens per second"),
    tile("Peak memory", bytes(last(/memory_bytes/)), null),
    tile("Time in steps", duration(total), null),
  ];
}

function phases(seconds, run, lay) {
  const sums = Object.entries(seconds || {})
    .map(([name, pieces]) => ({
      name,
      points: joinSegments(segments(pieces, { run }, lay)),
      total: pieces.flatMap((piece) => piece.values).reduce((sum, value) => sum + (value || 0), 0),
    }))
    .filter((one) => one.total > 0);
  sums.sort((a, b) => b.total - a.total); // the largest lies at the bottom, where its changes can be read
  const isShort = Math.max(0, ...sums.map((one) => one.points.x.length)) <= FEW_STEPS;
  return sums.map(({ name, points }, index) => {
    const color = COLORS[index % COLORS.length];
    const common = {
      x: points.x,
      y: points.y,
      name: label(name.replaceAll("_", " ")),
      text: points.names,
      hovertemplate: "%{y:.3~g} s",
    };
    return isShort
      ? { ...common, type: "bar", textposition: "none", marker: { color, opacity: index < COLORS.length ? 1 : 0.6 } }
      : {
          ...common,
          type: "scatter",
          mode: "none",
          stackgroup: "seconds",
          fillcolor: `${color}${index < COLORS.length ? "cc" : "77"}`,
        };
  });
}

function gibibytes(series) {
  const small = (pieces) =>
    pieces.map((piece) => ({
      ...piece,
      values: piece.values.map((value) => (isNumber(value) ? value / 2 ** 30 : null)),
    }));
  return Object.fromEntries(
    Object.entries(series).map(([name, pieces]) => [name, /_bytes$/.test(name) ? small(pieces) : pieces]),
  );
}

function bars(staleness) {
  if (!staleness?.ages?.length) return [];
  return [
    {
      type: "bar",
      x: staleness.ages,
      y: staleness.counts,
      name: "responses",
      marker: { color: COLORS[0] },
      hovertemplate: "%{x} versions: %{y}<extra></extra>",
    },
  ];
}

/** Ten shares on top of each other; ages that no token ever had are left out. */
function shares(series, run, lay) {
  const names = Object.keys(series).filter(
    (name) => TOKEN_AGES.test(name) && series[name].some((piece) => piece.values.some((value) => value > 0)),
  );
  return names.map((name, index) => {
    const age = Number(name.split("/").at(-1));
    const points = joinSegments(segments(series[name], { run }, lay));
    const title = age === 9 ? "9 versions or more" : age === 1 ? "1 version" : `${age} versions`;
    return {
      x: points.x,
      y: points.y,
      text: points.names,
      name: title,
      type: "scatter",
      mode: "none",
      stackgroup: "ages",
      fillcolor: `${COLORS[index % COLORS.length]}99`,
      hovertemplate: "%{y:.1%}",
    };
  });
}
