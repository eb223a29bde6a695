// One trajectory, token by token. Owns: colours of tokens, where turns begin, what the pointer or the focus shows.
import { ofRun } from "./api.js";
import { add, badge, card, el, empty, failure, fill, isNumber, number, plain, statusTone } from "./dom.js";
import { conversation, DROPPED, listed, parts } from "./rollouts.js";

const BLUE = "0, 114, 178";
const ORANGE = "213, 94, 0";
const PURPLE = "140, 107, 177";
const SCALES = {
  advantage: {
    title: "Advantage",
    value: (row, i) => at(row.advantages, i),
    diverging: true,
    low: "pushed down",
    high: "pushed up",
  },
  gap: {
    title: "Log-prob gap",
    value: (row, i) => gap(row, i),
    diverging: true,
    low: "trainer less sure than sampler",
    high: "more sure",
  },
  entropy: { title: "Entropy", value: (row, i) => at(row.entropies, i), low: "certain", high: "undecided (nats)" },
  mask: { title: "Mask", value: (row, i) => at(row.loss_mask, i), low: "no gradient", high: "trained" },
};

function at(array, index) {
  return array && isNumber(array[index]) ? array[index] : null;
}

function gap(row, index) {
  const policy = at(row.policy_logprobs, index);
  const behavior = at(row.behavior_logprobs, index);
  return policy === null || behavior === null || !row.loss_mask[index] ? null : policy - behavior;
}

export async function mount(root, { run, view, address, isCurrent }) {
  const { parameters } = view;
  const state = { scale: SCALES[view.get("color")] ? view.get("color") : "advantage", view };
  async function load(wanted) {
    const place = wanted.get("group_id")
      ? placeOf(Object.fromEntries(wanted))
      : await newest(run);
    if (!place) {
      fill(
        root,
        empty(
          "No trajectory yet",
          "One appears with the first step of a stage that samples from the policy. Supervised stages draw none.",
        ),
      );
      return;
    }
    try {
      const [found, group] = await Promise.all([
        ofRun(run.id, "trajectory", place),
        ofRun(run.id, "group", { stage: place.stage, step: place.step, group_id: place.group_id }),
      ]);
      if (isCurrent()) fill(root, page(run, place, found, neighbours(run, place, group), state, address));
    } catch (error) {
      fill(root, failure(error));
    }
  }
  await load(parameters);
  return { moved: load };
}

function placeOf({ stage, step, group_id, member }) {
  return { stage, step, group_id, member };
}

async function newest(run) {
  const found = await ofRun(run.id, "rollouts", { limit: 1 });
  return found.rows[0] || null;
}

/** The rollouts before and after: of the list the reader came from, else of the group. */
function neighbours(run, place, group) {
  const same = (row) =>
    String(row.stage) === String(place.stage) &&
    String(row.step) === String(place.step) &&
    row.group_id === place.group_id &&
    String(row.member) === String(place.member);
  const members = group.members.map((one) => ({ ...place, member: one.member }));
  const list = listed.run === run.id && listed.rows.some(same) ? listed.rows : members;
  const here = list.findIndex(same);
  return { list, here, previous: list[here - 1], next: list[here + 1] };
}

function page(run, place, found, around, state, address) {
  const link = (row, title, key) =>
    row
      ? el(
          "a",
          {
            class: "button",
            data: { key },
            href: address(run.id, "tokens", { ...placeOf(row), color: state.view.get("color") }),
          },
          title,
        )
      : el("button", { type: "button", disabled: true }, title);
  const text = el("div", {});
  const legend = el("div", { class: "legend" });
  const detail = el("div", {});
  const detailCard = el("section", { class: "card token-card", "aria-live": "polite" }, el("h2", {}, "Token"), detail);
  const streams = [];
  const paint = () => {
    for (const one of streams) recolor(one, state.scale);
    fill(legend, legendOf(found.rows, state.scale));
  };
  const choices = Object.entries(SCALES).map(([name, scale]) =>
    el(
      "button",
      {
        type: "button",
        "aria-pressed": String(name === state.scale),
        on: {
          click: (event) => {
            state.scale = name;
            state.view.set({ color: name });
            for (const other of event.target.parentElement.children)
              other.setAttribute("aria-pressed", String(other === event.target));
            paint();
          },
        },
      },
      scale.title,
    ),
  );
  found.rows.forEach((row, number) => text.append(rowOf(row, number, found, streams)));
  inspect(text, streams, detail, detailCard);
  fill(detail, el("p", { class: "hint" }, "Point at a token, or go through them with the arrow keys."));
  paint();
  const tokens = card(
    "Tokens",
    `Step ${place.step}, group ${place.group_id}, member ${place.member}`,
    el(
      "div",
      { class: "tools" },
      el("div", { class: "choice", role: "group", "aria-label": "Colour tokens by" }, choices),
      legend,
    ),
    found.rows.length
      ? text
      : found.text === null
        ? empty("The transcript was dropped", DROPPED)
        : empty("No tokens were kept", "The trajectory failed before it drew any, or its tokens were not recorded."),
  );
  const talk = card(
    "Conversation",
    "Prompt, turns of the policy, and what the environment answered.",
    conversation(found.prompt),
    found.text === null ? el("p", { class: "hint" }, DROPPED) : conversation(found.messages),
  );
  return [
    el(
      "div",
      { class: "tools" },
      link(around.previous, "← Previous", "previous"),
      link(around.next, "Next →", "next"),
      el("span", { class: "hint" }, `${around.here + 1} of ${around.list.length}`),
      badge(found.status, statusTone(found.status)),
      el("b", {}, `reward ${number(found.score)}`),
      el(
        "a",
        {
          class: "button",
          href: address(run.id, "rollouts", { group: `${place.stage}.${place.step}.${place.group_id}` }),
        },
        "Whole group",
      ),
    ),
    el(
      "div",
      { class: "tokens-page" },
      el("div", { class: "stack" }, tokens.node, talk.node),
      el("aside", { class: "side stack" }, detailCard, rewardCard(found), verdictsCard(found.verdicts), eventsCard(found.events)),
    ),
  ];
}

