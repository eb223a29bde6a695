// What the rules saw and what happened to the process. Owns: the timeline of alarms and the list of events.
import { badge, el, empty, isNumber, number, percent, when } from "./dom.js";
import { layOut, position } from "./stages.js";

/** Marks along the steps, and each alarm in words; choose(alarm) shows its step in all charts. */
export function timeline(run, alarms, choose) {
  if (!alarms.length)
    return empty(
      "No alarm has rung",
      "Rules watch the metrics of every step: reward against held-out score, length, entropy, KL, mismatch, gradients and more. What they see would stand here.",
    );
  const lay = layOut([{ run }]);
  const place = (alarm) => position(lay, { run }, alarm.stage, alarm.step) || 0;
  const end = Math.max(
    1,
    ...alarms.map(place),
    run.stages.reduce((sum, one) => sum + one.steps, 0),
  );
  const items = alarms.map((alarm) =>
    el(
      "li",
      {},
      el(
        "div",
        { class: "alarm-head" },
        badge(alarm.level, alarm.level),
        el("b", {}, alarm.rule),
        el(
          "span",
          { class: "hint" },
          `${run.stages.find((one) => one.stage === alarm.stage)?.name ?? ""} step ${alarm.step} · ${when(alarm.time)}${isNumber(alarm.value) ? ` · value ${number(alarm.value)}` : ""}`,
        ),
      ),
      el(
        "dl",
        {},
        el("dt", {}, "Saw"),
        el("dd", {}, alarm.text),
        el("dt", {}, "Usually means"),
        el("dd", {}, alarm.meaning),
        el("dt", {}, "Try"),
        el("dd", {}, alarm.advice),
      ),
    ),
  );
  const marks = alarms.map((alarm, index) =>
    el("button", {
      type: "button",
      class: alarm.level,
      style: { left: percent(0.01 + (0.98 * place(alarm)) / end) },
      title: `${alarm.rule}, step ${alarm.step}: ${alarm.text}`,
      "aria-label": `${alarm.level} ${alarm.rule} at step ${alarm.step}`,
      on: {
        click: () => {
          items.forEach((item, other) => item.classList.toggle("marked", other === index));
          choose(alarm);
          items[index].scrollIntoView({ block: "nearest" });
        },
      },
    }),
  );
  const strip = el(
    "div",
    { class: "strip", role: "group", "aria-label": "When alarms rang" },
    marks,
    el("span", { class: "edge", style: { left: "0" } }, "start"),
    el("span", { class: "edge", style: { right: "0" } }, `step ${end}`),
  );
  return [strip, el("ul", { class: "alarms" }, items.reverse())];
}

export function eventList(events) {
  if (!events.length)
    return empty(
      "Nothing to tell",
      "Resumes, changed configurations, skipped tasks and other notes of the process stand here.",
    );
  const tone = (level) => (level === "error" ? "bad" : level === "warning" ? "warn" : "");
  return el(
    "details",
    {},
    el("summary", {}, `${events.length} ${events.length === 1 ? "event" : "events"}, last ${when(events.at(-1).time)}`),
    el(
      "ul",
      { class: "alarms" },
      events
        .slice()
        .reverse()
        .map((one) =>
          el(
            "li",
            {},
            el(
              "div",
              { class: "alarm-head" },
              badge(one.level, tone(one.level)),
              el("span", { class: "hint" }, when(one.time)),
            ),
            el("pre", { class: "said" }, one.text),
          ),
        ),
    ),
  );
}
