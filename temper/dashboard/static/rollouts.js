// What the policy wrote. Owns: filters, the table, one group side by side.
import { ofRun } from "./api.js";
import { badge, card, el, empty, failure, fill, isNumber, number, plain, statusTone, table } from "./dom.js";
import { LIMIT, offsetOf, turner } from "./paging.js";

const FIELDS = [
  { name: "step", title: "From step", type: "number" },
  { name: "step_to", title: "To step", type: "number" },
  { name: "min_reward", title: "Reward from", type: "number", step: "any" },
  { name: "max_reward", title: "Reward to", type: "number", step: "any" },
  { name: "min_length", title: "Tokens from", type: "number" },
  { name: "max_length", title: "Tokens to", type: "number" },
  { name: "task", title: "Task", type: "text", wide: true },
];
export const listed = { run: null, rows: [] }; // so that the tokens page can go on to the next of this list

export async function mount(root, { run, view, address, isCurrent }) {
  const parameters = new URLSearchParams(view.parameters);
  const state = { run, offset: offsetOf(view), asked: 0 };
  const results = card("Rollouts", "Newest first. Enter or click opens the group.");
  const group = el("div", { class: "below-header" });
  const news = el("div", {});
  const form = filters(run, parameters, () => {
    state.offset = 0;
    return load();
  });
  fill(root, el("div", { class: "stack" }, el("section", { class: "card" }, form), news, group, results.node));

  const values = () => Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== ""));
  async function load() {
    const asked = ++state.asked;
    const emptied = Object.fromEntries([...form.elements].filter((one) => one.name).map((one) => [one.name, ""]));
    view.set({ ...emptied, ...values(), offset: state.offset || "" });
    try {
      const found = await ofRun(run.id, "rollouts", { ...values(), offset: state.offset, limit: LIMIT });
      if (asked !== state.asked || !isCurrent()) return;
      Object.assign(listed, { run: run.id, rows: found.rows });
      statuses(form, found.statuses || []);
      fill(news);
      fill(results.body, rows(found, { state, view, load, open }));
    } catch (error) {
      if (asked === state.asked) fill(results.body, failure(error));
    }
  }
  async function open(row) {
    view.set({ group: `${row.stage}.${row.step}.${row.group_id}` });
    const close = () => {
      fill(group);
      view.set({ group: "" });
    };
    fill(group, el("section", { class: "card" }, el("p", { class: "hint" }, "Loading the group …")));
    try {
      const found = await ofRun(run.id, "group", { stage: row.stage, step: row.step, group_id: row.group_id });
      if (isCurrent())
        fill(
          group,
          sideBySide(found, row, run, address, close),
        );
    } catch (error) {
      fill(group, failure(error));
    }
    group.scrollIntoView({ block: "start", behavior: "smooth" });
  }
  await load();
  const [stage, step, ...rest] = (parameters.get("group") || "").split(".");
  if (rest.length) await open({ stage, step, group_id: rest.join(".") });
  return {
    update: (kinds) => {
      if (!kinds.has("step")) return;
      // The list does not jump under the reader's eyes; without filters and on its first part it may simply grow.
      if (
        state.offset === 0 &&
        !Object.keys(values()).length &&
        !group.childElementCount &&
        !results.body.contains(document.activeElement)
      )
        return load();
      fill(
        news,
        el(
          "button",
          {
            type: "button",
            class: "news",
            on: {
              click: () => {
                state.offset = 0;
                load();
              },
            },
          },
          "New rollouts have arrived: show them",
        ),
      );
    },
  };
}

function filters(run, parameters, changed) {
  const field = (spec) =>
    el(
      "label",
      { class: spec.wide ? "field wide" : "field" },
      spec.title,
      el("input", { name: spec.name, type: spec.type, step: spec.step, value: parameters.get(spec.name) || "" }),
    );
  const stage = el(
    "select",
    { name: "stage" },
    el("option", { value: "" }, "any"),
    run.stages.map((one) =>
      el("option", { value: String(one.stage), selected: parameters.get("stage") === String(one.stage) }, one.name),
    ),
  );
  const status = el(
    "select",
    { name: "status" },
    el("option", { value: "" }, "any"),
    parameters.get("status")
      ? el("option", { value: parameters.get("status"), selected: true }, parameters.get("status"))
      : null,
  );
  const form = el(
    "form",
    { class: "filters", role: "search", "aria-label": "Filter rollouts" },
    el(
      "label",
      { class: "field wide" },
      "Search the text",
      el("input", {
        name: "q",
        type: "search",
        value: parameters.get("q") || "",
        placeholder: "words in a response  ( / )",
      }),
    ),
    el("label", { class: "field" }, "Stage", stage),
    el("label", { class: "field" }, "Status", status),
    FIELDS.map(field),
    el("button", { type: "submit", class: "main" }, "Filter"),
    el(
      "button",
      {
        type: "button",
        on: {
          click: () => {
            for (const input of form.querySelectorAll("input, select")) input.value = "";
            changed();
          },
        },
      },
      "Clear",
    ),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    changed();
  });
  form.addEventListener("change", changed);
  return form;
}

