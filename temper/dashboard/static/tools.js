// What is shown, and how. Owns: the row of choices above charts; each is kept in the address (view.js).
import { chosenRuns } from "./curves.js";
import { el, fill, runLabel } from "./dom.js";
import { AXES, mergedKinds } from "./stages.js";

/** redraw(): the same numbers in another way; reload(): other numbers are needed. */
export function tools({ view, run, runs, redraw, reload }) {
  const others = runs.filter((one) => one.id !== run.id);
  const seeds = runs.filter((one) => one.seeds && runs.some((two) => two !== one && two.seeds === one.seeds));
  const stage = el("span");
  const listStages = () => fill(stage, stageField(view, run, runs, redraw));
  const otherRuns = () => {
    listStages();
    reload();
  };
  listStages();
  return el(
    "div",
    { class: "tools" },
    stage,
    axisField(view, reload),
    scaleField(view, redraw),
    smoothingField(view, redraw),
    seeds.length ? seedsField(view, otherRuns) : null,
    others.length ? compareField(view, others, runs, otherRuns) : null,
  );
}

function choice(title, id, options, value, change) {
  const select = el(
    "select",
    { id, on: { change: (event) => change(event.target.value) } },
    options.map(([name, text]) => el("option", { value: name, selected: name === value }, text)),
  );
  return el("label", { class: "field row-field", for: id }, title, select);
}

/** Kinds of the stages of all runs that are shown, not their numbers: another run has its RL elsewhere. */
function stageField(view, run, runs, redraw) {
  const shown = chosenRuns(view, run, runs).map((id) => runs.find((one) => one.id === id) || run);
  const names = mergedKinds(shown);
  const options = [["", "all, one after the other"], ...names.map((name) => [name, name])];
  return choice("Stage", "stage", options, view.get("kind"), (value) => {
    view.set({ kind: value });
    redraw();
  });
}

function axisField(view, reload) {
  const options = Object.entries(AXES).map(([name, { title }]) => [name === "steps" ? "" : name, `${title}`]);
  return choice("Along", "axis", options, view.get("x"), (value) => {
    view.set({ x: value });
    reload();
  });
}

function scaleField(view, redraw) {
  const options = [
    ["", "linear"],
    ["log", "logarithmic"],
  ];
  return choice("Scale", "scale", options, view.get("scale"), (value) => {
    view.set({ scale: value, log: "" });
    redraw();
  });
}

function smoothingField(view, redraw) {
  const words = (weight) => (weight ? weight.toFixed(2) : "off");
  const amount = el("output", {}, words(Number(view.get("smooth", "0"))));
  const slider = el("input", {
    type: "range",
    min: "0",
    max: "0.98",
    step: "0.02",
    id: "smoothing",
    on: {
      input: (event) => {
        const weight = Number(event.target.value);
        amount.textContent = words(weight);
        view.set({ smooth: weight || "" });
        redraw();
      },
    },
  });
  slider.value = view.get("smooth", "0"); // after its bounds are known, or it would be cut to others
  return el("label", { class: "field row-field", for: "smoothing" }, "Smoothing", slider, amount);
}

function seedsField(view, reload) {
  const box = el("input", {
    type: "checkbox",
    id: "seeds",
    checked: Boolean(view.get("seeds")),
    on: {
      change: (event) => {
        view.set({ seeds: event.target.checked ? "1" : "" });
        reload();
      },
    },
  });
  const title =
    "Runs whose recipes differ in their seed alone become one curve: their mean, from the lowest to the highest";
  return el("label", { class: "field row-field", title }, box, "Seeds as mean and spread");
}

function compareField(view, others, runs, reload) {
  const chosen = () => view.list("compare");
  const boxes = others.map((one) => {
    const box = el("input", {
      type: "checkbox",
      disabled: Boolean(one.error),
      checked: chosen().includes(one.id),
      on: {
        change: () => {
          view.toggle("compare", one.id);
          reload();
        },
      },
    });
    return el("label", {}, box, runLabel(one, runs));
  });
  return el(
    "details",
    { class: "field", open: chosen().length > 0 },
    el("summary", {}, "Compare with other runs"),
    el("div", { class: "checks" }, boxes),
  );
}
