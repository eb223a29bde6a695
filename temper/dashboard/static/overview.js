// How the run goes, at a glance. Owns: the main curves, the comparison of runs, the alarms and when they rang.
import { eventList, timeline } from "./alarms.js";
import { remembered } from "./api.js";
import { band, boundaries, Chart, COLORS, constant, joined, line, offsets, stageName } from "./charts.js";
import { card, el, fill, isNumber, number, runLabel, tile } from "./dom.js";

const CHARTS = [
  {
    title: "Reward",
    names: ["reward/mean"],
    hint: "What is optimised. It rising proves nothing alone: look at the held-out score.",
  },
  {
    title: "Held-out score",
    evaluation: true,
    hint: "On tasks never trained on, with its 95% interval; dotted: always the commonest answer.",
  },
  { title: "Entropy", names: ["policy/entropy"], hint: "Nats per token. Falling to 0: no exploration left." },
  {
    title: "KL",
    names: ["policy/kl_ref_k3", "policy/kl_old_k3"],
    hint: "Nats per token from the reference and from the proximal policy.",
  },
  { title: "Length", names: ["gen/len_mean", "gen/len_max"], hint: "Tokens per response." },
  {
    title: "Clip fraction",
    names: ["policy/clip_frac_high", "policy/clip_frac_low", "policy/dual_clip_frac"],
    hint: "Share of tokens whose gradient the bound removed.",
  },
  {
    title: "Mismatch",
    sampled: true,
    names: ["mismatch/kl_k3", "mismatch/logp_abs_mean"],
    hint: "Trainer against sampler, nats per token. 0 in exact mode.",
  },
  {
    title: "Staleness",
    sampled: true,
    names: ["stale/mean", "stale/max"],
    hint: "Versions between the weights that drew a response and those it trains.",
  },
  {
    title: "Throughput split",
    names: ["sys/rollout_tok_s", "sys/train_tok_s"],
    hint: "Tokens per second while drawing and while training.",
  },
  {
    title: "Groups without signal",
    names: ["data/degenerate"],
    hint: "Share of groups whose rewards are all equal: nothing to learn from.",
  },
  { title: "Gradient norm", names: ["policy/grad_norm"], hint: "Before clipping. 0 or a spike: look at the alarms." },
  { title: "Loss", names: ["loss"], hint: "Its size says little, only its slope." },
];