function statuses(form, names) {
  const select = form.elements.status;
  const known = new Set([...select.options].map((option) => option.value));
  for (const name of names) if (!known.has(name)) select.append(el("option", { value: name }, name));
}

function rows(found, { state, view, load, open }) {
  if (!found.rows.length && state.offset === 0) {
    return empty(
      "No rollouts to show",
      state.run.last_step
        ? "No rollout of this run fits the filters, or its stages draw none (supervised stages train on given answers). Clear the filters to see all."
        : "Rollouts appear with the first step of a stage that samples from the policy.",
    );
  }
  const columns = [
    {
      title: "Step",
      class: "short",
      cell: (row) => [
        `${row.step}`,
        el("span", { class: "hint" }, ` ${state.run.stages.find((one) => one.stage === row.stage)?.name ?? row.stage}`),
      ],
    },
    {
      title: "Reward",
      number: true,
      cell: (row) => (row.score === null ? el("span", { title: row.reason || "" }, row.score_kind) : number(row.score)),
    },
    { title: "Prompt", class: "words prompt", cell: (row) => el("span", { class: "line-clamp" }, row.prompt) },
    { title: "Response", class: "words", cell: (row) => el("span", { class: "line-clamp" }, said(row.text)) },
    { title: "Tokens", number: true, cell: (row) => String(row.num_tokens) },
    { title: "Task", class: "short", cell: (row) => row.task_id },
    { title: "Status", cell: (row) => badge(row.status, statusTone(row.status)) },
    { title: "Outcome", cell: (row) => badge(row.outcome, statusTone(row.outcome)) },
  ];
  const words = `${state.offset + 1}–${state.offset + found.rows.length} ${total(found)}`;
  return [
    table(columns, found.rows, { open, label: "Rollouts" }),
    turner({ state, view, load, isLast: !found.more, words }),
  ];
}

/** "of 5,120 rollouts"; what a search could not count in time is said, too. */
function total(found) {
  if (!isNumber(found.total)) return "of more than could be counted in time";
  return `of ${found.is_whole ? "" : "more than "}${found.total.toLocaleString("en")} rollouts`;
}

export function parts(values, weighted) {
  const names = [...new Set([...Object.keys(values || {}), ...Object.keys(weighted || {})])];
  if (!names.length) return null;
  return el(
    "div",
    { class: "scroll" },
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el("th", {}, "Part"),
          el("th", { class: "number" }, "Value"),
          el("th", { class: "number" }, "Weighted"),
        ),
      ),
      el(
        "tbody",
        {},
        names.map((name) =>
          el(
            "tr",
            {},
            el("td", {}, name),
            el("td", { class: "number" }, plain(values?.[name])),
            el("td", { class: "number" }, plain(weighted?.[name])),
          ),
        ),
      ),
    ),
  );
}

/** What stands where a transcript was that went to make room for newer ones. */
export const DROPPED =
  "Words and tokens of this rollout went to make room for newer ones (rollout.transcripts_gb); its score, status, length and what it did to the world are kept.";

/** The text of a response; null: its transcript was dropped. */
function said(text) {
  return text === null ? "(transcript dropped)" : text || "(nothing)";
}

export function conversation(messages) {
  return (messages || []).map((message) =>
    el(
      "div",
      { class: `message ${["assistant", "tool", "system"].includes(message.role) ? message.role : "user"}` },
      el("b", {}, message.role === "tool" ? `observation${message.name ? ` from ${message.name}` : ""}` : message.role),
      el("pre", { class: "said" }, message.content),
    ),
  );
}

function sideBySide(found, row, run, address, close) {
  const member = (one) =>
    el(
      "article",
      { class: "member" },
      el(
        "div",
        { class: "member-head" },
        el("b", {}, `Member ${one.member}: ${one.score === null ? one.score_kind : `reward ${number(one.score)}`}`),
        badge(one.status, statusTone(one.status)),
        badge(`${one.num_tokens} tokens`),
      ),
      one.reason ? el("p", { class: "hint" }, one.reason) : null,
      el("pre", { class: "said" }, said(one.text)),
      parts(one.parts, one.weighted),
      el(
        "div",
        { class: "member-head" },
        el("span", { class: "hint" }, `mean advantage ${number(one.mean_advantage)}`),
        el(
          "a",
          {
            class: "button",
            href: address(run.id, "tokens", {
              stage: row.stage,
              step: row.step,
              group_id: row.group_id,
              member: one.member,
            }),
            "aria-label": `Tokens of member ${one.member}`,
          },
          "Tokens",
        ),
      ),
    );
  return el(
    "section",
    { class: "card", "aria-label": "Group" },
    el(
      "div",
      { class: "card-head" },
      el(
        "h2",
        {},
        `Group of ${found.members.length} at step ${row.step}`,
        el("button", { type: "button", data: { key: "close" }, on: { click: close } }, "Close"),
      ),
      el("p", { class: "hint" }, `task ${found.task_id} · ${found.outcome}`),
    ),
    conversation(found.prompt),
    found.answer ? el("p", { class: "hint" }, "Reference answer: ", el("code", {}, found.answer)) : null,
    el(
      "div",
      { class: "members", tabindex: "0", role: "region", "aria-label": "Members of the group" },
      found.members.map(member),
    ),
  );
}
