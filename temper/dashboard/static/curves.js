// From metrics of several runs to the curves of a chart. Owns: which runs are compared, seeds as one curve, names.
import { ofRun, remembered } from "./api.js";
import { isNumber, runLabel } from "./dom.js";
import { joinSegments, layOut, position, segments } from "./stages.js";
import { band, COLORS, constant, line, meanLine } from "./traces.js";

const MOST_RUNS = 40;

/** Ids of the runs that are shown: the page's own, those chosen beside it, and with `seeds` their siblings. */
export function chosenRuns(view, run, runs) {
  const ids = [run.id, ...view.list("compare").filter((id) => id !== run.id && runs.some((one) => one.id === id))];
  if (!view.get("seeds")) return ids.slice(0, MOST_RUNS);
  const groups = new Set(ids.map((id) => runs.find((one) => one.id === id)?.seeds).filter(Boolean));
  const siblings = runs.filter((one) => groups.has(one.seeds) && !one.error).map((one) => one.id);
  return [...new Set([...ids, ...siblings])].slice(0, MOST_RUNS);
}

/** {run, axes, ...what `read` gives} of every run that is shown. */
export async function loadEntries(view, run, runs, read) {
  const needsAxes = view.get("x", "steps") !== "steps";
  return Promise.all(
    chosenRuns(view, run, runs).map(async (id) => {
      const [found, axes] = await Promise.all([read(id), needsAxes ? remembered(id, "axes") : null]);
      return { run: id === run.id ? run : runs.find((one) => one.id === id), axes, ...found };
    }),
  );
}

/** Metrics of one run by name, a hundred at a time. */
export async function readSeries(id, names) {
  const parts = [];
  for (let at = 0; at < names.length; at += 100) parts.push(names.slice(at, at + 100));
  const answers = await Promise.all(parts.map((part) => ofRun(id, "series", { names: part.join(",") })));
  return Object.assign({}, ...answers);
}

/** Entries as they become curves: {name, color, entries}; several entries: seeds of one recipe. */
export function groupsOf(entries, view, runs) {
  const groups = [];
  for (const entry of entries) {
    const same = view.get("seeds") && entry.run.seeds && groups.find((one) => one.seeds === entry.run.seeds);
    if (same) same.entries.push(entry);
    else groups.push({ seeds: entry.run.seeds, entries: [entry] });
  }
  return groups.map((group, index) => ({
    ...group,
    color: COLORS[index % COLORS.length],
    name:
      group.entries.length > 1
        ? `${commonName(group.entries.map((entry) => entry.run.name))} (${group.entries.length} runs)`
        : runLabel(group.entries[0].run, runs),
  }));
}

/** "demo" for demo, demo-seed1 and demo-seed2. */
function commonName(names) {
  let length = 0;
  while (names.every((name) => name.length > length && name[length] === names[0][length])) length += 1;
  return names[0].slice(0, length).replace(/[\W_]+(seed|s)?[\W_]*$/i, "") || names[0];
}

export function isCompared(groups) {
  return groups.length > 1 || groups.some((group) => group.entries.length > 1);
}

/** What a band is when runs are drawn as one curve; else "". */
export function spreadNote(groups) {
  const isSpread = groups.some((group) => group.entries.length > 1);
  return isSpread ? "Several runs as one curve: their mean, in a band from the lowest to the highest." : "";
}

/** How this chart lies on the axis. kind: it shows that kind of stage only. */
export function layOf(entries, view, kind = "") {
  return layOut(entries, { x: view.get("x", "steps"), chosen: kind || view.get("kind") });
}

/** Curves of the metrics `names`. Of several runs only the first of them that a run has: one colour is one run. */
export function curves(names, groups, lay, { weight = 0, rename = short, keep = () => true } = {}) {
  const traces = [];
  let latest = null;
  for (const { entries, name: title, color } of groups) {
    const parts = (metric) =>
      entries.map((entry) =>
        segments(
          (entry.series?.[metric] || []).filter((piece) => keep(entry, piece.stage)),
          entry,
          lay,
        ),
      );
    const present = names.filter((metric) => parts(metric).some((found) => found.length));
    for (const [index, metric] of present.entries()) {
      if (index && isCompared(groups)) break;
      const found = parts(metric).filter((one) => one.length);
      const tone = isCompared(groups) ? color : COLORS[index % COLORS.length];
      const shown = isCompared(groups) ? title : rename(metric);
      if (found.length > 1) traces.push(...meanLine(found, shown, tone, weight));
      else traces.push(...line(joinSegments(found[0]), shown, tone, weight));
      latest ??= (found.length > 1 ? traces.at(-1) : joinSegments(found[0])).y.findLast(isNumber);
    }
  }
  return { traces, latest };
}

/** Held-out scores with their intervals; of seeds their mean, lowest and highest. */
export function heldout(groups, lay) {
  const traces = [];
  let latest = null;
  for (const { entries, name: title, color } of groups) {
    const names = [...new Set(entries.flatMap((entry) => (entry.evaluations || []).map((one) => one.name)))];
    for (const [index, name] of names.entries()) {
      if (index && isCompared(groups)) break;
      const rows = entries.map((entry) => evaluated(entry, name, lay)).filter((own) => own.length);
      if (!rows.length) continue;
      const tone = isCompared(groups) ? color : COLORS[index % COLORS.length];
      const shown = isCompared(groups) ? title : name;
      if (rows.length > 1) traces.push(...meanLine(rows.map(asSegments), shown, tone));
      else traces.push(...band(rows[0], shown, tone));
      if (!isCompared(groups)) traces.push(...constant(rows[0], tone));
      latest ??= rows[0].at(-1)?.score;
    }
  }
  return { traces, latest };
}

function evaluated(entry, name, lay) {
  return (entry.evaluations || [])
    .filter((one) => one.name === name)
    .map((one) => ({ ...one, x: position(lay, entry, one.stage, one.step), name: `step ${one.step}` }))
    .filter((one) => one.x !== null);
}

function asSegments(rows) {
  return [...new Set(rows.map((row) => row.stage))].map((stage) => {
    const own = rows.filter((row) => row.stage === stage);
    return { kind: stage, x: own.map((row) => row.x), y: own.map((row) => row.score), names: own.map(() => "") };
  });
}

export function short(name) {
  return name.replace(/^[a-z]+\//, "").replaceAll("_", " ");
}