export async function mount(root, { run, runs, parameters, address, isCurrent }) {
  const state = {
    run,
    runs,
    weight: 0,
    stage: "",
    marked: null,
    others: (parameters.get("compare") || "").split(",").filter(Boolean),
    found: new Map(),
  };
  const tiles = el("div", { class: "tiles" });
  const charts = CHARTS.map((spec) => ({ spec, chart: new Chart(spec.title, spec.hint) }));
  const alarms = card("Alarms", "What a rule saw, what it usually means, and what to try.");
  const events = card("Events", "What happened to the process.");
  const redraw = () => draw(state, charts);
  const compared = () => {
    history.replaceState(null, "", address(state.run.id, "overview", { compare: state.others.join(",") }));
    return load();
  };
  fill(
    root,
    tools(state, redraw, compared),
    tiles,
    el(
      "div",
      { class: "grid" },
      charts.map(({ chart }) => chart.node),
    ),
    el("div", { class: "stack", style: { "margin-top": "16px" } }, alarms.node, events.node),
  );

  async function load() {
    const wanted = [state.run.id, ...state.others];
    const answers = await Promise.all(wanted.map((id) => remembered(id, "overview")));
    if (!isCurrent()) return;
    state.found = new Map(wanted.map((id, index) => [id, answers[index]]));
    const own = answers[0];
    fill(tiles, summary(state.run, own));
    redraw();
    fill(alarms.body, timeline(state, own.alarms || [], redraw));
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

function tools(state, redraw, compared) {
  const amount = el("output", {}, "off");
  const slider = el("input", {
    type: "range",
    min: "0",
    max: "0.98",
    step: "0.02",
    value: "0",
    id: "smoothing",
    on: {
      input: (event) => {
        state.weight = Number(event.target.value);
        amount.textContent = state.weight ? state.weight.toFixed(2) : "off";
        redraw();
      },
    },
  });
  const stages = el(
    "select",
    {
      id: "stage",
      on: {
        change: (event) => {
          state.stage = event.target.value;
          redraw();
        },
      },
    },
    el("option", { value: "" }, "all, one after the other"),
    state.run.stages.map((one) => el("option", { value: String(one.stage) }, one.name)),
  );
  const rest = state.runs.filter((one) => one.id !== state.run.id);
  const boxes = rest.map((one) => {
    const box = el("input", {
      type: "checkbox",
      checked: state.others.includes(one.id),
      on: {
        change: (event) => {
          state.others = event.target.checked ? [...state.others, one.id] : state.others.filter((id) => id !== one.id);
          compared();
        },
      },
    });
    return el("label", {}, box, runLabel(one, state.runs));
  });
  return el(
    "div",
    { class: "tools" },
    el("label", { class: "field row-field" }, "Stage", stages),
    el("label", { class: "field row-field", for: "smoothing" }, "Smoothing", slider, amount),
    rest.length
      ? el(
          "details",
          { class: "field", open: state.others.length > 0 },
          el("summary", {}, "Compare with other runs"),
          el("div", { class: "checks" }, boxes),
        )
      : null,
  );
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

function draw(state, charts) {
  const isCompared = state.others.length > 0;
  const shapes = [...(isCompared ? [] : boundaries(state.run, state.stage))];
  if (state.marked !== null)
    shapes.push({
      type: "line",
      x0: state.marked,
      x1: state.marked,
      y0: 0,
      y1: 1,
      yref: "paper",
      line: { color: "#d55e00", width: 1.5 },
    });
  const named = [...state.found].map(([id, overview], index) => ({
    run: state.runs.find((one) => one.id === id) || state.run,
    overview,
    color: COLORS[index % COLORS.length],
  }));
  for (const { spec, chart } of charts) {
    const { traces, latest } = spec.evaluation ? heldout(named, state) : curves(spec, named, state, isCompared);
    chart.latest.textContent = isNumber(latest) ? number(latest) : "";
    chart.set(
      traces,
      { shapes, showlegend: traces.filter((trace) => trace.showlegend !== false).length > 1 },
      missing(spec, state.run),
    );
  }
}

function curves(spec, named, state, isCompared) {
  const traces = [];
  let latest = null;
  named.forEach(({ run, overview, color }) => {
    const present = spec.names.filter((name) => overview.series?.[name]?.some((piece) => piece.steps.length));
    present.slice(0, isCompared ? 1 : undefined).forEach((name, index) => {
      const points = joined(
        overview.series[name].filter((piece) => !spec.sampled || samples(overview, piece.stage)),
        run,
        state.stage,
      );
      latest ??= points.y.findLast(isNumber);
      if (points.x.length)
        traces.push(
          ...line(points, isCompared ? run.name : short(name), isCompared ? color : COLORS[index], state.weight),
        );
    });
  });
  return { traces, latest };
}

function short(name) {
  return name.replace(/^[a-z]+\//, "").replaceAll("_", " ");
}

/** Supervised stages have no sampler that the trainer could disagree with. */
function samples(overview, stage) {
  return (overview.series["reward/mean"] || []).some((piece) => piece.stage === stage);
}

function heldout(named, state) {
  const traces = [];
  let latest = null;
  const isCompared = named.length > 1;
  for (const { run, overview, color } of named) {
    const starts = offsets(run);
    const rows = (overview.evaluations || []).filter((one) => state.stage === "" || String(one.stage) === state.stage);
    const names = [...new Set(rows.map((one) => one.name))];
    names.slice(0, isCompared ? 1 : undefined).forEach((name, index) => {
      const own = rows
        .filter((one) => one.name === name)
        .map((one) => ({
          ...one,
          x: one.step + (state.stage === "" ? starts[one.stage] || 0 : 0),
          name: `${stageName(run, one.stage)} step ${one.step}`,
        }));
      const tone = isCompared ? color : COLORS[index % COLORS.length];
      latest ??= own.at(-1)?.score;
      traces.push(...band(own, isCompared ? run.name : name, tone));
      if (!isCompared) traces.push(...constant(own, tone));
    });
  }
  return { traces, latest };
}

function missing(spec, run) {
  if (spec.evaluation)
    return "Appears after the first held-out evaluation; the recipe sets how often with evaluation.every and needs a [heldout] section.";
  return run.last_step
    ? `This run does not record ${spec.names.join(" or ")}: its stages or objective have no such number.`
    : "Appears with the first step.";
}
