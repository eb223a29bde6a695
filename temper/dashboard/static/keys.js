// Everything by keyboard. Owns: which key does what, and the page that says so.
import { el, fill } from "./dom.js";

const SOON_MS = 1200;

export function listen(pages, go) {
  let pressedG = 0;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const field = event.target.closest?.("input, select, textarea");
    const isTick = field?.type === "checkbox"; // takes no letters: keys go on working
    if (field && !isTick) {
      if (event.key === "Escape") field.blur();
      return;
    }
    const key = event.key;
    if (performance.now() - pressedG < SOON_MS) {
      pressedG = 0;
      const page = pages.find((one) => one.letter === key);
      if (page) {
        event.preventDefault();
        go(page.name);
        return;
      }
    }
    if (key === "g") pressedG = performance.now();
    else if (/^[0-9]$/.test(key) && pages[key]) go(pages[key].name);
    else if (key === "j" || key === "k") {
      event.preventDefault();
      move(key === "j" ? 1 : -1);
    } else if (key === "/") search(event);
    else if (key === "?") showShortcuts(pages);
    else if (key === "[" || key === "]")
      document.querySelector(key === "[" ? "[data-key=previous]" : "[data-key=next]")?.click();
    else if (key === "Escape") document.querySelector("[data-key=close]")?.click();
  });
}

/** To the next or previous row of the page, from the one that has the focus. */
function move(by) {
  const rows = [...document.querySelectorAll("#page .row")];
  if (!rows.length) return;
  const at = rows.indexOf(document.activeElement);
  const next = at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(rows.length - 1, Math.max(0, at + by));
  rows[next].focus();
  rows[next].scrollIntoView({ block: "nearest" });
}

function search(event) {
  const field = document.querySelector("#page input[type=search]");
  if (!field) return;
  event.preventDefault();
  field.focus();
  field.select();
}

export function showShortcuts(pages) {
  const dialog = document.getElementById("shortcuts");
  const line = (keys, what) => [
    el(
      "dt",
      {},
      keys.map((key, index) => [index ? " " : "", el("kbd", {}, key)]),
    ),
    el("dd", {}, what),
  ];
  const list = el(
    "dl",
    { class: "keys" },
    pages.map((page, index) => line([String(index), "g", page.letter], page.title)),
    line(["j", "k"], "next and previous row"),
    line(["Enter"], "open the row"),
    line(["/"], "search"),
    line(["[", "]"], "previous and next rollout, or part of the list"),
    line(["←", "→"], "from token to token"),
    line(["Esc"], "close, or leave a field"),
    line(["?"], "this page"),
  );
  const close = el("button", { type: "button", class: "main", on: { click: () => dialog.close() } }, "Close");
  fill(dialog, el("h2", { id: "shortcuts-title" }, "Keyboard"), list, close);
  if (!dialog.open) dialog.showModal();
}
