// Lists in parts. Owns: where a list begins, which stands in the address, and the buttons that turn it over.
import { el } from "./dom.js";

export const LIMIT = 50;

/** Where the list begins by its address, which anybody may have written: a whole number, else 0. */
export function offsetOf(view) {
  const wanted = Math.floor(Number(view.get("offset")));
  return Number.isSafeInteger(wanted) ? Math.max(0, wanted) : 0;
}

/** Buttons and what is shown, in words. They move state.offset and call load(). */
export function turner({ state, view, load, isLast, words }) {
  const button = (by, key, title, isOff) => {
    const click = () => {
      state.offset = Math.max(0, state.offset + by);
      view.set({ offset: state.offset || "" });
      load();
    };
    return el("button", { type: "button", disabled: isOff, data: { key }, on: { click } }, title);
  };
  return el(
    "div",
    { class: "pages" },
    button(-LIMIT, "previous", "Previous", state.offset === 0),
    button(LIMIT, "next", "Next", isLast),
    el("span", { role: "status" }, words),
  );
}
