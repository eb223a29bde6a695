// What the policy is taught with. Owns: pass rates, groups without signal, the prompt ledger, the curriculum, what was
// chosen.
import { remembered } from "./api.js";
import { Chart } from "./charts.js";
import { curves } from "./curves.js";
import { card, el, empty, fill, isNumber, label, number, percent, table, tile } from "./dom.js";
import { promptCard, stacked } from "./prompts.js";
import { boundaries, layOut } from "./stages.js";
import { COLORS } from "./traces.js";

const LEFT = /^data\/(skipped|solved|in_band)/;
const SHARED = /^data\/(pool_|weight\/)/;

export async function mount(root, { run, view, address, isCurrent }) {
  const state = { run };
  const tiles = el("div", { class: "tiles" });
  const histogram = new Chart(
    "Pass rates of groups",
    "How many groups were solved by which share of their members, early against late. Groups in the middle teach most.",
    { height: 260, x: "pass rate", y: "groups" },
  );
  const signal = new Chart(
    "Groups without signal",
    "Share of groups: all passed (too easy), all failed (too hard), all rewards equal (nothing to learn).",
    { height: 260, y: "share of groups" },
  );
  const curriculum = new Chart("Curriculum", "Pass rate by source or task family over the steps.", {
    height: 260,
    y: "pass rate",
  });
  const rates = new Chart(
    "Prompts by pass rate",
    "Share of the prompts seen so far, by their running pass rate. A growing middle can be learned from; ends that grow cannot.",
    { height: 260, y: "share of prompts", hasLog: false },
  );
  const passed = new Chart(
    "What draws passed over",
    "By data.choose: prompts that draws came upon and left, and known prompts that are solved or lie in the band.",
    { height: 260, y: "share" },
  );
  const pools = new Chart(
    "What draws were shared out over",
    "By data.choose: pools of the prompts that were drawn, and weights of the sources for the next draws.",
    { height: 260, y: "share of draws" },
  );
  const every = promptCard({ run, view, address, isCurrent });
  const dropped = card("Why groups were dropped", "Prompts that were drawn but not trained, by reason.");
  const hard = card("Hardest prompts", "Lowest pass rates. Many at 0: too hard, or a broken verifier.");
  const easy = card("Easiest prompts", "Highest pass rates. Many at 1: nothing left to learn there.");
  fill(
    root,
    tiles,
    el(
      "div",
      { class: "grid two" },
      [histogram, signal, rates, curriculum, passed, pools, hard, easy].map((one) => one.node),
    ),
    el("div", { class: "stack", style: { "margin-top": "16px" } }, every.node, dropped.node),
  );

  const open = (row) => {
    location.hash = address(state.run.id, "rollouts", { group: `${row.stage}.${row.step}.${row.group_id}` });
  };
  async function load() {
    const found = await remembered(state.run.id, "data");
    if (!isCurrent()) return;
    fill(tiles, ledger(found.ledger || {}));
    histogram.set(
      bars(found.histogram),
      { barmode: "group", hovermode: "closest" },
      "Appears when groups have been scored. Supervised stages have none.",
    );
    const lay = layOut([state]);
    const drawn = (series) => {
      const alone = { entries: [{ run: state.run, series }], name: "", color: COLORS[0] };
      return curves(Object.keys(series || {}), [alone], lay).traces;
    };
    signal.set(
      drawn(found.series),
      { ...boundaries(lay), yaxis: { rangemode: "tozero" } },
      "Appears with the first step that draws groups.",
    );
    curriculum.set(
      drawn(found.curriculum),
      { ...boundaries(lay), yaxis: { rangemode: "tozero" }, showlegend: true },
      "Appears when tasks come from more than one source or family.",
    );
    rates.set(
      stacked(found.spread, state.run, lay),
      { ...boundaries(lay), barmode: "stack", bargap: 0, showlegend: true, yaxis: { rangemode: "tozero", tickformat: ".0%" } },
      "Appears with the first step that draws prompts and is judged by a reward.",
    );
    for (const [chart, names] of [
      [passed, LEFT],
      [pools, SHARED],
    ]) {
      const series = Object.fromEntries(Object.entries(found.chosen || {}).filter(([name]) => names.test(name)));
      chart.node.hidden = !Object.keys(found.chosen || {}).length; // most recipes choose nothing
      chart.set(
        drawn(series),
        { ...boundaries(lay), yaxis: { rangemode: "tozero" }, showlegend: true },
        "The choosers of this recipe have no say in it.",
      );
    }
    fill(dropped.body, reasons(found.ledger || {}));
    fill(hard.body, prompts(found.hardest, "Hardest prompts", open, found.ties?.hardest));
    fill(easy.body, prompts(found.easiest, "Easiest prompts", open, found.ties?.easiest));
  }
  await Promise.all([load(), every.load()]);
  return {
    update: (kinds, current) => {
      state.run = current;
      return Promise.all([load(), every.isBusy() ? null : every.load()]);
    },
  };
}

