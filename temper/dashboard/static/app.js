// The frame around the pages. Owns: which page is shown, the choice of run, live updates, theme, keys.
import { ask, forget } from "./api.js";
import { closeCharts, repaint, useView } from "./charts.js";
import { ago, el, empty, failure, fill, runLabel } from "./dom.js";
import { listen, showShortcuts } from "./keys.js";
import { follow } from "./live.js";
import { address, carried, route, TABLE, View } from "./view.js";

export const PAGES = [
  { name: TABLE, letter: "u", title: "Runs" },
  { name: "overview", letter: "o", title: "Overview" },
  { name: "metrics", letter: "m", title: "Metrics" },
  { name: "rollouts", letter: "r", title: "Rollouts" },
  { name: "tokens", letter: "t", title: "Tokens" },
  { name: "data", letter: "d", title: "Data" },
  { name: "systems", letter: "s", title: "Systems" },
  { name: "evaluations", letter: "e", title: "Evaluations" },
  { name: "config", letter: "c", title: "Config" },
  { name: "effects", letter: "f", title: "Effects" },
];
const RUNS_EVERY_MS = 10000;
const page = document.getElementById("page");
let runs = [];
let shown = { key: "", update: null };
let visit = 0;
let followed = { id: null, last: null, end: () => {} };

async function show() {
  const { id, name, parameters } = route();
  const run = runs.find((one) => one.id === id);
  if (!location.hash.replace(/^#\/?/, "") && runs.length) {
    location.replace(runs.length > 1 ? address("", TABLE) : address(runs[0].id, "overview"));
    return;
  }
  frame(run, name);
  const mine = ++visit;
  if (name === TABLE) unwatch();
  else if (!run) {
    closeCharts();
    fill(
      page,
      runs.length
        ? empty("No such run", `There is no run "${id}" here. Choose one above.`)
        : empty(
            "No runs yet",
            "This folder holds no run of Temper. Start one with `temper train RECIPE --run FOLDER`; it appears here by itself.",
          ),
    );
    return;
  }
  if (run?.error) {
    closeCharts();
    shown = { key: "" };
    fill(page, failure(new Error(run.error)));
    return;
  }
  if (run) watch(run);
  const key = `${id}/${name}`;
  if (shown.key === key && shown.moved) {
    shown.view.parameters = parameters;
    shown.moved(parameters);
    return;
  } // the page itself changed its address
  closeCharts();
  shown = { key, update: null };
  try {
    const found = PAGES.find((one) => one.name === name);
    if (!found)
      throw new Error(`There is no page "${name}". The pages are ${PAGES.map((one) => one.name).join(", ")}.`);
    const module = await import(`./${found.name}.js`);
    if (mine !== visit) return;
    const root = el("div", { class: "page" });
    fill(page, el("h1", { class: "hidden" }, found.title), root);
    const view = new View({ id, name, parameters }, () => links(run, name));
    useView(view);
    const handle = await module.mount(root, {
      run,
      runs,
      view,
      address,
      isCurrent: () => mine === visit || shown.key === key,
    });
    if (shown.key === key) Object.assign(shown, handle || {}, { view });
  } catch (error) {
    if (shown.key === key) fill(page, failure(error));
  }
}

function frame(run, name) {
  const title = PAGES.find((one) => one.name === name)?.title || "";
  document.title = run ? `${run.name} · ${title} · Temper` : "Temper";
  links(run, name);
  document.querySelector("#nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  listRuns(run);
}

/** To every page, with the choices that pages share. From the table: to the pages of the run that was shown last. */
function links(run, name) {
  const { parameters } = route();
  const to = run || runs.find((one) => one.id === followed.last) || runs[0];
  const nodes = PAGES.map((one, index) =>
    el(
      "a",
      {
        href: address(to?.id || "", one.name, one.name === TABLE ? {} : carried(parameters)),
        "aria-current": one.name === name ? "page" : null,
        title: `${index} or g ${one.letter}`,
      },
      one.title,
    ),
  );
  fill(document.getElementById("nav"), nodes);
}

function listRuns(run) {
  const select = document.getElementById("run");
  if (document.activeElement === select && select.options.length === runs.length) return; // not under the reader's fingers
  const options = runs.map((one) => el("option", { value: one.id, selected: one.id === run?.id }, runLabel(one, runs)));
  fill(select, run ? [] : el("option", { value: "", selected: true }, "Choose a run"), options);
}

/** state: "running", "finished", "failed", "stopped", "dead", "not finished", or "lost" for the connection. */
function tellState(run, state, text = "") {
  const node = document.getElementById("live");
  const words = {
    running: "live",
    lost: "connection lost, trying again",
    "not finished": `not finished · ${ago(run.updated)}`,
  };
  node.dataset.state = state;
  node.textContent = words[state] || (text ? `${state}: ${text.slice(0, 100)}` : state);
  node.title = text || node.textContent;
}

function unwatch() {
  followed.end();
  followed = { id: null, last: followed.last, end: () => {} };
  const node = document.getElementById("live");
  node.textContent = node.title = "";
  delete node.dataset.state;
}

function watch(run) {
  if (followed.id === run.id) return;
  followed.end();
  followed = { id: run.id, last: run.id, end: () => {} };
  tellState(run, run.state, run.ended);
  if (run.state === "finished") return;
  const end = follow(
    run,
    async (kinds) => {
      forget(run.id);
      await loadRuns();
      const current = runs.find((one) => one.id === run.id) || run;
      try {
        if (shown.key.startsWith(`${run.id}/`)) await shown.update?.(kinds, current, runs);
      } catch (error) {
        tellState(current, "lost");
        console.warn(error.message);
      }
    },
    (state, text) => tellState(runs.find((one) => one.id === run.id) || run, state, text),
  );
  followed = { id: run.id, last: run.id, end };
}

async function loadRuns() {
  const found = await ask("/api/runs");
  const isNew = found.length !== runs.length;
  runs = found;
  return isNew;
}

function go(name) {
  const link = [...document.querySelectorAll("#nav a")][PAGES.findIndex((one) => one.name === name)];
  if (link && (name === TABLE || !link.hash.startsWith("#//"))) location.hash = link.hash;
}

function flipTheme() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("temper-theme", next);
  } catch {
    /* not remembered, then */
  }
  repaint();
}

async function start() {
  document.getElementById("theme").addEventListener("click", flipTheme);
  document.getElementById("help").addEventListener("click", () => showShortcuts(PAGES));
  document.getElementById("skip").addEventListener("click", (event) => {
    event.preventDefault();
    page.focus();
  });
  document.getElementById("run").addEventListener("change", (event) => {
    const { name, parameters } = route();
    const page = { tokens: "rollouts", [TABLE]: "overview" }[name] || name;
    if (event.target.value) location.hash = address(event.target.value, page, carried(parameters));
  });
  listen(PAGES, go);
  window.addEventListener("hashchange", show);
  try {
    await loadRuns();
    await show();
  } catch (error) {
    fill(page, failure(error));
  }
  setInterval(async () => {
    if (document.hidden) return;
    try {
      const isNew = await loadRuns();
      if (!shown.key) {
        if (isNew) await show();
        return;
      }
      if (isNew) listRuns(runs.find((one) => one.id === route().id));
      if (route().name === TABLE) await shown.update?.();
    } catch {
      /* the stream's indicator already says that the server is gone */
    }
  }, RUNS_EVERY_MS);
}

start();
