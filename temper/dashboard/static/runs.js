// All runs in one table. Owns: sorting, searching, choosing runs to compare, tags and notes.
import { ask, send } from "./api.js";
import { ago, badge, card, duration, el, empty, exact, failure, fill, isNumber, number, runLabel, sortHead } from "./dom.js";
import { address } from "./view.js";

const TONES = { running: "good", finished: "", failed: "bad", dead: "bad", stopped: "warn" };
const WORDS = { running: "live" };

export async function mount(root, { view, isCurrent }) {
  const state = { found: null, chosen: new Set(view.list("chosen")), editing: null };
  const list = card(
    "Runs",
    "Click a title to sort by it. Enter or click opens a run; tick several to see them in one chart.",
  );
  const search = el("input", {
    type: "search",
    id: "run-search",
    value: view.get("q"),
    name: "q",
    placeholder: "name, tag, note, state, key of a recipe  ( / )",
    on: {
      input: (event) => {
        view.set({ q: event.target.value });
        draw();
      },
    },
  });
  const compare = el("button", { type: "button", class: "main", on: { click: () => goCompare() } }, "Compare");
  const dialog = el("dialog", { class: "notes", "aria-label": "Tags and note" });
  const count = el("span", { class: "hint", role: "status" });
  fill(
    root,
    el(
      "div",
      { class: "tools" },
      el("label", { class: "field row-field wide-search", for: "run-search" }, "Search", search),
      compare,
      count,
    ),
    list.node,
    dialog,
  );

  function goCompare() {
    const [first, ...rest] = [...state.chosen];
    location.hash = address(first, "overview", { compare: rest.join(",") });
  }

  async function load() {
    try {
      const found = await ask("/api/table");
      if (!isCurrent()) return;
      state.found = found;
      draw();
    } catch (error) {
      fill(list.body, failure(error));
    }
  }

  function draw() {
    if (!state.found) return;
    const { runs } = state.found;
    const columns = columnsOf(state, view, edit, choose);
    const shown = sorted(
      runs.filter((run) => fits(run, view.get("q"))),
      columns,
      view.get("sort", "name"),
    );
    count.textContent = `${shown.length} of ${runs.length} runs`;
    compare.disabled = state.chosen.size < 2;
    compare.textContent = state.chosen.size ? `Compare ${state.chosen.size}` : "Compare";
    fill(
      list.body,
      shown.length
        ? tableOf(columns, shown, view, draw)
        : empty(
            runs.length ? "No run fits" : "No runs yet",
            runs.length
              ? "Search for a part of a name, a tag, a state such as `dead`, or a key and its value such as `seed=3`."
              : "Start one with `temper train RECIPE --run FOLDER`; it appears here by itself.",
          ),
    );
  }

  function choose(run, isChosen) {
    if (isChosen) state.chosen.add(run.id);
    else state.chosen.delete(run.id);
    view.set({ chosen: [...state.chosen] });
    draw();
    list.body.querySelector(`[data-run="${run.id}"] input`)?.focus();
  }

  function edit(run) {
    fill(dialog, editor(run, dialog, load));
    dialog.showModal();
  }
  await load();
  return { update: () => (list.body.contains(document.activeElement) || dialog.open ? null : load()) };
}

/** Every word is somewhere in what the row says, or is key=value of its recipe. */
function fits(run, query) {
  const recipe = Object.entries(run.recipe).map(([key, value]) => `${key}=${exact(value)}`);
  const state = WORDS[run.state] || run.state;
  const said = [run.name, run.folder, state, run.ended, run.error, run.note, ...run.tags, ...recipe];
  const text = said.join(" ").toLowerCase();
  return query
    .toLowerCase()
    .split(/\s+/)
    .every((word) => text.includes(word));
}

