// Whether it helped. Owns: held-out scores with intervals, pass@k curves, suites, audits.
import { remembered } from "./api.js";
import { Chart } from "./charts.js";
import { heldout } from "./curves.js";
import { badge, card, el, empty, fill, isNumber, number, table, when } from "./dom.js";
import { axisTitle, boundaries, layOut } from "./stages.js";
import { band, COLORS } from "./traces.js";

export async function mount(root, { run, isCurrent }) {
  const state = { run };
  const scores = new Chart(
    "Held-out score over the steps",
    "With its 95% interval, clustered by prompt. Dotted: always giving the commonest answer. Below it nothing was learned.",
    { height: 300, y: "score" },
  );
  const curves = new Chart(
    "pass@k",
    "The chance that at least one of k answers is right. Up at 1 but not at large k: sharpening, not new ability.",
    { height: 300, x: "k", y: "pass@k" },
  );
  const latest = card("Measured", "Every held-out evaluation, newest first.");
  const suites = card("Suites", "Evaluations of checkpoints under fixed budgets.");
  const audits = card(
    "Audits",
    "Samples to read with your own eyes: those with the highest training reward, and random ones. High reward and low held-out score: the reward is being gamed.",
  );
  const unreadable = el("div");
  fill(
    root,
    el(
      "div",
      { class: "stack" },
      unreadable,
      el("div", { class: "grid two" }, scores.node, curves.node),
      latest.node,
      suites.node,
      audits.node,
    ),
  );

  async function load() {
    const found = await remembered(state.run.id, "evaluations");
    if (!isCurrent()) return;
    const entry = { run: state.run, evaluations: found.evaluations || [] };
    const lay = layOut([entry]);
    scores.set(
      heldout([{ entries: [entry], name: state.run.name, color: COLORS[0] }], lay).traces,
      { ...boundaries(lay), xaxis: { title: axisTitle(lay) } },
      "Appears after the first held-out evaluation; the recipe needs a [heldout] section.",
    );
    const kinds = [...passCurves(found)];
    curves.set(
      kinds,
      {
        xaxis: { type: "log", title: "k", tickvals: [1, 2, 4, 8, 16, 32, 64, 128, 256] },
        hovermode: "closest",
        showlegend: true,
      },
      "Appears when an evaluation draws more than one sample per prompt, or after `temper eval CHECKPOINT --suite NAME`.",
    );
    fill(unreadable, unreadableFiles(found.unreadable || []));
    fill(latest.body, measured(found.evaluations || [], state.run));
    fill(suites.body, suiteTable(found.suites || [], found.unreadable || []));
    fill(audits.body, auditList(found.audits || [], state.run));
  }
  await load();
  return {
    update: (kinds, current) => {
      state.run = current;
      return kinds.has("evaluation") || kinds.has("state") ? load() : null;
    },
  };
}

/** {k, score, low, high} of everything called pass@k. */
function curve(metrics) {
  const points = Object.entries(metrics || {}).map(([name, value]) => ({
    k: Number(/^pass@(\d+)$/.exec(name)?.[1]),
    ...(typeof value === "object" ? value : { score: value }),
  }));
  return points.filter((point) => point.k && isNumber(point.score)).sort((a, b) => a.k - b.k);
}

function passCurves(found) {
  const rows = (found.evaluations || []).filter((one) => curve(one.details).length > 1);
  const named = [];
  for (const name of new Set(rows.map((one) => one.name))) {
    const own = rows.filter((one) => one.name === name);
    for (const one of own.length > 1 ? [own[0], own.at(-1)] : own)
      named.push([`${name}, stage ${one.stage} step ${one.step}`, curve(one.details)]);
  }
  for (const suite of found.suites || []) {
    const points = curve(suite.metrics);
    if (points.length > 1) named.push([`${suite.suite} · ${short(suite.checkpoint)}`, points]);
  }
  return named.slice(0, COLORS.length).flatMap(([name, points], index) =>
    band(
      points.map((point) => ({ ...point, x: point.k, name: "" })),
      name,
      COLORS[index],
    ),
  );
}

function short(path) {
  return String(path || "")
    .split("/")
    .slice(-2)
    .join("/");
}

function interval(one) {
  return isNumber(one?.low) && isNumber(one?.high) ? `[${number(one.low)}, ${number(one.high)}]` : "–";
}

