// Builds the page. Owns: elements, numbers and times in words. Refuses: HTML from strings; text is only ever text.

/** An element. Attributes: "class", "on" (listeners), "data", "style" (properties); anything else by name. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.className = value;
    else if (name === "on")
      for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "style")
      for (const [property, setting] of Object.entries(value)) node.style.setProperty(property, setting);
    else if (name === "value" || name === "checked" || name === "selected" || name === "disabled") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  add(node, children);
  return node;
}

export function add(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function fill(node, ...children) {
  node.replaceChildren();
  add(node, children);
  return node;
}

export function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** A number short enough for a table: four digits that matter, thousands as k and M. */
export function number(value, digits = 3) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${trim((value / 1e9).toPrecision(3))}G`;
  if (size >= 1e6) return `${trim((value / 1e6).toPrecision(3))}M`;
  if (size >= 1e4) return `${trim((value / 1e3).toPrecision(3))}k`;
  if (Number.isInteger(value)) return String(value);
  if (size < 1e-3) return value.toExponential(1);
  if (size >= 1000) return value.toFixed(0);
  return size >= 100 ? value.toFixed(1) : trim(value.toFixed(digits));
}

function trim(text) {
  return text.includes(".") ? text.replace(/0+$/, "").replace(/\.$/, "") : text;
}

export function percent(value) {
  return isNumber(value) ? `${trim((100 * value).toFixed(1))}%` : "–";
}

export function bytes(value) {
  if (!isNumber(value)) return "–";
  return value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(2)} GiB` : `${(value / 2 ** 20).toFixed(0)} MiB`;
}

export function when(seconds) {
  return isNumber(seconds) ? new Date(seconds * 1000).toLocaleString() : "–";
}

export function ago(seconds) {
  if (!isNumber(seconds)) return "";
  const age = Math.max(0, Date.now() / 1000 - seconds);
  if (age < 90) return `${Math.round(age)} s ago`;
  if (age < 5400) return `${Math.round(age / 60)} min ago`;
  return age < 129600 ? `${Math.round(age / 3600)} h ago` : `${Math.round(age / 86400)} days ago`;
}

/** A part of a reward or of a configuration: number, text, or what it is as JSON. */
export function plain(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number") return number(value);
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** A value of a recipe, to the last digit: two that differ must not look the same. */
export function exact(value) {
  if (value === null || value === undefined) return "–";
  if (value === "") return '""';
  return typeof value === "string" ? value : typeof value === "number" ? String(value) : JSON.stringify(value);
}

/** A sentence with its `commands` set apart. */
export function prose(text) {
  return String(text)
    .split("`")
    .map((part, index) => (index % 2 ? el("code", {}, part) : part));
}

/** Plotly reads a little HTML in names; what comes from a run is shown as it is written. */
export function label(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

/** Seconds as people say them. */
export function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds >= 7200) return `${number(seconds / 3600, 1)} h`;
  return seconds >= 120 ? `${number(seconds / 60, 1)} min` : `${number(seconds, 1)} s`;
}

/** What a run is called; its folder only where two have the same name. */
export function runLabel(run, runs) {
  return runs.filter((one) => one.name === run.name).length > 1 ? `${run.name} · ${run.folder}` : run.name;
}

/** What stands where there is nothing: what would appear here, and why it does not yet. */
export function empty(title, why) {
  return el("div", { class: "empty" }, el("strong", {}, title), el("p", {}, prose(why)));
}

export function failure(error) {
  return el(
    "div",
    { class: "empty failure", role: "alert" },
    el("strong", {}, "This could not be shown"),
    el("p", {}, prose(error.message)),
  );
}

export function card(title, hint, ...children) {
  const body = el("div", { class: "card-body" }, children);
  const node = el(
    "section",
    { class: "card" },
    el("div", { class: "card-head" }, el("h2", {}, title), hint && el("p", { class: "hint" }, hint)),
    body,
  );
  return { node, body };
}

export function tile(label, value, note, tone) {
  return el(
    "div",
    { class: `tile ${tone || ""}` },
    el("span", { class: "tile-label" }, label),
    el("span", { class: "tile-value" }, value),
    note && el("span", { class: "tile-note" }, note),
  );
}

export function badge(text, tone) {
  return el("span", { class: `badge ${tone || ""}` }, text);
}

/** Numbers in words for a status: the tone of its badge. */
export function statusTone(status) {
  if (/error|fail|abort|timeout/i.test(status || "")) return "bad";
  return /trunc|length|drop/i.test(status || "") ? "warn" : "";
}

/** A table that scrolls inside its card. Columns: {title, cell(row), number}; open(row) makes its rows choosable. */
export function table(columns, rows, { open = null, label = "" } = {}) {
  const head = el(
    "tr",
    {},
    columns.map((column) => el("th", { scope: "col", class: column.number && "number" }, column.title)),
  );
  const body = rows.map((row) => {
    const cells = columns.map((column) =>
      el("td", { class: `${column.number ? "number" : ""} ${column.class || ""}` }, column.cell(row)),
    );
    if (!open) return el("tr", {}, cells);
    const node = el("tr", { class: "row", tabindex: "0" }, cells);
    node.addEventListener("click", () => open(row, node));
    node.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && event.target === node) open(row, node);
    });
    return node;
  });
  return el(
    "div",
    { class: "scroll", tabindex: open ? null : "0", role: "region", "aria-label": label || "Table" },
    el("table", {}, el("thead", {}, head), el("tbody", {}, body)),
  );
}

/** Titles of a table that sort it: of columns that have a key. order: the key, with - before it when the highest comes
 * first. sort(order) is called with the new one. */
export function sortHead(columns, order, sort) {
  return columns.map((column) => {
    if (!column.key) return el("th", { scope: "col", class: column.number && "number" }, column.title);
    const isSorted = order.replace(/^-/, "") === column.key;
    const isDown = order.startsWith("-");
    const turn = () => {
      sort(isSorted && !isDown ? `-${column.key}` : column.key);
      document.querySelector(`[data-sort="${CSS.escape(column.key)}"]`)?.focus();
    };
    const mark = isSorted ? (isDown ? " ↓" : " ↑") : "";
    const attributes = { type: "button", class: "sort", data: { sort: column.key }, on: { click: turn } };
    const button = el("button", attributes, column.title, mark);
    const sorting = isSorted ? (isDown ? "descending" : "ascending") : "none";
    return el("th", { scope: "col", class: column.number && "number", "aria-sort": sorting }, button);
  });
}
