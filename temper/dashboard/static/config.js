// What was run. Owns: the resolved recipe as it is kept with the run, and what differs from another one.
import { ask, remembered } from "./api.js";
import { card, el, empty, exact, failure, fill, runLabel, table } from "./dom.js";

export async function mount(root, { run, runs, view, isCurrent }) {
  const changed = card("What this recipe changes", "Keys whose values are not the defaults of this version of Temper.");
  const difference = card("Against another run", "Only the keys whose values differ.");
  const whole = card("Resolved configuration", "Every key, defaults included, as stored with the run.");
  const rest = runs.filter((one) => one.id !== run.id);
  const result = el("div", {});
  const choose = el(
    "select",
    { id: "other", on: { change: () => compare() } },
    el("option", { value: "" }, "choose a run"),
    rest.map((one) =>
      el("option", { value: one.id, selected: view.get("with") === one.id }, runLabel(one, runs)),
    ),
  );
  fill(
    difference.body,
    rest.length
      ? [
          el(
            "div",
            { class: "tools" },
            el("label", { class: "field row-field", for: "other" }, "Compare with", choose),
          ),
          result,
        ]
      : empty(
          "There is only this run",
          "Serve a folder with several runs, `temper watch FOLDER`, to see what differs between two of them.",
        ),
  );
  fill(root, el("div", { class: "stack" }, changed.node, difference.node, whole.node));

  async function compare() {
    view.set({ with: choose.value });
    if (!choose.value) {
      fill(result);
      return;
    }
    try {
      const rows = await ask("/api/config-diff", { a: run.id, b: choose.value });
      if (isCurrent())
        fill(
          result,
          differing(
            rows,
            run,
            rest.find((one) => one.id === choose.value),
          ),
        );
    } catch (error) {
      fill(result, failure(error));
    }
  }
  const found = await remembered(run.id, "config");
  if (!isCurrent()) return null;
  fill(changed.body, changes(found.changed || []));
  const text = found.toml ? toml(found.toml) : empty("No configuration was kept", "The run's config.toml is missing.");
  const all = el(
    "details",
    { open: Boolean(view.get("whole")) },
    el("summary", {}, `Show all ${found.toml.split("\n").length} lines`),
    text,
  );
  all.addEventListener("toggle", () => view.set({ whole: all.open ? "1" : "" }));
  fill(whole.body, all);
  if (choose.value) await compare();
  return {};
}

function changes(rows) {
  if (!rows.length) return empty("Nothing", "Every key has its default, or the run keeps no recipe that can be read.");
  return table(
    [
      { title: "Stage", class: "short", cell: (row) => row.stage || "all" },
      { title: "Key", class: "short", cell: (row) => el("code", {}, row.key) },
      { title: "Value", class: "after", cell: (row) => el("code", {}, exact(row.value)) },
      { title: "Default", cell: (row) => el("code", {}, exact(row.default)) },
    ],
    rows,
    { label: "Keys that differ from the defaults" },
  );
}

function differing(rows, run, other) {
  if (!rows.length) return empty("No difference", "Both runs have the same resolved configuration.");
  return table(
    [
      { title: "Key", class: "short", cell: (row) => el("code", {}, row.key) },
      { title: run.name, class: "before", cell: (row) => el("code", {}, exact(row.a)) },
      { title: other?.name || "other", class: "after", cell: (row) => el("code", {}, exact(row.b)) },
    ],
    rows,
    { label: "Differences" },
  );
}

function toml(text) {
  const copied = el(
    "button",
    {
      type: "button",
      on: {
        click: async () => {
          try {
            await navigator.clipboard.writeText(text);
            copied.textContent = "Copied";
          } catch {
            copied.textContent = "The browser forbids copying";
          }
        },
      },
    },
    "Copy",
  );
  const lines = text.split("\n").map((line) => {
    if (/^\s*#/.test(line)) return el("span", { class: "note" }, line, "\n");
    if (/^\s*\[/.test(line)) return el("span", { class: "head" }, line, "\n");
    const at = line.indexOf("=");
    return at < 0
      ? `${line}\n`
      : [el("span", { class: "key" }, line.slice(0, at + 1)), el("span", { class: "value" }, line.slice(at + 1)), "\n"];
  });
  return [el("div", { class: "tools" }, copied), el("pre", { class: "toml", tabindex: "0" }, lines)];
}
