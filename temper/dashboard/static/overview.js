// How the run goes, at a glance. Owns: the main curves, the comparison of runs, the alarms and when they rang.
import { eventList, timeline } from "./alarms.js";
import { remembered } from "./api.js";
import { Chart } from "./charts.js";
import { curves, groupsOf, heldout, isCompared, layOf, loadEntries, short, spreadNote } from "./curves.js";
import { card, el, fill, isNumber, number, tile } from "./dom.js";
import { axisTitle, boundaries, kinds, mergedKinds, position } from "./stages.js";
import { tools } from "./tools.js";

const KL_OLD = "policy/kl_old_k3";
const MISMATCH = "mismatch/kl_k3";
const WHOLE = new Set(["reward/mean", "reward/std", "reward/shaped_mean"]);
const CHARTS = [
  {
    title: "Reward",
    names: ["reward/mean"],
    y: "reward",
    hint: "What is optimised. It rising proves nothing alone: look at the held-out score.",
  },
  {
    title: "Held-out score",
    evaluation: true,
    y: "score",
    hint: "On tasks never trained on, with its 95% interval; dotted: always the commonest answer.",
  },
  {
    title: "Reward parts",
    parts: true,
    y: "reward",
    hint: "What each part adds to the reward, after bounds, weight and gates.",
  },
  { title: "Entropy", names: ["policy/entropy"], y: "nats per token", hint: "Falling to 0: no exploration left." },
  {
    title: "KL",
    names: ["policy/kl_ref_k3", KL_OLD],
    y: "nats per token",
    hint: "From the reference and from the proximal policy.",
  },
  { title: "Length", names: ["gen/len_mean", "gen/len_max"], y: "tokens", hint: "Tokens per response." },
  {
    title: "Clip fraction",
    names: ["policy/clip_frac_high", "policy/clip_frac_low", "policy/dual_clip_frac"],
    y: "share of tokens",
    hint: "Tokens whose gradient the bound removed.",
  },
  {
    title: "Mismatch",
    sampled: true,
    names: [MISMATCH, "mismatch/logp_abs_mean"],
    y: "nats per token",
    hint: "Trainer against sampler. 0 in exact mode.",
  },
  {
    title: "Staleness",
    sampled: true,
    names: ["stale/mean", "stale/max"],
    y: "versions",
    hint: "Versions between the weights that drew a response and those it trains.",
  },
  {
    title: "Throughput split",
    names: ["sys/rollout_tok_s", "sys/train_tok_s"],
    y: "tokens/s",
    hint: "While drawing and while training.",
  },
  {
    title: "Groups without signal",
    names: ["data/degenerate"],
    y: "share of groups",
    hint: "Groups whose rewards are all equal: nothing to learn from.",
  },
  {
    title: "Gradient norm",
    names: ["policy/grad_norm"],
    y: "norm",
    hint: "Before clipping. 0 or a spike: look at the alarms.",
  },
];

export async function mount(root, { run, runs, view, isCurrent }) {
  const state = { run, runs, view, entries: [], charts: [], built: "" };
  const tiles = el("div", { class: "tiles" });
  const grid = el("div", { class: "grid" });
  const ending = el("div");
  const alarms = card("Alarms", "What a rule saw, what it usually means, and what to try.");
  const events = card("Events", "What happened to the process.");
  const redraw = () => draw(state, grid);
  fill(
    root,
    ending,
    tools({ view, run, runs, redraw, reload: load }),
    tiles,
    grid,
    el("div", { class: "stack", style: { "margin-top": "16px" } }, alarms.node, events.node),
  );

  async function load() {
    const entries = await loadEntries(view, state.run, state.runs, (id) => remembered(id, "overview"));
    if (!isCurrent()) return;
    state.entries = entries;
    const own = entries[0];
    fill(ending, ended(state.run));
    fill(tiles, summary(state.run, own));
    redraw();
    const choose = (alarm) => {
      view.set({ mark: `${alarm.stage}.${alarm.step}` });
      redraw();
    };
    fill(alarms.body, timeline(state.run, own.alarms || [], choose));
    fill(events.body, eventList(own.events || []));
  }
  await load();
  return {
    update: (kinds, current, all) => {
      state.run = current;
      state.runs = all;
      return load();
    },
  };
}