function rewardCard(found) {
  const table = parts(found.parts, found.weighted) || el("p", { class: "hint" }, "No parts were recorded.");
  return card(
    "Reward",
    null,
    el(
      "dl",
      { class: "facts" },
      el("dt", {}, "Score"),
      el("dd", {}, number(found.score)),
      found.answer ? [el("dt", {}, "Reference"), el("dd", {}, found.answer)] : null,
      el("dt", {}, "Task"),
      el("dd", {}, found.task_id),
    ),
    table,
  ).node;
}

function verdictsCard(verdicts) {
  if (!verdicts?.length) return null;
  const detail = (one) => Object.entries(one.detail).map(([name, value]) => `${name}: ${plain(value)}`);
  const said = (one) => [badge(one.part, one.kind === "value" ? "accent" : "bad"), ` ${one.reason ?? number(one.value)} `];
  const line = (one) => el("li", { class: "event" }, said(one), el("span", { class: "hint" }, detail(one).join(", ")));
  return card("What judges said", null, el("ul", { class: "alarms" }, verdicts.map(line))).node;
}

function eventsCard(events) {
  if (!events?.length) return null;
  return card(
    "Tool calls and events",
    null,
    el(
      "ul",
      { class: "alarms" },
      events.map((event) =>
        el(
          "li",
          { class: "event" },
          eventBadge(event),
          isNumber(event.turn) ? ` turn ${event.turn + 1} ` : " ",
          el("b", {}, event.name || ""),
          event.detail ? el("pre", { class: "said" }, plain(event.detail)) : null,
          event.cost ? ` cost ${number(event.cost)}` : null,
        ),
      ),
    ),
  ).node;
}

function eventBadge(event, name = "") {
  return badge(
    `${plain(event.kind).replaceAll("_", " ")}${name && ` ${name}`}`,
    /error|timeout|bad|denied|described/.test(event.kind) ? "bad" : "accent",
  );
}

/** What a turn did beside its words. */
function calls(events, turn) {
  return turn === null
    ? null
    : (events || []).filter((event) => event.turn === turn).map((event) => eventBadge(event, event.name));
}

/** Runs of tokens by who wrote them: the prompt, each turn of the policy, each observation. */
function segments(row) {
  const found = [];
  row.token_ids.forEach((_, index) => {
    const isPolicy = Boolean(row.loss_mask[index]);
    if (!found.length || found.at(-1).isPolicy !== isPolicy) found.push({ isPolicy, first: index, end: index });
    found.at(-1).end = index + 1;
  });
  let turns = 0;
  return found.map((one, index) => ({
    ...one,
    turn: one.isPolicy ? turns : null,
    kind: one.isPolicy ? "policy" : index ? "observation" : "prompt",
    title: one.isPolicy
      ? `Turn ${++turns} of the policy`
      : index
        ? "Observation: not drawn by the policy, no gradient"
        : "Prompt: given, no gradient",
  }));
}

function rowOf(row, rowNumber, found, streams) {
  const holder = el("div", {}, found.rows.length > 1 ? el("h3", {}, `Row ${rowNumber + 1}`) : null);
  for (const part of segments(row)) {
    const stream = el("div", { class: "stream" });
    const spans = [];
    for (let index = part.first; index < part.end; index++) spans.push(tokenSpan(row, index));
    add(stream, spans);
    streams.push({ row, first: part.first, spans });
    holder.append(
      el(
        "div",
        { class: `segment ${part.kind}` },
        el(
          "div",
          { class: "segment-head" },
          el("b", {}, part.title),
          `${part.end - part.first} tokens`,
          calls(found.events, part.turn),
        ),
        stream,
      ),
    );
  }
  return holder;
}