/** Columns: {key, title, cell(run), value(run) to sort by, number}. */
function columnsOf(state, view, edit, choose) {
  const { runs, differing, can_edit: canEdit } = state.found;
  const planned = (run) => run.stages.reduce((sum, one) => sum + one.steps, 0);
  const alarms = (run) => Object.values(run.alarms).reduce((sum, times) => sum + times, 0);
  return [
    {
      key: "",
      title: el("span", { class: "hidden" }, "Compare"),
      cell: (run) => chooser(run, state, runs, choose),
    },
    {
      key: "name",
      title: "Run",
      class: "run-cell",
      value: (run) => runLabel(run, runs),
      cell: (run) => nameCell(run, runs),
    },
    {
      key: "state",
      title: "State",
      class: "state-cell",
      value: (run) => WORDS[run.state] || run.state,
      cell: stateCell,
    },
    {
      key: "notes",
      title: "Tags and note",
      class: "notes-cell",
      value: (run) => run.tags.join(",") || run.note || null,
      cell: (run) => notesCell(run, canEdit, edit),
    },
    {
      key: "score",
      title: "Held-out score",
      number: true,
      value: (run) => run.score?.last.score ?? null,
      cell: scoreCell,
    },
    {
      key: "reward",
      title: "Reward",
      number: true,
      value: (run) => run.reward?.last ?? null,
      cell: (run) => fromTo(run.reward),
    },
    ...differing.map((key) => ({
      key: `recipe:${key}`,
      title: el("code", {}, key),
      class: "recipe-cell",
      value: (run) => sortable(run.recipe[key]),
      cell: (run) =>
        key in run.recipe ? el("code", { title: exact(run.recipe[key]) }, compact(run.recipe[key])) : "–",
    })),
    {
      key: "steps",
      title: "Steps",
      number: true,
      value: (run) => run.steps_done,
      cell: (run) => `${run.steps_done} / ${planned(run)}`,
    },
    { key: "seconds", title: "Time", number: true, value: (run) => run.seconds, cell: (run) => duration(run.seconds) },
    { key: "drawn", title: "Tokens drawn", number: true, value: (run) => run.drawn, cell: (run) => number(run.drawn) },
    { key: "alarms", title: "Alarms", number: true, value: alarms, cell: (run) => alarmCell(run, alarms(run)) },
    {
      key: "updated",
      title: "Last written",
      class: "short",
      value: (run) => run.updated,
      cell: (run) => ago(run.updated),
    },
  ];
}

/** A value of a recipe in a narrow cell: of a path its end, of a table its keys. */
function compact(value) {
  if (value && typeof value === "object" && !Array.isArray(value))
    return Object.entries(value).map(([key, inner]) => `${key}=${exact(inner)}`).join(" ");
  const text = exact(value);
  const parts = text.split("/");
  return text.length > 30 && parts.length > 4 ? `…/${parts.slice(-3).join("/")}` : text;
}

function sortable(value) {
  return value === undefined || value === null ? null : isNumber(value) ? value : exact(value);
}

function sorted(runs, columns, order) {
  const isDown = order.startsWith("-");
  const named = (key) => columns.find((one) => one.key === key);
  const column = named(order.replace(/^-/, "")) || named("name");
  const compare = (a, b) => {
    if (isNumber(a) && isNumber(b)) return a - b;
    return String(a).localeCompare(String(b), undefined, { numeric: true });
  };
  return runs.slice().sort((one, other) => {
    const [a, b] = [column.value(one), column.value(other)];
    if (a === null || b === null) return (a === null) - (b === null); // without a value: last, either way
    return isDown ? compare(b, a) : compare(a, b);
  });
}

function tableOf(columns, runs, view, draw) {
  const head = sortHead(columns, view.get("sort", "name"), (sort) => {
    view.set({ sort });
    draw();
  });
  const open = (run) => {
    location.hash = address(run.id, "overview");
  };
  const rows = runs.map((run) => {
    const cells = columns.map((column) =>
      el("td", { class: `${column.number ? "number" : ""} ${column.class || ""}` }, column.cell(run)),
    );
    const node = el("tr", { class: "row", tabindex: "0", data: { run: run.id } }, cells);
    node.addEventListener("click", (event) => event.target.closest("a, button, input, label, summary") || open(run));
    node.addEventListener("keydown", (event) => event.key === "Enter" && event.target === node && open(run));
    return node;
  });
  const body = el("table", { class: "runs" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows));
  return el("div", { class: "scroll", role: "region", "aria-label": "Runs" }, body);
}

