// What tools did to the world. Owns: the list by episode, with its filters and parts. Refuses: other events (tokens.js).
import { ofRun } from "./api.js";
import { badge, card, el, empty, failure, fill, isNumber, table } from "./dom.js";
import { LIMIT, offsetOf, turner } from "./paging.js";

const SOON_MS = 250;
const TONES = { "carried out": "accent", described: "warn", denied: "bad" };

export async function mount(root, { run, view, address, isCurrent }) {
  const state = { run, offset: offsetOf(view), asked: 0 };
  const results = card(
    "Side effects",
    "Calls that changed something outside their conversation, or would have: newest first, episode by episode. A call that was carried out may have failed or been cut off, as its words say; one that is described was not carried out, for nobody approved it. Enter or click opens the episode, or the page of evaluations.",
  );
  const change = (changes) => {
    view.set({ ...changes, offset: "" });
    state.offset = 0;
    clearTimeout(state.later);
    state.later = setTimeout(load, SOON_MS);
  };
  fill(root, el("div", { class: "stack" }, el("section", { class: "card" }, filters(view, change)), results.node));

  async function load() {
    const asked = ++state.asked;
    const wanted = { tool: view.get("tool"), outcome: view.get("outcome"), offset: state.offset, limit: LIMIT };
    try {
      const found = await ofRun(run.id, "effects", wanted);
      if (asked === state.asked && isCurrent()) fill(results.body, listed(found, wanted));
    } catch (error) {
      if (asked === state.asked) fill(results.body, failure(error));
    }
  }

  function listed(found, wanted) {
    if (!found.rows.length && !state.offset) return nothing(found, wanted);
    const shown = `${state.offset + 1}–${state.offset + found.rows.length}`;
    const words = found.more === null ? `${shown}; there may be more than was found in time` : shown;
    return [
      table(columns(state.run), found.rows, { open, label: "Side effects" }),
      turner({ state, view, load, isLast: !found.more, words }),
    ];
  }

  function open({ stage, step, evaluation, group_id, member }) {
    // Of an evaluation single episodes are not kept.
    location.hash = evaluation
      ? address(run.id, "evaluations")
      : address(run.id, "tokens", { stage, step, group_id, member });
  }

  await load();
  return {
    update: (kinds, current) => {
      state.run = current;
      // What is being read does not move.
      if (kinds.has("step") && !state.offset && !root.contains(document.activeElement)) return load();
    },
  };
}

function filters(view, change) {
  const tool = el("input", {
    type: "search",
    name: "tool",
    value: view.get("tool"),
    placeholder: "part of a tool's name  ( / )",
    on: { input: (event) => change({ tool: event.target.value }) },
  });
  const outcome = el(
    "select",
    { name: "outcome", on: { change: (event) => change({ outcome: event.target.value }) } },
    el("option", { value: "" }, "any"),
    Object.keys(TONES).map((name) => el("option", { value: name, selected: view.get("outcome") === name }, name)),
  );
  const form = el(
    "form",
    { class: "filters", role: "search", "aria-label": "Filter side effects" },
    el("label", { class: "field wide" }, "Tool", tool),
    el("label", { class: "field" }, "What became of it", outcome),
  );
  form.addEventListener("submit", (event) => event.preventDefault());
  return form;
}

function nothing(found, wanted) {
  if (found.more === null)
    return empty("None was found in time", "This run is large, and none of its newest episodes has such a call.");
  if (wanted.tool || wanted.outcome) return empty("No call fits", "Choose another outcome, or a part of a tool's name.");
  return empty(
    "Nothing was changed",
    "No tool of this run's episodes has changed anything outside its conversation, described such a call, or been denied one. What environments do beside that stands with each rollout.",
  );
}

function columns(run) {
  const stage = (row) => run.stages.find((one) => one.stage === row.stage)?.name ?? row.stage;
  return [
    { title: "Tool", class: "short", cell: (row) => el("b", {}, row.tool || "–") },
    { title: "What became of it", cell: (row) => badge(row.outcome, TONES[row.outcome]) },
    { title: "Call", class: "words", cell: (row) => el("span", { class: "line-clamp", title: row.detail }, row.detail) },
    { title: "Step", class: "short", cell: (row) => [`${row.step}`, el("span", { class: "hint" }, ` ${stage(row)}`)] },
    {
      title: "Episode",
      class: "short",
      cell: (row) => [
        row.task_id,
        el("span", { class: "hint" }, ` ${row.evaluation || ""} member ${row.member}${isNumber(row.turn) ? `, turn ${row.turn + 1}` : ""}`),
      ],
    },
  ];
}