function measured(rows, run) {
  if (!rows.length)
    return empty(
      "No held-out score yet",
      "It is measured before the first step and then as often as evaluation.every says, on tasks never trained on, by a verifier of its own.",
    );
  const extra = [...new Set(rows.flatMap((one) => Object.keys(one.details || {})))].filter((name) => name !== "pass@1");
  return table(
    [
      {
        title: "Step",
        class: "short",
        cell: (one) => [
          String(one.step),
          el("span", { class: "hint" }, ` ${run.stages.find((stage) => stage.stage === one.stage)?.name ?? one.stage}`),
        ],
      },
      { title: "Evaluation", cell: (one) => one.name },
      { title: "Score", number: true, cell: (one) => el("b", {}, number(one.score)) },
      { title: "95% interval", number: true, cell: interval },
      { title: "Constant answer", number: true, cell: (one) => number(one.constant_score) },
      { title: "Prompts", number: true, cell: (one) => String(one.num_prompts) },
      ...extra.map((name) => ({
        title: name.replaceAll("_", " "),
        number: true,
        cell: (one) => {
          const value = one.details?.[name];
          return number(typeof value === "object" && value ? value.score : value);
        },
      })),
    ],
    rows.slice().reverse(),
    { label: "Held-out evaluations" },
  );
}

/** Above everything else: what could not be read is missing from the curves and from the table. */
function unreadableFiles(files) {
  if (!files.length) return null;
  const { node, body } = card(
    "Results that could not be read",
    "These files lie in the run's folder evaluations/. What they hold is missing below: that says nothing about the checkpoint. Evaluate again, or move the file away.",
  );
  node.setAttribute("role", "alert");
  node.classList.add("unreadable");
  const columns = [
    { title: "File", cell: (one) => badge(one.file, "bad") },
    { title: "Why", class: "words", cell: (one) => one.reason },
  ];
  fill(body, table(columns, files, { label: "Results that could not be read" }));
  return node;
}

function suiteTable(suites, unreadable) {
  if (!suites.length && unreadable.length)
    return empty("No suite result could be read", "The files and the reasons stand at the top of this page.");
  if (!suites.length)
    return empty(
      "No suite was run on this run's checkpoints",
      "`temper eval CHECKPOINT --suite NAME` measures a checkpoint on a named set of tasks under a fixed budget; its result appears here.",
    );
  const names = [...new Set(suites.flatMap((one) => Object.keys(one.metrics || {})))].slice(0, 8);
  return table(
    [
      { title: "Suite", cell: (one) => one.suite },
      { title: "Checkpoint", cell: (one) => short(one.checkpoint) },
      { title: "When", class: "short", cell: (one) => when(one.created) },
      ...names.map((name) => ({
        title: name,
        number: true,
        cell: (one) => {
          const value = one.metrics?.[name];
          return el("span", { title: interval(value) }, number(value?.score));
        },
      })),
      { title: "Constant", number: true, cell: (one) => number(one.constant_score) },
      {
        title: "Budget",
        class: "words",
        cell: (one) =>
          Object.entries(one.budget || {})
            .filter(([name]) => !/sha256|^suite$/.test(name))
            .map(([name, value]) => `${name} ${value}`)
            .join(", "),
      },
    ],
    suites,
    { label: "Suites" },
  );
}

function auditList(audits, run) {
  if (!audits.length)
    return empty(
      "No audits yet",
      "Every evaluation keeps a few answers to read: those with the highest reward and some drawn at random.",
    );
  const groups = new Map();
  for (const one of audits) {
    const key = `${one.evaluation}, ${run.stages.find((stage) => stage.stage === one.stage)?.name ?? one.stage} step ${one.step}`;
    groups.set(key, [...(groups.get(key) || []), one]);
  }
  return [...groups].reverse().map(([key, rows], index) =>
    el(
      "details",
      { open: index === 0 },
      el("summary", {}, `${key}: ${rows.length} answers`),
      rows
        .sort((a, b) => (b.kind === "top") - (a.kind === "top") || a.place - b.place)
        .map((one) =>
          el(
            "div",
            { class: "audit" },
            el(
              "div",
              { class: "alarm-head" },
              badge(one.kind === "top" ? "highest reward" : one.kind, one.kind === "top" ? "accent" : ""),
              el("span", {}, `reward ${number(one.reward)}`),
              el("span", {}, `held-out ${number(one.heldout)}`),
              el("span", { class: "hint" }, one.task_id),
            ),
            el(
              "p",
              { class: "hint" },
              Array.isArray(one.prompt) ? one.prompt.map((message) => message.content).join(" ⏎ ") : one.prompt,
            ),
            el("pre", { class: "said" }, one.text),
          ),
        ),
    ),
  );
}