function chooser(run, state, runs, choose) {
  return el("input", {
    type: "checkbox",
    "aria-label": `Compare ${runLabel(run, runs)}`,
    checked: state.chosen.has(run.id),
    disabled: Boolean(run.error),
    on: { change: (event) => choose(run, event.target.checked) },
  });
}

function nameCell(run, runs) {
  const siblings = runs.filter((one) => one.seeds && one.seeds === run.seeds).length;
  return [
    el("a", { href: address(run.id, "overview") }, runLabel(run, runs)),
    siblings > 1 ? el("div", { class: "hint" }, `one of ${siblings} runs of this recipe`) : null,
  ];
}

function notesCell(run, canEdit, edit) {
  return [
    run.tags.map((tag) => [badge(tag, "accent"), " "]),
    run.note ? el("div", { class: "line-clamp", title: run.note }, run.note) : null,
    run.notes_error ? el("div", { class: "bad-text" }, run.notes_error) : null,
    canEdit && !run.notes_error
      ? el(
          "button",
          {
            type: "button",
            class: "quiet small",
            "aria-label": `Edit tags and note of ${run.name}`,
            on: { click: () => edit(run) },
          },
          run.tags.length || run.note ? "Edit" : "Add",
        )
      : null,
  ];
}

function stateCell(run) {
  const why = (text) => el("div", { class: "line-clamp why", title: text }, text);
  if (run.error) return [badge("unreadable", "bad"), why(run.error)];
  return [
    badge(WORDS[run.state] || run.state, TONES[run.state]),
    run.ended ? why(run.ended) : null,
  ];
}

function fromTo(ends) {
  if (!ends) return "–";
  return `${number(ends.first)} → ${number(ends.last)}`;
}

function scoreCell(run) {
  if (!run.score) return "–";
  const { first, last, name, differs, constant } = run.score;
  const hasSides = isNumber(last.low) && isNumber(last.high);
  const sides = hasSides ? `[${number(last.low)}, ${number(last.high)}]` : "no interval";
  const title = `${name}; always the commonest answer: ${number(constant)}`;
  const isOne = first.stage === last.stage && first.step === last.step;
  return [
    el("span", { title }, isOne ? number(last.score) : fromTo({ first: first.score, last: last.score })),
    el("div", { class: "hint" }, sides),
    differs.length ? el("div", { class: "hint" }, `not comparable: ${differs.join(", ")}`) : null,
  ];
}

function alarmCell(run, total) {
  const worst = ["stop", "pause", "warn"].find((level) => run.alarms[level]);
  return total ? badge(String(total), worst === "stop" ? "bad" : worst ? "warn" : "") : "0";
}

function editor(run, dialog, saved) {
  const tags = el("input", { type: "text", id: "tags", value: run.tags.join(", "), placeholder: "baseline, to keep" });
  const note = el("textarea", { id: "note", rows: "6", maxlength: "4000" });
  note.value = run.note;
  const problem = el("p", { class: "bad-text", role: "alert" });
  const form = el(
    "form",
    { method: "dialog" },
    el("h2", {}, `Tags and note of ${run.name}`),
    el("label", { class: "field", for: "tags" }, "Tags, with commas between them", tags),
    el("label", { class: "field", for: "note" }, "Note", note),
    problem,
    el("p", { class: "hint" }, "Kept as notes.json in the run's directory; training does not notice."),
    el(
      "div",
      { class: "tools" },
      el("button", { type: "submit", class: "main" }, "Save"),
      el("button", { type: "button", data: { key: "close" }, on: { click: () => dialog.close() } }, "Cancel"),
    ),
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await send(`/api/runs/${encodeURIComponent(run.id)}/notes`, { tags: tags.value.split(","), note: note.value });
      dialog.close();
      await saved();
    } catch (error) {
      problem.textContent = error.message;
    }
  });
  return form;
}