/** Why a run ended before its last step, in full: beside its name there is room for a line. */
function ended(run) {
  if (!["failed", "dead", "stopped"].includes(run.state)) return null;
  const words = { failed: "This run failed", dead: "This run's process is dead", stopped: "This run was stopped" };
  const tone = run.state === "stopped" ? "ended" : "ended bad";
  const why = el("pre", { class: "said" }, run.ended);
  return el("div", { class: `card ${tone}`, role: "alert" }, el("strong", {}, words[run.state]), why);
}

function last(series, name) {
  const values = (series?.[name] || []).flatMap((piece) => piece.values).filter(isNumber);
  return values.length ? { first: values[0], last: values.at(-1) } : null;
}

function summary(run, overview) {
  const stage = run.stages.find((one) => one.stage === run.last_stage);
  const done =
    run.stages.filter((one) => one.stage < run.last_stage).reduce((sum, one) => sum + one.steps, 0) +
    (run.last_step || 0);
  const all = run.stages.reduce((sum, one) => sum + one.steps, 0);
  const progress = el("progress", { max: String(Math.max(all, 1)), value: String(done), "aria-label": "Steps done" });
  const moved = (name) => {
    const found = last(overview.series, name);
    return found && [number(found.last), found.first === found.last ? null : `from ${number(found.first)}`];
  };
  const scores = (overview.evaluations || []).filter((one) => isNumber(one.score));
  const held = scores.findLast((one) => one.name === scores[0].name); // the one that the chart names first
  const alarms = overview.alarms || [];
  const worst = ["stop", "pause", "warn"].find((level) => alarms.some((one) => one.level === level));
  return [
    tile("Progress", `${done} / ${all}`, [
      stage ? `${stage.name}, step ${run.last_step ?? 0}` : "no step yet",
      progress,
    ]),
    tile("Reward", ...(moved("reward/mean") || ["–", "no scored rollouts yet"])),
    tile(
      held ? `Held-out score, ${held.name}` : "Held-out score",
      held ? number(held.score) : "–",
      held
        ? `${isNumber(held.low) ? `[${number(held.low)}, ${number(held.high)}]` : "no interval"}${isNumber(held.constant_score) ? `, constant ${number(held.constant_score)}` : ""}`
        : "not measured yet",
    ),
    tile("Entropy", ...(moved("policy/entropy") || ["–", "not measured yet"])),
    tile("Length", ...(moved("gen/len_mean") || ["–", "no responses yet"])),
    tile(
      "Alarms",
      String(alarms.length),
      alarms.length ? `last: ${alarms.at(-1).rule}` : "all quiet",
      worst === "stop" ? "bad" : worst ? "warn" : "",
    ),
  ];
}

/** The charts of these runs: a loss for each kind of stage, since one axis for two would flatten the smaller; and one
 * chart, not two, for KL and mismatch when they are the same number. */
function specs(state) {
  const chosen = state.view.get("kind");
  const losses = mergedKinds(state.entries.map((entry) => entry.run)).filter((kind) => !chosen || kind === chosen);
  const isSame = sameNumbers(state.entries);
  const shown = CHARTS.map((spec) => {
    if (isSame && spec.title === "KL")
      return { ...spec, names: spec.names.filter((name) => name !== KL_OLD), hint: "From the reference." };
    return isSame && spec.title === "Mismatch" ? { ...spec, hint: `${spec.hint} ${isSame}` } : spec;
  });
  return [
    ...shown.filter((spec) => {
      if (spec.parts) return partNames(state.entries).length > 0; // a reward of one part is that part
      return spec.title !== "KL" || !isSame || hasMetric(state.entries, spec.names);
    }),
    ...(losses.length ? losses : [""]).map((kind) => ({
      title: losses.length > 1 ? `Loss, ${kind}` : "Loss",
      kind,
      names: ["loss"],
      y: "loss",
      hint: "Its size says little, only its slope.",
    })),
  ];
}

function hasMetric(entries, names) {
  return entries.some((entry) => names.some((name) => entry.series?.[name]?.length));
}