/** Line ends and tabs as signs, so that they can be pointed at; a line end still breaks the line. */
function tokenSpan(row, index) {
  const span = el("span", { class: "token", tabindex: "-1" });
  const piece = row.pieces?.[index] ?? String(row.token_ids[index]);
  for (const part of piece.split(/(\n|\t)/)) {
    if (part === "\n") add(span, [el("span", { class: "mark" }, "⏎"), "\n"]);
    else if (part === "\t") add(span, [el("span", { class: "mark" }, "⇥"), "\t"]);
    else if (part) add(span, [part]);
  }
  if (!piece) add(span, [el("span", { class: "mark" }, "∅")]);
  span.at = index;
  return span;
}

function reach(rows, scale) {
  let size = 0;
  for (const row of rows)
    row.token_ids.forEach((_, index) => {
      size = Math.max(size, Math.abs(SCALES[scale].value(row, index) || 0));
    });
  return size;
}

function recolor({ row, spans }, name) {
  const size = row.reaches?.[name] ?? ((row.reaches ??= {})[name] = reach([row], name));
  for (const span of spans) span.style.backgroundColor = color(SCALES[name], SCALES[name].value(row, span.at), size);
}

function color(scale, value, size) {
  if (!value || !size) return "transparent"; // unknown, or 0
  const strength = Math.min(1, Math.abs(value) / size) * 0.62;
  return `rgba(${scale.diverging ? (value > 0 ? BLUE : ORANGE) : PURPLE}, ${strength.toFixed(3)})`;
}

function legendOf(rows, name) {
  const scale = SCALES[name];
  const size = Math.max(0, ...rows.map((row) => reach([row], name)));
  if (!size)
    return el(
      "span",
      {},
      {
        advantage: "This trajectory was not trained, or every advantage is 0.",
        gap: "No gap is known or it is 0 everywhere: the step made no such pass, or sampler and trainer agree exactly.",
        entropy: "Entropies were not recorded for this trajectory.",
        mask: "No token has a gradient.",
      }[name],
    );
  const tones = scale.diverging
    ? [`rgba(${ORANGE}, 0.62)`, "transparent", `rgba(${BLUE}, 0.62)`]
    : ["transparent", `rgba(${PURPLE}, 0.62)`];
  return [
    scale.diverging ? `${number(-size)} ${scale.low}` : `0 ${scale.low}`,
    el("span", { class: "ramp", style: { background: `linear-gradient(90deg, ${tones.join(", ")})` } }),
    `${number(size)} ${scale.high}`,
  ];
}

function inspect(text, streams, detail, holder) {
  const spans = streams.flatMap((one) => one.spans.map((span) => ({ span, row: one.row })));
  if (!spans.length) return;
  spans.forEach((one, place) => {
    one.span.place = place;
  });
  spans[0].span.tabIndex = 0;
  const show = (target) => {
    const span = target.closest?.(".token");
    if (!span) return;
    holder.classList.add("open");
    fill(detail, facts(spans[span.place].row, span.at));
  };
  text.addEventListener("mouseover", (event) => show(event.target));
  text.addEventListener("focusin", (event) => show(event.target));
  text.addEventListener("click", (event) => event.target.closest(".token")?.focus());
  text.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    const here = document.activeElement.place;
    if (!by || here === undefined) return;
    event.preventDefault();
    const next = spans[Math.min(spans.length - 1, Math.max(0, here + by))].span;
    spans[here].span.tabIndex = -1; // one stop for Tab, wherever the reader is
    next.tabIndex = 0;
    next.focus();
  });
}

function facts(row, index) {
  const behavior = at(row.behavior_logprobs, index);
  const policy = at(row.policy_logprobs, index);
  const isDrawn = Boolean(row.loss_mask[index]);
  const ratio = isDrawn && behavior !== null && policy !== null ? Math.exp(policy - behavior) : null;
  const lines = [
    ["Token", JSON.stringify(row.pieces?.[index] ?? "")],
    ["Id", String(row.token_ids[index])],
    ["Position", String(index)],
    ["Trained", isDrawn ? "yes" : "no (masked)"],
    ["Log-prob, sampler", isDrawn ? number(behavior, 4) : "–"],
    ["Log-prob, trainer", isDrawn ? number(policy, 4) : "–"],
    ["Ratio", number(ratio, 4)],
    ["Weights version", isDrawn ? number(at(row.versions, index)) : "–"],
    ["Loss weight", number(at(row.weights, index), 5)],
    ["Advantage", number(at(row.advantages, index), 4)],
    ["Entropy", number(at(row.entropies, index), 4)],
  ];
  return el(
    "dl",
    { class: "facts" },
    lines.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
  );
}
