// Prompts and how often they were solved. Owns: the table of their histories, with its search, order and parts; the chart
// of pass rates over the steps.
import { ofRun } from "./api.js";
import { card, el, empty, failure, fill, label, number, percent, sortHead } from "./dom.js";
import { LIMIT, offsetOf, turner } from "./paging.js";
import { joinSegments, segments } from "./stages.js";

const SOON_MS = 250;
const FEW_STEPS = 120;
// From hard to easy: two reds, grey, two blues; told apart by colour-blind readers too.
const TONES = ["#d55e00", "#e69f00", "#7f7f7f", "#56b4e9", "#0072b2"];
const COLUMNS = [
  { key: "rate", title: "Pass rate", number: true, cell: (row) => percent(row.rate) },
  { key: "draws", title: "Drawn", number: true, cell: (row) => number(row.draws) },
  { key: "", title: "Prompt", class: "words", cell: (row) => el("span", { class: "line-clamp" }, row.prompt || "–") },
  {
    key: "attempts",
    title: "Passed / attempts",
    number: true,
    class: "short",
    cell: (row) => `${number(row.passed, 2)} / ${number(row.attempts)}`,
  },
  { key: "step", title: "Last step", number: true, cell: (row) => number(row.step) },
  { key: "task", title: "Task", class: "short", cell: (row) => row.task_id },
];

/** {node, load()}: the table of all prompts of a run. */
export function promptCard({ run, view, address, isCurrent }) {
  const state = { offset: offsetOf(view), asked: 0 };
  const { node, body } = card(
    "Prompts",
    "What the run remembers of each: its running pass rate, in which late groups count more, and how its answers did in all. Click a title to sort by it; Enter or click opens the newest group.",
  );
  const results = el("div", { class: "prompt-list" });
  const search = el("input", {
    type: "search",
    id: "prompt-search",
    name: "q",
    value: view.get("q"),
    placeholder: "words of a prompt, a task, a source  ( / )",
    on: {
      input: (event) => {
        view.set({ q: event.target.value, offset: "" });
        state.offset = 0;
        clearTimeout(state.later);
        state.later = setTimeout(load, SOON_MS);
      },
    },
  });
  fill(
    body,
    el(
      "div",
      { class: "tools" },
      el("label", { class: "field row-field wide-search", for: "prompt-search" }, "Search", search),
    ),
    results,
  );

  async function load() {
    const asked = ++state.asked;
    const order = view.get("sort", "rate");
    const answer = ofRun(run.id, "prompts", { q: view.get("q"), sort: order, offset: state.offset, limit: LIMIT });
    try {
      const found = await answer;
      if (asked === state.asked && isCurrent()) fill(results, listed(found, order));
    } catch (error) {
      if (asked === state.asked) fill(results, failure(error));
    }
  }

  function listed(found, order) {
    if (!found.every)
      return empty(
        "No histories yet",
        "They appear with the first step of a stage that samples and is judged by a reward. Runs of earlier versions have none.",
      );
    if (!found.total) return empty("No prompt fits", "Search for words of a prompt, or for a part of a task's name.");
    const sorted = async (sort) => {
      view.set({ sort, offset: "" });
      state.offset = 0;
      await load();
      results.querySelector(`[data-sort="${sort.replace(/^-/, "")}"]`)?.focus();
    };
    const columns = found.rows.some((row) => row.source)
      ? [...COLUMNS, { key: "source", title: "Source", class: "short", cell: (row) => row.source }]
      : COLUMNS;
    const last = state.offset + found.rows.length;
    const all = found.total === found.every ? "" : ` that fit, ${number(found.every)} in all`;
    return [
      el(
        "div",
        { class: "scroll", role: "region", "aria-label": "Prompts" },
        el(
          "table",
          {},
          el("thead", {}, el("tr", {}, sortHead(columns, order, sorted))),
          el(
            "tbody",
            {},
            found.rows.map((row) => rowOf(columns, row, open)),
          ),
        ),
      ),
      turner({
        state,
        view,
        load,
        isLast: last >= found.total,
        words: `${state.offset + 1}–${last} of ${found.total.toLocaleString("en")} prompts${all}`,
      }),
    ];
  }

  function open(row) {
    if (row.group_id)
      location.hash = address(run.id, "rollouts", { group: `${row.stage}.${row.step}.${row.group_id}` });
  }

  return { node, load, isBusy: () => node.contains(document.activeElement) };
}

function rowOf(columns, row, open) {
  const cells = columns.map((column) =>
    el("td", { class: `${column.number ? "number" : ""} ${column.class || ""}` }, column.cell(row)),
  );
  const node = el("tr", { class: "row", tabindex: "0" }, cells);
  node.addEventListener("click", () => open(row));
  node.addEventListener("keydown", (event) => event.key === "Enter" && event.target === node && open(row));
  return node;
}

/** Bands of pass rates, {name: pieces}, one on the other: all prompts that were seen make up the whole. */
export function stacked(bands, run, lay) {
  const parts = Object.entries(bands || {}).map(([name, pieces]) => [name, joinSegments(segments(pieces, { run }, lay))]);
  const isShort = Math.max(0, ...parts.map(([, points]) => points.x.length)) <= FEW_STEPS;
  return parts.map(([name, points], index) => {
    const color = TONES[index % TONES.length];
    const common = {
      x: points.x,
      y: points.y,
      text: points.names,
      name: label(name),
      hovertemplate: "%{y:.0%}",
    };
    return isShort
      ? { ...common, type: "bar", textposition: "none", marker: { color } }
      : { ...common, type: "scatter", mode: "none", stackgroup: "prompts", fillcolor: `${color}cc` };
  });
}