function ledger({ drawn, distinct, trained, dropped }) {
  const lost = Object.values(dropped || {}).reduce((sum, count) => sum + count, 0);
  const share = (count) => (drawn ? `${percent(count / drawn)} of those drawn` : null);
  return [
    tile("Prompts drawn", number(drawn ?? null), isNumber(distinct) ? `${number(distinct)} distinct` : null),
    tile("Trained", number(trained ?? null), share(trained)),
    tile("Dropped", number(lost), share(lost)),
    tile("Repeats", distinct ? `${number(drawn / distinct, 2)}×` : "–", "times a prompt was drawn"),
  ];
}

function bars(histogram) {
  if (!histogram?.edges?.length || ![...histogram.early, ...histogram.late].some(Boolean)) return [];
  const { edges } = histogram;
  const names = edges.slice(0, -1).map((edge, index) => `${number(edge, 2)}–${number(edges[index + 1], 2)}`);
  const one = (counts, name, color) => ({
    type: "bar",
    x: names,
    y: counts,
    name: label(name),
    marker: { color },
    hovertemplate: "%{x}: %{y} groups",
  });
  return [one(histogram.early, "early", COLORS[4]), one(histogram.late, "late", COLORS[0])];
}

function reasons({ dropped }) {
  const entries = Object.entries(dropped || {}).sort((a, b) => b[1] - a[1]);
  if (!entries.length)
    return empty(
      "Nothing was dropped",
      "Groups whose members all failed to run, timed out, or brought no signal would be counted here.",
    );
  const most = Math.max(...entries.map(([, count]) => count));
  return el(
    "div",
    { class: "bars" },
    entries.map(([reason, count]) => [
      el("span", {}, reason),
      el("span", { class: "fill", style: { width: percent(count / most) } }),
      el("b", { class: "number" }, number(count)),
    ]),
  );
}

/** ties: prompts with the pass rate of the last row, all and listed. */
function prompts(rows, name, open, ties) {
  if (!rows?.length) return empty("No prompts yet", "They appear when groups have been scored.");
  const more = (ties?.all || 0) - (ties?.listed || 0);
  const tied =
    more > 0
      ? `${ties.all} prompts have the pass rate ${percent(rows.at(-1).rate)}; ${ties.listed} of them are listed, those drawn most often, then by name.`
      : "";
  return [tied ? el("p", { class: "hint ties" }, tied) : null, promptTable(rows, name, open)];
}

function promptTable(rows, name, open) {
  return table(
    [
      { title: "Pass rate", number: true, cell: (row) => percent(row.rate) },
      { title: "Drawn", number: true, cell: (row) => number(row.draws) },
      {
        title: "Prompt",
        class: "words",
        cell: (row) => el("span", { class: "line-clamp" }, row.prompt || row.task_id),
      },
      { title: "Task", class: "short", cell: (row) => row.task_id },
    ],
    rows,
    { label: name, open },
  );
}
