// A chart to take away. Owns: its numbers as CSV, its picture as PNG, and handing a file to the browser.

/** A name that every file system takes. */
export function fileName(title) {
  return title.replace(/[^\w.-]+/g, "_").replace(/^_+|_+$/g, "") || "chart";
}

/** Text of one cell. A spreadsheet would run what begins with =, +, - or @, and names come from runs. */
function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t]/.test(value) ? `'${value}` : String(value);
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** Undoes label(). */
function plainText(text) {
  return String(text ?? "")
    .replace(/<[^>]*>/g, "")
    .replaceAll("&lt;", "<")
    .replaceAll("&gt;", ">")
    .replaceAll("&amp;", "&");
}

/** Of a map: its column, its row, and the value there. */
function cellsOf(trace) {
  return trace.z.flatMap((row, at) => row.map((value, place) => [plainText(trace.name), place, trace.y[at], value]));
}

/** Every point of a chart: series, x, y, where it is known the interval, and what the point is. */
export function csv(traces, xTitle, yTitle) {
  const shown = traces.filter((trace) => trace.meta !== "edge");
  const hasBand = shown.some((trace) => trace.meta?.low);
  const head = ["series", xTitle || "x", yTitle || "y", ...(hasBand ? ["low", "high"] : []), "point"];
  const rows = shown.flatMap((trace) =>
    trace.z
      ? cellsOf(trace)
      : [...(trace.x || [])].flatMap((x, at) => {
          const y = trace.y[at];
          if (y === null || y === undefined) return [];
          const sides = hasBand ? [trace.meta?.low?.[at], trace.meta?.high?.[at]] : [];
          const place = typeof x === "string" ? plainText(x) : x;
          return [[plainText(trace.name), place, y, ...sides, plainText(trace.text?.[at])]];
        }),
  );
  return [head, ...rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";
}

export function save(content, name, type) {
  const link = document.createElement("a");
  const isText = type === "text/csv";
  link.href = isText ? URL.createObjectURL(new Blob([content], { type: `${type};charset=utf-8` })) : content;
  link.download = name;
  link.click();
  if (isText) setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
