// Where the time and the memory go. Owns: seconds per step by phase, idle time, cache, staleness.
import { remembered } from "./api.js";
import { boundaries, Chart, COLORS, joined, label, lines } from "./charts.js";
import { bytes, el, fill, isNumber, number, percent, tile } from "./dom.js";

const FEW_STEPS = 120;

export async function mount(root, { run, isCurrent }) {
  const state = { run };
  const tiles = el("div", { class: "tiles" });
  const seconds = new Chart("Seconds per step", "Wall time of each step by phase.", { height: 320 });
  const speed = new Chart("Throughput", "Tokens per second while drawing and while training.");
  const cache = new Chart("Key-value cache", "Share of its blocks in use.");
  const preempted = new Chart(
    "Preemptions",
    "Sequences that lost their cache and were computed again. Above 0: too many at once.",
  );
  const memory = new Chart("Peak memory", "GiB; of the device, or resident on a CPU.");
  const stale = new Chart("Staleness", "Trained responses by the age, in versions, of the weights that drew them.");
  const aging = new Chart(
    "Staleness over the steps",
    "Mean and greatest age, and the share drawn by more than one version.",
  );
  const other = new Chart("Queues and the rest", "Other numbers of the system.");
  fill(
    root,
    tiles,
    el("div", { class: "stack", style: { "margin-bottom": "16px" } }, seconds.node),
    el(
      "div",
      { class: "grid" },
      speed.node,
      cache.node,
      preempted.node,
      memory.node,
      stale.node,
      aging.node,
      other.node,
    ),
  );

  async function load() {
    const found = await remembered(state.run.id, "systems");
    if (!isCurrent()) return;
    const pick = (pattern) =>
      Object.fromEntries(Object.entries(found.series || {}).filter(([name]) => pattern.test(name)));
    const show = (chart, series, why, layout = {}) =>
      chart.set(
        lines(series, state.run, {
          rename: (name) =>
            name
              .replace(/^(sys|stale)\//, "")
              .replace("tok_s", "tokens/s")
              .replaceAll("_", " "),
        }),
        { shapes: boundaries(state.run), yaxis: { rangemode: "tozero" }, ...layout },
        why,
      );
    fill(tiles, summary(found));
    seconds.set(
      phases(found.seconds, state.run),
      {
        barmode: "stack",
        bargap: 0,
        shapes: boundaries(state.run),
        margin: { l: 44, r: 10, t: 6, b: 30 },
        yaxis: { title: "s" },
      },
      "Appears with the first step.",
    );
    show(speed, pick(/tok_s/), "Appears with the first step.");
    show(cache, pick(/kv/), "Appears when a stage samples from the policy.", {
      yaxis: { rangemode: "tozero", tickformat: ".0%" },
    });
    show(preempted, pick(/preempt/), "Appears when a stage samples from the policy.");
    show(memory, gibibytes(pick(/memory/)), "Appears with the first step.");
    stale.set(
      ages(found.staleness),
      { hovermode: "closest", xaxis: { title: "versions", dtick: 1 } },
      "Appears when a stage samples from the policy.",
    );
    show(aging, pick(/^stale/), "Appears when a stage samples from the policy.");
    const rest = Object.fromEntries(
      Object.entries(found.series || {}).filter(([name]) => !/tok_s|kv|preempt|memory|tokens$|^stale/.test(name)),
    );
    other.node.hidden = !Object.keys(rest).length;
    show(other, rest, "Nothing more was recorded.");
  }
  await load();
  return {
    update: (kinds, current) => {
      state.run = current;
      return load();
    },
  };
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
    tile("Peak memory", bytes(last(/memory/)), null),
    tile(
      "Time in steps",
      total >= 3600
        ? `${number(total / 3600, 1)} h`
        : total >= 60
          ? `${number(total / 60, 1)} min`
          : `${number(total, 1)} s`,
      null,
    ),
  ];
}

function phases(seconds, run) {
  const sums = Object.entries(seconds || {})
    .map(([name, pieces]) => ({
      name,
      points: joined(pieces, run),
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
  return Object.fromEntries(
    Object.entries(series).map(([name, pieces]) => [
      name.replace(/_?bytes/, ""),
      pieces.map((piece) => ({
        ...piece,
        values: piece.values.map((value) => (isNumber(value) ? value / 2 ** 30 : null)),
      })),
    ]),
  );
}

function ages(staleness) {
  if (!staleness?.ages?.length) return [];
  return [
    {
      type: "bar",
      x: staleness.ages,
      y: staleness.counts,
      marker: { color: COLORS[0] },
      hovertemplate: "%{x} versions: %{y}<extra></extra>",
    },
  ];
}