/** A sentence when the KL from the proximal policy is the mismatch in every step; else "". */
function sameNumbers(entries) {
  const has = entries.filter((entry) => entry.series?.[KL_OLD]?.length);
  const values = (entry, name) => JSON.stringify(entry.series?.[name]?.filter((piece) => samples(entry, piece.stage)));
  if (!has.length || !has.every((entry) => values(entry, KL_OLD) === values(entry, MISMATCH))) return "";
  const isTold = has.every((entry) => (entry.proximal || []).includes("behavior"));
  const why = isTold ? ': the recipe says proximal = "behavior", so the sampler is the proximal policy' : "";
  return `The KL from the proximal policy is the same number and has no chart of its own${why}.`;
}

function draw(state, grid) {
  const wanted = specs(state);
  const key = JSON.stringify(wanted);
  if (state.built !== key) {
    for (const { chart } of state.charts) chart.close();
    state.charts = wanted.map((spec) => ({ spec, chart: new Chart(spec.title, spec.hint, { y: spec.y }) }));
    fill(
      grid,
      state.charts.map(({ chart }) => chart.node),
    );
    state.built = key;
  }
  const groups = groupsOf(state.entries, state.view, state.runs);
  for (const { spec, chart } of state.charts) drawOne(spec, chart, groups, state);
}

function drawOne(spec, chart, groups, state) {
  const lay = layOf(state.entries, state.view, spec.kind);
  const { traces, latest } = spec.evaluation
    ? heldout(groups, lay)
    : curves(spec.parts ? partNames(state.entries) : spec.names, groups, lay, {
        weight: Number(state.view.get("smooth", "0")),
        rename: spec.parts ? (name) => short(name).replace(/ weighted$/, "") : short,
        keep: (entry, stage) => !spec.sampled || samples(entry, stage),
      });
  chart.latest.textContent = isNumber(latest) ? number(latest) : "";
  chart.note = spreadNote(groups);
  const { shapes, annotations } = boundaries(lay);
  const only = isCompared(groups) && !spec.evaluation ? comparedName(spec, state.entries) : "";
  chart.set(
    traces,
    {
      shapes: [...shapes, ...marked(state, lay)],
      annotations,
      xaxis: { title: axisTitle(lay) },
      yaxis: only ? { title: `${only}, ${spec.y}` } : {},
      showlegend: traces.filter((trace) => trace.showlegend !== false && trace.meta !== "edge").length > 1,
    },
    missing(spec, state.run),
  );
}

/** Of several runs a chart shows one of its metrics: which. */
function comparedName(spec, entries) {
  const names = spec.parts ? partNames(entries) : spec.names;
  return names.length > 1 ? short(names.find((name) => hasMetric(entries, [name])) || names[0]) : "";
}

/** Parts of the reward: what each added, where that was recorded. */
function partNames(entries) {
  const names = [...new Set(entries.flatMap((entry) => Object.keys(entry.series || {})))].filter(
    (name) => name.startsWith("reward/") && !WHOLE.has(name),
  );
  const weighted = names.filter((name) => name.endsWith("_weighted"));
  return weighted.length ? weighted : names;
}

function marked(state, lay) {
  const [stage, step] = state.view.get("mark").split(".").map(Number);
  const place = state.view.get("mark") ? position(lay, state.entries[0], stage, step) : null;
  if (place === null) return [];
  const line = { color: "#d55e00", width: 1.5 };
  return [{ type: "line", x0: place, x1: place, y0: 0, y1: 1, yref: "paper", line }];
}

/** Supervised stages have no sampler that the trainer could disagree with. */
function samples(entry, stage) {
  return (entry.series["reward/mean"] || []).some((piece) => piece.stage === stage);
}

function missing(spec, run) {
  if (spec.evaluation)
    return "Appears after the first held-out evaluation; the recipe sets how often with evaluation.every and needs a [heldout] section.";
  if (!run.last_step) return "Appears with the first step.";
  if (spec.parts) return "Appears in stages that sample from the policy and score what it says.";
  const other = kinds(run).length > 1 ? " (or not in the stage that is chosen above)" : "";
  return `This run does not record ${spec.names.join(" or ")}${other}: its stages or objective have no such number.`;
}
